"""Compute losses and check image sizes for image models."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import ModelError
from pytest_gpumem.measuring.models.inputs import TARGET

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from pytest_gpumem.measuring.models.name import ModelName


def cross_entropy(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the cross-entropy of the logits. If the model has auxiliary classifiers, return the sum over all classifiers."""
    import torch

    losses = [torch.nn.functional.cross_entropy(logits, batch[TARGET]) for logits in _tensors(output)]
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def main_argument(model: torch.nn.Module) -> str:
    """Return the argument name for images in a model's forward."""
    return next(iter(inspect.signature(model.forward).parameters))


def check_side(name: ModelName, side: int, least: int) -> None:
    """Raise `ModelError` if images are too small.

    Args:
        name: The model's name, for the message.
        side: The images' side in pixels.
        least: The smallest side that the model accepts.
    """
    if side < least:
        raise ModelError(f"{name} needs images with {least} or more pixels a side, but the batch has {side}")


def _tensors(output: Any) -> Iterator[Any]:
    if isinstance(output, dict):
        output = tuple(output.values())
    # If an auxiliary classifier is switched off, the output contains None in its place.
    yield from (logits for logits in output if logits is not None) if isinstance(output, (tuple, list)) else (output,)
