"""A process's exit status, in a file beside the report.

Python's last functions cannot ask for the exit status. So C writes the file when the process ends.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_SUFFIX = ".status"
_MOST_BYTES = 16


def prepare_exit(library: str) -> None:
    """Get ready for `watch_exit`, before this process loads torch. ``library`` is the path of the same library."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(library).exit_prepare()


def watch_exit(library: str | None, folder: Path, name: str) -> None:
    """Write this process's exit status into a file when the process ends.

    Nothing is written without the library, with another C library than glibc, or if ``os._exit`` or a signal ends the process.

    Args:
        library: The path to the library that counts allocations.
        folder: The folder with this process's report. The folder belongs to this user.
        name: The report's name without ``.json``.
    """
    with suppress(OSError, AttributeError):
        if library is not None:
            loaded = ctypes.CDLL(library)
            loaded.exit_prepare()
            loaded.exit_watch(os.fsencode(folder), f"{name}{_SUFFIX}".encode())


def status_file(report: Path) -> Path:
    """Return the path to the file with the exit status, for the process that wrote this report."""
    return report.with_suffix(_SUFFIX)


def exit_status(report: Path) -> int | None:
    """Return the exit status from the file beside a report; ``None`` without such a file."""
    try:
        with status_file(report).open("rb") as file:
            text = file.read(_MOST_BYTES)
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) <= 255 else None
