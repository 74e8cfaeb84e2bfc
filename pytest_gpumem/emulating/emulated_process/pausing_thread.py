"""A thread that pauses while its process forks.

Python 3.12 and newer warn if a process with several threads forks, and a program may turn the warning into an error. Python
3.13.0 counts the threads after `after_in_parent`, so there the warning remains.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

MOST_SECONDS = 3.0
"""The longest wait for the thread's end. Linux may block a look into ``/proc`` while a child is stuck in the kernel."""


class PausingThread:
    """A daemon thread that calls `run` again after each fork. `begin` starts the thread, and `end` ends it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # a signal's handler may fork while its thread has the lock
        self._is_over = threading.Event()
        self._is_wanted = False
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Do the thread's work. Return soon after `is_over` is set."""
        raise NotImplementedError

    def wake(self) -> None:
        """End a wait in `run` that does not wait for `is_over`."""

    @property
    def is_running(self) -> bool:
        """True if the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_over(self) -> threading.Event:
        """Set if `run` has to return."""
        return self._is_over

    def begin(self) -> None:
        """Start the thread as soon as no fork is running."""
        _FORKS.begin(self)

    def end(self) -> None:
        """Stop the thread. In a fork, which has no such thread, nothing happens."""
        _FORKS.end(self)

    def start(self) -> None:
        """Start the thread. If the earlier thread is late to stop, it goes on."""
        with self._lock:
            self._is_wanted = True
            if self.is_running:
                return
            self._is_over.clear()
            thread = threading.Thread(target=self._run_while_wanted, name=self._name, daemon=True)
            # The system starts no further thread, or the interpreter is ending.
            with suppress(RuntimeError):
                thread.start()
                self._thread = thread

    def stop(self) -> None:
        """Stop the thread. If it is late, only the first call waits for it."""
        with self._lock:
            self._is_wanted = False
            thread = self._thread
            is_first_wait = not self._is_over.is_set()
            self._is_over.set()
        # The thread itself forks if it collects an object whose `__del__` forks. It cannot wait for its own end.
        if thread is not None and thread is not threading.current_thread():
            self.wake()
            thread.join(MOST_SECONDS if is_first_wait else 0)

    def _run_while_wanted(self) -> None:
        while True:
            self.run()
            with self._lock:
                if not self._is_wanted:
                    self._thread = None
                    return
                self._is_over.clear()


class _Forks:
    """The threads that have begun. They pause while this process forks, also if several threads fork at the same time."""

    def __init__(self) -> None:
        # A signal's handler may fork while its thread has the lock.
        self._lock = threading.RLock()
        self._depth = 0
        self._begun: list[PausingThread] = []

    def begin(self, thread: PausingThread) -> None:
        """Begin a thread. It starts as soon as no fork is running."""
        with self._lock:
            self._begun.append(thread)
            if not self._depth:
                thread.start()

    def end(self, thread: PausingThread) -> None:
        """End a thread. In a fork, which has no such thread, nothing happens."""
        with self._lock:
            if thread in self._begun:
                self._begun.remove(thread)
                thread.stop()

    def before(self) -> None:
        """Stop the threads, unless another fork has done so."""
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                for thread in self._begun:
                    thread.stop()

    def after_in_parent(self) -> None:
        """Start the threads, unless another fork is running."""
        with self._lock:
            if not self._depth:
                return  # this object was made while another thread forked
            self._depth -= 1
            if not self._depth:
                for thread in self._begun:
                    thread.start()

    def after_in_child(self) -> None:
        """Forget the threads. Another thread of the parent may have had the lock."""
        self._lock = threading.RLock()
        self._depth = 0
        self._begun = []


_FORKS = _Forks()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_FORKS.before, after_in_parent=_FORKS.after_in_parent, after_in_child=_FORKS.after_in_child
    )
