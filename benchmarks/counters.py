"""The allocator's counters, as the table of truth reads them: in use now, and at the peak since they were last read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pytest_gpumem.devices.cuda_runtime import TorchCuda

if TYPE_CHECKING:
    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.devices.cuda_runtime import CudaRuntime

Bytes = dict[str, int]
"""By counter. Only differences of two readings mean anything."""


class Counters(Protocol):
    """Where peaks are read. Whoever reads them first calls `take_peaks`, to begin."""

    def current(self) -> Bytes:
        """Bytes now."""

    def take_peaks(self) -> Bytes:
        """The peaks since the last call of this; the next ones begin at what is there now."""


class CudaCounters:
    """The statistics of ``torch.cuda.memory_stats()`` over all of its pools.

    ``requested`` is what tensors asked for, ``allocated`` the same in rounded blocks, ``active`` also counts blocks that are
    freed and wait for another stream, and ``reserved`` is what the allocator holds from the driver.
    """

    NAMES = ("allocated", "active", "requested", "reserved")

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime

    def current(self) -> Bytes:
        return self._read("current")

    def take_peaks(self) -> Bytes:
        peaks = self._read("peak")
        self._runtime.reset_peaks()
        return peaks

    def _read(self, which: str) -> Bytes:
        statistics = self._runtime.statistics()
        # Not every allocator that torch may be told to use keeps all of them.
        keys = {name: f"{name}_bytes.all.{which}" for name in self.NAMES}
        return {name: statistics[key] for name, key in keys.items() if key in statistics}


class DeviceCounters:
    """A device's own count, for one without an allocator to ask: ``allocated`` is what tensors hold."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def current(self) -> Bytes:
        return {"allocated": self._device.live()}

    def take_peaks(self) -> Bytes:
        return {"allocated": self._device.pop_peak().allocated}


def counters_of(device: Device) -> Counters:
    return CudaCounters(TorchCuda()) if device.name == "cuda" else DeviceCounters(device)
