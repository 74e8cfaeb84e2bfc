"""A model's step: the optimizer, the loss and the precision, and the errors if they do not make a step."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from pytest_gpumem.measuring.steps.global_settings import in_mode
from pytest_gpumem.measuring.steps.model_source import model_source
from pytest_gpumem.measuring.steps.model_step import build_optimizer, loss_of, parameters_of, precision_of


class Tiny(torch.nn.Module):
    """A scalar of its input."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)
        torch.nn.init.zeros_(self.linear.weight)

    def forward(self, x):
        return self.linear(x).sum()


# Parameters


def test_tied_parameters_count_once():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    assert parameters_of(model) == 2 * (16 + 4)
    model[1].weight = model[0].weight
    assert parameters_of(model) == 16 + 2 * 4


# Optimizers


def test_the_optimizer_is_adamw_unless_told_otherwise():
    model = Tiny()
    optimizer = build_optimizer(None, model, model_source(Tiny))
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


def test_only_trainable_parameters_are_optimized():
    model = Tiny()
    model.linear.bias.requires_grad_(False)
    optimizer = build_optimizer(torch.optim.Adam, model, model_source(model))
    assert type(optimizer) is torch.optim.Adam
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(model.linear.weight)]


def test_a_function_makes_the_optimizer_of_the_parameters():
    model = Tiny()
    optimizer = build_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=5.0), model, model_source(Tiny))
    assert optimizer.param_groups[0]["lr"] == 5.0


def test_an_optimizer_of_an_existing_model_is_used():
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters())
    assert build_optimizer(optimizer, model, model_source(model)) is optimizer


@pytest.mark.parametrize("optimized", ["another model", "what the factory returned"])
def test_an_optimizer_of_another_model_is_refused_with_what_to_pass(optimized):
    model = Tiny()
    other, source = (
        (Tiny(), model_source(model)) if optimized == "another model" else (model, model_source(lambda: model))
    )
    message = "the optimizer was created for other parameters than the model's; pass a function: optimizer=lambda parameters: ..."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build_optimizer(torch.optim.SGD(other.parameters()), model, source)


def test_a_frozen_model_is_told_how_it_can_be_measured():
    with pytest.raises(ValueError, match=r"no parameter that requires a gradient; measure it with gpumem\.infer_step$"):
        build_optimizer(None, Tiny().requires_grad_(False), model_source(Tiny))


def test_a_function_that_makes_no_optimizer_is_named():
    def make_nothing(_parameters):
        return None

    with pytest.raises(TypeError, match=r"make_nothing returned NoneType, not a torch\.optim\.Optimizer$"):
        build_optimizer(make_nothing, Tiny(), model_source(Tiny))


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
