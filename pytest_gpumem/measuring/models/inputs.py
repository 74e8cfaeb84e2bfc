"""Describe batches by their shapes, and make them with random values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from pytest_gpumem.measuring.models.name import BatchSize

TARGET = "target"
"""The batch's key for the target, if the model does not compute the loss itself. It is not an argument for forward."""


@dataclass(frozen=True)
class RandomTensor:
    """A tensor with random integers below a limit, or with floats if there is no limit.

    Example: ``RandomTensor((4, 4096), 50257)`` describes token ids, ``int64[4, 4096]`` with values from 0 to 50256.
    """

    shape: tuple[int, ...]
    below: int | None = None

    def make(self) -> torch.Tensor:
        """Return a new tensor."""
        import torch

        return torch.randn(self.shape) if self.below is None else torch.randint(self.below, self.shape)


@dataclass(frozen=True)
class RandomBoxes:
    """Boxes in a square image, given by two corners in pixels: ``float32[number, 4]``."""

    number: int
    side: int

    def make(self) -> torch.Tensor:
        """Return new boxes. Their sides have at least one pixel."""
        import torch

        first = torch.rand(self.number, 2) * (self.side // 2)
        return torch.cat((first, first + 1 + torch.rand(self.number, 2) * (self.side // 2 - 1)), dim=1)


@dataclass(frozen=True)
class Inputs:
    """Arguments for a model's forward by name, and the batch size.

    Attributes:
        size: Samples, and their length or side.
        arguments: Descriptions for tensors, also within dicts and lists. Other values are passed unchanged.
        shape: A sample's shape, if the size does not describe it: ``"3x224x224"``.
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
    """Return a shape as text: ``"3x224x224"``."""
    return "x".join(map(str, sides))


def _make(value: Any) -> Any:
    if isinstance(value, (RandomTensor, RandomBoxes)):
        return value.make()
    if isinstance(value, dict):
        return {name: _make(part) for name, part in value.items()}
    return [_make(part) for part in value] if isinstance(value, list) else value
