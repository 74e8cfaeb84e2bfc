"""Linux's /proc: the waiting of this thread, the machine's cores, and the other processes that use them.

Where there is no such file (macOS, Windows), every reading is ``None``.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_BUSY = (0, 1, 2, 5, 6)
"""Indices of counters of a cpu line: user, nice, system, irq, softirq; guests are in user and nice (proc_stat(5))."""
_STEAL = 7


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds since the machine started, all ``cores`` together: ``busy`` for any process, ``stolen`` by the hypervisor."""

    busy: float
    stolen: float
    cores: int


def tick_seconds() -> float:
    """Return the length in seconds of the ticks in which /proc counts CPU time."""
    try:
        return 1 / os.sysconf("SC_CLK_TCK")
    except (AttributeError, ValueError, OSError, ZeroDivisionError):
        return 0.01


def waited_seconds(path: Path = Path("/proc/thread-self/schedstat")) -> float | None:
    """Return the seconds that the calling thread was ready to run and had no core."""
    return waited_of(_text(path))


def cpu_times(path: Path = Path("/proc/stat")) -> CpuTimes | None:
    """Return what the machine's cores have done since it started."""
    return cpu_times_of(_text(path), tick_seconds())


def seconds_of_children(proc: Path = Path("/proc")) -> float:
    """Return the CPU seconds of this process's children and theirs, such as a DataLoader's workers.

    Of those that have ended, the ones that were waited for; of live ones, those that a main thread started.
    """
    ended = os.times()
    return ended.children_user + ended.children_system + sum(_seconds_of_live(proc, os.getpid(), tick_seconds()))


def _seconds_of_live(proc: Path, pid: int, tick: float) -> Iterator[float]:
    # The kernel lists them by the thread that started them, of which there may be hundreds.
    for word in (_text(proc / f"{pid}/task/{pid}/children") or "").split():
        yield seconds_in(_text(proc / f"{word}/stat"), tick)
        yield from _seconds_of_live(proc, int(word), tick)


def siblings_with(variable: str, proc: Path = Path("/proc")) -> tuple[int, ...]:
    """Return the other processes of this one's parent that have an environment variable with its value here.

    Args:
        variable: Its name; where it is not set here, there are none.
        proc: The folder that the kernel fills.
    """
    value = os.environ.get(variable)
    found = []
    for process in proc.glob("[0-9]*") if value is not None else ():
        pid, environ = int(process.name), _text(process / "environ") or ""
        mine = pid == os.getpid() or parent_in(_text(process / "stat")) != os.getppid()
        if not mine and f"{variable}={value}" in environ.split("\0"):
            found.append(pid)
    return tuple(found)


def seconds_of(pids: Iterable[int], proc: Path = Path("/proc")) -> float:
    """Return the CPU seconds of processes and their children; 0 for those that have ended."""
    tick = tick_seconds()
    return sum(seconds_in(_text(proc / f"{pid}/stat"), tick) + sum(_seconds_of_live(proc, pid, tick)) for pid in pids)


def parent_of(pid: int) -> int | None:
    """Return the process that ``pid`` was started by."""
    return parent_in(_text(Path(f"/proc/{pid}/stat")))


def is_of_session(pid: int) -> bool:
    """Return whether ``pid`` is this process, one that it started, or another pytest-xdist worker of the same session."""
    parents = {os.getpid()}
    if "PYTEST_XDIST_WORKER" in os.environ:
        parents.add(os.getppid())
    return pid == os.getpid() or parent_of(pid) in parents


def workers_of_session() -> int:
    """Return how many processes of this session measure: pytest-xdist's workers, or only this one."""
    workers = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "")
    return int(workers) if workers.isdigit() else 1


def machine(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU and how many of its cores this process may use: ``"AMD EPYC 9575F, 8 cores"``."""
    # Of the first core: on large machines the file is long, and the kernel slow to write it.
    model = model_of(_text(path, most=4096)) or platform_processor()
    cores = usable_cores()
    return f"{model}, {counted(cores, 'core')}"


def platform_processor() -> str:
    """Return the CPU where /proc does not name it: its architecture, but on Windows and macOS."""
    # On Linux, `platform.processor` runs a program and says no more than `machine`.
    named = platform.processor() if platform.system() in ("Windows", "Darwin") else ""
    return named or platform.machine() or "unknown CPU"


def usable_cores() -> int:
    """Return the number of logical cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def waited_of(schedstat: str | None) -> float | None:
    """Return the waiting in a ``schedstat``: ns on a core, ns waiting for one, turns; all 0 where the kernel does not count."""
    numbers = _numbers(schedstat)
    if len(numbers) < 2 or numbers[0] == 0:
        return None
    return numbers[1] / 1e9


def cpu_times_of(stat: str | None, tick: float) -> CpuTimes | None:
    """Return the cpu lines of ``/proc/stat``, whose counters are ticks of ``tick`` seconds."""
    lines = re.findall(r"^cpu(\d*)((?: +\d+)+)$", stat or "", re.MULTILINE)
    total = next((_numbers(counters) for number, counters in lines if not number), [])
    cores = sum(1 for number, _ in lines if number)
    if len(total) <= _STEAL or not cores:
        return None
    return CpuTimes(sum(total[column] for column in _BUSY) * tick, total[_STEAL] * tick, cores)


def seconds_in(stat: str | None, tick: float) -> float:
    """Return the CPU time in a process's ``stat``, with that of its children that it has waited for."""
    # From the third field on: the second is a name in parentheses that may have any character.
    fields = (stat or "").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) * tick


def parent_in(stat: str | None) -> int | None:
    """Return the parent in a process's ``stat``, whose second field is a name in parentheses that may have any character."""
    found = re.match(r"\d+ \(.*\) \S (\d+) ", stat or "", re.DOTALL)
    return int(found.group(1)) if found else None


def model_of(cpuinfo: str | None) -> str | None:
    """Return the CPU's name in ``/proc/cpuinfo``; Arm machines have numbers in its place."""
    text = cpuinfo or ""
    named = re.search(r"^model name\s*: *(\S.*?)\s*$", text, re.MULTILINE)
    if named:
        return " ".join(named.group(1).split())
    implementer = re.search(r"^CPU implementer\s*:\s*(\S+)$", text, re.MULTILINE)
    part = re.search(r"^CPU part\s*:\s*(\S+)$", text, re.MULTILINE)
    if implementer and part:
        return f"{platform.machine()} {implementer.group(1)}/{part.group(1)}"
    return None


def _text(path: Path, most: int = -1) -> str | None:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(most)
    except OSError:
        return None


def _numbers(text: str | None) -> list[int]:
    words = (text or "").split()
    return [int(word) for word in words] if all(word.isdigit() for word in words) else []
