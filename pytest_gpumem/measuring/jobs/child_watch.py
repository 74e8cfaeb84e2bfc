"""Find out whether this process has descendants with torch or CUDA that do not report their memory.

Such a process has another environment, or runs with ``python -I``, ``-E`` or ``-S``. If it ends within a test, a look after the
test comes too late. So a thread looks several times a second.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from pytest_gpumem.emulating.emulated_process.pausing_thread import PausingThread
from pytest_gpumem.measuring.jobs.processes import JobProcesses, own_children

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from typing_extensions import Self

    from pytest_gpumem.measuring.jobs.processes import Unseen

_LOOK_SECONDS = 0.1
_MOST_SHARE = 0.05
"""The thread spends at most this share of its time on looks, if pauses of `_LONGEST_PAUSE` allow that. A look at a single child
takes 0.5 ms."""
_LONGEST_PAUSE = 0.4
"""Seconds. Two looks are needed at a process that does not report."""


class ChildWatch(PausingThread):
    """Looks at this process's descendants within a context.

    Args:
        folder: The folder for reports.
        older: The pids of children that do not count.
        look: A function called with the pids of all descendants after each look at them.
        first_tick: The time from which processes can report, as in `ProcessIdentity.started`.
    """

    def __init__(
        self,
        folder: Path,
        older: Collection[int],
        look: Callable[[frozenset[int]], None] = lambda _: None,
        first_tick: int = 0,
    ) -> None:
        super().__init__("gpumem-watch")
        self._older = older
        self._look_further = look
        self._processes = JobProcesses(folder, first_tick=first_tick)
        self._children: set[int] = set()
        self._owner = os.getpid()

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def unseen(self) -> tuple[Unseen, ...]:
        """Return each process with torch or CUDA, but without a report. Call this after the context."""
        if self._owner != os.getpid():
            return ()
        # If the thread is still stuck in a look, a look here would be stuck as well.
        if not self.is_running:
            # A single look does not distinguish a program from its parent's fork.
            self._look()
            if self._processes.may_report_later():
                time.sleep(_LOOK_SECONDS)
            self._look()
        return self._processes.unseen()

    def run(self) -> None:
        """Look several times a second."""
        pause = _LOOK_SECONDS
        while not self.is_over.wait(pause):
            begin = time.thread_time()
            self._look()
            pause = min(_LONGEST_PAUSE, max(_LOOK_SECONDS, (time.thread_time() - begin) / _MOST_SHARE))

    def _look(self) -> None:
        if not self._processes.is_running() and not _has_children():
            return
        new = set(own_children()).difference(self._older, self._children)
        for pid in new:
            self._processes.begin(pid)
        self._children |= new
        if self._processes.is_running():
            self._processes.look()
            self._look_further(self._processes.pids())


def _has_children() -> bool:
    """Return whether this process has children. This costs less than to list them."""
    if not hasattr(os, "waitid"):
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
