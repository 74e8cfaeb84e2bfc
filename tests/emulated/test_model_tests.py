"""Models as tests without a file on an emulated GPU: gated twice, in training, inference, generation and with adapters."""

from __future__ import annotations

from tests import needs
from tests.models.test_by_name import CLASSES, written

pytestmark = [needs.package("transformers"), needs.package("peft")]

ENTRIES = """
[[tool.gpumem.models]]
model = "hf-tiny:{0}"
batch = "2x32"
config = ["fp32", "bf16,checkpoint=blocks"]

[[tool.gpumem.models]]
model = "hf-tiny:{0}"
train = false
"""
OTHER_TASKS = """
[[tool.gpumem.models]]
model = "hf-tiny:GPT2LMHeadModel"
batch = "2x16"
config = "bf16"
generate = 4

[[tool.gpumem.models]]
model = "hf-tiny:GPT2LMHeadModel"
batch = "2x16"
config = "bf16,checkpoint=blocks"
lora = "r=4"
"""


def test_models_by_name_are_recorded_and_gated_equal_to_the_byte(processes, tmp_path):
    names = ("GPT2LMHeadModel", "MixtralForCausalLM")
    for name in names:
        (tmp_path / name).mkdir()
        written(tmp_path / name, name, *CLASSES[name])
    entries = "".join(map(ENTRIES.format, names)) + OTHER_TASKS
    (tmp_path / "pyproject.toml").write_text(entries, encoding="utf-8")
    recorded = processes.pytest("--gpumem-update=new", "--gpumem-explain=never")
    assert "gpumem store: 8 baselines written (new)" in recorded.stdout, recorded.stdout
    gated = processes.pytest("--gpumem-baseline", "--gpumem-update=all", "--gpumem-explain=never", "--gpumem-strict")
    assert gated.returncode == 0, gated.stdout
    assert "gpumem: 8 gated" in gated.stdout
    assert "0 baselines written (all)" in gated.stdout
