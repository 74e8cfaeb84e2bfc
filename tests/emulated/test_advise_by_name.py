"""Models by name on emulated cards: what is said to fit is what a program needs, to the byte, also near a card's limit."""

from __future__ import annotations

import json
import re

import pytest

from pytest_gpumem.base.units import format_bytes
from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
from tests import needs
from tests.emulated.processes import REPOSITORY
from tests.workspaces import KEPT, RELEASE

pytestmark = needs.package("transformers")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
PROGRAM = """
import transformers

config = transformers.AutoConfig.from_pretrained("model")
config.use_cache = False
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = transformers.LlamaForCausalLM(config)
torch.set_default_dtype(torch.float32)
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(32000, (2, 1024)).cuda()
labels = torch.randint(32000, (2, 1024)).cuda()
try:
    for step in range(4):
        model(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
except torch.OutOfMemoryError:
    print("ran out")
"""
ADVICE = """
from pytest_gpumem.tools.advise.cards import begin, capacity_of, try_on, with_capacity
from pytest_gpumem.tools.advise.trial import subject_by_name
from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
from pytest_gpumem.measuring.models.name import batch_size
from pytest_gpumem.measuring.models.sources import model_name, named_model
from pytest_gpumem.measuring.models.task import TRAINING
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.torch_support.private_api.allocator import gpu_unseen

begin(emulated_gpu("h100"))
with gpu_unseen():
    subject = subject_by_name(named_model(model_name("hf:model"), batch_size("{batch}"), TRAINING))
for capacity in {capacities}:
    card = emulated_gpu("emulated:h100")
    card = with_capacity(card, capacity) if capacity else card
    tried, _ = try_on(card, subject, StepConfig.parse("{config}"))
    print(tried.allocated, tried.peak, tried.fits(capacity_of(card)), tried.why_not)
"""
CONTEXT = 520 * 2**20


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


def test_what_fits_is_what_a_program_needs_also_where_the_allocator_has_to_give_back(processes, on_gpu, model):
    allocated, reserved = map(int, on_gpu(PROGRAM).split())
    assert allocated < reserved
    capacities = [0, reserved, reserved - 2**21, allocated + 2**20, allocated - 2**20]
    done = processes.run(ADVICE.format(batch="2x1024", config="bf16", capacities=capacities))
    assert done.returncode == 0, done.stderr
    roomy, *limited = [line.split() for line in done.stdout.splitlines()]
    assert roomy == [str(allocated), str(reserved), "True"]
    for capacity, (_, peak, fits, *_) in zip(capacities[1:], limited, strict=True):
        size = capacity + CONTEXT
        ran_out = "ran out" in on_gpu(PROGRAM, f"{size}B")
        assert (fits == "True") == (not ran_out), capacity
        assert (int(peak) <= capacity) == (fits == "True")
    assert {fits for _, _, fits, *_ in limited} == {"True", "False"}


def test_a_table_of_cards_says_which_config_fits_and_which_card_has_no_kernels(processes, model):
    cards = [f"--device=emulated:{word}" for word in ("h100", "v100", "1500MB", "t4")]
    done = processes.gpumem("advise", "hf:model", "--batch", "2x1024", "--config", "fp32", "--config", "bf16", *cards)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    title = r"hf:model: LlamaForCausalLM, random weights, [\d.]+ M parameters, \d+ layers(, published in \w+)?; training, batch 2x1024"
    assert re.fullmatch(title, lines[0])
    table = next(n for n, line in enumerate(lines) if line.startswith("card "))
    assert lines[table].split() == ["card", "fp32", "bf16"]
    of_v100 = next(line for line in lines[table + 1 : table + 5] if line.startswith("V100 16GB (16.38 GB) "))
    assert of_v100.split()[-4:] == ["cannot", "run", "cannot", "run"]
    assert any(line.startswith("  V100 16GB: torch ") and "none for 7.0" in line for line in lines)
    assert any(line.startswith("H100 80GB: fp32, ") for line in lines)
    # torch emulates bfloat16 there: it is measured, and not recommended.
    assert any(
        line.startswith("  bf16 on T4: torch emulates bfloat16 slowly on a GPU of compute capability 7.5")
        for line in lines
    )
    assert any(line.startswith("T4: fp32, ") for line in lines)
    assert any(line.startswith("H100 with 1500MB: no config fits; the smallest, bf16, lacks ") for line in lines)
    assert "    optimizer = torch.optim.AdamW(model.parameters())" in lines
    assert "Traceback" not in done.stderr


def test_inference_takes_less_and_shows_its_own_code(processes, model):
    done = processes.gpumem("advise", "hf:model", "--infer", "--device=emulated:h100", "--fits", "500MB", new=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "H100 80GB: bf16, " in done.stdout
    code = "    model.eval()\n    model.to(torch.bfloat16)\n    with torch.inference_mode():\n        output = model(**batch)\n"
    assert code in done.stdout


FAILING = [
    ("raise RuntimeError('planted')", "fp32", "the model fails by itself: RuntimeError: planted"),
    ("raise RuntimeError('planted')", "bf16", "RuntimeError: planted"),
    (
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "bf16",
        "its process ended with SIGKILL, probably because this machine ran out of memory",
    ),
    ("import os; os._exit(3)", "fp32", "its process ended with exit code 3"),
]
FAILS = f"""
from pytest_gpumem.tools.advise.cards import TrialFailed, begin, try_on
from pytest_gpumem.tools.advise.trial import AdviceSubject
from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
from pytest_gpumem.measuring.step_config.config import StepConfig

begin(emulated_gpu("h100"))
for how, config, _ in {FAILING!r}:
    subject = AdviceSubject(lambda dtype: exec(how), {{}}, None, ())
    try:
        print(try_on(emulated_gpu("emulated:h100"), subject, StepConfig.parse(config))[0].why_not)
    except TrialFailed as failed:
        print(failed)
"""


def test_a_process_that_fails_ends_none_but_its_own(on_gpu):
    for line, (*_, told) in zip(on_gpu(FAILS).splitlines(), FAILING, strict=True):
        assert line.startswith(told)


LLAMA_3_8B = {
    **CONFIG,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
LLAMA_3_8B_RESERVED = {(2, 13): 82_998_984_704, (2, 15): 82_936_070_144}
"""Reserved bytes by torch release. With TORCH_CUBLAS_WORKSPACE_CACHE=1, torch 2.15 reserves as much as 2.13."""


def test_the_guides_example_is_what_llama_3_8b_takes(on_gpu, model):
    (model / "config.json").write_text(json.dumps(LLAMA_3_8B), encoding="utf-8")
    config = "bf16,checkpoint=blocks"
    _, peak, fits, *_ = on_gpu(ADVICE.format(batch="1x4096", config=config, capacities=[0])).split()
    capacity = emulated_gpu("h100").total_bytes - CONTEXT
    assert (fits, int(peak)) == ("True", LLAMA_3_8B_RESERVED.get(RELEASE, int(peak)))
    size = format_bytes(int(peak))
    told = f"H100 80GB: {config}, {size} of {format_bytes(capacity)}\n" if KEPT else f"`{config}` reserves {size} there"
    assert told in (REPOSITORY / "docs/guide/fits.md").read_text(encoding="utf-8"), told


CAST = """
import torch
from pytest_gpumem.tools.advise.cards import begin, try_on
from pytest_gpumem.tools.advise.trial import AdviceSubject
from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
from pytest_gpumem.measuring.models.task import INFERENCE
from pytest_gpumem.measuring.step_config.config import StepConfig

begin(emulated_gpu("h100"))


def build(dtype):
    return torch.nn.Linear(8192, 8192, bias=False)


subject = AdviceSubject(build, torch.ones(8, 8192), None, (), INFERENCE)
print(*(try_on(emulated_gpu("emulated:h100"), subject, StepConfig.parse(word))[0].peak for word in ("fp32", "bf16")))
"""


def test_inference_takes_what_the_cast_model_takes_and_not_what_casting_took(on_gpu):
    whole, cast = map(int, on_gpu(CAST).split())
    weights = 8192 * 8192 * 4
    assert weights < whole
    assert weights / 2 < cast < weights


GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 512,
    "n_layer": 2,
    "n_head": 8,
    "vocab_size": 8192,
    "n_positions": 512,
}
VIT = {
    "architectures": ["ViTForImageClassification"],
    "model_type": "vit",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
}
TEXTS = """dict(
    input_ids=torch.randint(8192, ({size}, 512)).cuda(), labels=torch.randint(8192, ({size}, 512)).cuda())"""
IMAGES = "dict(pixel_values=torch.randn({size}, 3, 224, 224).cuda(), labels=torch.randint(2, ({size},)).cuda())"
ANY_PROGRAM = """
import transformers

config = transformers.AutoConfig.from_pretrained("model")
config.use_cache = False
with torch.device("cuda"):
    model = getattr(transformers, config.architectures[0])(config)
optimizer = torch.optim.AdamW(model.parameters())
batch = {batch}
try:
    for step in range(4):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("fits")
except torch.OutOfMemoryError:
    print("ran out")
"""


@pytest.mark.parametrize(
    ("config", "length", "batch", "card"),
    [
        (GPT2, "x512", TEXTS, "3GB"),
        *(
            pytest.param(config, length, batch, card, marks=pytest.mark.thorough)
            for config, length, batch in ((GPT2, "x512", TEXTS), (VIT, "", IMAGES), (CONFIG, "x512", TEXTS))
            for card in ("t4", "rtx4090", "h100")
        ),
    ],
)
def test_the_largest_batch_fits_into_a_program_and_one_more_does_not(
    processes, on_gpu, model, config, length, batch, card
):
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = ["--config", "fp32", "--largest-batch", "--format", "json", f"--device=emulated:{card}"]
    done = processes.gpumem("advise", "hf:model", "--batch", f"2{length}", *words, gpu=card)
    assert done.returncode == 0, done.stderr
    (told,) = json.loads(done.stdout)["devices"]
    largest = told["configs"][0]["largest"]["size"]
    assert largest > 2
    ended = [on_gpu(ANY_PROGRAM.format(batch=batch.format(size=size)), card).strip() for size in (largest, largest + 1)]
    assert ended == ["fits", "ran out"]
