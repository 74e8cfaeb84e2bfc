"""TOML that strangers can write: files of a store, and pyproject.toml."""

from __future__ import annotations

import re
import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FEW_PARTS = 16
"""Parts of a dotted key that costs nothing worth a look. Keys of ours have 4 parts at most."""
_MOST_WORK = 2_000_000
"""Parts of all keys, times the parts of the longest one. The parser takes at most so many steps, here about 0.5 s.

For example, a key of 50,000 parts, which is a file of 100 kB, took the parser 100 s. Keys of another tool in pyproject.toml may
be longer than ours: one with 100 parts in a file of 20,000 parts is read.
"""
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
        ValueError: It is no TOML, is nested too deeply, has a number that is too long, or has dotted keys that would keep the
            parser busy.
    """
    keys = _BETWEEN_KEYS.split(_OPAQUE.sub("_", text))
    dots = [key.count(".") for key in keys]
    longest = max(dots)
    if longest >= _FEW_PARTS and (longest + 1) * (sum(dots) + len(dots)) > _MOST_WORK:
        key = keys[dots.index(longest)].strip()
        raise ValueError(f"a key has too many parts ({longest + 1}): {key[:40]}...")
    try:
        content: dict[str, Any] = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return content
