"""A readers-writer lock on a device: measured tests of one user share it, and the one that is being timed holds it alone.

Between processes: workers of one session, and sessions. The system holds the locks and frees those of a dead process.
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

from pytest_gpumem.devices.record_locks import SECONDS_BETWEEN_TRIES, LockFile, file_name_of, folder_of_user

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MOST_SECONDS_FOR_EXCLUSIVE = 60.0
MOST_SECONDS_FOR_SHARED = 600.0
"""No process holds a device alone for as long, unless its step hangs or is in a debugger."""
SECONDS_UNTIL_TOLD = 5.0
"""Seconds after which the holder that this process waits for is named."""
MOST_SECONDS_NEXT_TIME = 5.0
"""The longest wait after one that timed out, in seconds: a suite must not wait a minute in each of its tests."""


_Waits = Callable[[str | None], None]


def _tell(sentence: str) -> None:
    sys.stderr.write(f"gpumem: {sentence}\n")


class DeviceLock:
    """The lock on the device called ``name`` (a GPU's UUID, ``"cpu"``), in ``folder`` (default: this user's).

    All locks of one name and folder are the same to a process: it never waits for itself. Where the folder cannot be used,
    and on Windows, there is no lock: nothing fails, and in a worker of pytest-xdist, beside which others run, `exclusive`
    yields the reason.
    """

    def __init__(self, name: str, *, spoken: str = "the GPU", folder: Path | None = None) -> None:
        self._file_name = file_name_of(name, ".lock")
        self._spoken = spoken
        self._folder = folder
        self.tell: Callable[[str], object] = _tell
        """Called once with a sentence where others are waited for, after `SECONDS_UNTIL_TOLD`."""

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock together with others."""
        lock = self._of_this_process()
        lock.acquire_shared(self._waits)
        try:
            yield
        finally:
            lock.release_shared()

    @contextmanager
    def exclusive(self) -> Iterator[str | None]:
        """Hold the lock alone, within a `shared` region.

        Waits at most `MOST_SECONDS_FOR_EXCLUSIVE`. Yields ``None``, or a clause that says why others are not kept off. The
        shared lock is released meanwhile, so that two processes that both want this do not deadlock, and is held again
        afterwards.
        """
        lock = self._of_this_process()
        refused = lock.acquire_exclusive(self._spoken, self._waits)
        try:
            yield refused
        finally:
            lock.release_exclusive()

    def _waits(self, holder: str | None) -> None:
        who = "another process" if holder is None else holder
        self.tell(
            f"waiting for {self._spoken}, which is held by {who}: timed steps are alone on a device. To avoid it, run one "
            "session after the other, or with --no-gpumem-time"
        )

    def _of_this_process(self) -> _ProcessLock:
        return _process_lock(self._folder, self._file_name, os.getpid())


class _ProcessLock:
    """The lock as this process holds it: the system's record locks belong to a process, not to an object."""

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
        self._told = False
        self._for_shared = _Timeout(MOST_SECONDS_FOR_SHARED)
        self._for_exclusive = _Timeout(MOST_SECONDS_FOR_EXCLUSIVE)

    def acquire_shared(self, waits: _Waits) -> None:
        with self._guard:
            if self._is_free():
                self._begin(waits)
            self._shared_holders += 1

    def release_shared(self) -> None:
        if self._forked():
            return
        with self._guard:
            self._shared_holders -= 1
            self._close_if_free()

    def acquire_exclusive(self, spoken: str, waits: _Waits) -> str | None:
        with self._guard:
            if self._is_free():  # in a child that was forked within a region
                self._begin(waits)
            if self._exclusive_holders == 0:
                self._refused = self._why_not_exclusive(spoken, waits)
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

    def _teller(self, lock: _ReadersWriterLock, waits: _Waits, *, alone: bool) -> Callable[[], None]:
        """Return what tells once, of all waits of this process, for whom it waits."""

        def tell() -> None:
            if not self._told:
                self._told = True
                waits(lock.kept_by(alone=alone))

        return tell

    def _begin(self, waits: _Waits) -> None:
        self._broken = None
        try:
            self._lock = lock = _ReadersWriterLock(self._folder or folder_of_user(), self._file_name)
            self._for_shared.wait_for(lock.acquire_shared, self._teller(lock, waits, alone=False))
            lock.note(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0])
        except OSError as error:
            self._give_up(error)
        except BaseException:  # Ctrl-C while waiting
            self._close()
            raise

    def _why_not_exclusive(self, spoken: str, waits: _Waits) -> str | None:
        seconds = 0.0
        try:
            if self._lock is not None:
                seconds = self._wait_for_exclusive(self._lock, waits)
        except OSError as error:
            self._give_up(error)
        if self._broken is not None:
            # One process is the rule; the device's conditions show others.
            if "PYTEST_XDIST_WORKER" not in os.environ:
                return None
            return f"no lock keeps other measured tests off {spoken} ({self._broken})"
        return f"another measured test kept {spoken} busy for {seconds:.0f} s" if seconds else None

    def _wait_for_exclusive(self, lock: _ReadersWriterLock, waits: _Waits) -> float:
        """Exchange the shared lock for the exclusive one.

        Returns:
            0.0, or after a timeout the seconds that were waited in vain; then the lock is shared again.
        """
        began = time.monotonic()
        # Two processes that kept their shared locks would wait for one another for ever.
        lock.release()
        try:
            acquired = self._for_exclusive.wait_for(lock.acquire_exclusive, self._teller(lock, waits, alone=True))
        except BaseException:  # Ctrl-C while waiting
            lock.acquire_shared()  # which admits others, too, and does not wait
            raise
        lock.admit_others()
        seconds = time.monotonic() - began
        if not acquired:
            self._for_shared.wait_for(lock.acquire_shared, self._teller(lock, waits, alone=False))
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
        """Return whether this is a child that was forked within a region: it has inherited this object, and no lock."""
        return self._process != os.getpid()


_process_lock = functools.cache(_ProcessLock)
"""Returns the lock of one process: were there two objects, closing the file of one would free what the other holds."""


class _Timeout:
    """Deadline of waiting for a lock that others hold."""

    def __init__(self, most_seconds: float) -> None:
        self._most_seconds = most_seconds
        self._timed_out = False

    def wait_for(self, attempt: Callable[[], bool], long: Callable[[], None]) -> bool:
        """Return whether ``attempt`` succeeded in time. It is made at least once; ``long`` is called while it takes long."""
        most = min(self._most_seconds, MOST_SECONDS_NEXT_TIME) if self._timed_out else self._most_seconds
        began = time.monotonic()
        while not (done := attempt()) and (waited := time.monotonic() - began) < most:
            if waited >= SECONDS_UNTIL_TOLD:
                long()
            time.sleep(SECONDS_BETWEEN_TRIES)
        self._timed_out = not done
        return done


class _ReadersWriterLock(LockFile):
    """Readers-writer lock of POSIX record locks on two bytes of a file: the lock itself, and a turnstile before it.

    Every process passes the turnstile. A writer holds it while it waits for the readers, so that readers that come later
    cannot starve it.
    Raises ``OSError`` where record locks cannot be had.
    """

    _TURNSTILE, _LOCK = 0, 1

    def acquire_shared(self) -> bool:
        """Try to hold the lock together with others; fails while a writer holds it or waits for it."""
        if not self.share(self._TURNSTILE):
            return False
        try:
            return self.share(self._LOCK)
        finally:
            self.admit_others()

    def acquire_exclusive(self) -> bool:
        """Try to hold the lock alone. In any case the turnstile may stay held: see `admit_others`."""
        return self.take(self._TURNSTILE) and self.take(self._LOCK)

    def downgrade(self) -> None:
        """Turn the exclusive lock into a shared one without a gap in which another writer could come."""
        self.share(self._LOCK)

    def kept_by(self, *, alone: bool) -> str | None:
        """Return who keeps this process from the lock, as a clause."""
        return self.holder(self._LOCK, alone=alone) or self.holder(self._TURNSTILE, alone=alone)

    def release(self) -> None:
        self.free(self._LOCK)

    def admit_others(self) -> None:
        """Free the turnstile."""
        self.free(self._TURNSTILE)
