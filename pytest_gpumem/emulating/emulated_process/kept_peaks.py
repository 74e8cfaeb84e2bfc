"""A process's peaks of memory, also after the program has reset torch's peaks, and the statistics of torch's CUDA allocator."""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pytest_gpumem.base.variables import CUDA_VISIBLE_DEVICES
from pytest_gpumem.emulating.emulated_process.usage import among_all
from pytest_gpumem.emulating.emulated_process.workspaces import workspaces
from pytest_gpumem.torch_support.reset_guard import before_each_reset
from pytest_gpumem.torch_support.unseen_reset import UnseenResets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from pytest_gpumem.emulating.emulated_process.block_recorder import History
    from pytest_gpumem.emulating.emulated_process.workspaces import Workspaces

_NONE = {"all": {"peak": 0, "current": 0}}
"""A statistic that an allocator lacks."""


_WITHOUT_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING"}
"""With one of these variables, whatever its value, torch allocates each tensor by the driver and counts nothing."""


def keeps_statistics() -> bool:
    """Return whether torch's allocator keeps statistics. A program's own one, or torch's without its cache, keeps none."""
    return _has_cache() and torch.cuda.memory.get_allocator_backend() != "pluggable"


@functools.cache
def _has_cache() -> bool:
    """Return whether torch's allocator has its cache. torch reads the variables at the first allocation, and never again."""
    return _WITHOUT_CACHE.isdisjoint(os.environ)


class Statistics(Protocol):
    """The statistics of an allocator: torch's for CUDA (`CudaStatistics`), or for the CPU (`cpu_statistics`)."""

    device_type: str
    """``cuda`` or ``cpu``."""

    @property
    def own_history(self) -> History | None:
        """The history of the allocator; ``None`` for torch's history of CUDA."""

    @property
    def is_kept(self) -> bool:
        """False if the allocator keeps no statistics."""

    @property
    def counts(self) -> bool:
        """False if this process's memory does not count."""

    def devices(self) -> range:
        """Return the devices' indices in this process."""

    def statistics(self, device: int) -> Mapping[str, Any]:
        """Return the statistics since the last reset, in the form of ``torch.cuda.memory_stats_as_nested_dict``."""

    def reset(self, device: int) -> None:
        """Begin a new peak."""

    def begin(self, before_reset: Callable[[], None]) -> AbstractContextManager[object]:
        """Begin to be used. Within the context, call a function before the program resets the peaks."""

    def used(self, reserved: Mapping[int, int]) -> list[int]:
        """Return the devices on which this process used memory. ``reserved`` are the peaks of reserved bytes."""

    def index_in_machine(self, device: int) -> int:
        """Return a device's index among all devices of the machine."""

    def retries(self, device: int) -> int:
        """Return the number of times that the allocator released its cached memory and tried again."""

    def workspaces(self) -> dict[int, Workspaces]:
        """Return the workspaces of libraries by device. With several threads, chance decides how many there are."""


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


class KeptPeaks:
    """This process's peaks in bytes, by device index. They remain correct if the program resets torch's peaks.

    If the allocator keeps no statistics, there are no peaks.
    """

    def __init__(self, source: Statistics | None = None) -> None:
        """Begin without peaks. ``source`` is by default a new `CudaStatistics`."""
        self.allocated: Counter[int] = Counter()
        self.reserved: Counter[int] = Counter()
        self.requested: Counter[int] = Counter()
        self.lock = threading.RLock()
        """Held while peaks are read and written, because a job's process reads them in a thread as well."""
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew_lock)
        # This context is never closed, so resets are noticed until the process ends.
        self._entered = ExitStack()
        self._source: Statistics = source or CudaStatistics()

    def _renew_lock(self) -> None:
        self.lock = threading.RLock()

    def begin(self) -> None:
        """From now on, call `take` before each reset of torch's peaks."""
        self._entered.enter_context(self._source.begin(self.take))

    def take(self) -> None:
        """Read torch's peaks since their last reset, and update this object's peaks."""
        if not self._source.is_kept:
            return
        with self.lock:
            for device in self._source.devices():
                statistics = self._source.statistics(device)
                for peaks, name in self._by_name():
                    peaks[device] = max(peaks[device], statistics.get(f"{name}_bytes", _NONE)["all"]["peak"])

    def restart(self) -> None:
        """Begin new peaks at the current bytes. The program does not see this in torch's peaks."""
        with self.lock:
            for peaks, _ in self._by_name():
                peaks.clear()
            if self._source.is_kept:
                for device in self._source.devices():
                    self._source.reset(device)
            self.take()

    def allocations(self, device: int) -> int:
        """Return the number of allocations on a device so far."""
        return int(self._source.statistics(device)["allocation"]["all"]["allocated"])

    def live(self, device: int) -> int:
        """Return the requested bytes in a device's tensors; the allocated bytes if the allocator counts no requested bytes."""
        statistics = self._source.statistics(device)
        requested, allocated, active = (
            int(statistics.get(f"{name}_bytes", _NONE)["all"]["current"])
            for name in ("requested", "allocated", "active")
        )
        # A freed block that another stream uses is requested and active until the next allocation.
        return max(0, requested - (active - allocated)) if requested else allocated

    def _by_name(self) -> tuple[tuple[Counter[int], str], ...]:
        return (self.allocated, "allocated"), (self.reserved, "reserved"), (self.requested, "requested")
