"""Read CPU times by psutil, on systems without /proc. The functions have the names and the results of those in `proc`.

If psutil is not installed, `cpu_times` returns ``None``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pytest_gpumem.measuring.devices.proc import CpuTimes

if TYPE_CHECKING:
    from collections.abc import Iterable

NAME = "psutil"
_BUSY = ("user", "nice", "system", "irq", "softirq")
"""The counters for the time in which cores ran processes, as far as a system has them.

On Linux, ``user`` and ``nice`` include guest time. On Windows, ``system`` includes ``interrupt`` and ``dpc``.
"""


def cpu_times() -> CpuTimes | None:
    """Return the CPU times of all the machine's cores since the machine started."""
    try:
        import psutil

        return cpu_times_of(psutil.cpu_times(), psutil.cpu_count())
    except (ImportError, OSError, RuntimeError):  # psutil raises the last two if a container hides the counters
        return None


def cpu_times_of(times: Any, cores: int | None) -> CpuTimes | None:
    """Return the CPU times from the result of ``psutil.cpu_times()``, whose fields differ between systems.

    For example, macOS has the fields user, nice, system and idle. Only Linux has ``steal``.
    """
    if not cores:
        return None
    return CpuTimes(sum(getattr(times, name, 0.0) for name in _BUSY), getattr(times, "steal", None), cores)


def seconds_of_children() -> float:
    """Return the CPU seconds used by this process's descendants, such as a DataLoader's workers.

    Windows does not report the seconds of ended children.
    """
    ended = os.times()
    return ended.children_user + ended.children_system + sum(map(_seconds_in, _descendants(os.getpid())))


def seconds_of(pids: Iterable[int]) -> float:
    """Return the CPU seconds used by the processes ``pids`` and their descendants. An ended process counts as 0 seconds."""
    import psutil

    seconds = 0.0
    for pid in pids:
        try:
            process = psutil.Process(pid)
        except psutil.Error:
            continue
        seconds += sum(map(_seconds_in, [process, *_descendants(pid)]))
    return seconds


def siblings_with(variable: str) -> tuple[int, ...]:
    """Return the pids of other processes with the same parent and the same value in an environment variable.

    The result is empty if the variable is not set in this process.
    """
    import psutil

    value = os.environ.get(variable)
    siblings = []
    for process in psutil.Process(os.getppid()).children() if value is not None else ():
        try:
            if process.pid != os.getpid() and process.environ().get(variable) == value:
                siblings.append(process.pid)
        except (psutil.Error, OSError):  # another user's process, or a process that has just ended
            continue
    return tuple(siblings)


def _descendants(pid: int) -> list[Any]:
    import psutil

    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []


def _seconds_in(process: Any) -> float:
    import psutil

    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)
