"""Two readers-writer locks between processes: from POSIX record locks, and from SQLite databases on systems without them."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from pytest_gpumem.base.open_folder import private_folder
from pytest_gpumem.measuring.devices.record_locks import LockFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class ReadersWriterLock(Protocol):
    """A lock that several processes share, or that a single process holds alone. The system frees it with a dead process.

    Every process takes a second lock, the turnstile, for a moment before it takes the lock itself. A process that wants to
    hold the lock alone keeps the turnstile while it waits. So no new process can share the lock, and the wait ends when the
    current sharers have released the lock. Methods raise ``OSError`` if the system cannot lock.

    For example, processes A and B share the lock, and B wants to hold it alone. B releases the lock and takes the turnstile. A
    new process C waits for the turnstile. When A releases the lock, B takes the lock and frees the turnstile.
    """

    def acquire_shared(self) -> bool:
        """Try to share the lock. Return ``False`` if another process holds the lock alone, or waits to hold it alone."""
        ...

    def acquire_exclusive(self) -> bool:
        """Try to hold the lock alone. Even after a failed try, this process may hold the turnstile.

        So call `admit_others` after the last try, whether or not it succeeded.
        """
        ...

    def downgrade(self) -> None:
        """Share the lock that this process holds alone. No other process can take the lock alone in between."""
        ...

    def release(self) -> None:
        """Free the lock, but not the turnstile."""
        ...

    def admit_others(self) -> None:
        """Free the turnstile, so other processes can try to take the lock."""
        ...

    def kept_by(self, *, alone: bool) -> str | None:
        """Return the process for which this process must wait, such as ``"process 4711"``; ``None`` if it is unknown.

        ``alone`` is whether this process wants to hold the lock alone.
        """
        ...

    def note(self, text: str) -> None:
        """Note the test for which this process holds the lock. Other processes show the note to the user."""
        ...

    def close(self) -> None:
        """Free the lock and the turnstile. The object cannot be used afterwards."""
        ...


class RecordReadersWriterLock(LockFile):
    """A readers-writer lock from POSIX record locks on two bytes of a file: one is the lock, the other the turnstile."""

    _TURNSTILE, _LOCK = 0, 1

    def acquire_shared(self) -> bool:
        if not self.share(self._TURNSTILE):
            return False
        try:
            return self.share(self._LOCK)
        finally:
            self.admit_others()

    def acquire_exclusive(self) -> bool:
        return self.take(self._TURNSTILE) and self.take(self._LOCK)

    def downgrade(self) -> None:
        self.share(self._LOCK)

    def kept_by(self, *, alone: bool) -> str | None:
        return self.holder(self._LOCK, alone=alone) or self.holder(self._TURNSTILE, alone=alone)

    def release(self) -> None:
        self.free(self._LOCK)

    def admit_others(self) -> None:
        self.free(self._TURNSTILE)


class SqliteReadersWriterLock:
    """A readers-writer lock from filelock's ``ReadWriteLock``, for Windows. It does not name the process that others wait for.

    The lock and the turnstile are two empty databases, because SQLite can lock a database file on every system.
    """

    def __init__(self, folder: Path, file_name: str) -> None:
        import filelock

        if filelock.ReadWriteLock is None:  # this Python was built without SQLite
            raise OSError(errno.ENOSYS, "this system has neither POSIX record locks nor SQLite")
        with private_folder(folder), _as_os_errors():
            self._lock = filelock.ReadWriteLock(folder / f"{file_name}.db", is_singleton=False)
            self._turnstile = filelock.ReadWriteLock(folder / f"{file_name}.turnstile.db", is_singleton=False)

    def acquire_shared(self) -> bool:
        if not _is_free(self._turnstile.acquire_write):
            return False
        try:
            # SQLite cannot turn a lock held alone into a shared lock. While this process keeps the turnstile, no other
            # process can take the freed lock alone.
            self.release()
            return _is_free(self._lock.acquire_read)
        finally:
            self.admit_others()

    def acquire_exclusive(self) -> bool:
        return _is_free(self._turnstile.acquire_write) and _is_free(self._lock.acquire_write)

    def downgrade(self) -> None:
        # If another process waits at the turnstile to hold the lock alone, this process stays alone. The other process
        # would have to wait for a shared lock as well.
        self.acquire_shared()

    def release(self) -> None:
        with _as_os_errors():
            self._lock.release(force=True)

    def admit_others(self) -> None:
        with _as_os_errors():
            self._turnstile.release(force=True)

    def kept_by(self, *, alone: bool) -> str | None:
        return None

    def note(self, text: str) -> None:
        """Do nothing, because no process can learn which process holds the lock."""

    def close(self) -> None:
        with _as_os_errors():
            self._lock.close()
            self._turnstile.close()


def open_readers_writer_lock(folder: Path, file_name: str) -> ReadersWriterLock:
    """Open the lock ``file_name`` in a folder that only this user can access. Raises ``OSError`` if the system cannot lock.

    Record locks come first, because they name the process that others wait for, and a child that was forked while its parent
    held the lock can take it (`docs/architecture.md`).
    """
    try:
        import fcntl  # noqa: F401
    except ImportError:
        return SqliteReadersWriterLock(folder, file_name)
    return RecordReadersWriterLock(folder, file_name)


def _is_free(acquire: Callable[..., object]) -> bool:
    """Try to acquire a lock of filelock without waiting. Return whether this succeeded."""
    from filelock import Timeout

    with _as_os_errors():
        try:
            acquire(blocking=False)
        except Timeout:
            return False
    return True


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise SQLite's and filelock's errors as ``OSError``."""
    import sqlite3

    try:
        yield
    except (sqlite3.Error, RuntimeError, ValueError) as error:
        raise OSError(errno.ENOLCK, str(error)) from error
