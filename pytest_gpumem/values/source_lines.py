"""Lines of code as texts: ``model.py:88``, or ``transformers 4.38.2: models/llama/modeling_llama.py:1074`` of a package."""

from __future__ import annotations

import re

_PACKAGE = re.compile(r"(\S+) \S+: ")
_MOST_DIGITS = 18


def line_of(site: str, library: str) -> str:
    """Return a line as a person reads it: the library's own, and from which of the user's lines it was reached."""
    if library and site:
        return f"{library} (from {site})"
    return library or site


def without_release(line: str) -> str:
    """Return a line without the release of its package, so that lines of two releases can be equal."""
    return _PACKAGE.sub(r"\1: ", line, count=1)


def package_of(line: str) -> str:
    """Return the package that a line is in; empty where it is in none."""
    found = _PACKAGE.match(line)
    return found.group(1) if found else ""


def file_and_line(line: str) -> tuple[str, int]:
    """Return the file of a line, without the release of its package, and its number; 0 where it has none."""
    file, _, number = line.rpartition(":")
    if number.isascii() and number.isdecimal() and len(number) <= _MOST_DIGITS:
        return without_release(file), int(number)
    return without_release(line), 0
