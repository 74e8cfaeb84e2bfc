"""Find the name for this package's command: ``gpumem``, or ``pytest-gpumem`` if another package owns ``gpumem``.

PyPI has another package called ``gpumem``, with a command called ``gpumem``. To find out to which package an installed command
belongs, this module reads the command's file and never runs it.
"""

from __future__ import annotations

import functools
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

SHORT, LONG = "gpumem", "pytest-gpumem"
_MOST_BYTES = 2**20
"""The maximum size of a command's file. Larger files are not read. A script has a few hundred bytes. A launcher on Windows
has about 100,000 bytes, and its script is at the end of the file."""
_OURS = re.compile(rb"pytest[_-]gpumem")
_IMPORT = re.compile(rb"^from ([\w.]+) import ", re.MULTILINE)
_PYTHON = re.compile(rb"#![^\n]*python", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class OtherCommand:
    """A command ``gpumem`` from another package."""

    path: str
    module: str | None = None
    """The module that the command's script imports, for example ``gpumem.cli``; ``None`` if the script imports no module."""


@functools.cache
def command_name() -> str:
    """Return the name of this package's command, for hints in messages: ``gpumem`` or ``pytest-gpumem``."""
    return SHORT if other_command() is None else LONG


def other_command() -> OtherCommand | None:
    """Return the first command ``gpumem`` in ``PATH`` if it belongs to another package; otherwise ``None``."""
    path = shutil.which(SHORT)
    return None if path is None else other_in(path, _content(Path(path)))


def other_in(path: str, content: bytes) -> OtherCommand | None:
    """Return the command at ``path`` if its content shows that it belongs to another package; otherwise ``None``.

    A Python script without the name of this package belongs to another package. Other kinds of files do not show to which
    package they belong. For example, a version manager's shim can start a command from any package.
    """
    if _OURS.search(content):
        return None
    imported = _IMPORT.search(content)
    if imported is None and _PYTHON.match(content) is None:
        return None
    return OtherCommand(path, imported[1].decode() if imported else None)


def _content(path: Path) -> bytes:
    """Return the content of a command's file; ``b""`` if the file cannot be read, or is too large for a script."""
    try:
        # Read only regular files, because reading a named pipe would wait for a writer.
        return path.read_bytes() if path.is_file() and path.stat().st_size <= _MOST_BYTES else b""
    except OSError:
        return b""
