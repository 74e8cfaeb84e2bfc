"""Describe the tensors in a batch by their shapes, and make batches with random values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from pytest_gpumem.measuring.models.name import BatchSize

TARGET = "target"
"""The key for the target in a batch, if the model does not compute the loss itself. The target is not passed to forward."""


@dataclass(frozen=True)
class RandomTensor:
    """Describes a tensor with random integers below a limit, or with random floats if there is no limit.

    Example: ``RandomTensor((4, 4096), 50257)`` describes token ids, ``int64[4, 4096]`` with values from 0 to 50256.
    """

    shape: tuple[int, ...]
    below: int | None = None

    def make(self) -> torch.Tensor:
        """Return a new tensor with random values."""
        import torch

        return torch.randn(self.shape) if self.below is None else torch.randint(self.below, self.shape)


@dataclass(frozen=True)
class RandomBoxes:
    """Describes random boxes in a square image. A box is given by two corners in pixels: ``float32[number, 4]``."""

    number: int
    side: int

    def make(self) -> torch.Tensor:
        """Return new random boxes. A box is at least one pixel wide and high."""
        import torch

        first = torch.rand(self.number, 2) * (self.side // 2)
        return torch.cat((first, first + 1 + torch.rand(self.number, 2) * (self.side // 2 - 1)), dim=1)


@dataclass(frozen=True)
class Inputs:
    """The arguments for a model's forward by name, and the batch size.

    Attributes:
        size: The number of samples, and their length or side.
        arguments: The value for each argument. Descriptions of random tensors, also within dicts and lists, are replaced by new
            tensors. Other values are passed unchanged.
        shape: A sample's shape, such as ``"3x224x224"``. ``None`` if ``size`` describes a sample completely.
    """

    size: BatchSize
    arguments: Mapping[str, Any]
    shape: str | None = None

    def batch(self) -> dict[str, Any]:
        """Return a batch with random values."""
        return {name: _make(value) for name, value in self.arguments.items()}

    def __str__(self) -> str:
        return f"{self.size}" if self.shape is None else f"{self.size.samples} of {self.shape}"


def by_sides(sides: tuple[int, ...]) -> str:
    """Return a shape as a text, such as ``"3x224x224"``."""
    return "x".join(map(str, sides))


def _make(value: Any) -> Any:
    if isinstance(value, (RandomTensor, RandomBoxes)):
        return value.make()
    if isinstance(value, dict):
        return {name: _make(part) for name, part in value.items()}
    return [_make(part) for part in value] if isinstance(value, list) else value
