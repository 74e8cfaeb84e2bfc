"""Losses of models of images, and the side of their images."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from pytest_gpumem.models.errors import ModelError
from pytest_gpumem.models.inputs import TARGET

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from pytest_gpumem.models.name import ModelName


def cross_entropy(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the cross-entropy of logits and target; with auxiliary classifiers, the sum of all."""
    import torch

    losses = [torch.nn.functional.cross_entropy(logits, batch[TARGET]) for logits in _tensors(output)]
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def main_argument(model: torch.nn.Module) -> str:
    """Return the name by which a model takes its images."""
    return next(iter(inspect.signature(model.forward).parameters))


def check_side(name: ModelName, side: int, least: int) -> None:
    """Raise `ModelError` where images are too small."""
    if side < least:
        raise ModelError(f"{name} takes images of {least} pixels a side or more, and the batch has {side}")


def _tensors(output: Any) -> Iterator[Any]:
    if isinstance(output, dict):
        output = tuple(output.values())
    # Where an auxiliary classifier is left out, its place is None.
    yield from (one for one in output if one is not None) if isinstance(output, (tuple, list)) else (output,)
