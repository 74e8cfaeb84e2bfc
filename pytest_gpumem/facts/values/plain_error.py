"""The error about a plain value that does not fit its annotation."""

from __future__ import annotations

import json
from typing import Any

_LONGEST = 200
"""A message shows at most this many characters of a key or value from the file."""


class PlainError(ValueError):
    """A part in a plain value is wrong. The text names this part: ``cell.index must be at least 0, but is -1``."""

    def __init__(self, wrong: str, *keys: str | int, expected: str = "") -> None:
        super().__init__(wrong)
        self.wrong = wrong
        """The text after the path: ``must be at least 0, but is -1``."""
        self.keys = keys
        """The path to the wrong part: ``("cell", "index")``."""
        self.expected = expected
        """The right kind: ``a string``. Empty if the error is not about the kind."""

    def __str__(self) -> str:
        return f"{self.path or 'it'} {self.wrong}"

    @property
    def path(self) -> str:
        """The path to the wrong part: ``results[0].verdict.cell``. Empty for the value itself."""
        path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.keys).removeprefix(".")
        return _cut(json.dumps(path)[1:-1])

    def within(self, key: str | int) -> PlainError:
        """Return the same error as an error about the object or array around the value."""
        return PlainError(self.wrong, key, *self.keys, expected=self.expected)


def expected(kind: str, plain: Any) -> PlainError:
    """Return the error about a wrong kind: ``expected("a string", 3)`` is ``it must be a string, but is 3``."""
    return PlainError(f"must be {kind}, but is {_shown(plain)}", expected=kind)


def one_of(words: Any) -> str:
    """Return ``one of "si", "iec"``."""
    return f"one of {', '.join(map(json.dumps, words))}"


def _shown(plain: Any) -> str:
    if isinstance(plain, (dict, list)):
        return "an object" if isinstance(plain, dict) else "an array"
    if isinstance(plain, int) and abs(plain) >= 10**_LONGEST:
        # Python refuses to convert integers with thousands of digits to text.
        return "a number with very many digits"
    return _cut(json.dumps(plain, default=repr))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
