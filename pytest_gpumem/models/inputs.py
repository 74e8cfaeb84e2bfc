"""Batches of random values, described by their shapes: made as often as is wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from pytest_gpumem.models.name import BatchSize

TARGET = "target"
"""The name in a batch of what a loss compares an output with, where it is not the model that does: no argument of forward."""


@dataclass(frozen=True)
class RandomTensor:
    """The shape of a tensor, and below which its whole numbers are; floating point where there is no limit."""

    shape: tuple[int, ...]
    below: int | None = None

    def made(self) -> torch.Tensor:
        """Return a new tensor."""
        import torch

        return torch.randn(self.shape) if self.below is None else torch.randint(self.below, self.shape)


@dataclass(frozen=True)
class RandomBoxes:
    """Boxes in an image, from corner to corner: ``float32[number, 4]``."""

    number: int
    side: int

    def made(self) -> torch.Tensor:
        """Return new boxes, each of at least one pixel."""
        import torch

        first = torch.rand(self.number, 2) * (self.side // 2)
        return torch.cat((first, first + 1 + torch.rand(self.number, 2) * (self.side // 2 - 1)), dim=1)


@dataclass(frozen=True)
class Inputs:
    """Arguments of a model's forward, by name, and the size of the batch that they are.

    Attributes:
        size: Samples, and how long or wide each is.
        arguments: Tensors that are described here, also in dicts and lists; all else is as it is.
        shape: What one sample is, where its size does not say it: ``"3x224x224"``.
    """

    size: BatchSize
    arguments: Mapping[str, Any]
    shape: str | None = None

    def batch(self) -> dict[str, Any]:
        """Return a batch with random values."""
        return {name: _made(one) for name, one in self.arguments.items()}

    def __str__(self) -> str:
        return f"{self.size}" if self.shape is None else f"{self.size.samples} of {self.shape}"


def by_sides(sides: tuple[int, ...]) -> str:
    """Return a shape as people write it: ``"3x224x224"``."""
    return "x".join(map(str, sides))


def _made(one: Any) -> Any:
    if isinstance(one, (RandomTensor, RandomBoxes)):
        return one.made()
    if isinstance(one, dict):
        return {name: _made(part) for name, part in one.items()}
    return [_made(part) for part in one] if isinstance(one, list) else one
