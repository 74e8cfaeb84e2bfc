"""Read a GPU's clocks, the reasons for low clocks, and the processes on the GPU from NVML, through nvidia-ml-py.

No function in this module raises an error. A function returns ``None`` if NVML is not installed or does not report the value.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_EVENTS = {
    0x1: "GpuIdle",
    0x2: "ApplicationsClocksSetting",
    0x4: "SwPowerCap",
    0x8: "HwSlowdown",
    0x10: "SyncBoost",
    0x20: "SwThermalSlowdown",
    0x40: "HwThermalSlowdown",
    0x80: "HwPowerBrakeSlowdown",
    0x100: "DisplayClockSetting",
}
"""The bits of ``nvmlClocksEventReasons`` (nvml.h), with NVIDIA's current names. Older drivers use the same bits."""
_LONGEST_SAMPLING = 1.0
"""NVML's longest sampling interval in seconds. It samples a GPU every 1/6 to 1 second (nvml.h, ``nvmlUtilization_t``)."""


@dataclass(frozen=True, slots=True)
class OtherProcesses:
    """The processes from other sessions on a GPU. ``pids`` is empty if only their number is known."""

    number: int
    pids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class GpuState:
    """A GPU's clocks and processes. The fields have the same units and names as in `Conditions`."""

    clock_events: frozenset[str] | None = None
    sm_clock: float | None = None
    sm_clock_default: float | None = None
    other_processes: OtherProcesses | None = None


class NvmlGpu:
    """The GPU or MIG instance with a UUID. The UUID may be given without its prefix (``GPU-``, ``MIG-``).

    NVML is initialised at the first call and stays initialised until the process ends, because initialising takes
    milliseconds.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._trouble: str | None = None
        self._default_clock: float | None = None

    def driver_version(self) -> str:
        """Return the driver's release, for example ``"580.95.05"``; ``"unknown"`` with an error message if NVML fails."""
        version = None
        if self._nvml is not None:
            self._trouble = None
            version = self._query("nvmlSystemGetDriverVersion")
        if version is None:
            return f"unknown ({self._trouble})" if self._trouble else "unknown"
        return version.decode() if isinstance(version, bytes) else str(version)

    def now(self, is_ours: Callable[[int], bool], workers: int) -> GpuState:
        """Return the GPU's current clocks, and the processes from other sessions.

        Args:
            is_ours: Returns whether the process with a pid belongs to this session.
            workers: The number of measuring processes in this session.
        """
        processes = self.processes()
        ours = [pid for pid in processes or () if is_ours(pid)]
        other = other_processes(processes, None, ours, workers)
        if other is not None and other.number:
            # Ask for working processes only if there are other processes, because this copies a buffer of samples.
            other = other_processes(processes, self.working(), ours, workers)
        return GpuState(self.clock_events(), self.sm_clock(), self.default_sm_clock(), other)

    def clock_events(self) -> frozenset[str] | None:
        """Return the reasons for low clocks, named as in `Conditions.clock_events`."""
        bits = self._query_physical("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            # Drivers before 535 have this function only under its older name, which nvidia-ml-py still supports.
            bits = self._query_physical("nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if bits is None else frozenset(name for bit, name in _EVENTS.items() if bits & bit)

    def sm_clock(self) -> float | None:
        """Return the current SM clock in Hz."""
        return self._clock("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM")

    def default_sm_clock(self) -> float | None:
        """Return the default SM clock in Hz. If NVML reports no default (since driver 580), return the highest SM clock."""
        if self._default_clock is None:
            # NVML reports the default of the graphics clock, which is equal to the SM clock.
            self._default_clock = self._clock("nvmlDeviceGetDefaultApplicationsClock", "NVML_CLOCK_GRAPHICS")
        if self._default_clock is None:
            self._default_clock = self._clock("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM")
        return self._default_clock

    def processes(self) -> frozenset[int] | None:
        """Return the pids of all processes with a CUDA context on the GPU. In a container, NVML may report the host's pids."""
        processes = self.bytes_by_pid()
        return None if processes is None else frozenset(processes)

    def bytes_by_pid(self) -> dict[int, int | None] | None:
        """Return the bytes of each process with a CUDA context on the GPU; ``None`` for a process with unknown bytes.

        The result is ``None`` if NVML does not list processes. NVML reports 0 bytes in containers with some drivers (560.35,
        [HAMi-core#112](https://github.com/Project-HAMi/HAMi-core/issues/112)). As a context takes memory, 0 means unknown.
        """
        entries = self._process_entries()
        if entries is None:
            return None
        return {int(process.pid): int(process.usedGpuMemory or 0) or None for process in reversed(entries)}

    def _process_entries(self) -> list[Any] | None:
        """Return NVML's entries for all processes with a CUDA context; ``None`` if NVML does not report them."""
        if self._instance is None:
            return None
        entries = self._query("nvmlDeviceGetComputeRunningProcesses", self._instance)
        if entries is None:
            # Drivers before 510 only have this older function, and nvidia-ml-py does not fall back to it.
            entries = self._query("nvmlDeviceGetComputeRunningProcesses_v2", self._instance)
        return None if entries is None else list(entries)

    def working(self) -> frozenset[int] | None:
        """Return the pids of processes that used the GPU within the last two seconds; ``None`` for a MIG instance."""
        if self._physical is None or self._instance is not self._physical:
            return None
        start_us = int((time.time() - 2 * _LONGEST_SAMPLING) * 1e6)
        refusals: tuple[type[Exception], ...] = (AttributeError, *self._refusals())
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._physical, start_us)
        except refusals as error:
            # If NVML has no samples, nvidia-ml-py raises an exception, even though the call returned the code for success.
            no_samples = {getattr(self._nvml, name, None) for name in ("NVML_ERROR_NOT_FOUND", "NVML_SUCCESS")} - {None}
            return frozenset() if getattr(error, "value", None) in no_samples else None
        return frozenset(int(sample.pid) for sample in samples if sample.smUtil or sample.memUtil)

    def _clock(self, function: str, constant: str) -> float | None:
        megahertz = self._query_physical(function, getattr(self._nvml, constant, 0))
        return megahertz * 1e6 if megahertz else None

    def _query_physical(self, function: str, *arguments: object) -> Any:
        return None if self._physical is None else self._query(function, self._physical, *arguments)

    def _query(self, function: str, *arguments: object) -> Any:
        """Call a function in NVML, and return its result; ``None`` if NVML raises an error or lacks the function."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except AttributeError:
            return None
        except self._refusals() as error:
            self._trouble = str(error)
            return None

    def _refusals(self) -> tuple[type[Exception], ...]:
        """Return nvidia-ml-py's exception classes, for errors from NVML and for a driver that lacks a function."""
        names = ("NVMLError", "NVMLLibraryMismatchError")
        return tuple(getattr(self._nvml, name) for name in names if hasattr(self._nvml, name))

    @cached_property
    def _nvml(self) -> Any:
        """The module ``pynvml``, with NVML initialised; ``None`` if it is not installed or the initialisation fails."""
        try:
            import pynvml

            pynvml.nvmlInit()
        except (ImportError, OSError):
            return None
        except Exception as error:  # noqa: BLE001 - NVML's errors are defined in pynvml, which is only imported in this function
            self._trouble = str(error)
            return None
        return pynvml

    @cached_property
    def _instance(self) -> Any:
        """NVML's handle for the GPU or MIG instance with this UUID; ``None`` if NVML does not find it."""
        handles = (self._query("nvmlDeviceGetHandleByUUID", prefix + self._uuid) for prefix in ("", "GPU-", "MIG-"))
        return next((handle for handle in handles if handle is not None), None)

    @cached_property
    def _physical(self) -> Any:
        """NVML's handle for the whole GPU, because a MIG instance has no clocks of its own."""
        if self._instance is None:
            return None
        # NVML raises an error if the GPU is not divided into MIG instances.
        parent = self._query("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", self._instance)
        return self._instance if parent is None else parent


def other_processes(
    processes: frozenset[int] | None, working: frozenset[int] | None, ours: Collection[int], workers: int
) -> OtherProcesses | None:
    """Return the processes from other sessions that use the GPU, without idle processes.

    In a container, NVML lists the host's pids, so this session's pids are not among them. Then ``workers`` is subtracted from
    the number of listed processes. For example, NVML lists 5 pids, and the session has 2 workers, so 3 processes belong to
    other programs.

    Args:
        processes: All pids on the GPU; ``None`` if they are unknown.
        working: The pids of processes that recently used the GPU; ``None`` if they are unknown. Then no process counts as
            idle.
        ours: The pids among ``processes`` that belong to this session.
        workers: The number of measuring processes in this session.
    """
    if processes is None:
        return None
    foreign = processes.difference(ours)
    if len(foreign) < len(processes):
        at_work = foreign if working is None else foreign & working
        return OtherProcesses(len(at_work), at_work)
    number = max(len(processes) - workers, 0)
    if working is not None:
        # This process itself is one of the working processes.
        number = min(number, max(len(processes & working) - 1, 0))
    return OtherProcesses(number)
