"""Savings of checkpointing in a model's activations: a GPT-2 of narrow blocks, on the CPU.

Its activations are many times its gradients: what is left of a peak when parameters,
optimizer state and batch are taken off is activations.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from tests.models.architectures import GPT2, NEEDS_TRANSFORMERS, ON_THE_CPU

if TYPE_CHECKING:
    from pytest_gpumem.plugin.fixture import Gpumem
    from pytest_gpumem.plugin.relations.estimate import Estimate

pytestmark = [NEEDS_TRANSFORMERS, pytest.mark.usefixtures("_the_same_weights_and_data", "_without_times")]

BLOCKS = 12
SAMPLES, LENGTH, WIDTH = 2, 128, 32
NARROW = GPT2.but(hidden_size=WIDTH, vocab_size=128, max_position_embeddings=LENGTH)
BOUNDARY = SAMPLES * LENGTH * WIDTH * 4
"""Bytes of what one block hands to the next."""


def estimated(gpumem: Gpumem, checkpoint: str, blocks: int = BLOCKS) -> Estimate:
    tokens = torch.randint(128, (SAMPLES, LENGTH))
    deep = NARROW.but(num_hidden_layers=blocks)
    batch = {"input_ids": tokens, "labels": tokens}
    return gpumem.estimate(deep.build, batch, f"fp32,checkpoint={checkpoint}")


def beyond_rest(estimate: Estimate) -> int:
    """Bytes of the step's peak that are neither parameters, nor optimizer state, nor the batch."""
    state = estimate.state
    held = state.parameters.measured + state.optimizer_state.measured + state.buffers + state.batch + state.other
    return state.peak - held


@ON_THE_CPU
def test_checkpointing_all_blocks_saves_over_half_and_every_second_block_less(
    gpumem: Gpumem,
) -> None:
    plain, every_other, all_blocks = (estimated(gpumem, kind, blocks=4) for kind in ("none", "every:2", "blocks"))
    assert all_blocks.activations <= 0.5 * plain.activations
    assert all_blocks.activations < every_other.activations < plain.activations
    assert beyond_rest(all_blocks) < beyond_rest(every_other) < beyond_rest(plain)


@ON_THE_CPU
@pytest.mark.thorough
def test_segments_hold_their_boundaries_and_the_activations_of_one_segment(gpumem: Gpumem) -> None:
    """The rule of Chen, Xu, Zhang and Guestrin (2016): S segments of N blocks hold S boundaries + N / S blocks' activations.

    The last segment is the first to be recomputed, and then all boundaries are still held. Both sizes are measured, as what
    one more block adds to the peak of forward: without checkpointing its activations, with ``checkpoint=blocks`` its boundary.
    ``sqrt`` makes round(sqrt(N)) segments.
    """
    added = {}
    for checkpoint in ("none", "blocks"):
        deep, shallow = (estimated(gpumem, checkpoint, blocks).activations for blocks in (BLOCKS, 4))
        added[checkpoint] = (deep - shallow) / (BLOCKS - 4)
    # A boundary comes with the state of the random number generator, for the same dropout when recomputing.
    assert added["blocks"] == pytest.approx(BOUNDARY + torch.get_rng_state().nbytes, abs=64)

    segments = round(math.sqrt(BLOCKS))
    rule = segments * added["blocks"] + BLOCKS / segments * added["none"]
    estimate = estimated(gpumem, "sqrt")
    assert estimate.measurement.peak_backward > estimate.measurement.peak_forward
    assert beyond_rest(estimate) == pytest.approx(rule, rel=0.1)
