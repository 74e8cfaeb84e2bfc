"""A GPU as NVML sees it: its clocks, what slows it down, and which processes use it. Through nvidia-ml-py.

Nothing here raises: what NVML does not know, or where there is no NVML, is ``None``.
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
"""The bits of ``nvmlClocksEventReasons`` (nvml.h), whose names have changed once while the bits have not."""
_LONGEST_SAMPLING = 1.0
"""NVML samples a GPU's use every 1/6 to 1 second, depending on the product (nvml.h, ``nvmlUtilization_t``)."""


@dataclass(frozen=True, slots=True)
class OtherProcesses:
    """Processes on a GPU that are none of ours. ``pids`` is empty where only their number is known."""

    number: int
    pids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class GpuNow:
    """A GPU's state by NVML at one moment; units and names as in `Conditions`."""

    clock_events: frozenset[str] | None = None
    sm_clock: float | None = None
    sm_clock_default: float | None = None
    other_processes: OtherProcesses | None = None


class NvmlGpu:
    """The GPU, or the MIG instance, of a UUID; with or without its prefix (``GPU-``, ``MIG-``).

    NVML is initialised with the first reading and stays so: doing it anew for each takes milliseconds.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._trouble: str | None = None
        self._default_clock: float | None = None

    def driver_version(self) -> str:
        """Return the driver's release, ``"580.95.05"``; where NVML does not answer ``"unknown"``, with what it says."""
        version = None
        if self._nvml is not None:
            self._trouble = None
            version = self._asked("nvmlSystemGetDriverVersion")
        if version is None:
            return f"unknown ({self._trouble})" if self._trouble else "unknown"
        return version.decode() if isinstance(version, bytes) else str(version)

    def now(self, is_ours: Callable[[int], bool], workers: int) -> GpuNow:
        """Return the clocks now, and the other processes; ``is_ours`` and ``workers`` as in `other_processes`."""
        processes = self.processes()
        ours = [pid for pid in processes or () if is_ours(pid)]
        others = other_processes(processes, None, ours, workers)
        if others is not None and others.number:
            # Asked only where it matters, since NVML copies a buffer of samples for it.
            others = other_processes(processes, self.working(), ours, workers)
        return GpuNow(self.clock_events(), self.sm_clock(), self.default_sm_clock(), others)

    def clock_events(self) -> frozenset[str] | None:
        """Return why the clocks are not higher: names as `Conditions.clock_events` has them."""
        bits = self._of_physical("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            # Releases before 535 know the older name only; nvidia-ml-py has it as well.
            bits = self._of_physical("nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if bits is None else frozenset(name for bit, name in _EVENTS.items() if bits & bit)

    def sm_clock(self) -> float | None:
        """Return the SM clock now, in Hz."""
        return self._clock("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM")

    def default_sm_clock(self) -> float | None:
        """Return the default SM clock in Hz; the highest one where NVML knows no default (since driver 580)."""
        if self._default_clock is None:
            # The default is one of the graphics clock, which the SM clock is the same as.
            self._default_clock = self._clock("nvmlDeviceGetDefaultApplicationsClock", "NVML_CLOCK_GRAPHICS")
        if self._default_clock is None:
            self._default_clock = self._clock("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM")
        return self._default_clock

    def processes(self) -> frozenset[int] | None:
        """Return the processes with a CUDA context here, ours too, by the driver's pids: in a container those of the host."""
        listed = self._listed()
        return None if listed is None else frozenset(int(process.pid) for process in listed)

    def bytes_of(self, pid: int) -> int | None:
        """Return the bytes of the GPU's memory that a process has taken; ``None`` where that is not known.

        In a container the driver's pids are those of the host, and on Windows it does not know the bytes.
        """
        taken = [process.usedGpuMemory for process in self._listed() or () if process.pid == pid]
        return int(taken[0]) if taken and taken[0] is not None else None

    def _listed(self) -> list[Any] | None:
        """Return NVML's entries of the processes with a CUDA context here."""
        if self._instance is None:
            return None
        listed = self._asked("nvmlDeviceGetComputeRunningProcesses", self._instance)
        if listed is None:
            # Drivers before 510 have an older form only, which nvidia-ml-py does not fall back to.
            listed = self._asked("nvmlDeviceGetComputeRunningProcesses_v2", self._instance)
        return None if listed is None else list(listed)

    def working(self) -> frozenset[int] | None:
        """Return the processes that the GPU worked for within about the last second; ``None`` for a MIG instance."""
        if self._physical is None or self._instance is not self._physical:
            return None
        since = int((time.time() - 2 * _LONGEST_SAMPLING) * 1e6)
        refusals: tuple[type[Exception], ...] = (AttributeError, *self._refusals())
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._physical, since)
        except refusals as error:
            # nvidia-ml-py raises success, too, where NVML has no samples to copy.
            nothing = {getattr(self._nvml, name, None) for name in ("NVML_ERROR_NOT_FOUND", "NVML_SUCCESS")} - {None}
            return frozenset() if getattr(error, "value", None) in nothing else None
        return frozenset(int(sample.pid) for sample in samples if sample.smUtil or sample.memUtil)

    def _clock(self, function: str, which: str) -> float | None:
        megahertz = self._of_physical(function, getattr(self._nvml, which, 0))
        return megahertz * 1e6 if megahertz else None

    def _of_physical(self, function: str, *arguments: object) -> Any:
        return None if self._physical is None else self._asked(function, self._physical, *arguments)

    def _asked(self, function: str, *arguments: object) -> Any:
        """Return NVML's answer; ``None`` when it refuses, or does not know the function."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except AttributeError:
            return None
        except self._refusals() as error:
            self._trouble = str(error)
            return None

    def _refusals(self) -> tuple[type[Exception], ...]:
        """Return the exceptions of nvidia-ml-py: errors of NVML, and the one for a driver that is older than itself."""
        names = ("NVMLError", "NVMLLibraryMismatchError")
        return tuple(getattr(self._nvml, name) for name in names if hasattr(self._nvml, name))

    @cached_property
    def _nvml(self) -> Any:
        """Its Python module, once NVML is initialised; ``None`` where that cannot be done."""
        try:
            import pynvml

            pynvml.nvmlInit()
        except (ImportError, OSError):
            return None
        except Exception as error:  # noqa: BLE001 - NVML's own class, whose name needs the import
            self._trouble = str(error)
            return None
        return pynvml

    @cached_property
    def _instance(self) -> Any:
        """The handle of what the UUID names."""
        found = (self._asked("nvmlDeviceGetHandleByUUID", prefix + self._uuid) for prefix in ("", "GPU-", "MIG-"))
        return next((one for one in found if one is not None), None)

    @cached_property
    def _physical(self) -> Any:
        """The handle of the whole GPU, which alone has clocks; NVML refuses this question for one that is not partitioned."""
        if self._instance is None:
            return None
        parent = self._asked("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", self._instance)
        return self._instance if parent is None else parent


def other_processes(
    processes: frozenset[int] | None, working: frozenset[int] | None, ours: Collection[int], workers: int
) -> OtherProcesses | None:
    """Return the other processes that use the GPU: the ``processes`` on it that are not ``ours``, nor known to be idle.

    ``ours`` are the pids that this session's processes have here, and ``workers`` is how many of them measure. Where
    none of them is listed, NVML speaks of pids of another namespace: then as many as there are workers are taken to be
    this session's, whichever they are. ``working`` is ``None`` where it is not known, and then all count as working.
    """
    if processes is None:
        return None
    others = processes.difference(ours)
    if len(others) < len(processes):
        at_work = others if working is None else others & working
        return OtherProcesses(len(at_work), at_work)
    number = max(len(processes) - workers, 0)
    if working is not None:
        # One of those that work is this process.
        number = min(number, max(len(processes & working) - 1, 0))
    return OtherProcesses(number)
