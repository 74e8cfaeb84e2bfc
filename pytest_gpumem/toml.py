"""TOML that strangers can write: files of a store, and pyproject.toml."""

from __future__ import annotations

import re
import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MOST_PARTS = 16
"""Parts of the longest dotted key. A key of 50,000 parts, which is a file of 100 kB, took the parser 100 s; files of ours have
4 parts at most."""
# What has dots that are no key's: comments, and strings of several lines or of one. The last part of a text may be cut off.
_OPAQUE = re.compile(
    r"""\#[^\n]*
    |\"{3}(?:[^\\]|\\.)*?(?:\"{3,5}|\Z)
    |'{3}.*?(?:'{3,5}|\Z)
    |"(?:[^"\\\n]|\\.)*"?
    |'[^'\n]*'?""",
    re.DOTALL | re.VERBOSE,
)
_BETWEEN_KEYS = re.compile(r"[\n,={}\[\]]+")


def read_toml(text: str) -> dict[str, Any]:
    """Return the content of a TOML text.

    Raises:
        ValueError: It is no TOML, is nested too deeply, or has a number or a dotted key that is too long.
    """
    for key in _BETWEEN_KEYS.split(_OPAQUE.sub("_", text)):
        if key.count(".") >= _MOST_PARTS:
            raise ValueError(f"a key has more than {_MOST_PARTS} parts: {key.strip()[:40]}...")
    try:
        content: dict[str, Any] = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return content
