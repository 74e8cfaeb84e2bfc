"""Batches: moved to a device, described, counted, shared out, and fed to a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from pytest_gpumem.measurement import ITEMS, SAMPLES, TOKENS

if TYPE_CHECKING:
    import torch


def tensors_in(batch: object) -> Iterator[torch.Tensor]:
    """The tensors of a batch, in order: of a tensor, or of tuples, lists and mappings in any nesting."""
    import torch

    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from tensors_in(value)


def mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The batch with ``change`` done to each of its tensors; everything else in it stays as it is."""
    import torch

    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: mapped(value, change) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, change) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(mapped(value, change) for value in batch)
    return batch


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``; what is there already is not copied. A function that makes it is called."""
    import torch

    if callable(batch) and not isinstance(batch, torch.Tensor):
        with torch.device(device):
            batch = batch()
    return mapped(batch, lambda tensor: tensor.to(device))


def micro_batches(batch: Any, number: int) -> list[Any]:
    """``number`` parts of equal size, as views. What has not the batch's first dimension is the same in all of them.

    Raises ``ValueError`` when the samples cannot be shared out equally.
    """
    samples = samples_in(batch)
    if number == 1:
        return [batch]
    if samples is None or samples % number:
        what = "has no samples" if samples is None else f"has {samples} samples"
        raise ValueError(f"accumulate={number} needs a batch of a multiple of {number} samples; this one {what}")
    size = samples // number

    def part(first: int) -> Any:
        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.narrow(0, first, size) if tensor.dim() and tensor.shape[0] == samples else tensor

        return mapped(batch, cut)

    return [part(first) for first in range(0, samples, size)]


def describe(batch: object) -> str:
    """Dtypes and shapes of the batch's tensors: ``"int64[4, 256], float32[4]"``."""
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors_in(batch))


def samples_in(batch: object) -> int | None:
    """The first dimension of the batch's first tensor; ``None`` when there is none."""
    for tensor in tensors_in(batch):
        return int(tensor.shape[0]) if tensor.dim() else None
    return None


def work_in(batch: object, items: float | str | None) -> dict[str, float]:
    """What a step works on, by name; first what ``items`` asks for: a number, ``"samples"`` (the default) or ``"tokens"``.

    Tokens are the elements of the batch's first tensor of integers. Raises ``ValueError`` for another word, for what is no
    finite number above zero, or for a batch without tokens when they are asked for.
    """
    counts = {SAMPLES: samples_in(batch), TOKENS: _tokens_in(batch)}
    work: dict[str, float] = {name: count for name, count in counts.items() if count is not None}
    if items is None:
        items = SAMPLES
    if not isinstance(items, str):
        return {ITEMS: number_of_items(items), **work}
    if items not in counts:
        raise ValueError(f"items={items!r}: write a number, 'samples' or 'tokens'")
    if items not in work and items == TOKENS:
        raise ValueError(f"items='tokens' counts a tensor of integers, and the batch has none: {describe(batch)}")
    return {items: work[items], **work} if items in work else {}


def number_of_items(items: object) -> float:
    """Return ``items`` as a plain number. Raises ``ValueError`` unless it is finite and above zero."""
    if isinstance(items, Real) and not isinstance(items, bool):
        with suppress(OverflowError):
            if 0 < float(items) < math.inf:
                return int(items) if isinstance(items, Integral) else float(items)
    raise ValueError(f"items={items!r}: write what one step works on as a finite number above zero")


def _tokens_in(batch: object) -> int | None:
    for tensor in tensors_in(batch):
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor.numel()
    return None


def feed(model: Any, batch: Any) -> Any:
    """The model's output: a mapping is passed as keyword arguments, a tuple or list as positional ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)
