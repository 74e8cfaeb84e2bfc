"""A training step's model on its device, with its pipeline stage, gradient buckets, and the lines that created its tensors."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    import torch

    from pytest_gpumem.measuring.explain.sites import Site
    from pytest_gpumem.measuring.steps.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A training step's model on its device."""

    model: torch.nn.Module
    run: torch.nn.Module
    """The module to call: the model, or a wrapper such as ``DistributedDataParallel``."""
    blocks: str | None
    """The pattern for the model's repeated blocks; ``None`` if the blocks are detected."""
    creation_sites: Mapping[int, Site]
    """The source line that created each tensor in the model, by the tensor's address in memory."""
    pipeline: Pipeline | None = None
    """The pipeline stage on this rank, which runs all micro-batches; ``None`` without a pipeline."""
    unreduced: Callable[[], AbstractContextManager[object]] = nullcontext
    """Returns a context for forward. If forward ran in this context, backward does not average gradients over the ranks."""
    buckets: Mapping[int, torch.Tensor] | None = None
    """The buffers in which ``DistributedDataParallel`` (DDP) collects gradients, by bucket number; ``None`` without DDP.

    The mapping stays empty if several ranks run, because then DDP does not show its buckets."""
    notes: tuple[str, ...] = ()
