"""A model's step under a config, from what a test author hands in to figures; and the model as it was afterwards."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from pytest_gpumem.base.errors import CannotRun, ConfigError
from pytest_gpumem.measuring.measure.context import MeasuringContext
from pytest_gpumem.measuring.measure.prepared import MOST_SAMPLES, MeasuredStep
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.function import prepared_function
from pytest_gpumem.measuring.steps.inference import prepared_infer_step
from pytest_gpumem.measuring.steps.model_source import model_source
from pytest_gpumem.measuring.steps.train_step import prepared_train_step
from pytest_gpumem.measuring.timing.sampling import TimeBudget
from tests.measuring import measure_function, measure_infer_step, measure_train_step

WIDTH, SAMPLES, DEPTH = 32, 256, 4
F32 = 4
WEIGHTS = F32 * DEPTH * WIDTH * WIDTH
ACTIVATION = F32 * SAMPLES * WIDTH


class Model(torch.nn.Module):
    """Blocks that save little else than what they get."""

    def __init__(self):
        super().__init__()
        self.h = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.Tanh()) for _ in range(DEPTH)
        )

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return x.square().mean()


@pytest.fixture(params=[False])
def bench(request, device):
    return MeasuringContext(device, TimeBudget(0.1) if request.param else None)


timed = pytest.mark.parametrize("bench", [True], indirect=True)


def batch() -> torch.Tensor:
    return torch.ones(SAMPLES, WIDTH)


def train(bench, config=None, model=Model, **more) -> MeasuredStep:
    return measure_train_step(bench, model, batch, config=config and StepConfig.parse(config), **more)


def peak(step: MeasuredStep) -> float:
    return step.metrics()["peak_allocated"]


# Figures


def test_a_plain_config_is_the_step_without_one(bench):
    without, plain = train(bench), train(bench, "plain")
    assert without.metrics() == plain.metrics()
    assert without.workload == plain.workload
    assert (without.recomputed, plain.recomputed) == (0, 0)


def test_without_compiling_the_model_is_called_itself_and_nothing_is_run(bench):
    with prepared_train_step(bench, model_source(Model), batch) as prepared:
        assert prepared.training.run is prepared.model
        assert all(parameter.grad is None for parameter in prepared.model.parameters())
        assert not prepared.optimizer.state


def test_the_workload_says_the_config_with_the_precision_that_the_model_has(bench):
    class Double(Model):
        def forward(self, x):
            return super().forward(x.double())

    step = train(bench, "checkpoint=blocks,optimizer=sgd", lambda: Double().double())
    assert step.workload.config == "fp64,checkpoint=blocks,optimizer=sgd"
    assert step.workload.batch == f"float32[{SAMPLES}, {WIDTH}]"


def test_what_micro_batches_save_is_the_activations_of_the_others(bench):
    whole, parts = (train(bench, f"optimizer=sgd,accumulate={number}").metrics() for number in (1, 4))
    # A tanh's output of each block and the batch; the gradients of the first parts are beside the later ones.
    saved = whole["peak_forward"] - parts["peak_forward"]
    assert saved >= DEPTH * ACTIVATION * 3 / 4 - WEIGHTS


@pytest.mark.parametrize("config", ["fp32", "amp-fp16", "compile=eager", "checkpoint=blocks,zero_grad=zero"])
def test_a_step_gives_the_same_bytes_again_and_leaves_nothing_behind(bench, config):
    first, second = train(bench, config), train(bench, config)
    assert first.figures.is_settled
    assert first.metrics() == second.metrics()
    assert first.metrics()["retained"] == 0


@timed
def test_throughput_is_of_samples_unless_told_otherwise(bench):
    samples, items = (train(bench, "fp32", items=items).metrics() for items in (None, 10))
    assert samples["throughput"] == SAMPLES / samples["step_time"]
    assert items["throughput"] == 10 / items["step_time"]


@timed
def test_the_phases_of_a_step_have_times_of_their_own(bench):
    step = train(bench, "fp32,accumulate=2")
    phases = {name: value for name, value in step.metrics().items() if name.endswith("_time") and name != "step_time"}
    assert phases.keys() == {"forward_time", "backward_time", "optimizer_time"}
    assert all(seconds > 0 for seconds in phases.values())


def timed_as_often_as_it_may_be(prepared) -> MeasuredStep:
    step = prepared.time(prepared.measure())
    while step.may_be_timed_again:
        step = prepared.time_again(step)
    return step


@timed
def test_a_step_that_is_timed_again_has_another_sample_and_the_same_bytes(bench):
    with prepared_train_step(bench, model_source(Model), batch) as prepared:
        first = prepared.time(prepared.measure())
        again = prepared.time_again(first)
    assert len(first.figures.times.samples) == 1
    assert again.figures.times.samples[0] == first.figures.times.samples[0]
    assert len(again.figures.times.samples) == 2
    assert again.figures.memory == first.figures.memory


@timed
@pytest.mark.parametrize("prepare", [prepared_function, prepared_infer_step, prepared_train_step])
def test_every_kind_of_step_is_timed_again_until_it_has_samples_enough(bench, prepare):
    given = (lambda: torch.ones(SAMPLES),) if prepare is prepared_function else (model_source(Model), batch)
    with prepare(bench, *given) as prepared:
        step = timed_as_often_as_it_may_be(prepared)
    assert len(step.figures.times.samples) == MOST_SAMPLES == 3


@timed
def test_random_numbers_after_a_measurement_do_not_depend_on_the_timed_runs(bench):
    before = torch.get_rng_state()
    with prepared_function(bench, lambda: torch.rand(8)) as prepared:
        timed_as_often_as_it_may_be(prepared)
    assert torch.equal(torch.get_rng_state(), before)
    measure_function(replace(bench, time_budget=None), lambda: torch.rand(8))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_that_is_not_timed_may_not_be_timed_again(bench):
    step = train(bench)
    assert step.figures.times is None
    assert not step.may_be_timed_again


def test_an_inference_step_in_half_precision_holds_half_the_bytes(bench):
    def build():
        return torch.nn.Linear(WIDTH, WIDTH, bias=False)

    full, half = (measure_infer_step(bench, build, batch, config=StepConfig(word)) for word in ("fp32", "bf16"))
    assert full.figures.memory.own == F32 * WIDTH * WIDTH + ACTIVATION
    assert half.figures.memory.own == full.figures.memory.own / 2
    assert (full.workload.config, half.workload.config) == ("fp32", "bf16")


# What is handed in


def test_a_given_model_is_as_it_was_but_for_being_trained(bench):
    model = Model().eval()
    names = list(model.state_dict())
    first = model.h[0][0].weight
    before = first.detach().clone()
    first.grad = torch.ones_like(first)
    step = train(bench, "amp-bf16,checkpoint=blocks,optimizer=sgd,zero_grad=zero", model)
    assert not torch.equal(first, before)
    assert [parameter.grad for parameter in model.parameters()] == [None] * DEPTH
    assert list(model.state_dict()) == names
    assert not any("forward" in vars(module) or module.training for module in model.modules())
    assert peak(step) == peak(train(bench, "amp-bf16,checkpoint=blocks,optimizer=sgd,zero_grad=zero"))


def test_a_given_model_in_another_dtype_is_not_converted(bench):
    with pytest.raises(ConfigError, match=r"^bf16 needs bfloat16 parameters, but the model has float32; "):
        train(bench, "bf16", Model())


def test_an_optimizer_is_given_once(bench):
    message = "the test passes optimizer=, but the step config also has optimizer=sgd; leave one out"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        train(bench, "optimizer=sgd", optimizer=torch.optim.Adam)


def test_an_optimizer_may_be_given_beside_a_config_that_says_none(bench):
    given = train(bench, "amp-bf16", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    assert given.metrics() == train(bench, "amp-bf16,optimizer=sgd").metrics()


@pytest.mark.parametrize("config", ["tf32", "checkpoint=offload"])
def test_what_the_device_cannot_run_is_not_run(bench, config):
    def build():
        raise AssertionError("built")

    with pytest.raises(CannotRun):
        train(bench, config, build)


def test_a_precision_that_the_device_emulates_is_measured_with_a_note(bench, monkeypatch):
    monkeypatch.setattr(type(bench.device), "emulates", lambda _, feature: "slow" if feature == "amp-bf16" else None)
    with prepared_train_step(bench, model_source(Model), batch, config=StepConfig(precision="amp-bf16")) as training:
        assert training.notes == ("slow",)
    for precision, notes in (("amp-bf16", ("slow",)), ("fp32", ())):
        with prepared_infer_step(
            bench, model_source(Model), batch(), config=StepConfig(precision=precision)
        ) as inference:
            assert inference.notes == notes


def test_after_an_error_nothing_of_the_config_is_left(bench):
    model = Model()

    def loss(_output, _batch):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(bench, "amp-bf16,checkpoint=ops", model, loss=loss)
    assert not any("forward" in vars(module) for module in model.modules())
    assert not torch.is_autocast_enabled("cpu")
    assert train(bench, "fp32", model).figures.is_settled
