"""A process's peaks of GPU memory, also after the program has reset torch's peaks."""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import ExitStack

import torch

from pytest_gpumem.torch_support.reset_guard import before_each_reset
from pytest_gpumem.torch_support.unseen_reset import UnseenResets

_NONE = {"all": {"peak": 0, "current": 0}}
"""A statistic that an allocator lacks."""


def keeps_statistics() -> bool:
    """Return whether torch's allocator keeps statistics. A program's own allocator does not keep any."""
    return torch.cuda.memory.get_allocator_backend() != "pluggable"


class KeptPeaks:
    """This process's peaks in bytes, by GPU index. They remain correct if the program resets torch's peaks.

    If the allocator keeps no statistics, there are no peaks.
    """

    def __init__(self) -> None:
        self.allocated: Counter[int] = Counter()
        self.reserved: Counter[int] = Counter()
        self.requested: Counter[int] = Counter()
        self.lock = threading.RLock()
        """Held while peaks are read and written, because a job's process reads them in a thread as well."""
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew_lock)
        # This context is never closed, so resets are noticed until the process ends.
        self._entered = ExitStack()
        self._resets = UnseenResets()

    def _renew_lock(self) -> None:
        self.lock = threading.RLock()

    def begin(self) -> None:
        """From now on, call `take` before each reset of torch's peaks."""
        self._entered.enter_context(before_each_reset(self.take, "cuda"))

    def take(self) -> None:
        """Read torch's peaks since their last reset, and update this object's peaks."""
        if not keeps_statistics():
            return
        with self.lock:
            for device in range(torch.cuda.device_count()):
                statistics = self._resets.statistics(device)
                for peaks, name in self._by_name():
                    peaks[device] = max(peaks[device], statistics.get(f"{name}_bytes", _NONE)["all"]["peak"])

    def restart(self) -> None:
        """Begin new peaks at the current bytes. The program does not see this in torch's peaks."""
        with self.lock:
            for peaks, _ in self._by_name():
                peaks.clear()
            if keeps_statistics():
                for device in range(torch.cuda.device_count()):
                    self._resets.reset(device)
            self.take()

    def allocations(self, device: int) -> int:
        """Return the number of allocations on a GPU so far."""
        return int(self._resets.statistics(device)["allocation"]["all"]["allocated"])

    def live(self, device: int) -> int:
        """Return the requested bytes in a GPU's tensors; the allocated bytes if the allocator does not count requested ones."""
        statistics = self._resets.statistics(device)
        requested, allocated, active = (
            int(statistics.get(f"{name}_bytes", _NONE)["all"]["current"])
            for name in ("requested", "allocated", "active")
        )
        # A freed block that another stream uses is requested and active until the next allocation.
        return max(0, requested - (active - allocated)) if requested else allocated

    def _by_name(self) -> tuple[tuple[Counter[int], str], ...]:
        return (self.allocated, "allocated"), (self.reserved, "reserved"), (self.requested, "requested")
