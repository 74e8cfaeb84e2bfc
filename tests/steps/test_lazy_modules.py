"""Lazy modules: a step of a model whose parameters have no shape yet is that of the same model with all of them."""

from __future__ import annotations

import pytest
import torch

from pytest_gpumem.measuring.measure.context import MeasuringContext
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.global_settings import is_uninitialised
from pytest_gpumem.measuring.steps.model_source import model_source
from pytest_gpumem.measuring.steps.train_step import prepared_train_step
from pytest_gpumem.plugin.relations.gradients import assert_same_gradients
from pytest_gpumem.plugin.relations.state import state_of
from pytest_gpumem.torch_support.static_access import elements_of
from tests.measuring import measure_infer_step, measure_train_step

WIDTH = 16
PARAMETERS = (WIDTH * 32 + 32) + 2 * 32 + (32 * 4 + 4)


class Eager(torch.nn.Module):
    """What the lazy model becomes."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = torch.nn.Linear(WIDTH, 32), torch.nn.BatchNorm1d(32)
        self.down = torch.nn.Linear(32, 4)

    def forward(self, x):
        return self.down(self.norm(self.up(x))).square().mean()


class Lazy(Eager):
    def __init__(self):
        torch.nn.Module.__init__(self)
        self.up, self.norm, self.down = torch.nn.LazyLinear(32), torch.nn.LazyBatchNorm1d(), torch.nn.LazyLinear(4)


class PartlyUsed(Lazy):
    """One of its lazy modules is never called."""

    def __init__(self):
        super().__init__()
        self.never = torch.nn.LazyLinear(4)


@pytest.fixture
def bench(device):
    return MeasuringContext(device, time_budget=None)


def train(bench, model, config="fp32", **more):
    batch = torch.arange(8.0 * WIDTH).reshape(8, WIDTH).sin()
    return measure_train_step(bench, model, batch, config=StepConfig.parse(config), **more)


@pytest.mark.parametrize("config", ["plain", "bf16", "accumulate=2", "compile=eager"])
def test_a_lazy_model_needs_what_the_model_that_it_becomes_needs(bench, config):
    lazy, eager = train(bench, Lazy, config), train(bench, Eager, config)
    assert lazy.metrics() == eager.metrics()
    assert lazy.workload == eager.workload
    assert lazy.workload.parameters == PARAMETERS


def test_a_model_that_was_given_with_an_optimizer_of_its_own_is_trained(bench):
    model = Lazy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = train(bench, model, optimizer=optimizer)
    assert step.workload.parameters == PARAMETERS
    assert step.metrics() == train(bench, Eager(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)).metrics()
    assert not any(map(is_uninitialised, model.parameters()))


def test_a_model_can_be_trained_after_it_was_first_used_in_inference(bench):
    model = Lazy()
    step = measure_infer_step(bench, model, torch.ones(8, WIDTH))
    assert step.workload.parameters == PARAMETERS
    assert not any(parameter.is_inference() for parameter in model.parameters())
    assert train(bench, model).figures.is_settled


def test_a_lazy_module_that_is_never_called_counts_nothing(bench):
    config = StepConfig.parse("fp32")
    with prepared_train_step(bench, model_source(PartlyUsed), torch.ones(8, WIDTH), config=config) as prepared:
        step = prepared.measure()
        state = state_of(prepared, step.figures)
    assert step.workload.parameters == PARAMETERS
    assert state.parameters.formula == state.parameters.measured == 4 * PARAMETERS


def test_gradients_of_a_lazy_model_are_compared_with_equal_weights(bench):
    batch = torch.arange(8.0 * WIDTH).reshape(8, WIDTH).sin()
    configs = StepConfig.parse("fp32"), StepConfig.parse("checkpoint=modules:up")
    assert assert_same_gradients(bench.device, model_source(Lazy), batch, configs) is None


def test_an_uninitialised_parameter_has_no_elements():
    assert elements_of(torch.nn.UninitializedParameter()) == 0
    assert is_uninitialised(torch.nn.UninitializedBuffer())
    assert not is_uninitialised(torch.nn.Parameter(torch.ones(2)))


def test_a_model_that_fails_in_its_first_forward_fails_with_its_own_error(bench):
    class Failing(Lazy):
        def forward(self, x):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(bench, Failing)
