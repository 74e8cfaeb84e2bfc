"""A readers-writer lock on a device. A user's measured tests share the lock, and a test holds it alone during timing.

All workers and all sessions of a user use the same lock. When a process dies, the system frees its lock.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from pytest_gpumem.measuring.devices.readers_writer_locks import open_readers_writer_lock
from pytest_gpumem.measuring.devices.record_locks import SECONDS_BETWEEN_TRIES, file_name_of, folder_of_user

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pytest_gpumem.measuring.devices.readers_writer_locks import ReadersWriterLock

MOST_SECONDS_FOR_EXCLUSIVE = 60.0
MOST_SECONDS_FOR_SHARED = 600.0
"""The longest waits for the lock alone and for the shared lock, in seconds.

A process that holds the lock for longer probably hangs or is in a debugger.
"""
SECONDS_UNTIL_TOLD = 5.0
"""After waiting this many seconds, a process prints which process holds the lock."""
MOST_SECONDS_NEXT_TIME = 5.0
"""The longest wait in seconds after a wait that timed out. Without this limit, each test in a suite might wait a minute."""


_WaitReporter = Callable[[str | None], None]


def _tell(sentence: str) -> None:
    sys.stderr.write(f"gpumem: {sentence}\n")


class DeviceLock:
    """The lock on the device called ``name`` (a GPU's UUID, or ``"cpu"``).

    The lock is a file in ``folder``, by default in this user's folder. A process never waits for itself, even if it has
    several objects for the same lock. If the folder cannot be used, there is no lock, and no call fails. In this case,
    `exclusive` yields a reason in a pytest-xdist worker, because other workers may run tests at the same time.

    Example:
        >>> with lock.shared():  # other measured tests run
        ...     warm_up()
        ...     with lock.exclusive() as refused:  # other measured tests wait
        ...         time_the_step()
    """

    def __init__(self, name: str, *, spoken: str = "the GPU", folder: Path | None = None) -> None:
        self._file_name = file_name_of(name, ".lock")
        self._spoken = spoken
        self._folder = folder
        self.tell: Callable[[str], object] = _tell
        """Prints a sentence about a wait. Called at most once in a process, after waiting `SECONDS_UNTIL_TOLD`."""

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock together with other processes."""
        lock = self._of_this_process()
        lock.acquire_shared(self._report_wait)
        try:
            yield
        finally:
            lock.release_shared()

    @contextmanager
    def exclusive(self) -> Iterator[str | None]:
        """Hold the lock alone for a while, within a `shared` context. At the end, the lock is shared again.

        This method waits for other processes, at most `MOST_SECONDS_FOR_EXCLUSIVE`. During the wait, this process does not
        share the lock. If two waiting processes both kept their shared locks, they would wait for each other forever. After a
        timeout, the lock is shared again, and the yielded reason names the wait.

        Yields:
            ``None``, or the reason why other processes may use the device at the same time.
        """
        lock = self._of_this_process()
        refused = lock.acquire_exclusive(self._spoken, self._report_wait)
        try:
            yield refused
        finally:
            lock.release_exclusive()

    def _report_wait(self, holder: str | None) -> None:
        name = "another process" if holder is None else holder
        self.tell(
            f"waiting for {self._spoken}, which is held by {name}: timed steps are alone on a device. To avoid the wait, run "
            "one session after the other, or with --no-gpumem-time"
        )

    def _of_this_process(self) -> _ProcessLock:
        return _process_lock(self._folder, self._file_name, os.getpid())


class _ProcessLock:
    """The state of a lock in this process. All `DeviceLock` objects share it, because locks belong to a process."""

    def __init__(self, folder: Path | None, file_name: str, process: int) -> None:
        self._folder = folder
        self._file_name = file_name
        self._process = process
        self._guard = threading.RLock()
        self._lock: ReadersWriterLock | None = None
        self._broken: OSError | None = None
        self._refused: str | None = None
        self._shared_holders = 0
        self._exclusive_holders = 0
        self._has_reported = False
        self._for_shared = _Timeout(MOST_SECONDS_FOR_SHARED)
        self._for_exclusive = _Timeout(MOST_SECONDS_FOR_EXCLUSIVE)

    def acquire_shared(self, report_wait: _WaitReporter) -> None:
        with self._guard:
            if self._is_free():
                self._begin(report_wait)
            self._shared_holders += 1

    def release_shared(self) -> None:
        if self._forked():
            return
        with self._guard:
            self._shared_holders -= 1
            self._close_if_free()

    def acquire_exclusive(self, spoken: str, report_wait: _WaitReporter) -> str | None:
        with self._guard:
            if self._is_free():  # this process was forked within a `shared` context, so it does not hold the lock yet
                self._begin(report_wait)
            if self._exclusive_holders == 0:
                self._refused = self._why_not_exclusive(spoken, report_wait)
            self._exclusive_holders += 1
            return self._refused

    def release_exclusive(self) -> None:
        if self._forked():
            return
        with self._guard:
            self._exclusive_holders -= 1
            if self._exclusive_holders == 0 and self._lock is not None:
                with suppress(OSError):
                    self._lock.downgrade()
            self._close_if_free()

    def _holder_reporter(
        self, lock: ReadersWriterLock, report_wait: _WaitReporter, *, alone: bool
    ) -> Callable[[], None]:
        """Return a function that reports which process holds the lock, at most once in this process."""

        def report_holder() -> None:
            if not self._has_reported:
                self._has_reported = True
                report_wait(lock.kept_by(alone=alone))

        return report_holder

    def _begin(self, report_wait: _WaitReporter) -> None:
        self._broken = None
        try:
            self._lock = lock = open_readers_writer_lock(self._folder or folder_of_user(), self._file_name)
            self._for_shared.wait_for(lock.acquire_shared, self._holder_reporter(lock, report_wait, alone=False))
            lock.note(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0])
        except OSError as error:
            self._give_up(error)
        except BaseException:  # Ctrl-C while waiting
            self._close()
            raise

    def _why_not_exclusive(self, spoken: str, report_wait: _WaitReporter) -> str | None:
        seconds = 0.0
        try:
            if self._lock is not None:
                seconds = self._wait_for_exclusive(self._lock, report_wait)
        except OSError as error:
            self._give_up(error)
        if self._broken is not None:
            # Without pytest-xdist, other processes are rare, and `Device.conditions` reveals them.
            if "PYTEST_XDIST_WORKER" not in os.environ:
                return None
            return f"no lock keeps other measured tests off {spoken} ({self._broken})"
        return f"another measured test kept {spoken} busy for {seconds:.0f} s" if seconds else None

    def _wait_for_exclusive(self, lock: ReadersWriterLock, report_wait: _WaitReporter) -> float:
        """Release the shared lock, and wait until this process holds the lock alone.

        Returns:
            0.0 if this process holds the lock alone. After a timeout, the seconds of the wait; the lock is shared again.
        """
        began = time.monotonic()
        # If two processes kept their shared locks here, they would wait for each other forever.
        lock.release()
        try:
            acquired = self._for_exclusive.wait_for(
                lock.acquire_exclusive, self._holder_reporter(lock, report_wait, alone=True)
            )
        except BaseException:  # Ctrl-C while waiting
            lock.acquire_shared()  # this also frees the turnstile, and returns at once
            raise
        lock.admit_others()
        seconds = time.monotonic() - began
        if not acquired:
            self._for_shared.wait_for(lock.acquire_shared, self._holder_reporter(lock, report_wait, alone=False))
        return 0.0 if acquired else seconds

    def _give_up(self, error: OSError) -> None:
        self._broken = error
        self._close()

    def _is_free(self) -> bool:
        return self._shared_holders == 0 and self._exclusive_holders == 0

    def _close_if_free(self) -> None:
        if self._is_free():
            self._close()

    def _close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _forked(self) -> bool:
        """Return whether this process was forked while its parent held the lock. A fork copies this object, not the lock."""
        return self._process != os.getpid()


_process_lock = functools.cache(_ProcessLock)
"""Return the process's only `_ProcessLock` for a file. Closing a second descriptor would free all its locks on the file."""


class _Timeout:
    """Limits the waits for a lock to ``most_seconds``. If a wait has timed out, the next wait has a shorter limit."""

    def __init__(self, most_seconds: float) -> None:
        self._most_seconds = most_seconds
        self._timed_out = False

    def wait_for(self, attempt: Callable[[], bool], report: Callable[[], None]) -> bool:
        """Call ``attempt`` repeatedly until it returns true or the time is over.

        Args:
            attempt: Tries to take the lock, and returns whether it succeeded. Called at least once.
            report: Called after each failed attempt if the wait is longer than `SECONDS_UNTIL_TOLD`.

        Returns:
            Whether an attempt succeeded.
        """
        most = min(self._most_seconds, MOST_SECONDS_NEXT_TIME) if self._timed_out else self._most_seconds
        began = time.monotonic()
        while not (done := attempt()) and (waited := time.monotonic() - began) < most:
            if waited >= SECONDS_UNTIL_TOLD:
                report()
            time.sleep(SECONDS_BETWEEN_TRIES)
        self._timed_out = not done
        return done
