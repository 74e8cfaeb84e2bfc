"""A model's step: what is made of a model, a loss and an optimizer, and what is said when they do not make a step."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace

import pytest
import torch

from pytest_gpumem.measuring.steps.global_settings import in_mode
from pytest_gpumem.measuring.steps.model_step import build_model, build_optimizer, loss_of, parameters_of, precision_of

CPU = torch.device("cpu")
META = torch.device("meta")


class Tiny(torch.nn.Module):
    """A scalar of its input."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)
        torch.nn.init.zeros_(self.linear.weight)

    def forward(self, x):
        return self.linear(x).sum()


# Models


def test_a_model_that_was_given_is_taken_as_it_is():
    model = Tiny()
    assert build_model(model, CPU) is model


def test_a_class_or_function_builds_the_model_on_the_device():
    assert {p.device for p in build_model(Tiny, META).parameters()} == {META}
    assert {p.device for p in build_model(lambda: torch.nn.Linear(1, 1, device="cpu"), CPU).parameters()} == {CPU}


def test_a_model_that_is_built_on_the_device_is_not_built_elsewhere_first():
    seen = []

    def build():
        seen.append(torch.empty(1).device)
        return Tiny()

    build_model(build, META)
    assert seen == [META]


def _through_numpy():
    return torch.from_numpy(torch.linspace(0, 1, 2).numpy())


def _mixed():
    return torch.tensor([1.0, 2.0], device="cpu") + torch.ones(2)


@pytest.mark.parametrize("draw", [_through_numpy, _mixed, lambda: [float(torch.ones(()))] * 2])
def test_a_factory_that_fails_under_a_default_device_runs_without_and_is_moved(draw):
    class Scaled(Tiny):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.as_tensor(draw()))

    model = build_model(Scaled, META)
    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {META}


def test_what_is_called_again_draws_the_same_random_numbers():
    drawn = []

    def build():
        drawn.append((random.random(), float(torch.rand((), device="cpu"))))
        _mixed()
        return Tiny()

    build_model(build, META)
    assert len(drawn) == 2
    assert drawn[0] == drawn[1]


def test_a_function_that_fails_anyway_fails_with_the_error_of_a_plain_program():
    def build():
        _mixed()
        raise KeyError("layers")

    with pytest.raises(KeyError, match="layers") as caught:
        build_model(build, META)
    assert "device" in str(caught.value.__cause__)


def test_a_model_that_has_no_room_is_not_built_again():
    calls = []

    def build():
        calls.append(1)
        raise torch.OutOfMemoryError("planted")

    with pytest.raises(torch.OutOfMemoryError):
        build_model(build, META)
    assert calls == [1]


def test_a_model_on_another_device_is_told_how_to_get_here():
    message = (
        "the model is on meta, but this step is measured on cpu; "
        "move it with model.to(gpumem.device), or pass a function that builds it"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build_model(torch.nn.Linear(1, 1, device="meta"), CPU)


def test_what_is_no_model_and_builds_none_is_named():
    message = "expected a torch.nn.Module or a function that builds one, got 'Tiny'"
    with pytest.raises(TypeError, match=re.escape(message)):
        build_model("Tiny", CPU)


def test_a_function_that_builds_something_else_is_named():
    def build_tensor():
        return torch.ones(1)

    with pytest.raises(TypeError, match=r"build_tensor returned Tensor, not a torch\.nn\.Module$"):
        build_model(build_tensor, CPU)


def test_tied_parameters_count_once():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    assert parameters_of(model) == 2 * (16 + 4)
    model[1].weight = model[0].weight
    assert parameters_of(model) == 16 + 2 * 4


# Optimizers


def test_the_optimizer_is_adamw_unless_told_otherwise():
    model = Tiny()
    optimizer = build_optimizer(None, model, is_existing=False)
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


def test_only_trainable_parameters_are_optimized():
    model = Tiny()
    model.linear.bias.requires_grad_(False)
    optimizer = build_optimizer(torch.optim.Adam, model, is_existing=True)
    assert type(optimizer) is torch.optim.Adam
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(model.linear.weight)]


def test_a_function_makes_the_optimizer_of_the_parameters():
    model = Tiny()
    optimizer = build_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=5.0), model, is_existing=False)
    assert optimizer.param_groups[0]["lr"] == 5.0


def test_an_optimizer_of_a_given_model_is_taken_as_it_is():
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters())
    assert build_optimizer(optimizer, model, is_existing=True) is optimizer


@pytest.mark.parametrize("given", [True, False])
def test_an_optimizer_of_another_model_is_refused_with_what_to_pass(given):
    message = "the optimizer was created for other parameters than the model's; pass a function: optimizer=lambda parameters: ..."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build_optimizer(torch.optim.SGD(Tiny().parameters()), Tiny(), is_existing=given)


def test_a_frozen_model_is_told_how_it_can_be_measured():
    with pytest.raises(ValueError, match=r"no parameter that requires a gradient; measure it with gpumem\.infer_step$"):
        build_optimizer(None, Tiny().requires_grad_(False), is_existing=True)


def test_a_function_that_makes_no_optimizer_is_named():
    def make_nothing(_parameters):
        return None

    with pytest.raises(TypeError, match=r"make_nothing returned NoneType, not a torch\.optim\.Optimizer$"):
        build_optimizer(make_nothing, Tiny(), is_existing=True)


# Losses


@pytest.fixture
def scalar() -> torch.Tensor:
    return torch.ones(1, requires_grad=True).sum()


def test_the_loss_is_that_of_the_function_with_output_and_batch(scalar):
    assert (
        loss_of("output", "batch", lambda output, batch: scalar if (output, batch) == ("output", "batch") else None)
        is scalar
    )


def test_the_loss_is_the_outputs_own(scalar):
    assert loss_of({"loss": scalar, "logits": None}, None, None) is scalar
    assert loss_of(SimpleNamespace(loss=scalar), None, None) is scalar
    assert loss_of(scalar, None, None) is scalar


def test_a_function_goes_before_the_outputs_own_loss(scalar):
    other = torch.ones(1, requires_grad=True).sum()
    assert loss_of(SimpleNamespace(loss=other), None, lambda _output, _batch: scalar) is scalar


@pytest.mark.parametrize(
    ("output", "loss", "said"),
    [
        (torch.ones(4, 2), None, "the model returned float32[4, 2]"),
        ((1, 2), None, "the model returned tuple"),
        (None, lambda _output, _batch: 0.5, "loss(...) returned float"),
    ],
)
def test_what_is_no_scalar_loss_is_named_with_what_to_pass(output, loss, said):
    message = f"there is no scalar loss: {said}; pass loss=lambda output, batch: ..., which returns one number"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        loss_of(output, None, loss)


def test_a_loss_without_a_gradient_is_refused():
    with pytest.raises(
        ValueError, match=r"^the loss does not depend on any parameter that requires a gradient; return a loss "
    ):
        loss_of(torch.tensor(1.0), None, None)


# Precision


@pytest.mark.parametrize(
    ("model", "word"),
    [
        (Tiny().half(), "fp16"),
        (Tiny().double(), "fp64"),
        (torch.nn.Sequential(Tiny(), Tiny().bfloat16()), "bf16+fp32"),
        (torch.nn.ReLU(), "fp32"),
    ],
    ids=["fp16", "fp64", "of several dtypes", "without parameters"],
)
def test_the_precision_of_a_plain_step_is_that_of_the_parameters(model, word):
    assert precision_of(model) == word


# Modes


@pytest.mark.parametrize("training", [True, False])
def test_each_module_goes_back_to_its_own_mode(training):
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout(), torch.nn.Dropout())
    model[1].eval()
    with in_mode(model, training):
        assert [module.training for module in model.modules()] == [training] * 4
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_each_module_goes_back_to_its_own_mode_after_an_error():
    model = torch.nn.Dropout()
    with pytest.raises(ZeroDivisionError), in_mode(model, training=False):
        raise ZeroDivisionError
    assert model.training
