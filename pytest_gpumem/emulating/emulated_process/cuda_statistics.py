"""The statistics of torch's CUDA allocator in this process."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.base.variables import CUDA_VISIBLE_DEVICES
from pytest_gpumem.emulating.emulated_process.usage import among_all
from pytest_gpumem.emulating.emulated_process.workspaces import workspaces
from pytest_gpumem.torch_support.reset_guard import before_each_reset
from pytest_gpumem.torch_support.unseen_reset import UnseenResets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from pytest_gpumem.emulating.emulated_process.usage import Workspaces

_WITHOUT_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING"}
"""With one of these variables, whatever its value, torch allocates each tensor by the driver and counts nothing."""


def keeps_statistics() -> bool:
    """Return whether torch's allocator keeps statistics. A program's own one, or torch's without its cache, keeps none."""
    return _has_cache() and torch.cuda.memory.get_allocator_backend() != "pluggable"


@functools.cache
def _has_cache() -> bool:
    """Return whether torch's allocator has its cache. torch reads the variables at the first allocation, and never again."""
    return _WITHOUT_CACHE.isdisjoint(os.environ)


class CudaStatistics:
    """The statistics of torch's CUDA allocator in this process."""

    device_type = "cuda"
    own_history = None
    counts = True

    def __init__(self) -> None:
        self._resets = UnseenResets()
        self._visible: str | None = None

    @property
    def is_kept(self) -> bool:
        return keeps_statistics()

    def devices(self) -> range:
        return range(torch.cuda.device_count())

    def statistics(self, device: int) -> Mapping[str, Any]:
        return self._resets.statistics(device)

    def reset(self, device: int) -> None:
        self._resets.reset(device)

    def begin(self, before_reset: Callable[[], None]) -> AbstractContextManager[object]:
        # The variables count as they were when CUDA began, because torch read them then.
        _has_cache()
        self._visible = os.environ.get(CUDA_VISIBLE_DEVICES)
        return before_each_reset(before_reset, "cuda")

    def used(self, reserved: Mapping[int, int]) -> list[int]:
        return sorted(device for device, nbytes in reserved.items() if nbytes)

    def index_in_machine(self, device: int) -> int:
        return among_all(device, self._visible)

    def retries(self, device: int) -> int:
        return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))

    def workspaces(self) -> dict[int, Workspaces]:
        return workspaces()
