"""A running job's processes, as listed by Linux: the command, its children, their children and so on.

A process reports its memory if it inherits the job's environment and imports torch. A process with another environment, with
``python -I``, ``-E`` or ``-S``, with another Python, or without torch does not report. If it uses a GPU, it still maps torch's
or CUDA's libraries, and Linux lists these in ``/proc/<pid>/maps``. On other systems this module finds no processes.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.emulating.emulated_process.before_torch import USAGE
from pytest_gpumem.emulating.emulated_process.marks import SEEN, bytes_of, mark_in, stack_start, text_of, words_of
from pytest_gpumem.emulating.emulated_process.start import STARTUP

if TYPE_CHECKING:
    from collections.abc import Sequence

_GPU_LIBRARY = re.compile(rb"/lib(torch_cpu|torch_cuda|cuda|cudart)\.(so|dylib)[^/\n]*$", re.MULTILINE)
_DRIVER = b"cuda"
_DRIVER_FILE = "/dev/nvidiactl"
_CONTEXT_FILE = "/dev/nvidia-uvm"
"""The driver opens this file for the first CUDA context."""

_COMPILE_WORKER = b"/torch/_inductor/compile_worker/"
"""A part of the command of torch.compile's processes. They compile kernels, and hold no tensors."""
_TOO_EARLY = "it, or the process that started it, began before the tests were collected (start it in a fixture)"
_HAS_LISTS = Path("/proc/thread-self/children").exists()
"""True if the kernel lists the children of each thread (``CONFIG_PROC_CHILDREN``)."""
_ISOLATING = frozenset("IES")
"""Options of the Python interpreter with which no process reports. ``-I`` includes ``-E``."""
_LAST_OPTIONS = frozenset("cmWX")
"""Options of the Python interpreter after which a word has other letters."""


class Unseen(NamedTuple):
    """A process with torch or CUDA, and without a report."""

    command: str
    cause: str = ""
    """A clause with the cause and the remedy; empty if the cause is not known."""

    @property
    def text(self) -> str:
        """The process, the fact and the cause as a clause."""
        because = f", because {self.cause}" if self.cause else ""
        return f"`{self.command}` loads torch or CUDA, and does not report its memory{because}"


@dataclass(frozen=True, slots=True)
class _Process:
    """A process at the last look. ``start`` distinguishes it from a later process with the same pid.

    ``looks`` counts the looks at which the process ran this program. Between ``vfork`` and ``exec`` a process still has its
    parent's command and libraries, so a single look proves nothing.
    """

    start: bytes
    command: bytes
    stack: bytes = b""
    looks: int = 1
    has_gpu_library: bool = False
    cause: str = ""
    """`Unseen.cause`"""
    is_early: bool = False
    """True if the process, or its parent, started before the tests were collected."""


class JobProcesses:
    """A job's processes. A process stays in the job when its parent ends."""

    def __init__(self, folder: Path, proc: Path = Path("/proc"), first_tick: int = 0) -> None:
        """Begin without processes.

        Args:
            folder: The folder for reports.
            proc: The kernel's folder about processes.
            first_tick: The time from which processes can report, as in `ProcessIdentity.started`.
        """
        self._folder = folder
        self._proc = proc
        self._first_tick = first_tick
        self._processes: dict[int, _Process] = {}
        self._gone: dict[int, _Process] = {}

    def begin(self, pid: int) -> None:
        """Add the job's command, which has just started."""
        start = self._start_of(pid)
        self._processes[pid] = _Process(start, b"", looks=0, is_early=bool(start) and int(start) < self._first_tick)

    def look(self) -> None:
        """Look once at the job's processes, and add their new children."""
        pids = [pid for pid in self._processes if self._is_alive(pid)]
        for pid in [pid for pid in self._processes if pid not in pids]:
            self._gone[pid] = self._processes.pop(pid)
        early_pids = {pid for pid in pids if self._processes[pid].is_early}
        for pid in pids:
            new_children = [child for child in children_of(self._proc / str(pid)) if child not in pids]
            pids += new_children
            early_pids.update(new_children if pid in early_pids else ())
            command, start = self._bytes(pid, "cmdline"), self._start_of(pid)
            earlier = self._processes.get(pid)
            stack = stack_start(self._bytes(pid, "stat"))
            if earlier and not command:
                continue  # it ends at this moment, and has no command any more
            process = _Process(start, command, stack, is_early=pid in early_pids)
            if earlier is not None and _is_same_program(earlier, process):
                process = replace(earlier, command=command, looks=earlier.looks + 1)
            is_worker = process.is_early and _COMPILE_WORKER in command
            if not process.has_gpu_library and not is_worker and not self._reports(pid, process):
                variables = self._variables_of(pid, command)
                if self._may_use_gpu(pid):
                    cause = _TOO_EARLY if process.is_early else why_unseen(words_of(command), variables)
                    process = replace(process, has_gpu_library=True, cause=cause)
            self._processes[pid] = process

    def pids(self) -> frozenset[int]:
        """Return the pids of the processes at the last look."""
        return frozenset(self._processes)

    def unseen(self) -> tuple[Unseen, ...]:
        """Return each process with a GPU library, but without a report."""
        return tuple(
            Unseen(text_of(process.command) or f"process {pid}", process.cause)
            for pid, process in {**self._gone, **self._processes}.items()
            if process.has_gpu_library and process.looks > 1 and not self._reports(pid, process)
        )

    def may_report_later(self) -> bool:
        """Return whether a process with a GPU library had no report at the last look. A new fork may not have run yet."""
        return any(
            process.has_gpu_library and not self._reports(pid, process) for pid, process in self._processes.items()
        )

    def alive(self) -> tuple[str, ...]:
        """Return commands: one for each running process with a report or a GPU library."""
        return tuple(
            text_of(process.command) or f"process {pid}"
            for pid, process in self._processes.items()
            if (process.has_gpu_library or self._reports(pid, process)) and self._is_alive(pid)
        )

    def is_running(self) -> bool:
        """Return whether a process ran at the last look."""
        return bool(self._processes)

    def kill(self) -> None:
        """End all processes that still run."""
        for pid in self._processes:
            if self._is_alive(pid):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _reports(self, pid: int, process: _Process) -> bool:
        """Return whether a process has left its mark. If it runs another program by ``exec``, this program has left none."""
        mark = self._folder / f"{pid}{SEEN}"
        if not mark.exists():
            return False
        command, stack = mark_in(bytes_of(mark))
        return command == process.command or (stack not in (b"", b"0") and stack == process.stack)

    def _variables_of(self, pid: int, command: bytes) -> Sequence[bytes] | None:
        """Return the environment with which a program began; ``None`` if it is not known.

        A fork of this process began with the environment of this process. A program with a new title may have overwritten
        its environment.
        """
        try:
            is_fork = command == self._bytes(os.getpid(), "cmdline")
            variables = [] if is_fork else (self._proc / str(pid) / "environ").read_bytes().rstrip(b"\0").split(b"\0")
        except OSError:
            return None
        is_whole = all(b"=" in variable for variable in variables if variable)
        return variables if is_whole and not is_fork else None

    def _may_use_gpu(self, pid: int) -> bool:
        """Return whether a process has torch or CUDA in its memory, and is not known to have no CUDA context.

        Example:
            ``nvidia-smi`` maps libcuda to print its version. It opens ``/dev/nvidiactl``, but not ``/dev/nvidia-uvm``.
        """
        libraries = {match[1] for match in _GPU_LIBRARY.finditer(self._bytes(pid, "maps"))}
        if libraries == {_DRIVER}:
            files = self._files_of(pid)
            return _DRIVER_FILE not in files or _CONTEXT_FILE in files
        return bool(libraries)

    def _files_of(self, pid: int) -> frozenset[str]:
        """Return the paths of a process's open files. Files of another user's process are not shown."""
        files = set()
        with suppress(OSError):
            for descriptor in (self._proc / str(pid) / "fd").iterdir():
                with suppress(OSError):
                    files.add(str(descriptor.readlink()))
        return frozenset(files)

    def _is_alive(self, pid: int) -> bool:
        return _is_running(self._fields(pid), self._processes[pid].start)

    def _start_of(self, pid: int) -> bytes:
        fields = self._fields(pid)
        return fields[19] if fields else b""

    def _fields(self, pid: int) -> list[bytes]:
        return _stat_fields(self._bytes(pid, "stat"))

    def _bytes(self, pid: int, name: str) -> bytes:
        return bytes_of(self._proc / str(pid) / name)


def _is_same_program(earlier: _Process, current: _Process) -> bool:
    """Return whether a process still runs the program of the last look. A program may change its title, but not its stack."""
    return earlier.start == current.start and (
        earlier.command == current.command or (earlier.stack not in (b"", b"0") and earlier.stack == current.stack)
    )


def why_unseen(command: Sequence[str], variables: Sequence[bytes] | None) -> str:
    """Return a clause on why a Python process does not report, with the remedy; empty if the cause is not known.

    Example:
        ``why_unseen(["python", "-I", "serve.py"], None)`` returns ``it runs with python -I (start it without -I)``.

    Args:
        command: The interpreter, its options, the program and the program's arguments.
        variables: The environment with which the program began: ``[b"PATH=/bin"]``. ``None`` if unknown.
    """
    if not command or not PurePath(command[0]).name.startswith("python"):
        return ""
    for word in command[1:]:
        if not word.startswith("-") or word.startswith("--"):
            break
        letters = word[1:]
        until = next((at for at, letter in enumerate(letters) if letter in _LAST_OPTIONS), len(letters))
        isolating = next((letter for letter in letters[:until] if letter in _ISOLATING), None)
        if isolating is not None:
            return f"it runs with python -{isolating} (start it without -{isolating})"
        if until < len(letters):
            break
    if variables is None:
        return ""
    values = dict(variable.split(b"=", 1) for variable in variables if variable)
    paths = values.get(b"PYTHONPATH")
    for name in ("PYTHONPATH", USAGE):
        if name.encode() not in values:
            return f"its environment has no {name} (start it with env={{**os.environ, ...}})"
    if os.fsencode(STARTUP) not in (paths or b"").split(os.pathsep.encode()):
        return 'its PYTHONPATH was replaced (add os.environ["PYTHONPATH"] to it)'
    return ""


def is_running(pid: int, started: int) -> bool:
    """Return whether a process runs. ``started`` is `ProcessIdentity.started`; 0 if unknown, as on other systems than Linux."""
    if started:
        return _is_running(_stat_fields(bytes_of(Path(f"/proc/{pid}/stat"))), str(started).encode())
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def children_of(process: Path) -> list[int]:
    """Return the pids of a process's children, including ended children that nobody has waited for.

    The lists of its threads are read in 0.04 ms. A kernel without such lists needs a scan of all processes, which takes 3 ms if
    there are 70.

    Args:
        process: The kernel's folder about the process.
    """
    if not _HAS_LISTS:
        parent = b"%d" % os.getpid() if process.name == "self" else process.name.encode()
        folders = process.parent.glob("[0-9]*")
        return [int(folder.name) for folder in folders if _stat_fields(bytes_of(folder / "stat"))[1:2] == [parent]]
    threads = process / "task"
    with suppress(OSError):
        names = os.listdir(threads)  # noqa: PTH208 -- `iterdir` takes longer
        return [int(pid) for name in names for pid in bytes_of(threads / name / "children").split()]
    return []


def own_children() -> list[int]:
    """Return the pids of this process's children as `children_of` does."""
    return children_of(Path("/proc/self"))


def own_children_before(tick: int) -> frozenset[int]:
    """Return the pids of this process's children that started before a time. The time is as in `ProcessIdentity.started`."""
    starts = {pid: _stat_fields(bytes_of(Path(f"/proc/{pid}/stat"))) for pid in own_children()}
    return frozenset(pid for pid, fields in starts.items() if not fields or int(fields[19]) < tick)


def _is_running(fields: list[bytes], started: bytes) -> bool:
    return bool(fields) and fields[0] not in (b"Z", b"X") and fields[19] == started


def _stat_fields(stat: bytes) -> list[bytes]:
    """Return the fields in ``/proc/<pid>/stat`` after the program's name; nothing if the process has ended."""
    fields = stat.rpartition(b")")[2].split()
    return fields if len(fields) > 19 else []
