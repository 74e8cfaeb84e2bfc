"""A file of this user whose bytes processes lock: POSIX record locks, in a folder that only this user may enter."""

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

from pytest_gpumem.open_folder import private_folder

SECONDS_BETWEEN_TRIES = 0.02
"""Seconds between polls: seldom enough not to disturb the process that is being timed, on whose cores it runs."""


class _Layout(NamedTuple):
    """``struct flock`` of a system."""

    format: str
    fields: tuple[str, ...]


_FLOCK = {
    "linux": _Layout("hhqqi0q", ("type", "whence", "start", "length", "process")),
    "darwin": _Layout("qqihh0q", ("start", "length", "process", "type", "whence")),
}
_NOTE_BYTES, _NOTES = 256, 1024


def _offset_of_note(process: int) -> int:
    """Return where a process's note stands in a file, beyond the bytes that are locked. Two may share it."""
    return _NOTE_BYTES * (1 + process % _NOTES)


class LockFile:
    """A file whose bytes can be locked, each for itself.

    Record locks are freed when the process ends, however it ends, and a forked child has none of them: unlike those of
    ``flock``, which a child that outlives a killed parent (a worker of a ``DataLoader``) would go on holding. They belong to a
    process: closing another descriptor of the file would free them. Raises ``OSError`` where they cannot be had.
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
        """Try to hold the lock on a byte together with others, without waiting."""
        return self._lock(self._fcntl.LOCK_SH | self._fcntl.LOCK_NB, byte)

    def take(self, byte: int) -> bool:
        """Try to hold the lock on a byte alone, without waiting."""
        return self._lock(self._fcntl.LOCK_EX | self._fcntl.LOCK_NB, byte)

    def wait_for(self, byte: int) -> None:
        """Hold the lock on a byte alone, once nobody else does."""
        self._lock(self._fcntl.LOCK_EX, byte)

    def holder(self, byte: int, *, alone: bool) -> str | None:
        """Return who keeps this process from locking a byte, as a clause with the process and its note; ``None`` if nobody.

        ``alone``: from `take` and not only from `share`. The system names the process, so that the note of one that has died
        is not believed.
        """
        layout = _FLOCK.get(sys.platform)
        if layout is None:
            return None
        kind = self._fcntl.F_WRLCK if alone else self._fcntl.F_RDLCK
        asked = {"type": kind, "whence": os.SEEK_SET, "start": byte, "length": 1, "process": 0}
        packed = struct.pack(layout.format, *(asked[name] for name in layout.fields))
        try:
            answer = self._fcntl.fcntl(self.descriptor, self._fcntl.F_GETLK, packed)
            found = dict(zip(layout.fields, struct.unpack(layout.format, answer), strict=True))
            written = os.pread(self.descriptor, _NOTE_BYTES, _offset_of_note(found["process"]))
        except OSError:
            return None
        if found["type"] == self._fcntl.F_UNLCK or found["process"] <= 0:
            return None
        process = str(found["process"])
        noted, _, note = written.decode(errors="replace").strip("\0 ").partition(" ")
        return f"process {process} ({note})" if noted == process and note else f"process {process}"

    def note(self, text: str) -> None:
        """Note what this process holds locks for; the file is as long as it has to be for that, and sparse."""
        written = f"{os.getpid()} {text}".encode(errors="backslashreplace")[:_NOTE_BYTES].ljust(_NOTE_BYTES)
        with suppress(OSError):
            os.pwrite(self.descriptor, written, _offset_of_note(os.getpid()))

    def free(self, byte: int) -> None:
        """Free the lock on a byte."""
        self._lock(self._fcntl.LOCK_UN, byte)

    @property
    def is_removed(self) -> bool:
        """Return whether it has been removed since it was opened, so that others open another file."""
        return os.fstat(self.descriptor).st_nlink == 0

    def remove(self) -> None:
        """Remove the file. Who has opened it before has to look whether it `is_removed`."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file, which frees all locks."""
        os.close(self.descriptor)

    def _lock(self, kind: int, byte: int) -> bool:
        try:
            self._fcntl.lockf(self.descriptor, kind, 1, byte)
        except (BlockingIOError, PermissionError):  # POSIX allows both for a lock that another process holds
            return False
        return True


def file_name_of(name: str, suffix: str) -> str:
    """Return the name of a file for the device called ``name``; it cannot lead out of its folder."""
    return re.sub(r"[^A-Za-z0-9-]", "_", name) + suffix


def folder_of_user() -> Path:
    """Return the folder for this user's files, in the temporary one."""
    # A user's number and not a name: in a container it may have none.
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return Path(tempfile.gettempdir()) / f"pytest-gpumem-{user}"


def _open_private(folder: Path, file_name: str) -> int:
    """Return the descriptor of a file to lock, in a folder that only this user may enter.

    Another user may have put something of that name into the temporary folder: a symbolic link is not followed,
    and another user's folder not used. Raises ``OSError``.
    """
    with private_folder(folder) as opened:
        # Non-blocking, as opening a named pipe would wait for a reader.
        return opened.open(file_name, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
