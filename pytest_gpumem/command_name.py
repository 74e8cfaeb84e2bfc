"""The name by which a shell finds this package's command: ``gpumem``, or ``pytest-gpumem`` if the former is another's.

The package index has a package ``gpumem`` with a command of that name. The command is looked at and never run.
"""

from __future__ import annotations

import functools
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

SHORT, LONG = "gpumem", "pytest-gpumem"
_MOST_BYTES = 2**20
"""Bytes that are read of a command. A script has hundreds, a launcher of Windows 100,000 with the script at its end."""
_OURS = re.compile(rb"pytest[_-]gpumem")
_IMPORT = re.compile(rb"^from ([\w.]+) import ", re.MULTILINE)
_PYTHON = re.compile(rb"#![^\n]*python", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class OtherCommand:
    """A command ``gpumem`` that belongs to another package."""

    path: str
    module: str | None = None
    """The module that its script imports, for example ``gpumem.cli``; ``None`` if the script does not say."""


@functools.cache
def command_name() -> str:
    """Return the name to type for this package's command, as hints have it."""
    return SHORT if other_command() is None else LONG


def other_command() -> OtherCommand | None:
    """Return the ``gpumem`` that is first on the path, if it belongs to another package."""
    path = shutil.which(SHORT)
    return None if path is None else other_in(path, _content(Path(path)))


def other_in(path: str, content: bytes) -> OtherCommand | None:
    """Return the command at ``path`` if its content shows that it belongs to another package.

    A script of Python belongs to another package unless it names this one. Nothing is known of other files: a version
    manager's shim, say, starts a command of any package. Pure.
    """
    if _OURS.search(content):
        return None
    imported = _IMPORT.search(content)
    if imported is None and _PYTHON.match(content) is None:
        return None
    return OtherCommand(path, imported[1].decode() if imported else None)


def _content(path: Path) -> bytes:
    """Return the bytes of a command; none if it is no file that can be read, or too large for a script."""
    try:
        # A pipe on the path would wait for a writer.
        return path.read_bytes() if path.is_file() and path.stat().st_size <= _MOST_BYTES else b""
    except OSError:
        return b""
