"""Batches: moved to a device, described, counted, and fed to a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

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


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``; what is there already is not copied."""
    import torch

    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: on_device(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(on_device(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(on_device(value, device) for value in batch)
    return batch


def describe(batch: object) -> str:
    """Dtypes and shapes of the batch's tensors: ``"int64[4, 256], float32[4]"``."""
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors_in(batch))


def samples_in(batch: object) -> int | None:
    """The first dimension of the batch's first tensor; ``None`` when there is none."""
    for tensor in tensors_in(batch):
        return int(tensor.shape[0]) if tensor.dim() else None
    return None


def feed(model: Any, batch: Any) -> Any:
    """The model's output: a mapping is passed as keyword arguments, a tuple or list as positional ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)
