"""Generation on an emulated card: what is said to be needed is what a program with `generate` needs, to the byte."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests import needs

pytestmark = needs.package("transformers")

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
PARTS = {
    "d_model": 256,
    **{f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 3), ("attention_heads", 8))},
    **{f"{part}_ffn_dim": 512 for part in ("encoder", "decoder")},
}
# What a checkpoint's configuration asks of generate(), which a greedy search leaves out.
ASKED = {"num_beams": 4, "no_repeat_ngram_size": 3, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 2}


@dataclass(frozen=True)
class Case:
    """A model, and a step of it."""

    model_class: str
    model_type: str
    values: dict[str, Any]
    config: str
    batch: tuple[int, int]
    new_tokens: int
    more: dict[str, Any] = field(default_factory=dict)
    """Arguments with which the program leaves out what the model's configuration asks of ``generate``."""


CASES = {
    "gpt2": Case(
        "GPT2LMHeadModel",
        "gpt2",
        {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 2048, "n_positions": 256, "eos_token_id": 2},
        "fp32",
        (4, 64),
        8,
    ),
    "grouped-query": Case(
        "LlamaForCausalLM",
        "llama",
        {**SIZES, "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 1024},
        "bf16",
        (16, 24),
        48,
    ),
    "sliding-window": Case(
        "MistralForCausalLM",
        "mistral",
        {**SIZES, "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 1024, "sliding_window": 32},
        "bf16",
        (16, 24),
        24,
    ),
    "encoder-decoder": Case(
        "BartForConditionalGeneration",
        "bart",
        {**PARTS, **ASKED, "vocab_size": 1024, "max_position_embeddings": 256},
        "amp-bf16",
        (4, 64),
        12,
        {"num_beams": 1, "no_repeat_ngram_size": 0, "pad_token_id": None, "forced_eos_token_id": None},
    ),
    # With the pad token from its configuration, the program has two more blocks of 512 bytes: the token, and a flag.
    "state-space": Case(
        "Mamba2ForCausalLM",
        "mamba2",
        {"hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 1024, "num_heads": 8, "head_dim": 64, "n_groups": 1},
        "bf16",
        (16, 24),
        90,
        {"pad_token_id": None},
    ),
}
LONG = Case("LlamaForCausalLM", "llama", CASES["grouped-query"].values | {"num_hidden_layers": 1}, "bf16", (32, 4), 90)
FORETOLD = """
from pathlib import Path

from pytest_gpumem.tools.advise import trial

foretold_peak = trial.foretold_peak


def noted(*arguments):
    peak = foretold_peak(*arguments)
    Path("foretold.txt").write_text(str(peak is not None))
    return peak


trial.foretold_peak = noted
"""
PROGRAM = """
import transformers

config = transformers.AutoConfig.from_pretrained("model")
torch.set_default_dtype(torch.bfloat16 if {config!r} == "bf16" else torch.float32)
with torch.device("cuda"):
    model = transformers.{model_class}(config).eval()
torch.set_default_dtype(torch.float32)
tokens = torch.randint(5, 1000, {batch}).cuda()
torch.cuda.reset_peak_memory_stats()
for step in range(3):
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16, enabled={config!r} == "amp-bf16"):
        text = model.generate(tokens, max_new_tokens={new_tokens}, do_sample=False, eos_token_id=None, **{more})
    assert text.shape[1] == {new_tokens} + (1 if config.is_encoder_decoder else {batch}[1])
    del text
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""
ADVICE = """
from pytest_gpumem.tools.advise.cards import begin, try_on
from pytest_gpumem.tools.advise.trial import subject_by_name
from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
from pytest_gpumem.measuring.models.name import BatchSize
from pytest_gpumem.measuring.models.sources import model_name, named_model
from pytest_gpumem.measuring.models.task import Task
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.torch_support.private_api.allocator import gpu_unseen

begin(emulated_gpu("h100"))
with gpu_unseen():
    task = Task(trains=False, new_tokens={new_tokens})
    subject = subject_by_name(named_model(model_name("hf:model"), BatchSize(*{batch}), task))
tried, _ = try_on(emulated_gpu("emulated:h100"), subject, StepConfig.parse({config!r}))
print(tried.allocated, tried.peak, tried.why_not, tried.doubt)
"""


def write(tmp_path, case):
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    values = {"architectures": [case.model_class], "model_type": case.model_type, **case.values}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] if name in ("gpt2", "sliding-window") else []) for name in CASES],
)
def test_a_card_has_to_hold_what_a_program_that_generates_takes(on_gpu, tmp_path, name):
    case = CASES[name]
    write(tmp_path, case)
    advised, program = (on_gpu(source.format(**vars(case))).split() for source in (ADVICE, PROGRAM))
    assert advised == program


@pytest.mark.parametrize("config", ["bf16", "amp-bf16"])
def test_a_generation_foretold_from_few_tokens_equals_the_whole_program(on_gpu, tmp_path, config):
    write(tmp_path, LONG)
    case = vars(LONG) | {"config": config}
    advised, program = (on_gpu(source.format(**case)).split() for source in (FORETOLD + ADVICE, PROGRAM))
    assert (tmp_path / "foretold.txt").read_text() == "True"
    assert advised == program


@pytest.mark.thorough
def test_a_window_that_is_reached_after_the_first_tokens_has_all_tokens_run(on_gpu, tmp_path):
    values = CASES["sliding-window"].values | {"num_hidden_layers": 1, "sliding_window": 64}
    case = Case("MistralForCausalLM", "mistral", values, "bf16", (16, 8), 90)
    write(tmp_path, case)
    advised, program = (on_gpu(source.format(**vars(case))).split() for source in (FORETOLD + ADVICE, PROGRAM))
    assert (tmp_path / "foretold.txt").read_text() == "False"
    assert advised == program


def test_a_mask_of_any_size_is_known_to_leave_nothing_out_until_it_is_written_to(on_gpu):
    source = """
from pytest_gpumem.emulating.host_values.scope import current


def mask():
    return torch.ones(300, 8192, dtype=torch.int64, device="cuda")


def told(mask):
    every = bool((mask == 1).all())
    return every, current().reads.take_trouble()


print(*told(mask()))
in_place = {
    "an element": lambda mask: mask.__setitem__((3, 4), 0),
    "a slice": lambda mask: mask[5:].zero_(),
    "a view": lambda mask: mask.view(-1).mul_(2),
    "an index": lambda mask: mask.index_fill_(0, torch.tensor([2], device="cuda"), 0),
    "a part of a fill": lambda mask: mask[:, ::2].fill_(3),
}
for name, change in in_place.items():
    changed = mask()
    change(changed)
    print(f"{name}: {told(changed)[1]}")
"""
    whole, *written = on_gpu(source).splitlines()
    assert whole == "True None"
    assert len(written) == 5
    for line in written:
        assert ": a value is read that an emulated GPU does not compute" in line, line
