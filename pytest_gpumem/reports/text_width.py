"""What a stream can show: which characters, in how many cells. Pure."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

_HARMLESS = frozenset({"Zs"})
"""Of what Python calls unprintable, only blanks may be written as they are."""
_INSTEAD = {"µ": "u", "μ": "u", "…": "..."}
_BEGINNING = 1 / 3
"""Of a text that is shortened. The end of a test's id tells more than its beginning."""


@dataclass(frozen=True, slots=True)
class Screen:
    """A stream of text: how wide its lines may be, in cells (``None`` for no limit), and how it encodes characters."""

    width: int | None = None
    encoding: str = "utf-8"

    def legible(self, text: str) -> str:
        """``text`` as this stream can show it, in one line.

        What would move the cursor, recolour or reorder (control characters, newlines, right-to-left marks) or cannot be
        seen is escaped as in Python. What the stream cannot encode is replaced by its ASCII equivalent, or else escaped.
        """
        if not text.isprintable():
            text = "".join(map(_harmless, text))
        if text.isascii() or self._encodes(text):
            return text
        return "".join(
            character if self._encodes(character) else _INSTEAD.get(character) or _escaped(character)
            for character in text
        )

    def shortened(self, text: str, width: int) -> str:
        """``text`` in at most ``width`` cells: what does not fit is left out of its middle."""
        if cells(text) <= width:
            return text
        left_out = self.legible("…")
        room = max(0, width - len(left_out))
        beginning = _first(text, int(room * _BEGINNING))
        return f"{beginning}{left_out}{_last(text, room - cells(beginning))}"

    def _encodes(self, text: str) -> bool:
        try:
            text.encode(self.encoding)
        except (UnicodeEncodeError, LookupError):
            return text.isascii()
        return True


def cells(text: str) -> int:
    """How many cells of a terminal ``text`` takes: two for an East Asian character, none for a combining one."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _harmless(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) in _HARMLESS:
        return character
    return _escaped(character)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _first(text: str, width: int) -> str:
    """As much of the beginning as fits."""
    beginning = text[:width]
    while cells(beginning) > width:
        beginning = beginning[:-1]
    return beginning


def _last(text: str, width: int) -> str:
    """As much of the end as fits, and no mark without the character that it belongs to."""
    end = text[len(text) - width :] if width else ""
    while end and (cells(end) > width or not cells(end[0])):
        end = end[1:]
    return end
