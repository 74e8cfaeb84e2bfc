"""Make texts of commands for messages and reports. Reports may be posted, so the texts contain no secrets. Pure.

Example:
    ``shown_command(["python", "serve.py", "--api-key", "abc"])`` returns ``python serve.py --api-key ***``.

A secret is the value of an option, variable or header whose name contains a word from `_SECRET`. Passwords in addresses and
tokens with a known start (``hf_``) are secrets too. In doubt, a text shows less.
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
_SECRET = re.compile(
    r"(?:(?:api|access|private)-?key|password|passwd|passphrase|pwd|secret|credential|auth)s?\b"
    r"|token\b|\b(?:keys?|authorization)\b|\b(?:ssh)?pass$"
)
"""The words for secrets in a name from `_plain_name`. Not among them are ``tokens``, ``tokenizer`` and ``keyword``."""
_MAY_COUNT = {"key", "token"}
"""Words that also occur in the names of small numbers: ``--num-key-value-heads 8``, ``--pad-token-id 0``."""
_SMALL_NUMBER = re.compile(r"\d{1,6}(?=,?(?:[\s)}\]]|$))")
_NAME_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_OPTION = re.compile(r"-[\w.-]*")
_NEXT_OPTION = r"(?:--|-[A-Za-z](?!\S))"
"""A word after an option that is never its value. ``-abc`` may be a password."""
_CODE_OPTION = re.compile(r"-\w*c")
"""An option with code in the next word: ``sh -lc``, ``python -c``."""
_NAMED = re.compile(
    rf"""(?<![\w.-])(?:
    # HF_TOKEN=abc, "token": "abc", environ['HF_TOKEN'] = 'abc', but not tests/token.py::test and token://host
    (?P<variable>[\w.-]+) [\\"'\]]*\s*(?:=|:(?!:|//))[=>]*\s*(?:(?i:basic|bearer)\s+)?
    # setdefault('HF_TOKEN', 'abc')
    | (?P<text>[\w.-]+) \\?["']\s*,\s*(?=\w?\w?\\?["'])
    # --token abc
    | (?P<option>-[\w.-]*) ["']?\s+(?!{_NEXT_OPTION})
    )""",
    re.VERBOSE,
)
"""A name with a value behind it."""
_TO_QUOTE = {quote: re.compile(rf"(?:\\.|[^\\{quote}])*", re.DOTALL) for quote in ("'", '"')}
_QUOTED = "|".join(f"{quote}{pattern.pattern}{quote}?" for quote, pattern in _TO_QUOTE.items())
_VALUE = rf"(?:{re.escape(HIDDEN)}|(?:{_QUOTED}|[(\[][^)\]]*|[^\s\"'(\[])+)"
"""A value with its quotes and brackets. It ends with the text if a quote or bracket is not closed."""
_ONE_VALUE = re.compile(_VALUE, re.DOTALL)
_VALUES = re.compile(rf"{_VALUE}(?:\s+(?!-){_VALUE})*", re.DOTALL)
_UNNAMED = [
    # In postgres://user:abc@host, and in https://abc@host
    re.compile(r"(://)(?:[^\s/@:]*:\S*|[^\s/@]+)(?=@)"),
    re.compile(r"(\bbearer\s+)[^\s\"']+", re.IGNORECASE),
    re.compile(
        r"((?<![A-Za-z0-9]))(?:hf_[A-Za-z0-9]{16,}|A[KS]IA[0-9A-Z]{16}|(?:sk-|gh[a-z]_|github_pat_|xox[a-z]-)[\w-]{16,})"
    ),
]
"""Secrets without a name, each behind a group to show."""
_READ_CHARACTERS = 4 * MOST_CHARACTERS
"""Only the start of a long word is read, so a word of 5 MB costs no more than a short one."""
_EDGE_CHARACTERS = 100
"""The last characters of a cut word are not shown: they may be the start of a secret."""


def shown_command(command: Sequence[str]) -> str:
    """Return a command as a text, with ``***`` instead of secrets, and cut after `MOST_CHARACTERS`."""
    return " ".join(map(_quoted, shown_words(command)))


def _quoted(word: str) -> str:
    is_whole = HIDDEN in word and " " not in word
    # Quotes for a shell would make Python code with quotes hard to read.
    return word if is_whole else f'"{word}"' if "'" in word and '"' not in word else shlex.quote(word)


def shown_words(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command's words, with ``***`` instead of secrets, and cut after `MOST_CHARACTERS`."""
    words: list[str] = []
    left = MOST_CHARACTERS
    for word in _without_secrets(command):
        if len(word) > left:
            words.append(f"{word[:left]}{CUT}")
            break
        words.append(word)
        left = max(left - len(word) - 1, 0)
    return tuple(words)


def _without_secrets(command: Sequence[str]) -> Iterator[str]:
    option, previous, hidden = "", "", False
    for word in command:
        if option:
            # An option may have several values: --api-key abc def
            ends = re.match("-" if hidden else _NEXT_OPTION, word) or not (hidden or _is_secret(option, word))
            if not ends:
                yield HIDDEN
                hidden = True
                continue
        option, hidden = word if len(word) < _READ_CHARACTERS and _OPTION.fullmatch(word) else "", False
        yield _word_without_secrets(word, is_code=_CODE_OPTION.fullmatch(previous) is not None)
        previous = option


def _word_without_secrets(word: str, *, is_code: bool) -> str:
    text = word[:_READ_CHARACTERS]
    for pattern in _UNNAMED:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    text = _without_named(text, is_code=is_code)
    if len(word) <= _READ_CHARACTERS or text.endswith(HIDDEN):
        return text
    return f"{text[:-_EDGE_CHARACTERS]}{CUT}"


def _without_named(text: str, *, is_code: bool) -> str:
    shown, end = "", 0
    for match in _NAMED.finditer(text):
        start = match.end()
        if match.start() < end or not _is_secret(next(filter(None, match.groups())), text[start:]):
            continue
        # Only code has something else behind the value: --header=Authorization: abc def
        if not is_code and not re.search(r"\s", text[: match.start()]):
            return f"{shown}{text[end:start]}{HIDDEN if text[start:] else ''}"
        value_end = _value_end(text, match)
        if value_end > start:
            shown += f"{text[end:start]}{HIDDEN}"
            end = value_end
    return shown + text[end:]


def _value_end(text: str, named: re.Match[str]) -> int:
    start, quote = named.end(), text[: named.start()][-1:]
    # Quotes may enclose the name and the value: curl -H 'X-Api-Key: abc def'
    is_enclosed = quote in _TO_QUOTE and quote not in named[0]
    pattern = _TO_QUOTE[quote] if is_enclosed else _VALUES if named["option"] else _ONE_VALUE
    value = pattern.match(text, start)
    return value.end() if value else start


def _is_secret(name: str, value: str) -> bool:
    words = set(_SECRET.findall(_plain_name(name)))
    return bool(words - _MAY_COUNT if _SMALL_NUMBER.match(value) else words)


def _plain_name(name: str) -> str:
    """Return the words of a name: ``aws-secret-access-key`` for ``--awsSecret.ACCESS_KEY``."""
    return "-".join(_NAME_WORD.findall(name)).lower()
