"""Read TOML files with untrusted content: store files and pyproject.toml."""

from __future__ import annotations

import re
import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FEW_PARTS = 16
"""A file is checked only if a dotted key, such as ``a.b.c``, has more parts than this. Other files are parsed quickly. This
package's keys have at most 4 parts."""
_MOST_WORK = 2_000_000
"""The upper limit for a product: the number of parts in all keys times the number of parts in the longest key. With this
limit, parsing takes at most about 0.5 s.

For example, the parser took 100 s for a key with 50,000 parts, in a file of 100 kB. The limit allows long keys of other
tools in pyproject.toml. For example, a key with 100 parts in a file with 20,000 parts is accepted.
"""
# Match comments and strings, because dots in them do not separate parts of a key. A string without a closing quote extends
# to the end of its line or of the text.
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
    """Parse a TOML text.

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
