"""Find out whether a process from ``subprocess`` has torch or CUDA, if it will not report its memory.

Such a process has another environment, or runs with ``python -I``, ``-E`` or ``-S``. It may end within a test, and then a look
after the test would come too late.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from dataclasses import dataclass
from functools import wraps
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from pytest_gpumem.emulating.emulated_process.before_torch import USAGE
from pytest_gpumem.measuring.jobs.processes import JobProcesses

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_LOOK_SECONDS = 0.1
_MOST_SECONDS = 30.0
"""A process is looked at for this long. If it runs longer, the look at the end of each test finds it."""
_ENVIRONMENT = 10
"""The position of ``env`` in the arguments for `subprocess.Popen`."""


@dataclass(eq=False, slots=True)
class _Watched:
    """A started command with its child processes."""

    processes: JobProcesses
    started: float
    """When the command was started, on `time.monotonic`."""
    ran: float
    """When a look last found a running process."""
    runs: bool = True


class PopenWatch:
    """Looks at processes from `subprocess.Popen` which will not report to a folder. A thread looks while they run.

    Args:
        folder: The folder for reports.
        variables: The variables with which a process reports.
    """

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self._folder = folder
        self._variables = variables
        self._watched: list[_Watched] = []
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._original = subprocess.Popen.__init__
        self._replaced = self._watching(self._original)
        subprocess.Popen.__init__ = self._replaced  # type: ignore[method-assign]
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_fork)

    def close(self) -> None:
        """Look at no further process."""
        if subprocess.Popen.__init__ is self._replaced:
            subprocess.Popen.__init__ = self._original  # type: ignore[method-assign]
        self._variables = {}
        with self._lock:
            self._watched.clear()

    def unseen_since(self, begin: float) -> tuple[str, ...]:
        """Return commands: one for each process with torch or CUDA, but without a report, after a time on `time.monotonic`."""
        with self._lock:
            watched = [entry for entry in self._watched if entry.ran >= begin]
            return tuple(dict.fromkeys(command for entry in watched for command in entry.processes.unseen()))

    def _begin_fork(self) -> None:
        self._lock = threading.RLock()
        self.close()

    def _watching(self, original: Any) -> Any:
        @wraps(original)
        def start(popen: subprocess.Popen[Any], *args: Any, **kwargs: Any) -> None:
            original(popen, *args, **kwargs)
            environment = args[_ENVIRONMENT] if len(args) > _ENVIRONMENT else kwargs.get("env")
            if self._variables and not will_report(popen.args, environment, self._variables):
                self._watch(popen.pid)

        return start

    def _watch(self, pid: int) -> None:
        processes = JobProcesses(self._folder)
        processes.begin(pid)
        with self._lock:
            self._watched.append(_Watched(processes, time.monotonic(), time.monotonic()))
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="gpumem-watch", daemon=True)
                self._thread.start()

    def _look(self) -> None:
        while True:
            with self._lock:
                running = [entry for entry in self._watched if entry.runs]
                if not running:
                    self._thread = None
                    return
                for entry in running:
                    entry.processes.look()
                    is_young = time.monotonic() - entry.started < _MOST_SECONDS
                    entry.runs = is_young and entry.processes.is_running()
                    entry.ran = time.monotonic() if entry.runs else entry.ran
                # An ended process without torch and CUDA is forgotten.
                self._watched = [entry for entry in self._watched if entry.runs or entry.processes.unseen()]
            time.sleep(_LOOK_SECONDS)


def will_report(command: Any, environment: Mapping[Any, Any] | None, variables: Mapping[str, str]) -> bool:
    """Return whether a command inherits the variables with which processes report, and its Python reads them.

    Args:
        command: The first argument for `subprocess.Popen`.
        environment: The argument ``env``. ``None`` means this process's environment, which a test may have changed.
        variables: The variables with which a process reports.
    """
    environment = os.environ if environment is None else environment
    inherited = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
    startup, *_ = variables["PYTHONPATH"].split(os.pathsep)
    paths = inherited.get("PYTHONPATH", "").split(os.pathsep)
    # `Gpumem.launch` has another folder for its processes.
    if USAGE not in inherited or startup not in paths:
        return False
    words = [os.fsdecode(word) for word in command] if isinstance(command, (list, tuple)) else []
    return not _ignores_environment(words)


def _ignores_environment(words: Sequence[str]) -> bool:
    """Return whether a command is Python with ``-I``, ``-E`` or ``-S``."""
    if not words or not PurePath(words[0]).name.startswith("python"):
        return False
    options = iter(words[1:])
    for word in options:
        if word in ("-W", "-X"):
            next(options, None)
            continue
        if not word.startswith("-") or word.startswith("--") or set("mc").intersection(word):
            return False
        if set("IES").intersection(word):
            return True
    return False
