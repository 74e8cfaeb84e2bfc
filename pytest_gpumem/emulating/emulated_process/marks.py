"""Small files beside the reports: a process says there that its report will come, or why none will.

Each process with torch loads this module, so only small modules are imported here.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

SEEN = ".seen"
"""Suffix for a file beside the usages. A reporting process with the pid 4711 writes its command into ``4711.seen``,
followed by the start of its stack."""

UNCOUNTED = ".uncounted"
"""Suffix for a file beside the usages. A process that cannot count its memory on the CPU writes its command and the reason."""


def is_own(folder: Path) -> bool:
    """Return whether a folder exists and belongs to this user. After the session's end, somebody may make another."""
    try:
        return _is_own(folder.lstat())
    except OSError:
        return False


def _is_own(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and (not hasattr(os, "getuid") or status.st_uid == os.getuid())


@contextmanager
def opened_if_own(folder: Path) -> Iterator[int]:
    """Open a folder of this user, for calls with ``dir_fd``. Another folder with this name then changes nothing.

    Raises:
        OSError: The folder does not exist, is a link or belongs to another user, or this system has no ``dir_fd``.
    """
    if os.open not in os.supports_dir_fd:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not _is_own(os.fstat(descriptor)):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(folder))
        yield descriptor
    finally:
        os.close(descriptor)


def _write_mark(folder: Path, suffix: str, content: bytes) -> None:
    """Write this process's file with the suffix into a folder of this user, and follow no link.

    Raises:
        OSError: The file cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with opened_if_own(folder) as directory:
        descriptor = os.open(f"{os.getpid()}{suffix}", flags, mode=0o600, dir_fd=directory)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)


def mark_as_reporting(folder: Path) -> None:
    """Write the command of this process, and of each fork, into a file in the folder. So the job expects a report."""

    def mark() -> None:
        # The job may have ended, and its folder is removed then. Other systems than Linux have no ``/proc``, and there nobody
        # looks for this file.
        with suppress(OSError):
            own = Path("/proc/self")
            mark = (own / "cmdline").read_bytes() + b"\n" + stack_start((own / "stat").read_bytes())
            _write_mark(folder, SEEN, mark)

    mark()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=mark)


def unmark_as_reporting(folder: Path) -> None:
    """Remove the file from `mark_as_reporting`, because this process cannot report."""
    with suppress(OSError), opened_if_own(folder) as directory:
        os.unlink(f"{os.getpid()}{SEEN}", dir_fd=directory)


def mark_as_uncounted(folder: Path, reason: str) -> None:
    """Write the reason why this process cannot count its memory on the CPU into a file in the folder."""
    with suppress(OSError):
        from pytest_gpumem.base.shown_command import shown_command

        text = f"{shown_command(sys.orig_argv)}\n{reason}"
        _write_mark(folder, UNCOUNTED, text.encode(errors="backslashreplace"))


def uncounted_in(path: Path) -> tuple[str, str]:
    """Return the command of a process that cannot count its memory, and the reason, from its file (`UNCOUNTED`)."""
    command, _, reason = path.read_text(encoding="utf-8").partition("\n")
    return command, reason


def mark_in(content: bytes) -> tuple[bytes, bytes]:
    """Return the command and the start of the stack from a file with the suffix `SEEN`."""
    command, newline, stack = content.rpartition(b"\n")
    return (command, stack) if newline else (content, b"")


def stack_start(stat: bytes) -> bytes:
    """Return the address of a program's stack from ``/proc/<pid>/stat``.

    If Linux does not tell the address, this is ``b"0"`` or empty. The address changes if the process runs another program by
    ``exec``. It stays if the program changes its own command, as vLLM's processes do (``VLLM::EngineCore``).
    """
    fields = stat.rpartition(b")")[2].split()
    return fields[25] if len(fields) > 25 else b""


def bytes_of(path: Path) -> bytes:
    """Return a file's content; nothing if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def text_of(command: bytes) -> str:
    """Return a command from ``/proc/<pid>/cmdline`` for a message."""
    from pytest_gpumem.base.shown_command import shown_command

    return shown_command(words_of(command))


def words_of(command: bytes) -> list[str]:
    """Return the words of a command from ``/proc/<pid>/cmdline``."""
    return [word.decode(errors="replace") for word in command.split(b"\0") if word]
