"""Find out whether this process has descendants with torch or CUDA that do not report their memory.

Such a process has another environment, or runs with ``python -I``, ``-E`` or ``-S``. It may end within a test, and then a look
after the test would come too late. So a thread looks several times a second, however the process was started.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from pytest_gpumem.measuring.jobs.processes import JobProcesses, own_children

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from typing_extensions import Self

_LOOK_SECONDS = 0.1
_MOST_SHARE = 0.05
"""The thread looks for at most this share of the time. A look took 5 ms on a machine with 150 processes."""
_BEGUN: list[ChildWatch] = []
"""The watches whose context has begun."""


class ChildWatch:
    """Looks at this process's descendants within a context.

    Args:
        folder: The folder for reports.
        older: The pids of children that do not count.
    """

    def __init__(self, folder: Path, older: Collection[int]) -> None:
        self._older = older
        self._processes = JobProcesses(folder)
        self._children: set[int] = set()
        self._owner = os.getpid()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        _BEGUN.append(self)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        _BEGUN.remove(self)
        if self._owner == os.getpid():  # a fork has no such thread
            self.stop()

    def start(self) -> None:
        """Start the thread."""
        self._is_over.clear()
        self._thread = threading.Thread(target=self._look_again, name="gpumem-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        if self._thread is not None:
            self._is_over.set()
            self._thread.join()
            self._thread = None

    def unseen(self) -> tuple[str, ...]:
        """Return commands: one for each process with torch or CUDA, but without a report. Call this after the context."""
        if self._owner != os.getpid():
            return ()
        # A single look does not distinguish a program from its parent's fork.
        self._look()
        self._look()
        return self._processes.unseen()

    def _look_again(self) -> None:
        pause = _LOOK_SECONDS
        while not self._is_over.wait(pause):
            begin = time.thread_time()
            self._look()
            pause = max(_LOOK_SECONDS, (time.thread_time() - begin) / _MOST_SHARE)

    def _look(self) -> None:
        if not self._processes.is_running() and not _has_children():
            return
        new = set(own_children()).difference(self._older, self._children)
        for pid in new:
            self._processes.begin(pid)
        self._children |= new
        if self._processes.is_running():
            self._processes.look()


def _has_children() -> bool:
    """Return whether this process has children. This costs less than to list them."""
    if not hasattr(os, "waitid"):
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _stop_all() -> None:
    for watch in _BEGUN:
        watch.stop()


def _start_all() -> None:
    for watch in _BEGUN:
        watch.start()


if hasattr(os, "register_at_fork"):
    # Python 3.12 and newer warn if a process with several threads forks, and a test may turn the warning into an error.
    os.register_at_fork(before=_stop_all, after_in_parent=_start_all, after_in_child=_BEGUN.clear)
