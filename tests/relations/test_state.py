"""The bytes that a training step keeps for each parameter: by formula, and as they are."""

from __future__ import annotations

import pytest
import torch

from pytest_gpumem.measuring.measure.context import MeasuringContext
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.model_source import model_source
from pytest_gpumem.measuring.steps.train_step import prepared_train_step
from pytest_gpumem.plugin.relations.state import Share, StateBytes
from pytest_gpumem.plugin.relations.state import state_of as state_of_step

INPUTS, OUTPUTS, SAMPLES = 64, 64, 8
F32, COUNT = 4, 4
PARAMETERS = F32 * (INPUTS * OUTPUTS + OUTPUTS)
BATCH, OUTPUT, LOSS = F32 * SAMPLES * INPUTS, F32 * SAMPLES * OUTPUTS, F32


@pytest.fixture
def bench(device):
    return MeasuringContext(device, time_budget=None)


def state_of(bench, config="fp32", model=None, optimizer=None) -> StateBytes:
    with prepared_train_step(
        bench,
        model_source(model or (lambda: torch.nn.Linear(INPUTS, OUTPUTS))),
        lambda: torch.ones(SAMPLES, INPUTS),
        config=StepConfig.parse(config),
        loss=lambda output, _batch: output.sum(),
        optimizer=optimizer,
    ) as prepared:
        step = prepared.measure()
        state = state_of_step(prepared, step.figures)
    assert state.peak == step.figures.memory.memory_metrics()["peak_allocated"]
    return state


def exactly(nbytes: int) -> Share:
    return Share(formula=nbytes, measured=nbytes)


def test_a_step_of_adamw_holds_what_the_formulas_say(bench):
    state = state_of(bench)
    assert state.parameters == state.gradients == exactly(PARAMETERS)
    assert state.optimizer_state == exactly(2 * PARAMETERS + 2 * COUNT)
    assert state.master_weights == exactly(0)
    assert (state.buffers, state.batch, state.other) == (0, BATCH, 0)
    assert state.activations == OUTPUT + LOSS


@pytest.mark.parametrize(
    ("config", "parameters", "optimizer_state"),
    [
        ("bf16", PARAMETERS // 2, PARAMETERS + 2 * COUNT),
        ("fp16,optimizer=sgd", PARAMETERS // 2, 0),
        ("amp-bf16,optimizer=adam", PARAMETERS, 2 * PARAMETERS + 2 * COUNT),
        ("fp32,optimizer=none", PARAMETERS, 0),
    ],
)
def test_weights_gradients_and_state_are_in_the_bytes_of_the_precision(bench, config, parameters, optimizer_state):
    state = state_of(bench, config)
    assert state.parameters == state.gradients == exactly(parameters)
    assert state.optimizer_state == exactly(optimizer_state)
    assert state.master_weights == exactly(0)
    assert state.other == 0


def test_frozen_parameters_have_neither_gradient_nor_state(bench):
    def build():
        model = torch.nn.Sequential(torch.nn.Linear(INPUTS, OUTPUTS), torch.nn.Linear(OUTPUTS, OUTPUTS))
        model[0].requires_grad_(False)
        return model

    state = state_of(bench, model=build)
    assert state.parameters == exactly(2 * PARAMETERS)
    assert state.gradients == exactly(PARAMETERS)
    assert state.optimizer_state == exactly(2 * PARAMETERS + 2 * COUNT)


def test_tied_parameters_count_once(bench):
    def build():
        model = torch.nn.Sequential(torch.nn.Linear(INPUTS, OUTPUTS), torch.nn.Linear(OUTPUTS, OUTPUTS))
        model[1].weight, model[1].bias = model[0].weight, model[0].bias
        return model

    assert state_of(bench, model=build).parameters == exactly(PARAMETERS)


def test_buffers_are_told_apart_from_parameters(bench):
    class Buffered(torch.nn.Linear):
        def __init__(self):
            super().__init__(INPUTS, OUTPUTS)
            self.register_buffer("table", torch.ones(100))

    state = state_of(bench, model=Buffered)
    assert (state.buffers, state.parameters) == (400, exactly(PARAMETERS))


def test_zeroed_gradients_are_held_at_rest_and_are_no_activations(bench):
    dropped, kept = state_of(bench), state_of(bench, "fp32,zero_grad=zero")
    assert kept.gradients == dropped.gradients
    assert (kept.other, kept.activations) == (0, dropped.activations)


def test_the_gradients_of_earlier_micro_batches_are_no_activations(bench):
    state = state_of(bench, "fp32,accumulate=2")
    # Half of the output, its sum, and that divided by the number of parts, beside the loss of the part before.
    assert OUTPUT // 2 <= state.activations <= OUTPUT // 2 + 4 * LOSS
    assert state.other == 0


def test_an_optimizer_without_a_formula_is_told_by_none_and_measured(bench):
    state = state_of(bench, optimizer=torch.optim.Adagrad)
    assert state.optimizer_state == Share(formula=None, measured=PARAMETERS + 2 * COUNT)


class WithMasters(torch.optim.SGD):
    """Keeps a float32 copy of each parameter, as mixed-precision optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("master_param", parameter.detach().float().clone())
        return super().step(closure)


def test_full_precision_copies_of_half_precision_weights_are_told_apart(bench):
    state = state_of(bench, "bf16", optimizer=lambda parameters: WithMasters(parameters, lr=0.1))
    assert state.parameters == exactly(PARAMETERS // 2)
    assert state.master_weights == Share(formula=0, measured=PARAMETERS)


def test_what_nobody_accounts_for_is_told_as_other(bench):
    class Hoarding(torch.nn.Linear):
        def __init__(self):
            super().__init__(INPUTS, OUTPUTS)
            self.cache = []

        def forward(self, x):
            output = super().forward(x)
            self.cache[:] = [torch.ones(1000)]
            return output

    assert state_of(bench, model=Hoarding).other == 4000
