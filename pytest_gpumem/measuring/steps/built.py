"""A training step's model on its device, with its pipeline stage, gradient buckets and creation sites."""

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
    """The pattern for repeated blocks; ``None`` to find them automatically."""
    creation_sites: Mapping[int, Site]
    """The lines that created the model's tensors, by address."""
    pipeline: Pipeline | None = None
    """The stage that runs the micro-batches, for a pipeline."""
    unreduced: Callable[[], AbstractContextManager[object]] = nullcontext
    """A context around forward. After forward in this context, backward does not average gradients over the ranks."""
    buckets: Mapping[int, torch.Tensor] | None = None
    """``DistributedDataParallel``'s copies of gradients, as far as visible; ``None`` without ``DistributedDataParallel``."""
    notes: tuple[str, ...] = ()
