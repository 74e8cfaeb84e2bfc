"""Make texts of commands for messages and reports. Reports may be posted, so the texts contain no secrets. Pure.

Example:
    ``shown_command(["python", "serve.py", "--api-key", "abc"])`` returns ``python serve.py --api-key ***``.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST_CHARACTERS = 300
"""A longer command is cut."""
HIDDEN = "***"
CUT = "..."
_NAMED = r"[^\s=:]*(?:key|token(?!s(?![a-z])|iz)|secret|passw|passphrase|pwd|credential)[^\s=:]*"
"""A name for a secret. ``--tokenizer`` and ``--max-tokens`` are none."""
_ASSIGNS = r"(?:=|:(?=[\s\"']))"
_OPTION = re.compile(rf"-{_NAMED}", re.IGNORECASE)
"""An option with a secret in the next word: ``--api-key``."""
_ASSIGNED = re.compile(rf"({_NAMED}{_ASSIGNS}).+", re.IGNORECASE | re.DOTALL)
"""A word with a name and a secret: ``--api-key=abc``, ``HF_TOKEN=abc``."""
_IN_TEXT = re.compile(rf"(-{_NAMED}\s+|{_NAMED}\s*{_ASSIGNS}\s*|\bbearer\s+)(?:\"[^\"]*\"|'[^']*'|\S+)", re.IGNORECASE)
"""The same within a word, for example in ``sh -c 'HF_TOKEN=abc serve --api-key abc'``."""
_IN_ADDRESS = re.compile(r"(://)[^/\s@]+@")
"""A user's name and password in an address."""


def shown_command(command: Sequence[str]) -> str:
    """Return a command as a text, with ``***`` instead of secrets, and cut after `MOST_CHARACTERS`."""
    return " ".join(map(_quoted, shown_words(command)))


def _quoted(word: str) -> str:
    is_whole = HIDDEN in word and " " not in word
    # Quotes for a shell would make Python code with quotes hard to read.
    return word if is_whole else f'"{word}"' if "'" in word and '"' not in word else shlex.quote(word)


def shown_words(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command's words, with ``***`` instead of secrets, and cut after `MOST_CHARACTERS`.

    A secret is the value of an option or variable whose name contains key, token, secret, credential or a word for password.
    """
    words: list[str] = []
    left = MOST_CHARACTERS
    for word in _without_secrets(command):
        if len(word) > left:
            words.append(f"{word[:left]}{CUT}")
            break
        words.append(word)
        left -= len(word) + 1
    return tuple(words)


def _without_secrets(command: Sequence[str]) -> Iterator[str]:
    is_secret = False
    for word in command:
        if is_secret and not word.startswith("-"):
            yield HIDDEN
            is_secret = False
            continue
        is_secret = _OPTION.fullmatch(word) is not None
        shown = _IN_ADDRESS.sub(rf"\1{HIDDEN}@", word)
        is_text = any(map(str.isspace, shown)) and not shown.startswith("-")
        yield (_IN_TEXT if is_text else _ASSIGNED).sub(rf"\1{HIDDEN}", shown)
