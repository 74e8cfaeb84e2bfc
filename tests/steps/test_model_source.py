"""The source of a step's model: an existing model or a factory, and the errors for anything else."""

from __future__ import annotations

import random
import re
import weakref

import pytest
import torch

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.model_source import (
    ExistingModel,
    ModelFactory,
    check_existing_model,
    model_source,
)

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


def model_on(model_or_factory, device):
    return model_source(model_or_factory).model_on(device, None)


def test_an_existing_model_is_used_unchanged():
    model = Tiny()
    assert model_source(model) == ExistingModel(model)
    assert model_on(model, CPU) is model


def test_a_proxy_is_replaced_by_its_model():
    model = Tiny()
    assert model_source(weakref.proxy(model)).existing is model


@pytest.mark.parametrize("factory", [Tiny, lambda: torch.nn.Linear(4, 2)], ids=["class", "function"])
def test_a_class_or_function_is_a_factory(factory):
    source = model_source(factory)
    assert source == ModelFactory(factory)
    assert source.existing is None


def test_only_a_built_model_is_converted():
    assert model_source(Tiny).model_on(CPU, "bf16").linear.weight.dtype == torch.bfloat16
    model = Tiny()
    with pytest.raises(ConfigError, match=r"^bf16 needs bfloat16 parameters, but the model has float32; "):
        model_source(model).model_on(CPU, "bf16")
    assert model.linear.weight.dtype == torch.float32


def test_a_factory_builds_in_its_own_precision():
    assert ModelFactory(lambda: Tiny().double()).build(CPU).linear.weight.dtype == torch.float64


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            "fp32,shard=fsdp,world=2",
            "shard=fsdp changes the model for good; pass a function that builds it, not the model",
        ),
        ("weights=int8", "weights=int8 changes the model; pass a function that builds it"),
        ("fp32,offload=optimizer", "the offloading optimizer's hooks would stay on the model"),
    ],
)
def test_a_config_that_changes_an_existing_model_is_refused(config, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_existing_model(StepConfig.parse(config))


@pytest.mark.parametrize("config", ["fp32,shard=ddp,world=2", "bf16,checkpoint=blocks", ""])
def test_a_config_that_leaves_an_existing_model_unchanged_is_accepted(config):
    check_existing_model(StepConfig.parse(config) if config else StepConfig())


def test_a_class_or_function_builds_the_model_on_the_device():
    assert {p.device for p in model_on(Tiny, META).parameters()} == {META}
    assert {p.device for p in model_on(lambda: torch.nn.Linear(1, 1, device="cpu"), CPU).parameters()} == {CPU}


def test_a_model_that_is_built_on_the_device_is_not_built_elsewhere_first():
    seen = []

    def build():
        seen.append(torch.empty(1).device)
        return Tiny()

    model_on(build, META)
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

    model = model_on(Scaled, META)
    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {META}


def test_what_is_called_again_draws_the_same_random_numbers():
    drawn = []

    def build():
        drawn.append((random.random(), float(torch.rand((), device="cpu"))))
        _mixed()
        return Tiny()

    model_on(build, META)
    assert len(drawn) == 2
    assert drawn[0] == drawn[1]


def test_a_function_that_fails_anyway_fails_with_the_error_of_a_plain_program():
    def build():
        _mixed()
        raise KeyError("layers")

    with pytest.raises(KeyError, match="layers") as caught:
        model_on(build, META)
    assert "device" in str(caught.value.__cause__)


def test_a_model_that_has_no_room_is_not_built_again():
    calls = []

    def build():
        calls.append(1)
        raise torch.OutOfMemoryError("planted")

    with pytest.raises(torch.OutOfMemoryError):
        model_on(build, META)
    assert calls == [1]


def test_a_model_on_another_device_is_told_how_to_get_here():
    message = (
        "the model is on meta, but this step is measured on cpu; "
        "move it with model.to(gpumem.device), or pass a function that builds it"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        model_on(torch.nn.Linear(1, 1, device="meta"), CPU)


def test_what_is_no_model_and_builds_none_is_named():
    message = "expected a torch.nn.Module or a function that builds one, got 'Tiny'"
    with pytest.raises(TypeError, match=re.escape(message)):
        model_on("Tiny", CPU)


def test_a_function_that_builds_something_else_is_named():
    def build_tensor():
        return torch.ones(1)

    with pytest.raises(TypeError, match=r"build_tensor returned Tensor, not a torch\.nn\.Module$"):
        model_on(build_tensor, CPU)
