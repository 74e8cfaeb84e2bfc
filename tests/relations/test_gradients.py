"""Equal gradients under two configs: what counts as equal, and what is said of the first that is not."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

from pytest_gpumem.base.errors import CannotRun, ConfigError, MeasuringError
from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.model_source import model_source
from pytest_gpumem.plugin.relations.gradients import Gradients, assert_same_gradients, difference

RTOL = 1e-2


def gradients(config="fp32", **by_name) -> Gradients:
    values = {
        name: None if value is None else torch.as_tensor(value, dtype=torch.float32) for name, value in by_name.items()
    }
    return Gradients(config, values)


def told(mine: Gradients, theirs: Gradients, **more) -> str | None:
    return difference(mine, theirs, **({"rtol": RTOL} | more))


# What differs


def test_equal_gradients_do_not_differ():
    one = gradients(weight=[[1.0, -2.0]], bias=[0.0], frozen=None)
    assert told(one, one) is None
    assert told(one, one, rtol=0, atol=0) is None


@pytest.mark.parametrize(("off", "same"), [(0.02, True), (0.03, False), (-0.03, False)])
def test_the_error_may_be_a_part_of_the_gradients_size(off, same):
    # The root mean square of the entries is 2, that of the error half of what one of four entries is off.
    theirs = gradients(weight=[2.0, -2.0, 2.0, -2.0])
    mine = gradients(weight=[2.0 + off * 2, -2.0, 2.0, -2.0])
    assert (told(mine, theirs, atol=0.0) is None) == same


def test_a_single_entry_may_be_far_off_where_the_others_are_not():
    theirs = gradients(weight=torch.ones(10_000))
    mine = gradients(weight=torch.ones(10_000).index_fill(0, torch.tensor([7]), 1.5))
    assert told(mine, theirs) is None


def test_a_gradient_of_rounding_errors_is_held_against_the_largest():
    theirs = gradients(weight=[100.0], keys_bias=[1e-6])
    assert told(gradients(weight=[100.0], keys_bias=[-1e-3]), theirs) is None
    assert told(gradients(weight=[100.0], keys_bias=[2e-2]), theirs) is not None


def test_of_several_gradients_the_first_that_differs_is_told():
    message = (
        "gradients differ: second: error 1, allowed 0.01; entry 1 is 3 against 1 (rtol 0.01, atol 0); "
        "amp-bf16 against fp32, 2 of 3 parameters differ"
    )
    mine = gradients("amp-bf16", first=[1.0], second=[1.0, 3.0, 1.0, 1.0], third=[0.0])
    theirs = gradients("fp32", first=[1.0], second=[1.0, 1.0, 1.0, 1.0], third=[1.0])
    assert told(mine, theirs, atol=0.0) == message


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_is_never_the_same(wrong):
    told_of = told(gradients(weight=[1.0, wrong]), gradients(weight=[1.0, 1.0]), rtol=1e9)
    assert told_of is not None
    assert f"entry 1 is {wrong:g} against 1" in told_of


def test_shapes_that_differ_are_told():
    told_of = told(gradients(weight=[[1.0, 2.0]]), gradients(weight=[1.0, 2.0]))
    assert told_of is not None
    assert told_of.startswith("gradients differ: weight: shape [1, 2] against [2] (")


def test_a_missing_gradient_is_told_with_the_config_that_lacks_it():
    message = (
        "gradients differ: first has a gradient under fp32, but none under ops: a tensor "
        "between the parameter and the loss is detached (2 of 3 parameters)"
    )
    theirs = gradients("fp32", first=[1.0], second=[1.0], third=[1.0])
    mine = gradients("ops", first=None, second=None, third=[1.0])
    assert told(mine, theirs) == told(theirs, mine) == message
    assert told(gradients("ops", first=[1.0], second=None, third=[1.0]), theirs) is not None


def test_models_of_different_parameters_are_told():
    message = "the models have different parameters: extra is in only one model; build the same model each time"
    one, other = gradients(weight=[1.0]), gradients(weight=[1.0], extra=[1.0])
    assert told(one, other) == told(other, one) == message


@pytest.mark.parametrize("nothing", [{}, {"frozen": None}])
def test_without_any_gradient_nothing_is_the_same(nothing):
    assert told(gradients(**nothing), gradients(**nothing)) == "nothing to compare: no parameter has a gradient"


def test_empty_parameters_have_equal_gradients():
    one = gradients(weight=[1.0], empty=[])
    assert told(one, one) is None


# Two steps of a model


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5)) for _ in range(4))
        self.head = nn.Linear(8, 1)

    def forward(self, hidden):
        for block in self.h:
            hidden = block(hidden)
        return self.head(hidden).square().mean()


class WithoutDropout(Model):
    def __init__(self):
        super().__init__()
        for block in self.h:
            block[2].p = 0.0


def compare(model, config_a, config_b, **more):
    batch = torch.linspace(-1, 1, 64).view(8, 8)
    configs = (StepConfig.parse(config_a), StepConfig.parse(config_b))
    return assert_same_gradients(CpuDevice(), model_source(model), batch, configs, **more)


@pytest.mark.parametrize("config", ["checkpoint=blocks", "optimizer=sgd,clip=1,zero_grad=zero"])
def test_what_saves_memory_gives_the_same_gradients_with_dropout(config):
    assert compare(Model, config, "fp32", rtol=0, atol=0) is None


@pytest.mark.parametrize(
    "config",
    ["amp-bf16", "amp-fp16", "bf16", "accumulate=4", "amp-fp16,accumulate=2,checkpoint=blocks", "compile=aot_eager"],
)
def test_what_rounds_gives_the_same_gradients_within_what_that_explains(config):
    assert compare(WithoutDropout, config, "fp32") is None


def test_half_precision_is_not_the_same_within_a_float32_tolerance():
    with pytest.raises(AssertionError, match=r"^gradients differ: h\.0\.0\.weight: error .* amp-bf16 against fp32, "):
        compare(WithoutDropout, "amp-bf16", "fp32", rtol=1e-6)


def test_a_model_that_detaches_under_one_config_names_the_first_parameter():
    class Detaching(Model):
        def forward(self, hidden):
            for number, block in enumerate(self.h):
                hidden = block(hidden)
                if number == 1 and torch.is_autocast_enabled("cpu"):
                    hidden = hidden.detach()
            return self.head(hidden).square().mean()

    message = (
        "gradients differ: h.0.0.weight has a gradient under fp32, but none under amp-bf16: a tensor "
        "between the parameter and the loss is detached (4 of 10 parameters)"
    )
    with pytest.raises(AssertionError, match=f"^{re.escape(message)}$"):
        compare(Detaching, "amp-bf16", "fp32")


def test_a_block_that_is_not_the_same_when_it_runs_again_is_told():
    class Moody(nn.Linear):
        ran = 0

        def forward(self, hidden):
            Moody.ran += 1
            return super().forward(hidden) * (1.0 if Moody.ran % 3 else 2.0)

    class WithMoody(Model):
        def __init__(self):
            super().__init__()
            self.h = nn.ModuleList(nn.Sequential(Moody(8, 8), nn.Tanh()) for _ in range(2))

    with pytest.raises(AssertionError, match=r"^gradients differ: h\.0\.0\.weight: error"):
        compare(WithMoody, "checkpoint=blocks", "fp32")


def test_micro_batches_draw_their_own_dropout_which_is_hinted_at():
    hint = (
        "; each micro-batch draws its own dropout, and the mean over micro-batches with unequal token counts differs from "
        "the mean over the batch"
    )
    with pytest.raises(AssertionError, match=f"{re.escape(hint)}$"):
        compare(Model, "accumulate=4", "fp32")


def test_both_steps_begin_with_the_weights_and_buffers_of_the_first_model():
    built = []

    class Drifting(WithoutDropout):
        def __init__(self):
            super().__init__()
            self.register_buffer("shift", torch.full((8,), float(len(built))))
            built.append(self)

        def forward(self, hidden):
            return super().forward(hidden + self.shift)

    compare(Drifting, "checkpoint=blocks", "fp32", rtol=0, atol=0)
    first, second = (model.state_dict() for model in built)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_comparison_changes_nothing_that_is_drawn_afterwards():
    torch.manual_seed(5)
    model = Model()
    before = torch.random.get_rng_state()
    compare(lambda: copy.deepcopy(model), "checkpoint=blocks", "fp32")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_gradients_that_overflow_at_a_large_scale_are_taken_at_a_smaller_one():
    assert compare(WithoutDropout, "amp-fp16", "fp32", loss=lambda output, _batch: output * 1e4) is None


@pytest.mark.parametrize(("precision", "factor"), [("fp32", float("nan")), ("amp-fp16", float("inf"))])
def test_a_gradient_that_is_not_finite_is_no_relation(precision, factor):
    with pytest.raises(MeasuringError, match=rf"^the gradient of h\.0\.0\.weight is not finite under {precision}$"):
        compare(WithoutDropout, precision, "checkpoint=blocks", loss=lambda output, _batch: output * factor)


def test_compiled_dropout_is_hinted_at():
    hint = "; compiled code draws other random numbers: compare with dropout switched off"
    with pytest.raises(AssertionError, match=f"{re.escape(hint)}$"):
        compare(Model, "compile=eager,amp-bf16", "fp32", rtol=0, atol=0)


@pytest.mark.parametrize(
    ("configs", "error", "message"),
    [
        (("cache=on", "fp32"), ConfigError, "step config 'cache=on': cache does nothing in gpumem.train_step"),
        (("fp32", "tf32"), CannotRun, "TF32 is a format of NVIDIA GPUs, and this is a CPU"),
    ],
)
def test_a_config_that_makes_no_training_step_here_is_told(configs, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        compare(Model, *configs)


def test_a_model_that_was_built_already_is_refused():
    message = "assert_same_gradients builds the model twice: pass a class or function that builds it, not a model"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        compare(Model(), "fp32", "checkpoint=blocks")
