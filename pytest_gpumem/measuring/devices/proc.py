"""Read Linux's /proc files: how long this thread waited for a core, the CPU's name, and the CPU time of processes.

If a file is missing, as on macOS and Windows, a function returns ``None``, 0 or an empty result. `psutil_times` has the same
functions for these systems.
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

NAME = "/proc"
_BUSY = (0, 1, 2, 5, 6)
"""Indices of the counters for user, nice, system, irq and softirq in a line for a core of /proc/stat.

The counters for user and nice include guest time (proc_stat(5)).
"""
_STEAL = 7


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds since the machine started, summed over all ``cores``.

    ``busy`` is the time in which cores ran processes. ``stolen`` is the time in which the hypervisor ran other machines, or
    ``None`` if the system does not count it.
    """

    busy: float
    stolen: float | None
    cores: int


def tick_seconds() -> float:
    """Return the length of a tick in seconds. Systems count CPU time in ticks. A tick on Windows takes 15.6 ms."""
    try:
        return 1 / os.sysconf("SC_CLK_TCK")
    except (AttributeError, ValueError, OSError, ZeroDivisionError):
        return 1 / 64


def waited_seconds(path: Path = Path("/proc/thread-self/schedstat")) -> float | None:
    """Return the seconds in which the calling thread was ready to run but had no core."""
    return waited_of(_text(path))


def cpu_times(path: Path = Path("/proc/stat")) -> CpuTimes | None:
    """Return the CPU times of all the machine's cores since the machine started."""
    return cpu_times_of(_text(path), tick_seconds())


def seconds_of_children(proc: Path = Path("/proc")) -> float:
    """Return the CPU seconds used by this process's descendants, such as a DataLoader's workers.

    An ended child is included if its parent has waited for it. A live child is included if its parent's main thread has
    started it.
    """
    ended = os.times()
    return ended.children_user + ended.children_system + sum(_seconds_of_live(proc, os.getpid(), tick_seconds()))


def _seconds_of_live(proc: Path, pid: int, tick: float) -> Iterator[float]:
    # The kernel has a list of children for each thread. Only the main thread's list is read, because there may be hundreds.
    for word in (_text(proc / f"{pid}/task/{pid}/children") or "").split():
        yield seconds_in(_text(proc / f"{word}/stat"), tick)
        yield from _seconds_of_live(proc, int(word), tick)


def siblings_with(variable: str, proc: Path = Path("/proc")) -> tuple[int, ...]:
    """Return the pids of other processes with the same parent and the same value in an environment variable.

    For example, the ranks in a distributed job have the same value in ``MASTER_PORT``.

    Args:
        variable: The variable's name. The result is empty if the variable is not set in this process.
        proc: The folder with the kernel's files about processes.
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
    """Return the CPU seconds used by the processes ``pids`` and their descendants. An ended process counts as 0 seconds."""
    tick = tick_seconds()
    return sum(seconds_in(_text(proc / f"{pid}/stat"), tick) + sum(_seconds_of_live(proc, pid, tick)) for pid in pids)


def parent_of(pid: int) -> int | None:
    """Return the pid of a process's parent; ``None`` if it is unknown."""
    return parent_in(_text(Path(f"/proc/{pid}/stat")))


def program_of(pid: int) -> str | None:
    """Return the name of a process's program, such as ``python``; ``None`` if this process cannot read the name.

    Arguments are left out, because they may contain passwords. Linux cuts the name after 15 characters.
    """
    return (_text(Path(f"/proc/{pid}/comm")) or "").rstrip("\n") or None


def is_of_session(pid: int) -> bool:
    """Return whether a process belongs to this session: this process, its child, or one of its pytest-xdist workers."""
    parents = {os.getpid()}
    if "PYTEST_XDIST_WORKER" in os.environ:
        parents.add(os.getppid())
    return pid == os.getpid() or parent_of(pid) in parents


def workers_of_session() -> int:
    """Return the number of measuring processes in this session: pytest-xdist's workers, or 1 without pytest-xdist."""
    workers = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "")
    return int(workers) if workers.isdigit() else 1


def machine(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's name and the number of cores that this process may use: ``"AMD EPYC 9575F, 8 cores"``."""
    # Read only the first core's entry, because the kernel needs a long time for the entries of hundreds of cores.
    model = model_of(_text(path, most=4096)) or platform_processor()
    cores = usable_cores()
    return f"{model}, {counted(cores, 'core')}"


def platform_processor() -> str:
    """Return the CPU's name on Windows and macOS, and its architecture elsewhere. Used if /proc/cpuinfo has no name."""
    # On Linux, `platform.processor` runs a program, and its result says nothing that `platform.machine` does not say.
    name = platform.processor() if platform.system() in ("Windows", "Darwin") else ""
    return name or platform.machine() or "unknown CPU"


def usable_cores() -> int:
    """Return the number of logical cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def waited_of(schedstat: str | None) -> float | None:
    """Return how many seconds a thread has waited for a core, from the text of its ``schedstat`` file.

    The text has three numbers: nanoseconds on a core, nanoseconds waiting for a core, and time slices. For example, the result
    for ``"5000000 2000000000 7"`` is 2.0. If the kernel does not measure them, all numbers are 0, and the result is ``None``.
    """
    numbers = _numbers(schedstat)
    if len(numbers) < 2 or numbers[0] == 0:
        return None
    return numbers[1] / 1e9


def cpu_times_of(stat: str | None, tick: float) -> CpuTimes | None:
    """Return the CPU times from the text of ``/proc/stat``, whose counters are in ticks of ``tick`` seconds."""
    lines = re.findall(r"^cpu(\d*)((?: +\d+)+)$", stat or "", re.MULTILINE)
    total = next((_numbers(counters) for number, counters in lines if not number), [])
    cores = sum(1 for number, _ in lines if number)
    if len(total) <= _STEAL or not cores:
        return None
    return CpuTimes(sum(total[column] for column in _BUSY) * tick, total[_STEAL] * tick, cores)


def seconds_in(stat: str | None, tick: float) -> float:
    """Return a process's CPU seconds from the text of its ``stat`` file, including ended children that it has waited for."""
    # Split after the second field, a name in parentheses that may contain any character.
    fields = (stat or "").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) * tick


def parent_in(stat: str | None) -> int | None:
    """Return the parent's pid from the text of a process's ``stat`` file; ``None`` if the text is missing or invalid.

    The second field is the process's name in parentheses. It may contain any text, even parentheses.
    """
    match = re.match(r"\d+ \(.*\) \S (\d+) ", stat or "", re.DOTALL)
    return int(match.group(1)) if match else None


def model_of(cpuinfo: str | None) -> str | None:
    """Return the CPU's name from the text of ``/proc/cpuinfo``; ``None`` if the text has no name.

    On Arm, the file has two numbers instead of a name. Then the result is, for example, ``"aarch64 0x41/0xd0c"``.
    """
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
