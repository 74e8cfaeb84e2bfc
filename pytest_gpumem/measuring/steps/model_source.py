"""The source of a step's model: an existing model, or a factory that builds one."""

from __future__ import annotations

import traceback
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_gpumem.base.errors import ConfigError, NotAStep
from pytest_gpumem.measuring.explain.recording import is_out_of_memory
from pytest_gpumem.measuring.measure.random_numbers import RandomNumbers
from pytest_gpumem.measuring.steps.global_settings import is_lazy
from pytest_gpumem.measuring.steps.precision import check_precision, in_precision
from pytest_gpumem.torch_support.static_access import class_name, is_a

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pytest_gpumem.measuring.step_config.config import StepConfig


@dataclass(frozen=True, slots=True)
class ExistingModel:
    """A model that the test built. A step runs this model, and never converts it."""

    existing: torch.nn.Module

    def model_on(self, device: torch.device, precision: str | None) -> torch.nn.Module:
        """Return the model, if it is on ``device`` and in the config's precision.

        Args:
            device: The step's device.
            precision: The word for ``precision=``, or ``None`` for the model's own precision.

        Raises:
            NotAStep: The model is on another device.
            ConfigError: The model is in another precision.
        """
        other_devices = {str(p.device) for p in self.existing.parameters() if p.device.type != device.type}
        if other_devices:
            raise NotAStep(
                f"the model is on {', '.join(sorted(other_devices))}, but this step is measured on {device}; "
                "move it with model.to(gpumem.device), or pass a function that builds it"
            )
        check_precision(self.existing, precision)
        return self.existing


@dataclass(frozen=True, slots=True)
class ModelFactory:
    """A class or function that builds a new model for a step."""

    factory: Callable[[], torch.nn.Module]
    existing: ClassVar[None] = None

    def model_on(self, device: torch.device, precision: str | None) -> torch.nn.Module:
        """Build a model on ``device``, and convert it to the config's precision.

        Args:
            device: The step's device.
            precision: The word for ``precision=``, or ``None`` for the model's own precision.

        Raises:
            TypeError: The factory returned something else than a model.
            ConfigError: The model cannot be converted.
        """
        return in_precision(self.build(device), precision)

    def build(self, device: torch.device) -> torch.nn.Module:
        """Build a model on ``device`` in its own precision.

        Args:
            device: The default device for new tensors. The model is moved to this device, unless the factory split the model
                over several devices.

        Raises:
            TypeError: The factory returned something else than a model.
        """
        import torch

        model = built_on(device, self.factory)
        if not is_a(model, torch.nn.Module):
            raise TypeError(f"{factory_name(self.factory)} returned {class_name(type(model))}, not a torch.nn.Module")
        is_split = any(
            parameter.device.type == device.type and parameter.device != device for parameter in model.parameters()
        )
        return model if is_split else model.to(device)


if TYPE_CHECKING:
    ModelOrFactory = torch.nn.Module | Callable[[], torch.nn.Module]
    ModelSource = ExistingModel | ModelFactory


def model_source(model_or_factory: ModelOrFactory) -> ModelSource:
    """Return the source of a step's model. A ``weakref.proxy`` is replaced by its model.

    Args:
        model_or_factory: The model, or a class or function that builds it.

    Raises:
        TypeError: The argument is neither a model nor callable.

    Example:
        ``model_source(GPT())`` is an `ExistingModel`, and ``model_source(GPT)`` is a `ModelFactory`.
    """
    import torch

    if is_a(model_or_factory, *weakref.ProxyTypes) and isinstance(model_or_factory, torch.nn.Module):
        return ExistingModel(next(model_or_factory.modules()))
    if is_a(model_or_factory, torch.nn.Module):
        return ExistingModel(model_or_factory)
    if not callable(model_or_factory):
        name = factory_name(model_or_factory)
        raise TypeError(f"expected a torch.nn.Module or a function that builds one, got {name}")
    return ModelFactory(model_or_factory)


def creates_tensors(source: ModelSource) -> bool:
    """Return whether tensors of the model are created in the step: by a factory, or by forward of an existing lazy model."""
    return source.existing is None or is_lazy(source.existing)


def check_existing_model(config: StepConfig) -> None:
    """Check that a step with this config changes only the parameters' values in an existing model.

    Args:
        config: The step config.

    Raises:
        ConfigError: The config replaces parameters, or leaves hooks on the model.
    """
    if config.sharding is not None and config.sharding.in_place:
        raise ConfigError(
            f"shard={config.shard} changes the model for good; pass a function that builds it, not the model"
        )
    if config.weights is not None:
        raise ConfigError(f"weights={config.weights} changes the model; pass a function that builds it")
    if "optimizer" in config.offloaded:
        raise ConfigError(
            f"{config}: the offloading optimizer's hooks would stay on the model; pass a function that builds the model"
        )


def built_on(device: torch.device, factory: Callable[[], Any]) -> Any:
    """Call ``factory`` with ``device`` as torch's default device for new tensors, and return the result.

    Some factories fail with a default device, for example if they draw from a CPU generator or read a NumPy array. Such a
    factory is called again without a default device and with the same random numbers. Then its result may be on another
    device.

    Args:
        device: The default device for new tensors.
        factory: A function without arguments.

    Raises:
        Exception: The factory ran out of memory, or also failed without a default device. In the second case, the exception's
            cause is the error from the first call.
    """
    import torch

    numbers = RandomNumbers.current(None)
    try:
        with torch.device(device):
            return factory()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        with_device = error
    # Free the tensors in the failed call's frames.
    traceback.clear_frames(with_device.__traceback__)
    numbers.restore()
    try:
        return factory()
    except Exception as error:
        raise error from with_device


def factory_name(factory: object) -> str:
    """Return the name of a class or function for a message, or the ``repr`` of another object."""
    try:
        return str(getattr(factory, "__qualname__", None) or repr(factory))
    except Exception:  # noqa: BLE001 - an error in repr() must not replace the message
        return f"<{class_name(type(factory))}>"
