"""Find processes in a job with torch or CUDA, but without a report on their memory.

A process reports if it inherits the job's environment. A process with another environment, with ``python -I``, ``-E`` or
``-S``, or without Python does not report. It still maps torch's or CUDA's libraries, and Linux lists these in
``/proc/<pid>/maps``. On other systems this module finds no process.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pytest_gpumem.emulating.emulated_process.before_torch import SEEN

_GPU_LIBRARY = re.compile(rb"/lib(torch_cpu|torch_cuda|cuda|cudart)\.(so|dylib)[^/\n]*$", re.MULTILINE)


class UnseenProcesses:
    """The processes in a running job with torch or CUDA, and without a report."""

    def __init__(self, folder: Path, proc: Path = Path("/proc")) -> None:
        """Begin to watch.

        Args:
            folder: The folder for the processes' reports.
            proc: The kernel's folder about processes.
        """
        self._folder = folder
        self._proc = proc
        self._commands: dict[int, str] = {}

    def look(self) -> None:
        """Look once at all descendants of this process."""
        for pid in descendants(os.getpid(), self._proc):
            if not self._reports(pid) and self._uses_a_gpu(pid):
                self._commands[pid] = self._command(pid)

    def commands(self) -> tuple[str, ...]:
        """Return these processes' commands. A process with a later report is left out."""
        return tuple(command for pid, command in self._commands.items() if not self._reports(pid))

    def _reports(self, pid: int) -> bool:
        return (self._folder / f"{pid}{SEEN}").exists()

    def _uses_a_gpu(self, pid: int) -> bool:
        return _GPU_LIBRARY.search(_bytes(self._proc / str(pid) / "maps")) is not None

    def _command(self, pid: int) -> str:
        words = _bytes(self._proc / str(pid) / "cmdline").split(b"\0")
        return " ".join(word.decode(errors="replace") for word in words if word) or f"process {pid}"


def descendants(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """Return the pids of a process's children, grandchildren and so on; no pids on systems without ``/proc``."""
    children: dict[int, list[int]] = {}
    for process in proc.glob("[0-9]*"):
        stat = _bytes(process / "stat").rpartition(b")")[2].split()
        if len(stat) > 1:
            children.setdefault(int(stat[1]), []).append(int(process.name))
    pids: list[int] = []
    parents = [pid]
    while parents:
        generation = [child for parent in parents for child in children.get(parent, [])]
        pids += generation
        parents = generation
    return sorted(pids)


def _bytes(path: Path) -> bytes:
    """Return a file's bytes, or no bytes after the process has ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
