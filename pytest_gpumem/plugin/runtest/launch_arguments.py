"""Check the arguments of `Gpumem.launch`. Each error names the argument and the mend."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_gpumem.base.shown_command import shown_words

_NEEDS = "gpumem.launch() needs"
_NEEDS_LIST = f"{_NEEDS} a list with a program and its arguments"
_EXAMPLE = ["python", "train.py"]
_ADVICE = ((bytes, "; write os.fsdecode(...)"), ((int, float), "; write str(...)"))


def checked_command(command: Any) -> list[str]:
    """Return a command as a list of words. Raises ``TypeError`` or ``ValueError`` unless it is a list of texts and paths."""
    if isinstance(command, str):
        raise TypeError(f"{_NEEDS} a list of words, got a text{_words_in(command)}")
    if isinstance(command, (bytes, os.PathLike)):
        raise TypeError(f"{_NEEDS_LIST}, got only {type(command).__name__}; write for example {_EXAMPLE!r}")
    if not isinstance(command, (list, tuple)):
        raise TypeError(f"{_NEEDS_LIST}, got {type(command).__name__}")
    if not command:
        raise TypeError(f"{_NEEDS_LIST}, got an empty one")
    words = [_text(word, f"{_NEEDS_LIST} as texts", f"at index {index}") for index, word in enumerate(command)]
    if not words[0]:
        raise ValueError(f"{_NEEDS_LIST}, got an empty text as the program")
    return words


def checked_environment(env: Any) -> dict[str, str]:
    """Return environment variables with texts. Raises ``TypeError`` or ``ValueError`` if a program cannot get them."""
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise TypeError(f"{_NEEDS} a dictionary as env, got {type(env).__name__}; write for example {{'SIZE': '8'}}")
    needs = f"{_NEEDS} texts in env"
    for name, value in env.items():
        if not isinstance(name, str):
            raise TypeError(f"{needs}, got {type(name).__name__} as a name: {name!r}")
        if not _text(name, needs, "as a name") or "=" in name:
            raise ValueError(f"{needs} with names without '=', got the name {name!r}")
        if value is None:
            raise TypeError(f"{needs}, got None for {name!r}; remove a variable by monkeypatch.delenv({name!r})")
    return {name: _text(value, needs, f"for {name!r}") for name, value in env.items()}


def checked_folder(cwd: Any) -> Path:
    """Return the folder for the command; by default the current one. Raises ``TypeError`` unless ``cwd`` is a text or path."""
    return Path.cwd() if cwd is None else Path(_text(cwd, f"{_NEEDS} a text or path", "as cwd"))


def check_timeout(timeout: Any) -> None:
    """Raise ``TypeError`` unless ``timeout`` is a positive number or ``None``."""
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0):
        raise TypeError(f"{_NEEDS} a number of seconds above 0 as timeout, got {timeout!r}")


def check_ranks(ranks: Any) -> None:
    """Raise ``TypeError`` unless ``ranks`` is a positive whole number or ``None``."""
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
        raise TypeError(f"{_NEEDS} a whole number of 1 or more as ranks, got {ranks!r}")


def _words_in(text: str) -> str:
    """Return the end of a sentence about a text in place of a list of words: the advice."""
    try:
        words: Sequence[str] = shown_words(shlex.split(text))
    except ValueError as error:
        # The text itself is not shown, because it may have a password.
        return f" with {str(error).lower()}; write for example {_EXAMPLE!r}"
    return f"; write {list(words)!r}" if words else f" without words; write for example {_EXAMPLE!r}"


def _text(value: Any, needs: str, place: str) -> str:
    """Return a text, or a path as a text.

    Raises:
        TypeError: The value is neither a text nor a path.
        ValueError: No program can get the text.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        advice = next((advice for kind, advice in _ADVICE if isinstance(text, kind)), "")
        raise TypeError(f"{needs}, got {type(text).__name__} {place}{advice}")
    try:
        has_nul = b"\0" in os.fsencode(text)
    except UnicodeEncodeError:
        raise ValueError(f"{needs}, got a text with half a surrogate pair {place}") from None
    if has_nul:
        raise ValueError(f"{needs}, got a text with a NUL character {place}")
    return text
