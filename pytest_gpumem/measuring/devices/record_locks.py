"""A file whose bytes processes lock with POSIX record locks, in a folder with access for this user only."""

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
"""Seconds between polls. Polling uses the same cores as the timed process, so the interval must not be short."""


class _Layout(NamedTuple):
    """The layout of ``struct flock`` on a system."""

    format: str
    fields: tuple[str, ...]


_FLOCK = {
    "linux": _Layout("hhqqi0q", ("type", "whence", "start", "length", "process")),
    "darwin": _Layout("qqihh0q", ("start", "length", "process", "type", "whence")),
}
_NOTE_BYTES, _NOTES = 256, 1024


def _offset_of_note(process: int) -> int:
    """Return the offset of a process's note in a file, after the lockable bytes. Two processes may share an offset.

    For example, processes 5 and 1029 share the offset 1536.
    """
    return _NOTE_BYTES * (1 + process % _NOTES)


class LockFile:
    """A file whose bytes can be locked separately.

    The system frees record locks when their process ends, even a killed one. A forked child does not inherit locks. By
    contrast, a child that outlives a killed parent (a ``DataLoader`` worker) would keep ``flock`` locks. Record locks
    belong to a process, so closing another descriptor of the file frees them. Raises ``OSError`` if the system has no record
    locks.
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
        """Try to share the lock on a byte with other processes, without waiting."""
        return self._lock(self._fcntl.LOCK_SH | self._fcntl.LOCK_NB, byte)

    def take(self, byte: int) -> bool:
        """Try to hold the lock on a byte alone, without waiting."""
        return self._lock(self._fcntl.LOCK_EX | self._fcntl.LOCK_NB, byte)

    def wait_for(self, byte: int) -> None:
        """Take the lock on a byte alone, after waiting for all other holders."""
        self._lock(self._fcntl.LOCK_EX, byte)

    def holder(self, byte: int, *, alone: bool) -> str | None:
        """Return the process whose lock on a byte blocks this process; ``None`` if there is none.

        The system identifies the process, so the note of a dead process is ignored.

        Args:
            byte: The byte to lock.
            alone: Whether this process wants the lock alone (`take`) or shared (`share`).

        Returns:
            A clause such as ``"process 4711 (tests/test_gpt.py::test_step)"``.
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
        """Write why this process holds locks. The file grows to the offset of the note, and is sparse."""
        note_bytes = f"{os.getpid()} {text}".encode(errors="backslashreplace")[:_NOTE_BYTES].ljust(_NOTE_BYTES)
        with suppress(OSError):
            os.pwrite(self.descriptor, note_bytes, _offset_of_note(os.getpid()))

    def free(self, byte: int) -> None:
        """Free the lock on a byte."""
        self._lock(self._fcntl.LOCK_UN, byte)

    @property
    def is_removed(self) -> bool:
        """True if the open file was removed. Other processes then open a new file."""
        return os.fstat(self.descriptor).st_nlink == 0

    def remove(self) -> None:
        """Remove the file. Other processes have to check `is_removed`."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file, which frees all locks."""
        os.close(self.descriptor)

    def _lock(self, kind: int, byte: int) -> bool:
        try:
            self._fcntl.lockf(self.descriptor, kind, 1, byte)
        except (BlockingIOError, PermissionError):  # POSIX allows both errors if another process holds the lock
            return False
        return True


def file_name_of(name: str, suffix: str) -> str:
    """Return a file name for the device called ``name``. The name contains no separator, so the file is in its folder."""
    return re.sub(r"[^A-Za-z0-9-]", "_", name) + suffix


def folder_of_user() -> Path:
    """Return the folder for this user's files, inside the temporary folder."""
    # A user may have no name in a container, so the folder has the number.
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return Path(tempfile.gettempdir()) / f"pytest-gpumem-{user}"


def _open_private(folder: Path, file_name: str) -> int:
    """Return a descriptor for a file to lock, in a folder with access for this user only.

    Another user may have created a file or folder with this name in the temporary folder. A symbolic link is not followed, and
    another user's folder is not used. Raises ``OSError``.
    """
    with private_folder(folder) as opened:
        # Non-blocking, because opening a named pipe would wait for a reader.
        return opened.open(file_name, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
