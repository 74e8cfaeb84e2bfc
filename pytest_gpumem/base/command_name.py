"""Find the name for this package's command: ``gpumem``, or ``pytest-gpumem`` if another package owns ``gpumem``.

The package index has another package ``gpumem`` with a command of the same name. This module reads the command's file and never
runs it.
"""

from __future__ import annotations

import functools
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

SHORT, LONG = "gpumem", "pytest-gpumem"
_MOST_BYTES = 2**20
"""The most bytes to read from a command. A script has some hundred bytes. A launcher on Windows has 100,000 bytes, and its
script comes last."""
_OURS = re.compile(rb"pytest[_-]gpumem")
_IMPORT = re.compile(rb"^from ([\w.]+) import ", re.MULTILINE)
_PYTHON = re.compile(rb"#![^\n]*python", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class OtherCommand:
    """A command ``gpumem`` from another package."""

    path: str
    module: str | None = None
    """The module imported by its script, for example ``gpumem.cli``; ``None`` if the script imports no module."""


@functools.cache
def command_name() -> str:
    """Return the name to type for this package's command, for hints in messages."""
    return SHORT if other_command() is None else LONG


def other_command() -> OtherCommand | None:
    """Return the first ``gpumem`` on the path if it belongs to another package; otherwise ``None``."""
    path = shutil.which(SHORT)
    return None if path is None else other_in(path, _content(Path(path)))


def other_in(path: str, content: bytes) -> OtherCommand | None:
    """Return the command at ``path`` if its content shows that it belongs to another package. Pure.

    A Python script belongs to another package unless it names this package. Other kinds of files do not show their package. For
    example, a version manager's shim starts a command from any package.
    """
    if _OURS.search(content):
        return None
    imported = _IMPORT.search(content)
    if imported is None and _PYTHON.match(content) is None:
        return None
    return OtherCommand(path, imported[1].decode() if imported else None)


def _content(path: Path) -> bytes:
    """Return the bytes of a command; ``b""`` if it is not a readable file, or is too large for a script."""
    try:
        # Reading a named pipe on the path would wait for a writer.
        return path.read_bytes() if path.is_file() and path.stat().st_size <= _MOST_BYTES else b""
    except OSError:
        return b""
