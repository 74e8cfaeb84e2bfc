"""Lock single bytes of a file with POSIX record locks. The file is in a folder that only this user can access."""

from __future__ import annotations

import errno
import os
import re
import struct
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pytest_gpumem.base.open_folder import private_folder

SECONDS_BETWEEN_TRIES = 0.02
"""Seconds between two attempts to take a lock. More frequent attempts would disturb a process that times its steps."""


class _Layout(NamedTuple):
    """The layout of the C structure ``struct flock`` on an operating system, for `struct.pack`."""

    format: str
    fields: tuple[str, ...]


_FLOCK = {
    "linux": _Layout("hhqqi0q", ("type", "whence", "start", "length", "process")),
    "darwin": _Layout("qqihh0q", ("start", "length", "process", "type", "whence")),
}
_NOTE_BYTES, _NOTES = 256, 1024


def _offset_of_note(process: int) -> int:
    """Return the offset of a process's note in a lock file. All notes come after the locked bytes.

    Two processes may have the same offset. For example, the offset for processes 5 and 1029 is 1536.
    """
    return _NOTE_BYTES * (1 + process % _NOTES)


class LockFile:
    """A file whose bytes a process can lock separately, with POSIX record locks.

    When a process ends or is killed, the system frees its record locks, and forked children do not inherit them. By contrast,
    the children (such as ``DataLoader`` workers) would keep a lock from ``flock``. A process must not open the file a second
    time, because closing one of the two descriptors frees all the process's locks on the file. Raises ``OSError`` if the system
    has no record locks.
    """

    def __init__(self, folder: Path, file_name: str) -> None:
        try:
            import fcntl
        except ImportError:
            raise OSError(errno.ENOSYS, "this system has no POSIX record locks") from None
        self._fcntl = fcntl
        self._path = folder / file_name
        self.descriptor = _open_private(folder, file_name)

    def share(self, byte: int) -> bool:
        """Try to lock a byte together with other processes. Return whether this succeeded, without waiting."""
        return self._lock(self._fcntl.LOCK_SH | self._fcntl.LOCK_NB, byte)

    def take(self, byte: int) -> bool:
        """Try to lock a byte for this process alone. Return whether this succeeded, without waiting."""
        return self._lock(self._fcntl.LOCK_EX | self._fcntl.LOCK_NB, byte)

    def wait_for(self, byte: int) -> None:
        """Lock a byte for this process alone. Wait until all other processes have freed it."""
        self._lock(self._fcntl.LOCK_EX, byte)

    def holder(self, byte: int, *, alone: bool) -> str | None:
        """Return a process whose lock on a byte conflicts with the lock that this process wants.

        Args:
            byte: The byte to lock.
            alone: True if this process wants to lock the byte alone (`take`), false if shared (`share`).

        Returns:
            The process with its `note`, for example ``"process 4711 (tests/test_gpt.py::test_step)"``. ``None`` if no process
            has a conflicting lock. The system reports the process, so notes from dead processes are ignored.
        """
        layout = _FLOCK.get(sys.platform)
        if layout is None:
            return None
        kind = self._fcntl.F_WRLCK if alone else self._fcntl.F_RDLCK
        query = {"type": kind, "whence": os.SEEK_SET, "start": byte, "length": 1, "process": 0}
        packed = struct.pack(layout.format, *(query[name] for name in layout.fields))
        try:
            answer = self._fcntl.fcntl(self.descriptor, self._fcntl.F_GETLK, packed)
            lock_fields = dict(zip(layout.fields, struct.unpack(layout.format, answer), strict=True))
            note_bytes = os.pread(self.descriptor, _NOTE_BYTES, _offset_of_note(lock_fields["process"]))
        except OSError:
            return None
        if lock_fields["type"] == self._fcntl.F_UNLCK or lock_fields["process"] <= 0:
            return None
        process = str(lock_fields["process"])
        note_process, _, note = note_bytes.decode(errors="replace").strip("\0 ").partition(" ")
        return f"process {process} ({note})" if note_process == process and note else f"process {process}"

    def note(self, text: str) -> None:
        """Write a note into the file: the test for which this process holds its locks. Other processes show it to the user."""
        note_bytes = f"{os.getpid()} {text}".encode(errors="backslashreplace")[:_NOTE_BYTES].ljust(_NOTE_BYTES)
        with suppress(OSError):
            os.pwrite(self.descriptor, note_bytes, _offset_of_note(os.getpid()))

    def free(self, byte: int) -> None:
        """Free this process's lock on a byte."""
        self._lock(self._fcntl.LOCK_UN, byte)

    @property
    def is_removed(self) -> bool:
        """True if another process has removed this file. New processes then create and lock a new file with the same name."""
        return os.fstat(self.descriptor).st_nlink == 0

    def remove(self) -> None:
        """Remove the file. Other processes may have opened it already, so they must check `is_removed`."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file, which frees all of this process's locks on it."""
        os.close(self.descriptor)

    def _lock(self, kind: int, byte: int) -> bool:
        try:
            self._fcntl.lockf(self.descriptor, kind, 1, byte)
        except (BlockingIOError, PermissionError):  # if another process holds the lock, POSIX allows EACCES or EAGAIN
            return False
        return True


def file_name_of(name: str, suffix: str) -> str:
    """Return a file name for the device called ``name``. Characters such as slashes are replaced by underscores."""
    return re.sub(r"[^A-Za-z0-9-]", "_", name) + suffix


def folder_of_user() -> Path:
    """Return the folder for this user's lock files and ledgers, inside the system's temporary folder."""
    # The folder is called after the user's number, because a user in a container may have no name.
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return Path(tempfile.gettempdir()) / f"pytest-gpumem-{user}"


def _open_private(folder: Path, file_name: str) -> int:
    """Open a lock file in a folder that only this user can access, and return its descriptor. Create both if necessary.

    Another user may have created a file or folder with this name in the temporary folder. A symbolic link is not followed, and
    another user's folder is not used. In these cases, the function raises ``OSError``.
    """
    with private_folder(folder) as opened:
        # O_NONBLOCK, because opening a named pipe would otherwise wait for another process.
        return opened.open(file_name, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
