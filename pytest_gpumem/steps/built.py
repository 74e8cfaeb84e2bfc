"""The model of a training step once it is on its device, with what belongs to it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    import torch

    from pytest_gpumem.explain.sites import Site
    from pytest_gpumem.steps.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Built:
    """The model of a training step, on its device."""

    model: torch.nn.Module
    run: torch.nn.Module
    """The model as it is called: itself, or what is around it."""
    blocks: str | None
    """The pattern of its repeated blocks, if they are not to be found."""
    creation_sites: Mapping[int, Site]
    """The lines that made its tensors, by address."""
    pipeline: Pipeline | None = None
    """The stage that runs its micro-batches."""
    unreduced: Callable[[], AbstractContextManager[object]] = nullcontext
    """A context around forward in which backward leaves gradients as this rank's own."""
    buckets: Mapping[int, torch.Tensor] | None = None
    """The copies of gradients that ``DistributedDataParallel`` sends, as far as it shows them; ``None`` without it."""
    notes: tuple[str, ...] = ()
