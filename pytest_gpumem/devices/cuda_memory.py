"""The memory of a CUDA GPU that several processes share."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from pytest_gpumem.devices.memory_ledger import DeviceMemory
from pytest_gpumem.emulation.load import CONTEXT_BYTES

if TYPE_CHECKING:
    from pytest_gpumem.devices.cuda_runtime import CudaRuntime
    from pytest_gpumem.devices.memory_ledger import MemoryLedger


class CudaMemory:
    """A `SharedMemory`: what a process holds of a GPU is its context and what its allocator has reserved.

    The context, with the code of kernels, which is loaded when they are first used, is what NVML tells of the process beyond
    the allocator's bytes. It is taken to be `CONTEXT_BYTES` at least: that much it will be once kernels of all kinds ran.
    """

    def __init__(self, runtime: CudaRuntime, ledger: MemoryLedger) -> None:
        self.ledger = ledger
        self._runtime = runtime

    def now(self) -> DeviceMemory:
        free, total = self._runtime.free_and_total()
        return DeviceMemory(total, free, self._context() + self._reserved())

    def limit(self, most: int | None) -> None:
        _, total = self._runtime.free_and_total()
        self._runtime.limit(1.0 if most is None else min(1.0, max(0, most - self._context()) / total))

    def release(self) -> None:
        gc.collect()
        self._runtime.synchronize()
        self._runtime.clear_workspaces()
        self._runtime.empty_cache()

    def refusals(self) -> int:
        return self._runtime.statistics().get("num_ooms", 0)

    def _context(self) -> int:
        whole = self._runtime.bytes_of_process()
        return CONTEXT_BYTES if whole is None else max(CONTEXT_BYTES, whole - self._reserved())

    def _reserved(self) -> int:
        return self._runtime.statistics()["reserved_bytes.all.current"]
