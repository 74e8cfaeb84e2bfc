"""A `CudaRuntime` over host memory: real steps, read through the counters that a CUDA allocator keeps.

What is requested is what tensors hold on the host. The other counters are made from it, so that each is told from the
others: no figure of them is one of a GPU.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import torch

from pytest_gpumem.devices.cuda_runtime import GpuProperties
from tests.silent_cuda import SilentCuda

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.devices.cpu import CpuDevice

TIMES = {"requested": 1, "allocated": 2, "active": 3, "reserved": 4}
"""How many bytes each counter counts for one that is requested."""


class HostAsCuda(SilentCuda):
    """See above."""

    def __init__(self, host: CpuDevice) -> None:
        self._host = host
        self._peak = 0

    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def properties(self) -> GpuProperties:
        return GpuProperties("A host", 10**9, "none", "no uuid", (9, 0))

    def statistics(self) -> dict[str, int]:
        self._peak = max(self._peak, self._host.pop_peak().allocated)
        readings = {"current": self._host.live(), "peak": self._peak, "allocated": self._host.turnover()}
        return {
            f"{name}_bytes.all.{which}": times * size
            for which, size in readings.items()
            for name, times in TIMES.items()
        }

    def reset_peaks(self) -> None:
        self._host.pop_peak()
        self._peak = self._host.live()

    def allocate(self, nbytes: int) -> object:
        return torch.empty(nbytes, dtype=torch.uint8)

    def laps(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        borders = [time.perf_counter()]
        for run in runs:
            run()
            borders.append(time.perf_counter())
        return [end - start for start, end in itertools.pairwise(borders)]
