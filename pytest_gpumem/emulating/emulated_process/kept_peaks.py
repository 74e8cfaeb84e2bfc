"""A process's peaks of memory, also after the program has reset torch's peaks."""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from pytest_gpumem.emulating.emulated_process.block_recorder import History
    from pytest_gpumem.emulating.emulated_process.usage import Workspaces

_NONE = {"all": {"peak": 0, "current": 0}}
"""A statistic that an allocator lacks."""


class Statistics(Protocol):
    """The statistics of an allocator: torch's for CUDA (`cuda_statistics`), or for the CPU (`cpu_statistics`)."""

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


class KeptPeaks:
    """This process's peaks in bytes, by device index. They remain correct if the program resets torch's peaks.

    If the allocator keeps no statistics, there are no peaks.
    """

    def __init__(self, source: Statistics) -> None:
        """Begin without peaks of the allocator with these statistics."""
        self.allocated: Counter[int] = Counter()
        self.reserved: Counter[int] = Counter()
        self.requested: Counter[int] = Counter()
        self.lock = threading.RLock()
        """Held while peaks are read and written, because a job's process reads them in a thread as well."""
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew_lock)
        # This context is never closed, so resets are noticed until the process ends.
        self._entered = ExitStack()
        self._source = source

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
