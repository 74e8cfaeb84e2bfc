"""A model by name: built with random weights as often as is wanted, with a batch and a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.models.errors import ModelError
from pytest_gpumem.models.inputs import TARGET
from pytest_gpumem.models.task import TRAINING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pytest_gpumem.models.inputs import Inputs
    from pytest_gpumem.models.name import ModelName
    from pytest_gpumem.models.task import Task
    from pytest_gpumem.steps.model_step import Loss


@dataclass(frozen=True)
class NamedModel:
    """A model that can be built as often as is wanted, with random weights, its batch, and the loss if it has none itself."""

    name: ModelName
    class_name: str
    make: Callable[[], torch.nn.Module]
    """Builds it on torch's default device, in torch's default dtype."""
    inputs: Inputs
    loss: Loss | None = None
    """Takes the output and the batch, whose target is no argument of forward."""
    task: Task = TRAINING

    def build(self, dtype: torch.dtype) -> torch.nn.Module:
        """Return a new model whose weights are made in a dtype, as they are when they are loaded in it."""
        import torch

        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            made = self.make()
        finally:
            torch.set_default_dtype(before)
        if self.loss is not None:
            made.register_forward_pre_hook(_without_target, with_kwargs=True)
        return made

    def batch(self) -> dict[str, Any]:
        """Return a new batch."""
        return self.inputs.batch()

    @property
    def title(self) -> str:
        """Its name, its class, its task, and the size of its batch."""
        return f"{self.name}: {self.class_name}, random weights; {self.task}, batch {self.inputs}"


def on_meta(name: ModelName, make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Return a model without memory, to be looked at.

    Raises:
        ModelError: It cannot be built. The message has the library's own.
    """
    import torch

    try:
        with torch.device("meta"):
            return make()
    except Exception as error:  # noqa: BLE001, the model's own
        what = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
        raise ModelError(f"{name} cannot be built: {what}") from None


def _without_target(
    _model: torch.nn.Module, arguments: tuple[Any, ...], by_name: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return arguments, {name: one for name, one in by_name.items() if name != TARGET}
