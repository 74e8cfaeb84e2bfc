"""Lay out tables with styled cells for a terminal's width and encoding. Pure.

For example, if a table is too wide for a terminal with 60 cells, long names are shortened first, then columns are omitted, and
finally each row's name is printed on a line above its figures.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


_COMMAND = re.compile(r"^(\s*):(?=:[\w-]+(?:\s.*)?::)")
"""Commands to GitHub's runner: ``::`` at the beginning of a line, and ``##[...]`` anywhere (``ActionCommand.cs``)."""
_INSTEAD = {"µ": "u", "μ": "u", "…": "..."}
_BEGINNING = 1 / 3
"""The beginning is a third of a shortened text. The end is longer, because a test's id is more specific at its end."""


@dataclass(frozen=True, slots=True)
class Screen:
    """A text stream's properties: the maximum width of a line in cells (``None`` for no limit), and the encoding."""

    width: int | None = None
    encoding: str = "utf-8"

    def legible(self, text: str) -> str:
        """Return ``text`` on a single line that is safe and visible in this stream.

        Some characters are escaped as in Python: characters that move the cursor, recolour or reorder the text (control
        characters, newlines, right-to-left marks), invisible characters, and commands to a CI log. Characters that the stream
        cannot encode become their ASCII equivalent, or are escaped.
        """
        if not text.isprintable():
            text = "".join(map(_harmless, text))
        text = _COMMAND.sub(lambda match: f"{match[1]}\\x3a", text).replace("##[", "#\\x23[")
        return self.encodable(text)

    def encodable(self, text: str) -> str:
        """Replace characters that the stream cannot encode by their ASCII equivalent, or escape them."""
        if text.isascii() or self._encodes(text):
            return text
        return "".join(
            character if self._encodes(character) else _INSTEAD.get(character) or _escaped(character)
            for character in text
        )

    def shortened(self, text: str, width: int) -> str:
        """Return ``text`` in at most ``width`` cells. An ellipsis replaces characters in the middle of a longer text."""
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
    """Return the width of ``text`` in a terminal's cells: an East Asian character has two, a combining mark has none."""
    return len(text) if text.isascii() else sum(map(_character_cells, text))


def _character_cells(character: str) -> int:
    """Return the width of a character, by Unicode's tables in the standard library."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _harmless(character: str) -> str:
    # `isprintable` is also false for spaces other than the ASCII space, but spaces are harmless.
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return _escaped(character)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _first(text: str, width: int) -> str:
    """Return the longest beginning of ``text`` in at most ``width`` cells."""
    beginning = text[:width]
    while cells(beginning) > width:
        beginning = beginning[:-1]
    return beginning


def _last(text: str, width: int) -> str:
    """Return the longest end of ``text`` in at most ``width`` cells, without a combining mark at its start."""
    end = text[len(text) - width :] if width else ""
    while end and (cells(end) > width or not cells(end[0])):
        end = end[1:]
    return end


Style = Literal["good", "bad", "doubtful", "heading", "aside"]
"""The meaning of a text, shown by a colour. The text's words say the same, so a terminal without colours loses nothing."""

LEAST_NAME = 30
"""A test's id may be shortened to this width, in cells."""
_GAP = 2
_HANGING = 4
"""The indentation of figures below their row's name, in cells."""


@dataclass(frozen=True, slots=True)
class Span:
    """A styled part of a line."""

    text: str
    style: Style | None = None


Line = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """A column, and how it shrinks if the table is too wide.

    With ``least``, the column's texts may be shortened to this many cells. With ``weight``, the column may be omitted, and
    columns with smaller weights are omitted first. Without both, the column keeps its width. ``left`` aligns the texts left.
    """

    title: str
    left: bool = False
    least: int | None = None
    weight: int | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a cell in each row for each column. The first cell names the row."""

    columns: tuple[Column, ...]
    rows: tuple[Line, ...]
    indent: int = 0

    def without_empty(self, keep: Collection[int]) -> Table:
        """Return the table without its empty columns. Columns whose numbers are in ``keep`` always stay."""
        column_numbers = [n for n in range(len(self.columns)) if n in keep or any(row[n].text for row in self.rows)]
        rows = tuple(tuple(row[n] for n in column_numbers) for row in self.rows)
        return replace(self, columns=tuple(self.columns[n] for n in column_numbers), rows=rows)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The numbers and widths of the columns to show.

    If ``hanging`` is true, each row's first cell is printed on a line above the other cells.
    """

    shown: tuple[int, ...]
    widths: tuple[int, ...]
    hanging: bool = False


Piece = Table | Line
"""A part of an output: a table, or a line between tables."""
NOTHING: Line = ()
"""An empty line."""


def laid_out(table: Table, screen: Screen) -> list[Line]:
    """Return a table's lines, beginning with the header. If columns did not fit, a last line names them.

    If a row's name and its figures do not fit side by side, the name is printed above the figures.
    """
    header = tuple(Span(column.title, "heading") for column in table.columns)
    rows = [tuple(Span(screen.legible(span.text), span.style) for span in row) for row in (header, *table.rows)]
    plan = _plan(table, rows, screen)
    lines = [line for row in rows for line in _lines_of(row, table, plan, screen)]
    left_out = [column.title for number, column in enumerate(table.columns) if number not in plan.shown]
    if left_out:
        note = f"too narrow to show: {', '.join(title for title in left_out if title)}"
        lines.append((Span(" " * table.indent + note, "aside"),))
    return lines


def as_lines(pieces: Iterable[Piece], screen: Screen) -> list[Line]:
    """Lay out tables and lines for a screen."""
    lines: list[Line] = []
    for piece in pieces:
        if isinstance(piece, Table):
            lines += laid_out(piece, screen)
        else:
            lines.append(tuple(Span(screen.legible(span.text), span.style) for span in piece))
    return lines


def text_of(line: Line) -> str:
    """Return a line without its styles."""
    return "".join(span.text for span in line)


def _plan(table: Table, rows: Sequence[Line], screen: Screen) -> _Plan:
    natural = [max(cells(row[number].text) for row in rows) for number in range(len(table.columns))]
    everything = tuple(range(len(natural)))
    if screen.width is None:
        return _Plan(everything, tuple(natural))
    room = screen.width - table.indent
    weighed = [(column.weight, number) for number, column in enumerate(table.columns) if column.weight is not None]
    droppable = [number for _, number in sorted(weighed)]
    candidates = [
        tuple(number for number in everything if number not in droppable[:count]) for count in range(len(droppable) + 1)
    ]
    for shown in candidates:
        widths = _fitted(table.columns, natural, shown, room)
        if widths is not None and _differ(rows, widths[0], screen):
            return _Plan(shown, widths)
    for shown in candidates:
        widths = _fitted(table.columns, natural, shown[1:], room - _HANGING)
        if widths is not None:
            return _Plan(shown, (room, *widths), hanging=True)
    shown = candidates[-1]
    narrow = tuple(min(natural[number], table.columns[number].least or natural[number]) for number in shown)
    return _Plan(shown, (room, *narrow[1:]), hanging=True)


def _fitted(
    columns: Sequence[Column], natural: Sequence[int], shown: Sequence[int], room: int
) -> tuple[int, ...] | None:
    """Return the widths for the columns in ``shown``; ``None`` if they do not fit into ``room`` cells.

    Shortened columns share the remaining cells.
    """
    widths = {number: min(natural[number], columns[number].least or natural[number]) for number in shown}
    spare = room - sum(widths.values()) - _GAP * (len(shown) - 1)
    if spare < 0:
        return None
    by_need = sorted((natural[number] - widths[number], number) for number in shown)
    for index, (need, number) in enumerate(by_need):
        share = min(need, spare // (len(by_need) - index))
        widths[number] += share
        spare -= share
    return tuple(widths[number] for number in shown)


def _differ(rows: Sequence[Line], width: int, screen: Screen) -> bool:
    """Return whether different row names still differ after they are shortened to ``width`` cells."""
    names = {row[0].text for row in rows}
    return len({screen.shortened(name, width) for name in names}) == len(names)


def _lines_of(row: Line, table: Table, plan: _Plan, screen: Screen) -> Iterable[Line]:
    fitted = [
        _aligned(row[number], table.columns[number], width, screen)
        for number, width in zip(plan.shown, plan.widths, strict=True)
    ]
    if not plan.hanging:
        yield _joined(fitted, table.indent)
        return
    if row[0].text:
        yield _joined(fitted[:1], table.indent)
    yield _joined(fitted[1:], table.indent + _HANGING)


def _aligned(cell: Span, column: Column, width: int, screen: Screen) -> tuple[str, Span, str]:
    """Return the blanks before a cell, the cell with its shortened text, and the blanks after the cell."""
    text = cell.text if column.least is None else screen.shortened(cell.text, width)
    blank = " " * (width - cells(text))
    return ("", Span(text, cell.style), blank) if column.left else (blank, Span(text, cell.style), "")


def _joined(fitted: Sequence[tuple[str, Span, str]], indent: int) -> Line:
    """Return a line without trailing blanks."""
    line: list[Span] = []
    blank = " " * indent
    for before, span, after in fitted:
        blank += before
        if span.text:
            if blank:
                line.append(Span(blank))
            line.append(span)
            blank = ""
        blank += after + " " * _GAP
    return tuple(line)


def without_empty(
    header: Sequence[str], rows: Sequence[Sequence[str]], keep: Collection[int] = (0,)
) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows without empty columns. Columns whose numbers are in ``keep`` always stay."""
    column_numbers = [number for number in range(len(header)) if number in keep or any(row[number] for row in rows)]
    return [header[number] for number in column_numbers], [[row[number] for number in column_numbers] for row in rows]


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Return a table's lines without a width limit. The columns in ``left`` are aligned left, the others right."""
    titles = tuple(Column(title, left=number in left) for number, title in enumerate(header))
    return plain_lines(Table(titles, tuple(tuple(map(Span, row)) for row in rows)))


def plain_lines(table: Table) -> list[str]:
    """Return a table's lines without styles and without a width limit."""
    return [text_of(line).rstrip() for line in laid_out(table, Screen())]
