"""Find out whether this process has descendants with torch or CUDA that do not report their memory.

Such a process has another environment, or runs with ``python -I``, ``-E`` or ``-S``. It may end within a test, and then a look
after the test would come too late. So a thread looks several times a second, however the process was started.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from pytest_gpumem.measuring.jobs.processes import JobProcesses, own_children

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from typing_extensions import Self

    from pytest_gpumem.measuring.jobs.processes import Unseen

_LOOK_SECONDS = 0.1
_MOST_SHARE = 0.05
"""The thread looks for at most this share of the time. A look took 5 ms on a machine with 150 processes."""
_MOST_SECONDS = 3.0
"""The longest wait for the thread's end. Linux may block a look into ``/proc`` while a child is stuck in the kernel."""


class ChildWatch:
    """Looks at this process's descendants within a context.

    Args:
        folder: The folder for reports.
        older: The pids of children that do not count.
        look: A function called with the pids of all descendants after each look at them.
    """

    def __init__(
        self, folder: Path, older: Collection[int], look: Callable[[frozenset[int]], None] = lambda _: None
    ) -> None:
        self._older = older
        self._look_further = look
        self._processes = JobProcesses(folder)
        self._children: set[int] = set()
        self._owner = os.getpid()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        _FORKS.begin(self)
        return self

    def __exit__(self, *_: object) -> None:
        _FORKS.end(self)

    def start(self) -> None:
        """Start the thread, unless the earlier one has not ended."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._is_over.clear()
        thread = threading.Thread(target=self._look_again, name="gpumem-watch", daemon=True)
        with suppress(RuntimeError):  # the system starts no further thread; the looks after the context remain
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """Stop the thread. If it waits too long for the system, go on; the thread then ends after its look."""
        if self._thread is None:
            return
        is_first_wait = not self._is_over.is_set()
        self._is_over.set()
        self._thread.join(_MOST_SECONDS if is_first_wait else 0)
        if not self._thread.is_alive():
            self._thread = None

    def unseen(self) -> tuple[Unseen, ...]:
        """Return each process with torch or CUDA, but without a report. Call this after the context."""
        if self._owner != os.getpid():
            return ()
        # A look here would wait for the system as long as the thread does.
        if self._thread is None or not self._thread.is_alive():
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


class _Forks:
    """The watches whose context has begun. Their threads pause while this process forks.

    Python 3.12 and newer warn if a process with several threads forks, and a test may turn the warning into an error. Python
    3.13.0 counts the threads after `after_in_parent`, so there the warning remains. Several threads of a test may fork at the
    same time.
    """

    def __init__(self) -> None:
        # A signal's handler may fork while its thread has the lock.
        self._lock = threading.RLock()
        self._depth = 0
        self._begun: list[ChildWatch] = []

    def begin(self, watch: ChildWatch) -> None:
        """Begin a watch. Its thread starts as soon as no fork is running."""
        with self._lock:
            self._begun.append(watch)
            if not self._depth:
                watch.start()

    def end(self, watch: ChildWatch) -> None:
        """End a watch. In a fork, which has no such thread, nothing happens."""
        with self._lock:
            if watch in self._begun:
                self._begun.remove(watch)
                watch.stop()

    def before(self) -> None:
        """Stop the threads, unless another fork has done so."""
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                for watch in self._begun:
                    watch.stop()

    def after_in_parent(self) -> None:
        """Start the threads, unless another fork is running."""
        with self._lock:
            if not self._depth:
                return  # this object was made while another thread forked
            self._depth -= 1
            if not self._depth:
                for watch in self._begun:
                    watch.start()

    def after_in_child(self) -> None:
        """Forget the watches. Another thread of the parent may have had the lock."""
        self._lock = threading.RLock()
        self._depth = 0
        self._begun = []


_FORKS = _Forks()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_FORKS.before, after_in_parent=_FORKS.after_in_parent, after_in_child=_FORKS.after_in_child
    )
