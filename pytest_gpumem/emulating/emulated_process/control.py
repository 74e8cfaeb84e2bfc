"""Requests for a running process's memory figures, through a socket in a folder that only this user can open.

The test's process listens, and other processes connect when they first use CUDA or allocate on the CPU. To begin a window, the
test sends the window's number in a line. A process answers with this number and its usage since the last request, also in a
line (`answer_line`). If the process at one end dies, the other end sees it at once.

Example: a test's call begins with the request 6 and ends with the request 7. The answer to 7 has the figures of the call.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from pytest_gpumem.emulating.emulated_process.marks import is_own
from pytest_gpumem.emulating.emulated_process.usage import InvalidReport, usage_from, usage_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pytest_gpumem.emulating.emulated_process.usage import ProcessUsage

_NAME = "control"
_NUMBER = re.compile(rb"[0-9]{1,18}")
_MOST_WAITING = 4096
"""The number of processes that can connect before the test's process accepts them. The system may have a lower limit."""


def request_line(window: int) -> bytes:
    """Return the request to begin a window as a line."""
    return f"{window}\n".encode()


def answer_line(window: int, usage: ProcessUsage) -> bytes:
    """Return the answer to the request to begin a window: the usage in the window before."""
    return f"{window} {usage_text(usage)}\n".encode()


def answer_from(line: bytes) -> tuple[int, ProcessUsage]:
    """Return the number and the usage in a line from `answer_line`.

    Raises:
        InvalidReport: The line is not an answer from this release.
    """
    number, _, text = line.partition(b" ")
    usage = usage_from(text)
    if not _NUMBER.fullmatch(number):
        raise InvalidReport("sent an answer without a number")
    return int(number), usage


def listen(folder: Path) -> socket.socket | None:
    """Return a socket to which processes connect. ``None`` if the system or the folder's file system has no such sockets."""
    if not hasattr(socket, "AF_UNIX"):
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short_path(folder) as path:
            listener.bind(path)
        listener.listen(_MOST_WAITING)
    except OSError:  # some file systems have no sockets
        listener.close()
        return None
    listener.setblocking(False)
    return listener


def pid_at(connection: socket.socket) -> int | None:
    """Return the pid of the process at the other end of a connection; ``None`` if the system does not tell it."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


def has_socket(folder: Path) -> bool:
    """Return whether a process has listened in a folder."""
    return (folder / _NAME).exists()


def is_listening(folder: Path) -> bool:
    """Return whether a process listens in a folder."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(1.0)
        try:
            with _short_path(folder) as path:
                connection.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # for example, too many processes wait
            return True
    return True


def connect(folder: Path, seconds: float) -> socket.socket | None:
    """Return a socket to the process that listens in a folder; ``None`` if nobody listens, or too many processes wait.

    Args:
        folder: The folder.
        seconds: The longest time to wait for the connection, for a request, or until an answer is sent.
    """
    if not is_own(folder) or not has_socket(folder):
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        with _short_path(folder) as path:
            connection.connect(path)
    except OSError:
        connection.close()
        return None
    if hasattr(os, "register_at_fork"):
        # A fork would keep the connection open after the end of this process.
        os.register_at_fork(after_in_child=connection.close)
    return connection


@contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """Yield the socket's path. Linux allows 107 bytes, and a folder for temporary files may have a longer name."""
    path = str(folder / _NAME)
    if len(os.fsencode(path)) < 100:
        yield path
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{descriptor}/{_NAME}"
    finally:
        with suppress(OSError):
            os.close(descriptor)
