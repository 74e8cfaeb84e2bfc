"""GPT-2 small under a matrix of step configs: what its state must hold, and what saves memory against what."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from tests.gpu.gpt2 import FLOAT, MOST_WORKSPACES, PARAMETERS, TENSORS, batch, gpt2_small

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.measuring.step_config.config import StepConfig
    from pytest_gpumem.plugin.fixture import Gpumem
    from pytest_gpumem.plugin.relations.estimate import Estimate

    Plain = Callable[[str], Estimate]

pytestmark = [
    pytest.mark.usefixtures("room_for_gpt2"),
    # What another library or its torch warn of is not what these tests are about.
    pytest.mark.filterwarnings("default"),
]

PRECISIONS = ["fp32", "tf32", "amp-bf16", "amp-fp16", "bf16"]
CHECKPOINTS = ["blocks", "every:2", "sqrt", "ops"]
WEIGHT = {"fp32": FLOAT, "tf32": FLOAT, "amp-bf16": FLOAT, "amp-fp16": FLOAT, "bf16": 2}
"""Bytes of a parameter, its gradient, and each of AdamW's two averages."""


@pytest.fixture(scope="module")
def plain_estimates() -> dict[str, Estimate]:
    return {}


@pytest.fixture
def plain(gpumem: Gpumem, plain_estimates: dict[str, Estimate]) -> Plain:
    """The plain step in a precision, for others to be held against. Measured once for all tests."""

    def of(precision: str) -> Estimate:
        if precision not in plain_estimates:
            plain_estimates[precision] = gpumem.estimate(gpt2_small, batch(), precision, name=f"plain-{precision}")
        return plain_estimates[precision]

    return of


def holds(estimate: Estimate, weight: int, optimizer_state: int) -> None:
    """Assert what is there between forward and the optimizer's step, to the byte."""
    state = estimate.state
    assert state.parameters.measured == estimate.parameters == PARAMETERS * weight
    assert state.gradients.measured == estimate.gradients == PARAMETERS * weight
    assert state.optimizer_state.measured == estimate.optimizer_state == optimizer_state
    assert state.master_weights.measured == 0
    assert estimate.findings == ()
    assert estimate.measurement.settled
    assert estimate.measurement.retained == 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_in_a_precision_holds_its_state(plain: Plain, precision: str) -> None:
    # The counts of AdamW's steps are on the host.
    holds(plain(precision), WEIGHT[precision], 2 * PARAMETERS * WEIGHT[precision])


@pytest.mark.gpumem_configs(precision=["amp-fp16", "bf16"], checkpoint=CHECKPOINTS)
def test_checkpointing_holds_the_same_state_and_saves(gpumem: Gpumem, gpumem_config: StepConfig, plain: Plain) -> None:
    precision = str(gpumem_config.precision)
    cell = gpumem.estimate(gpt2_small, batch(), gpumem_config)
    holds(cell, WEIGHT[precision], 2 * PARAMETERS * WEIGHT[precision])
    assert cell.measurement.recomputed
    saves(cell.measurement, plain(precision).measurement)


def saves(with_it: Measurement, without: Measurement) -> None:
    for peak in ("peak_forward", "peak_backward", "peak_allocated"):
        assert with_it.metrics[peak] < without.metrics[peak], peak


def test_half_precision_saves_and_tf32_does_not(plain: Plain) -> None:
    of = {precision: plain(precision).measurement for precision in PRECISIONS}
    saves(of["bf16"], of["amp-bf16"])
    saves(of["amp-bf16"], of["fp32"])
    assert of["amp-fp16"].peak_allocated == pytest.approx(of["amp-bf16"].peak_allocated, rel=0.01)
    assert abs(of["tf32"].peak_allocated - of["fp32"].peak_allocated) <= MOST_WORKSPACES


@pytest.mark.hardware("no time passes on an emulated one")
def test_tf32_is_faster(plain: Plain) -> None:
    assert plain("tf32").measurement.step_time < plain("fp32").measurement.step_time


@pytest.mark.gpumem_configs(precision="amp-bf16", checkpoint="offload")
def test_what_is_moved_to_the_host_is_not_on_the_gpu(gpumem: Gpumem, gpumem_config: StepConfig, plain: Plain) -> None:
    without = plain("amp-bf16")
    offloaded = gpumem.estimate(gpt2_small, batch(), gpumem_config)
    holds(offloaded, FLOAT, 2 * PARAMETERS * FLOAT)
    saves(offloaded.measurement, without.measurement)


@pytest.mark.gpumem_configs(precision="amp-bf16", optimizer=["adamw", "adamw-foreach", "adamw-fused"])
def test_every_form_of_adamw_holds_two_averages(gpumem: Gpumem, gpumem_config: StepConfig) -> None:
    # Fused, each parameter's count of steps is on the GPU.
    counts = TENSORS * FLOAT if gpumem_config.optimizer == "adamw-fused" else 0
    holds(gpumem.estimate(gpt2_small, batch(), gpumem_config), FLOAT, 2 * PARAMETERS * FLOAT + counts)


def test_adamw_is_foreach_by_itself_and_fused_makes_no_temporaries(gpumem: Gpumem) -> None:
    given = batch()
    usual, foreach, fused = (
        gpumem.train_step(gpt2_small, given, config=f"amp-bf16,optimizer={name}", name=name).peak_optimizer
        for name in ("adamw", "adamw-foreach", "adamw-fused")
    )
    assert usual == foreach
    # One temporary, as large as the parameters, at the least.
    assert foreach - fused >= PARAMETERS * FLOAT - TENSORS * FLOAT


@pytest.mark.gpumem_configs(precision="amp-bf16", optimizer="adamw-8bit")
def test_eight_bit_adamw_holds_a_byte_for_each_of_two_averages(gpumem: Gpumem, gpumem_config: StepConfig) -> None:
    pytest.importorskip("torchao", reason="needs torchao: this is a test of its 8-bit AdamW")
    estimate = gpumem.estimate(gpt2_small, batch(), gpumem_config)
    assert estimate.findings == ()
    assert 2 * PARAMETERS < estimate.state.optimizer_state.measured < 2.1 * PARAMETERS


@pytest.mark.gpumem_configs(precision="amp-bf16", checkpoint=[*CHECKPOINTS, "offload"])
def test_checkpointing_changes_no_gradient(gpumem: Gpumem, gpumem_config: StepConfig) -> None:
    plainly = dataclasses.replace(gpumem_config, checkpoint="none")
    gpumem.assert_same_gradients(gpt2_small, batch(), gpumem_config, plainly)
