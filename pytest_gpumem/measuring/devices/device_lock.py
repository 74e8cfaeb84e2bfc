"""A readers-writer lock on a device. A user's measured tests share the lock, and a timed test holds the lock alone.

A session's workers and separate sessions use the same lock. The system frees a dead process's locks.
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

from pytest_gpumem.measuring.devices.record_locks import SECONDS_BETWEEN_TRIES, LockFile, file_name_of, folder_of_user

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MOST_SECONDS_FOR_EXCLUSIVE = 60.0
MOST_SECONDS_FOR_SHARED = 600.0
"""The longest waits, in seconds. Only a step that hangs or is in a debugger holds a device alone for so long."""
SECONDS_UNTIL_TOLD = 5.0
"""After waiting this many seconds, a process prints the name of the lock's holder."""
MOST_SECONDS_NEXT_TIME = 5.0
"""The longest wait after a timeout, in seconds, because a suite must not wait a minute in each of its tests."""


_WaitReporter = Callable[[str | None], None]


def _tell(sentence: str) -> None:
    sys.stderr.write(f"gpumem: {sentence}\n")


class DeviceLock:
    """The lock on the device called ``name`` (a GPU's UUID, ``"cpu"``), in ``folder`` (default: this user's folder).

    All locks with the same name and folder are the same lock in a process, so a process never waits for itself. There is no
    lock on Windows, or if the folder cannot be used. Nothing fails then, but `exclusive` yields the reason in a pytest-xdist
    worker, because other workers run at the same time.

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
        """Called once with a sentence after waiting `SECONDS_UNTIL_TOLD` for other processes."""

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
        """Hold the lock alone, within a `shared` region. Wait at most `MOST_SECONDS_FOR_EXCLUSIVE`.

        The shared lock is released before the wait and taken again afterwards. Otherwise two processes that both call this
        method would deadlock.

        Yields:
            ``None``, or a clause with the reason why other processes may run.
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
            f"waiting for {self._spoken}, which is held by {name}: timed steps are alone on a device. To avoid it, run one "
            "session after the other, or with --no-gpumem-time"
        )

    def _of_this_process(self) -> _ProcessLock:
        return _process_lock(self._folder, self._file_name, os.getpid())


class _ProcessLock:
    """A process's state of the lock. All `DeviceLock` objects share it, because record locks belong to a process."""

    def __init__(self, folder: Path | None, file_name: str, process: int) -> None:
        self._folder = folder
        self._file_name = file_name
        self._process = process
        self._guard = threading.RLock()
        self._lock: _ReadersWriterLock | None = None
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
            if self._is_free():  # this is a child that was forked within a region
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
        self, lock: _ReadersWriterLock, report_wait: _WaitReporter, *, alone: bool
    ) -> Callable[[], None]:
        """Return a function that reports the lock's holder, only once for each process."""

        def report_holder() -> None:
            if not self._has_reported:
                self._has_reported = True
                report_wait(lock.kept_by(alone=alone))

        return report_holder

    def _begin(self, report_wait: _WaitReporter) -> None:
        self._broken = None
        try:
            self._lock = lock = _ReadersWriterLock(self._folder or folder_of_user(), self._file_name)
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
            # A session usually has a single process. The device's conditions reveal other processes.
            if "PYTEST_XDIST_WORKER" not in os.environ:
                return None
            return f"no lock keeps other measured tests off {spoken} ({self._broken})"
        return f"another measured test kept {spoken} busy for {seconds:.0f} s" if seconds else None

    def _wait_for_exclusive(self, lock: _ReadersWriterLock, report_wait: _WaitReporter) -> float:
        """Exchange the shared lock for the exclusive lock.

        Returns:
            0.0 if this process now holds the lock alone. After a timeout, the seconds of the wait. The lock is then shared.
        """
        began = time.monotonic()
        # Two processes with shared locks would wait for each other forever.
        lock.release()
        try:
            acquired = self._for_exclusive.wait_for(
                lock.acquire_exclusive, self._holder_reporter(lock, report_wait, alone=True)
            )
        except BaseException:  # Ctrl-C while waiting
            lock.acquire_shared()  # this also frees the turnstile, and does not wait
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
        """Return whether this process is a child that was forked within a region. The child has this object, but no lock."""
        return self._process != os.getpid()


_process_lock = functools.cache(_ProcessLock)
"""Return the process's lock. There is only one lock, because closing a second file would free all locks of the process."""


class _Timeout:
    """The longest wait for a lock that another process holds. After a timeout, the next wait is shorter."""

    def __init__(self, most_seconds: float) -> None:
        self._most_seconds = most_seconds
        self._timed_out = False

    def wait_for(self, attempt: Callable[[], bool], report: Callable[[], None]) -> bool:
        """Repeat ``attempt`` until success or the end of the time limit.

        Args:
            attempt: Tries to take the lock. Called at least once.
            report: Called during a wait longer than `SECONDS_UNTIL_TOLD`.

        Returns:
            Whether the attempt succeeded.
        """
        most = min(self._most_seconds, MOST_SECONDS_NEXT_TIME) if self._timed_out else self._most_seconds
        began = time.monotonic()
        while not (done := attempt()) and (waited := time.monotonic() - began) < most:
            if waited >= SECONDS_UNTIL_TOLD:
                report()
            time.sleep(SECONDS_BETWEEN_TRIES)
        self._timed_out = not done
        return done


class _ReadersWriterLock(LockFile):
    """A readers-writer lock built from POSIX record locks on two bytes of a file: the lock itself and a turnstile.

    Every process passes the turnstile before it takes the lock. A writer holds the turnstile while it waits for the readers,
    so later readers cannot starve it. Raises ``OSError`` if the system has no record locks.

    For example, A and B share the lock, and B wants to hold the lock alone. B takes the turnstile, C waits at the turnstile, A
    releases the lock, and B takes the lock. Finally B frees the turnstile.
    """

    _TURNSTILE, _LOCK = 0, 1

    def acquire_shared(self) -> bool:
        """Try to share the lock. Return ``False`` while a writer holds or awaits the lock."""
        if not self.share(self._TURNSTILE):
            return False
        try:
            return self.share(self._LOCK)
        finally:
            self.admit_others()

    def acquire_exclusive(self) -> bool:
        """Try to hold the lock alone. The turnstile may remain held, even after a failure; see `admit_others`."""
        return self.take(self._TURNSTILE) and self.take(self._LOCK)

    def downgrade(self) -> None:
        """Turn the exclusive lock into a shared lock without a gap for another writer."""
        self.share(self._LOCK)

    def kept_by(self, *, alone: bool) -> str | None:
        """Return a clause with the name of the blocking process; ``None`` if no process blocks."""
        return self.holder(self._LOCK, alone=alone) or self.holder(self._TURNSTILE, alone=alone)

    def release(self) -> None:
        self.free(self._LOCK)

    def admit_others(self) -> None:
        """Free the turnstile."""
        self.free(self._TURNSTILE)
