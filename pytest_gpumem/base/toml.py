"""Read TOML from strangers: store files and pyproject.toml."""

from __future__ import annotations

import re
import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FEW_PARTS = 16
"""A key with at most this number of parts is not checked, because parsing it is fast. This package's keys have at most 4
parts."""
_MOST_WORK = 2_000_000
"""The limit for the number of parts in all keys, multiplied by the parts in the longest key. The limit bounds the
parser's time to about 0.5 s.

For example, the parser took 100 s for a key with 50,000 parts, in a file of 100 kB. Keys of other tools in pyproject.toml may
be longer than this package's keys: a key with 100 parts in a file with 20,000 parts is read.
"""
# Match comments and strings, because their dots do not separate parts of a key. An unfinished string ends with the text.
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
        ValueError: The text is not TOML, is nested too deeply, or contains a number or a dotted key that is too long.
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
