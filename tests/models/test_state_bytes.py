"""Bytes of parameters, gradients and AdamW state of four models, against numbers worked out on paper. On the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.models.architectures import (
    BERT,
    CLASSES,
    GPT2,
    LLAMA,
    NEEDS_TRANSFORMERS,
    ON_THE_CPU,
    VIT,
    VOCABULARY,
    Architecture,
)

if TYPE_CHECKING:
    from pytest_gpumem.plugin.fixture import Gpumem

pytestmark = [NEEDS_TRANSFORMERS, pytest.mark.usefixtures("_the_same_weights_and_data", "_without_times")]

D, INNER, BLOCKS, POSITIONS = 64, 128, 2, 64
NORM = 2 * D
"""Weight and bias of a layer normalisation."""
FLOAT = 4


class Size(NamedTuple):
    """Of a model: how many parameters, in how many tensors, and how many bytes of buffers."""

    parameters: int
    tensors: int
    buffers: int = 0


def linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def gpt2() -> Size:
    block = NORM + linear(D, 3 * D) + linear(D, D) + NORM + linear(D, 4 * D) + linear(4 * D, D)
    return Size(VOCABULARY * D + POSITIONS * D + BLOCKS * block + NORM, 2 + BLOCKS * 12 + 2)


def llama() -> Size:
    """No biases, RMS norms without one, half as many heads for keys and values, and a head of its own."""
    block = 2 * D * D + 2 * D * (D // 2) + 3 * D * INNER + 2 * D
    frequencies = 2 * (D // 4 // 2) * FLOAT
    return Size(2 * VOCABULARY * D + BLOCKS * block + D, 1 + BLOCKS * 9 + 2, frequencies)


def encoder_block() -> int:
    return 4 * linear(D, D) + linear(D, INNER) + linear(INNER, D) + 2 * NORM


def bert() -> Size:
    embeddings = (VOCABULARY + POSITIONS + 2) * D + NORM
    head = linear(D, D) + NORM + VOCABULARY
    numbers = 2 * POSITIONS * 8
    return Size(embeddings + BLOCKS * encoder_block() + head, 5 + BLOCKS * 16 + 5, numbers)


def vit() -> Size:
    patches = (32 // 8) ** 2
    embeddings = D + (patches + 1) * D + linear(3 * 8 * 8, D)
    return Size(embeddings + BLOCKS * encoder_block() + NORM + linear(D, CLASSES), 4 + BLOCKS * 16 + 4)


WEIGHTS = {"fp32": 4, "amp-fp16": 4, "bf16": 2}
"""Bytes of a parameter, by precision."""


@ON_THE_CPU
@pytest.mark.parametrize(
    ("architecture", "size"),
    [
        (GPT2, gpt2()),
        (LLAMA, llama()),
        (BERT, bert()),
        (VIT, vit()),
    ],
    ids=["gpt2", "llama", "bert", "vit"],
)
def test_parameters_gradients_and_adamw_state_are_to_the_byte_what_the_formula_says(
    gpumem: Gpumem, architecture: Architecture, size: Size
) -> None:
    batch = architecture.batch()
    for precision in WEIGHTS if architecture is GPT2 else ("amp-fp16",):
        weight = WEIGHTS[precision]
        estimate = gpumem.estimate(architecture.build, batch, precision)
        state = estimate.state
        assert estimate.measurement.workload.parameters == size.parameters
        assert state.parameters.formula == state.parameters.measured == weight * size.parameters, precision
        assert state.gradients.formula == state.gradients.measured == weight * size.parameters, precision
        # Two averages in the parameter's dtype, and a float32 that counts the steps, for each tensor.
        adamw = 2 * weight * size.parameters + FLOAT * size.tensors
        assert state.optimizer_state.formula == state.optimizer_state.measured == adamw, precision
        assert state.master_weights.formula == state.master_weights.measured == 0, precision
        assert estimate.findings == (), precision
        # The gradient scaler keeps its scale and a count.
        assert state.other == (8 if precision == "amp-fp16" else 0), precision
        if weight == FLOAT:
            assert state.buffers == size.buffers, precision
