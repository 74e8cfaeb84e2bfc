"""Describe a model that a user has named, with its batch and loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import ModelError
from pytest_gpumem.measuring.models.inputs import TARGET
from pytest_gpumem.measuring.models.task import TRAINING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pytest_gpumem.measuring.models.inputs import Inputs
    from pytest_gpumem.measuring.models.name import ModelName
    from pytest_gpumem.measuring.models.task import Task
    from pytest_gpumem.measuring.steps.model_step import Loss


@dataclass(frozen=True)
class NamedModel:
    """A model with its batch and loss. It can be built repeatedly, each time with random weights.

    Example: ``timm:resnet50`` has the class name ``"ResNet"``, inputs ``1 of 3x224x224``, and cross-entropy as its loss.
    """

    name: ModelName
    class_name: str
    make: Callable[[], torch.nn.Module]
    """Builds a new model on torch's default device and in torch's default dtype."""
    inputs: Inputs
    loss: Loss | None = None
    """Computes the loss from the output and the batch. ``None`` if the model itself computes the loss, or if no loss is
    needed."""
    task: Task = TRAINING

    def build(self, dtype: torch.dtype) -> torch.nn.Module:
        """Return a new model. Its weights have the given dtype, as if they had been loaded in this dtype."""
        import torch

        outer_dtype = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model = self.make()
        finally:
            torch.set_default_dtype(outer_dtype)
        if self.loss is not None:
            model.register_forward_pre_hook(_without_target, with_kwargs=True)
        return model

    def batch(self) -> dict[str, Any]:
        """Return a new batch with random values."""
        return self.inputs.batch()

    @property
    def title(self) -> str:
        """A text with the model's name, class and task, and with the batch size."""
        return f"{self.name}: {self.class_name}, random weights; {self.task}, batch {self.inputs}"


def on_meta(name: ModelName, make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Return a model on the meta device for inspection. Such a model takes no memory.

    Args:
        name: The model's name, for messages.
        make: Builds the model.

    Raises:
        ModelError: The model cannot be built. The message contains the library's message.
    """
    import torch

    try:
        with torch.device("meta"):
            return make()
    except Exception as error:  # noqa: BLE001, from the model's own code
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
        raise ModelError(f"{name} cannot be built: {reason}") from None


def _without_target(
    _model: torch.nn.Module, arguments: tuple[Any, ...], by_name: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return arguments, {name: value for name, value in by_name.items() if name != TARGET}
