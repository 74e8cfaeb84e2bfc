"""The peaks of each device over a process's life, also where the program resets its statistics."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

import torch

from pytest_gpumem.torch_support.reset_guard import before_each_reset


def keeps_statistics() -> bool:
    """Return whether the process's allocator keeps statistics: one that the program gave to torch has none."""
    return torch.cuda.memory.get_allocator_backend() != "pluggable"


class KeptPeaks:
    """Peaks in bytes, by device. They stay empty where the allocator keeps no statistics."""

    def __init__(self) -> None:
        self.allocated: Counter[int] = Counter()
        self.reserved: Counter[int] = Counter()
        # Entered for good, and left while torch is still there.
        self._entered = ExitStack()

    def begin(self) -> None:
        """Look before each reset from now on."""
        self._entered.enter_context(before_each_reset(self.look, "cuda"))

    def look(self) -> None:
        """Take the peaks since the last reset."""
        if not keeps_statistics():
            return
        for device in range(torch.cuda.device_count()):
            self.allocated[device] = max(self.allocated[device], torch.cuda.max_memory_allocated(device))
            self.reserved[device] = max(self.reserved[device], torch.cuda.max_memory_reserved(device))
