"""A training step of GPT-2 small (124 million parameters, random weights) in fp32, against the bytes that it must hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.gpu.gpt2 import BATCH, FLOAT, MOST_WORKSPACES, PARAMETERS, TOKENS, VOCABULARY, batch, gpt2_small
from tests.gpu.project import without_chance

if TYPE_CHECKING:
    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.plugin.fixture import Gpumem

pytestmark = [
    pytest.mark.usefixtures("room_for_gpt2"),
    # What another library or its torch warn of is not what these tests are about.
    pytest.mark.filterwarnings("default"),
]


def tokens_of(given: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in given.values())


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, momentum=0.9)


def test_a_training_step_repeats_to_the_byte_with_other_weights_and_data(gpumem: Gpumem) -> None:
    measured = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        measured.append(
            gpumem.train_step(gpt2_small, batch(seed), items=BATCH * TOKENS, name=f"gpt2-small-seed-{seed}")
        )
    first, second = measured
    assert first.settled
    assert first.workload.parameters == PARAMETERS
    assert without_chance(first.metrics) == without_chance(second.metrics)
    assert (first.retained, first.cyclic_garbage) == (0, 0)
    assert first.peak_allocated == max(first.peak_forward, first.peak_backward, first.peak_optimizer)
    assert first.peak_reserved >= first.peak_allocated


def test_parameters_gradients_and_optimizer_state_are_where_they_must_be(gpumem: Gpumem) -> None:
    model, given = gpt2_small().to(gpumem.device), batch()
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    parameters = PARAMETERS * FLOAT
    assert sum(parameter.nbytes for parameter in model.parameters()) == parameters
    resident = parameters + buffers + tokens_of(given)

    def measure(optimizer: Any, name: str) -> Measurement:
        return gpumem.train_step(model, given, optimizer=optimizer, name=name)

    sgd = measure(torch.optim.SGD, "sgd")
    averaging = measure(momentum, "momentum")
    adamw = measure(torch.optim.AdamW, "adamw")

    # One optimizer differs from the other in nothing but its state until its own step begins. AdamW's counters of steps
    # are on the host.
    for phase in ("peak_forward", "peak_backward"):
        assert averaging.metrics[phase] - sgd.metrics[phase] == parameters
        assert adamw.metrics[phase] - sgd.metrics[phase] == 2 * parameters

    # Plain SGD updates in place: parameters, gradients, batch and loss, and the workspaces that cuBLAS has by then.
    workspaces = sgd.peak_optimizer - (resident + parameters + FLOAT)
    assert 0 <= workspaces <= MOST_WORKSPACES
    assert adamw.peak_optimizer >= resident + 3 * parameters + FLOAT
    assert adamw.peak_forward >= resident + 2 * parameters
    assert adamw.peak_backward >= resident + 3 * parameters


def test_inference_needs_less_than_training_and_the_logits_at_least(gpumem: Gpumem) -> None:
    model, given = gpt2_small().to(gpumem.device), batch()
    logits = BATCH * TOKENS * VOCABULARY * FLOAT
    inference = gpumem.infer_step(model, given, name="inference")
    training = gpumem.train_step(model, given, name="training")
    assert PARAMETERS * FLOAT + logits <= inference.peak_allocated < training.peak_allocated
