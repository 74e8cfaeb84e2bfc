"""Readings from Linux's /proc: this thread's waiting, the machine's cores, and the other processes on them.

On systems without these files (macOS, Windows) every reading is ``None``.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_BUSY = (0, 1, 2, 5, 6)
"""Indices of counters on a cpu line: user, nice, system, irq, softirq. User and nice include guest time (proc_stat(5))."""
_STEAL = 7


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds since the machine started, summed over ``cores``: ``busy`` with processes, ``stolen`` by the hypervisor."""

    busy: float
    stolen: float
    cores: int


def tick_seconds() -> float:
    """Return the length of a tick in seconds. /proc counts CPU time in ticks."""
    try:
        return 1 / os.sysconf("SC_CLK_TCK")
    except (AttributeError, ValueError, OSError, ZeroDivisionError):
        return 0.01


def waited_seconds(path: Path = Path("/proc/thread-self/schedstat")) -> float | None:
    """Return the seconds in which the calling thread was ready to run but had no core."""
    return waited_of(_text(path))


def cpu_times(path: Path = Path("/proc/stat")) -> CpuTimes | None:
    """Return the times on the machine's cores since it started."""
    return cpu_times_of(_text(path), tick_seconds())


def seconds_of_children(proc: Path = Path("/proc")) -> float:
    """Return the CPU seconds used by this process's descendants, such as a DataLoader's workers.

    Ended children count if they were waited for. Live children count if a main thread started them.
    """
    ended = os.times()
    return ended.children_user + ended.children_system + sum(_seconds_of_live(proc, os.getpid(), tick_seconds()))


def _seconds_of_live(proc: Path, pid: int, tick: float) -> Iterator[float]:
    # The kernel lists children by their starting thread, and a process may have hundreds of threads.
    for word in (_text(proc / f"{pid}/task/{pid}/children") or "").split():
        yield seconds_in(_text(proc / f"{word}/stat"), tick)
        yield from _seconds_of_live(proc, int(word), tick)


def siblings_with(variable: str, proc: Path = Path("/proc")) -> tuple[int, ...]:
    """Return the other processes with the same parent and the same value in an environment variable.

    Args:
        variable: The variable's name. The result is empty if this process lacks the variable.
        proc: The folder that the kernel fills.
    """
    value = os.environ.get(variable)
    siblings = []
    for process in proc.glob("[0-9]*") if value is not None else ():
        pid, environ = int(process.name), _text(process / "environ") or ""
        is_no_sibling = pid == os.getpid() or parent_in(_text(process / "stat")) != os.getppid()
        if not is_no_sibling and f"{variable}={value}" in environ.split("\0"):
            siblings.append(pid)
    return tuple(siblings)


def seconds_of(pids: Iterable[int], proc: Path = Path("/proc")) -> float:
    """Return the CPU seconds used by processes and their descendants; 0 for ended processes."""
    tick = tick_seconds()
    return sum(seconds_in(_text(proc / f"{pid}/stat"), tick) + sum(_seconds_of_live(proc, pid, tick)) for pid in pids)


def parent_of(pid: int) -> int | None:
    """Return the parent of the process ``pid``."""
    return parent_in(_text(Path(f"/proc/{pid}/stat")))


def is_of_session(pid: int) -> bool:
    """Return whether ``pid`` is this process, its child, or another pytest-xdist worker from the same session."""
    parents = {os.getpid()}
    if "PYTEST_XDIST_WORKER" in os.environ:
        parents.add(os.getppid())
    return pid == os.getpid() or parent_of(pid) in parents


def workers_of_session() -> int:
    """Return how many processes in this session measure: pytest-xdist's workers, or only this process."""
    workers = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "")
    return int(workers) if workers.isdigit() else 1


def machine(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU and how many cores this process may use: ``"AMD EPYC 9575F, 8 cores"``."""
    # Read only the first core, because the file is long on large machines, and slow for the kernel to write.
    model = model_of(_text(path, most=4096)) or platform_processor()
    cores = usable_cores()
    return f"{model}, {counted(cores, 'core')}"


def platform_processor() -> str:
    """Return the CPU on systems where /proc does not name it: a name on Windows and macOS, otherwise the architecture."""
    # On Linux, `platform.processor` runs a program and returns no more than `platform.machine`.
    name = platform.processor() if platform.system() in ("Windows", "Darwin") else ""
    return name or platform.machine() or "unknown CPU"


def usable_cores() -> int:
    """Return how many logical cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def waited_of(schedstat: str | None) -> float | None:
    """Return how many seconds a thread has waited for a core, from its ``schedstat``.

    The file has the nanoseconds on a core, the nanoseconds waiting for a core, and the turns. For example,
    ``"5000000 2000000000 7"`` gives 2.0. All numbers are 0 if the kernel does not count, and the result is ``None``.
    """
    numbers = _numbers(schedstat)
    if len(numbers) < 2 or numbers[0] == 0:
        return None
    return numbers[1] / 1e9


def cpu_times_of(stat: str | None, tick: float) -> CpuTimes | None:
    """Return the times in ``/proc/stat``, whose counters are ticks of ``tick`` seconds."""
    lines = re.findall(r"^cpu(\d*)((?: +\d+)+)$", stat or "", re.MULTILINE)
    total = next((_numbers(counters) for number, counters in lines if not number), [])
    cores = sum(1 for number, _ in lines if number)
    if len(total) <= _STEAL or not cores:
        return None
    return CpuTimes(sum(total[column] for column in _BUSY) * tick, total[_STEAL] * tick, cores)


def seconds_in(stat: str | None, tick: float) -> float:
    """Return the CPU seconds in a process's ``stat``, including waited-for children."""
    # Split after the second field, a name in parentheses that may contain any character.
    fields = (stat or "").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) * tick


def parent_in(stat: str | None) -> int | None:
    """Return the parent in a process's ``stat``, if it is readable. The second field, in parentheses, may be any text."""
    match = re.match(r"\d+ \(.*\) \S (\d+) ", stat or "", re.DOTALL)
    return int(match.group(1)) if match else None


def model_of(cpuinfo: str | None) -> str | None:
    """Return the CPU's name from ``/proc/cpuinfo``, or two numbers on Arm machines, which have no name there."""
    text = cpuinfo or ""
    name = re.search(r"^model name\s*: *(\S.*?)\s*$", text, re.MULTILINE)
    if name:
        return " ".join(name.group(1).split())
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
