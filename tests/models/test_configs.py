"""Four models under the step configs: they run, learn the same, and measure the same again. On the CPU.

TF32 and offloading need a GPU, and so are not here.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING

import pytest
import torch

from tests.models.architectures import (
    BERT,
    GPT2,
    LLAMA,
    NEEDS_TRANSFORMERS,
    ON_THE_CPU,
    SCALARS,
    VIT,
    Architecture,
    assert_rows_add_up,
    bytes_of,
)
from tests.needs import NEEDS_COMPILER

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _pytest.mark import ParameterSet

    from pytest_gpumem.plugin.fixture import Gpumem

pytestmark = [NEEDS_TRANSFORMERS, pytest.mark.usefixtures("_the_same_weights_and_data", "_without_times")]

DROPOUT = 0.1
PRECISIONS = ("fp32", "amp-fp16", "amp-bf16", "bf16", "fp16")
HALF_PRECISIONS = PRECISIONS[1:]
CHECKPOINTS = ("blocks", "every:2", "sequential:2", "sqrt", "modules:SOME", "ops")
IN_SHORT = ("blocks", "ops")
"""One that checkpoints modules, as most do, and the one that checkpoints operators."""
EXPLAINED = "ops"
"""The kind whose steps are explained here, which takes longer than to measure them; a test below explains one of modules."""


def four_blocks(architecture: Architecture) -> Architecture:
    return architecture.but(num_hidden_layers=4)


SHALLOW = {"gpt2": GPT2, "llama": LLAMA, "bert": BERT, "vit": VIT}
"""Of two blocks, where nothing depends on how many there are."""
ARCHITECTURES = {
    "gpt2": four_blocks(GPT2),
    "llama": four_blocks(LLAMA),
    "bert": four_blocks(BERT),
    "vit": four_blocks(VIT),
}


MORE_OF_THE_SAME = ("llama", "bert", "vit")
"""Transformers, as gpt2 is."""


def each(names: Iterable[str]) -> list[ParameterSet]:
    """These as parameters, some of them for `make explore`."""
    return [pytest.param(one, marks=[pytest.mark.thorough] if one in MORE_OF_THE_SAME else []) for one in names]


@pytest.fixture(params=each(ARCHITECTURES))
def architecture(request: pytest.FixtureRequest) -> Architecture:
    return ARCHITECTURES[request.param].with_dropout(DROPOUT)


def checkpointed(architecture: Architecture, precision: str, kind: str) -> str:
    return f"{precision},checkpoint={kind.replace('SOME', architecture.some)}"


@ON_THE_CPU
@pytest.mark.parametrize("name", each(SHALLOW))
def test_a_model_trains_in_every_precision(gpumem: Gpumem, name: str) -> None:
    architecture = SHALLOW[name].with_dropout(DROPOUT)
    batch = architecture.batch()
    for precision in PRECISIONS:
        measured = gpumem.train_step(architecture.build, batch, config=precision)
        assert measured.workload.config == precision
        assert measured.settled, precision
        assert measured.notes == (), precision
        assert measured.recomputed == 0, precision
        assert measured.retained == 0, precision


@ON_THE_CPU
@pytest.mark.parametrize(
    "kinds", [IN_SHORT, pytest.param([one for one in CHECKPOINTS if one not in IN_SHORT], marks=pytest.mark.thorough)]
)
def test_every_kind_of_checkpointing_saves_in_forward_and_computes_again_in_backward(
    gpumem: Gpumem, architecture: Architecture, kinds: Iterable[str]
) -> None:
    batch = architecture.batch()
    plain = gpumem.train_step(architecture.build, batch, config="amp-bf16")
    for kind in kinds:
        config = checkpointed(architecture, "amp-bf16", kind)
        explain = kind == EXPLAINED
        measured = gpumem.train_step(architecture.build, batch, config=config, explain=explain)
        assert measured.settled, kind
        assert measured.recomputed is not None
        assert measured.recomputed > 0, kind
        assert measured.peak_forward < plain.peak_forward, kind
        assert measured.peak_optimizer == plain.peak_optimizer, kind
        if explain:
            assert_rows_add_up(measured)
            assert measured.composition.recomputed, kind


@ON_THE_CPU
def test_checkpointing_changes_no_bit_of_any_gradient_even_with_dropout(
    gpumem: Gpumem, architecture: Architecture
) -> None:
    batch = architecture.batch()
    for precision, kind in [*itertools.product(["amp-bf16"], CHECKPOINTS), ("fp32", "blocks"), ("amp-fp16", "ops")]:
        config = checkpointed(architecture, precision, kind)
        gpumem.assert_same_gradients(architecture.build, batch, config, precision, rtol=0, atol=0)


@ON_THE_CPU
def test_half_precisions_give_the_gradients_of_fp32(gpumem: Gpumem, architecture: Architecture) -> None:
    batch = architecture.batch()
    for config in (*HALF_PRECISIONS, "bf16,checkpoint=blocks"):
        gpumem.assert_same_gradients(architecture.build, batch, config, "fp32")


@ON_THE_CPU
def test_dropout_is_really_on_in_these_comparisons(gpumem: Gpumem, architecture: Architecture) -> None:
    without = architecture.with_dropout(0.0).build().state_dict()
    rates = iter((0.0, DROPOUT))

    def build() -> torch.nn.Module:
        model = architecture.with_dropout(next(rates)).build()
        model.load_state_dict(without)
        return model

    with pytest.raises(AssertionError, match="gradients differ"):
        gpumem.assert_same_gradients(build, architecture.batch(), "fp32", "fp32")


@ON_THE_CPU
@pytest.mark.parametrize(
    "config",
    [
        "amp-fp16,checkpoint=sqrt,accumulate=2",
        pytest.param("bf16,checkpoint=ops,optimizer=sgd,clip=1,zero_grad=zero", marks=pytest.mark.thorough),
    ],
)
def test_a_config_gives_the_same_bytes_again_with_other_weights_and_data(
    gpumem: Gpumem, architecture: Architecture, config: str
) -> None:
    seen = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        seen.append(gpumem.train_step(architecture.build, architecture.batch(), config=config, explain=True))
        assert_rows_add_up(seen[-1])
        assert seen[-1].composition.recomputed
    assert bytes_of(seen[0]) == bytes_of(seen[1])
    assert seen[0].composition == seen[1].composition
    assert seen[0].recomputed == seen[1].recomputed


def perceptrons() -> torch.nn.Module:
    """Two, whose hidden layers can be computed again: a transformer takes half a minute to compile."""
    pair = (torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64), torch.nn.Tanh())
    return torch.nn.Sequential(*pair, *copy.deepcopy(pair))


def squares(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@ON_THE_CPU
@NEEDS_COMPILER
@pytest.mark.thorough
def test_within_a_memory_budget_compiled_code_saves_and_gives_the_same_gradients(gpumem: Gpumem) -> None:
    batch = torch.randn(64, 64)
    whole = gpumem.train_step(perceptrons, batch, loss=squares, config="fp32,compile=default", explain=True)
    half = gpumem.train_step(perceptrons, batch, loss=squares, config="fp32,compile=default,checkpoint=budget:0.5")
    assert_rows_add_up(whole)
    assert half.settled
    assert half.peak_forward < whole.peak_forward
    assert half.peak_optimizer == whole.peak_optimizer
    halved = "fp32,compile=default,checkpoint=budget:0.5"
    gpumem.assert_same_gradients(perceptrons, batch, halved, "fp32", loss=squares)


@ON_THE_CPU
@pytest.mark.parametrize(
    ("name", "key_value_heads", "precision", "size"), [("gpt2", 4, "fp32", 4), ("llama", 2, "bf16", 2)]
)
def test_a_key_value_cache_costs_its_keys_and_values(
    gpumem: Gpumem, name: str, key_value_heads: int, precision: str, size: int
) -> None:
    architecture = ARCHITECTURES[name]
    tokens = architecture.batch()["input_ids"]
    samples, length = tokens.shape
    blocks, head_size = 4, 16
    bytes_a_token = 2 * blocks * samples * key_value_heads * head_size * size

    def peak(tokens: torch.Tensor, config: str) -> int:
        explain = config == precision
        measured = gpumem.infer_step(architecture.build, {"input_ids": tokens}, config=config, explain=explain)
        assert measured.retained == 0
        if explain:
            assert_rows_add_up(measured)
        return measured.peak_allocated

    by_itself = peak(tokens, precision)
    off = peak(tokens, f"{precision},cache=off")
    assert by_itself - off == length * bytes_a_token

    prompt = tokens[:, :-1].contiguous()
    beside = peak(tokens, f"{precision},cache=on") - peak(prompt, f"{precision},cache=off")
    # The prompt is a view: the last token's column is held, too.
    held = tokens.nbytes - prompt.nbytes
    assert 0 <= beside - held - (length - 1) * bytes_a_token < SCALARS
