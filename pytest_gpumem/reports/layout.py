"""Tables of styled cells that fit the width and the characters of a stream. Pure."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


_COMMAND = re.compile(r"^(\s*):(?=:[\w-]+(?:\s.*)?::)")
"""Commands to GitHub's runner: at the beginning of a line, and ``##[...]`` anywhere (``ActionCommand.cs``)."""
_INSTEAD = {"µ": "u", "μ": "u", "…": "..."}
_BEGINNING = 1 / 3
"""The share of the beginning in a shortened text: the end of a test's id has more information."""


@dataclass(frozen=True, slots=True)
class Screen:
    """A stream of text: how wide its lines may be, in cells (``None`` for no limit), and how it encodes characters."""

    width: int | None = None
    encoding: str = "utf-8"

    def legible(self, text: str) -> str:
        """Return ``text`` as this stream can show it, in one line.

        What would move the cursor, recolour or reorder (control characters, newlines, right-to-left marks), cannot be seen,
        or would be a command in a CI's log is escaped as in Python. What the stream cannot encode is replaced by its ASCII
        equivalent, or else escaped.
        """
        if not text.isprintable():
            text = "".join(map(_harmless, text))
        text = _COMMAND.sub(lambda found: f"{found[1]}\\x3a", text).replace("##[", "#\\x23[")
        return self.encodable(text)

    def encodable(self, text: str) -> str:
        """Return ``text`` with what the stream cannot encode replaced by its ASCII equivalent, or else escaped."""
        if text.isascii() or self._encodes(text):
            return text
        return "".join(
            character if self._encodes(character) else _INSTEAD.get(character) or _escaped(character)
            for character in text
        )

    def shortened(self, text: str, width: int) -> str:
        """Return ``text`` in at most ``width`` cells; characters in its middle are left out."""
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
    """Return how many cells of a terminal ``text`` takes: two for an East Asian character, none for a combining one."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _harmless(character: str) -> str:
    # Blanks, too, are unprintable to Python.
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return _escaped(character)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _first(text: str, width: int) -> str:
    """Return as much of the beginning as fits."""
    beginning = text[:width]
    while cells(beginning) > width:
        beginning = beginning[:-1]
    return beginning


def _last(text: str, width: int) -> str:
    """Return as much of the end as fits, without a combining mark at its start."""
    end = text[len(text) - width :] if width else ""
    while end and (cells(end) > width or not cells(end[0])):
        end = end[1:]
    return end


Style = Literal["good", "bad", "doubtful", "heading", "aside"]
"""The meaning of a text, which its words have, too: without colours nothing is lost."""

_GAP = 2
_HANGING = 4
"""The indentation of figures that stand beneath the name of their row."""


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a line."""

    text: str
    style: Style | None = None


Line = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """A column, and how it shrinks where there is no room for the whole table.

    Cells of one with ``least`` are shortened to that many cells of the screen; one with a ``weight`` is left out, the
    lightest first. One with neither keeps its width. With ``left``, its cells are aligned left.
    """

    title: str
    left: bool = False
    least: int | None = None
    weight: int | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """``rows`` have a cell for each of the ``columns``; the first names the row."""

    columns: tuple[Column, ...]
    rows: tuple[Line, ...]
    indent: int = 0

    def without_empty(self, keep: Collection[int]) -> Table:
        """Return the table without the columns that are empty in all rows; those with a number in ``keep`` stay."""
        kept = [n for n in range(len(self.columns)) if n in keep or any(row[n].text for row in self.rows)]
        rows = tuple(tuple(row[n] for n in kept) for row in self.rows)
        return replace(self, columns=tuple(self.columns[n] for n in kept), rows=rows)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The columns that are shown, by number, and their widths; ``hanging`` if the first has a line of its own."""

    kept: tuple[int, ...]
    widths: tuple[int, ...]
    hanging: bool = False


def laid_out(table: Table, screen: Screen) -> list[Line]:
    """Return the lines of a table, with its header, and one that names the columns for which there was no room.

    Where the name of a row and its figures do not fit side by side, it stands above them.
    """
    header = tuple(Span(column.title, "heading") for column in table.columns)
    rows = [tuple(Span(screen.legible(span.text), span.style) for span in row) for row in (header, *table.rows)]
    plan = _plan(table, rows, screen)
    lines = [line for row in rows for line in _lines_of(row, table, plan, screen)]
    left_out = [column.title for number, column in enumerate(table.columns) if number not in plan.kept]
    if left_out:
        note = f"not shown, for want of width: {', '.join(title for title in left_out if title)}"
        lines.append((Span(" " * table.indent + note, "aside"),))
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
    offers = [
        tuple(number for number in everything if number not in droppable[:count]) for count in range(len(droppable) + 1)
    ]
    for kept in offers:
        widths = _fitted(table.columns, natural, kept, room)
        if widths is not None and _differ(rows, widths[0], screen):
            return _Plan(kept, widths)
    for kept in offers:
        widths = _fitted(table.columns, natural, kept[1:], room - _HANGING)
        if widths is not None:
            return _Plan(kept, (room, *widths), hanging=True)
    kept = offers[-1]
    narrow = tuple(min(natural[number], table.columns[number].least or natural[number]) for number in kept)
    return _Plan(kept, (room, *narrow[1:]), hanging=True)


def _fitted(
    columns: Sequence[Column], natural: Sequence[int], kept: Sequence[int], room: int
) -> tuple[int, ...] | None:
    """Return the widths of the columns in ``kept``, if they fit; those that can be shortened share the spare cells."""
    widths = {number: min(natural[number], columns[number].least or natural[number]) for number in kept}
    spare = room - sum(widths.values()) - _GAP * (len(kept) - 1)
    if spare < 0:
        return None
    by_need = sorted((natural[number] - widths[number], number) for number in kept)
    for index, (need, number) in enumerate(by_need):
        share = min(need, spare // (len(by_need) - index))
        widths[number] += share
        spare -= share
    return tuple(widths[number] for number in kept)


def _differ(rows: Sequence[Line], width: int, screen: Screen) -> bool:
    """Return whether different names still differ when shortened."""
    names = {row[0].text for row in rows}
    return len({screen.shortened(name, width) for name in names}) == len(names)


def _lines_of(row: Line, table: Table, plan: _Plan, screen: Screen) -> Iterable[Line]:
    fitted = [
        _aligned(row[number], table.columns[number], width, screen)
        for number, width in zip(plan.kept, plan.widths, strict=True)
    ]
    if not plan.hanging:
        yield _joined(fitted, table.indent)
        return
    if row[0].text:
        yield _joined(fitted[:1], table.indent)
    yield _joined(fitted[1:], table.indent + _HANGING)


def _aligned(cell: Span, column: Column, width: int, screen: Screen) -> tuple[str, Span, str]:
    """Return the cell, and the blanks before and after it."""
    text = cell.text if column.least is None else screen.shortened(cell.text, width)
    blank = " " * (width - cells(text))
    return ("", Span(text, cell.style), blank) if column.left else (blank, Span(text, cell.style), "")


def _joined(fitted: Sequence[tuple[str, Span, str]], indent: int) -> Line:
    """Return one line, without blanks at its end."""
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
    """Return a table without the columns that are empty in all ``rows``; those with a number in ``keep`` stay."""
    kept = [number for number in range(len(header)) if number in keep or any(row[number] for row in rows)]
    return [header[number] for number in kept], [[row[number] for number in kept] for row in rows]


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Return lines of a table without limits of width; numbers are aligned right, the columns in ``left`` left."""
    titles = tuple(Column(title, left=number in left) for number, title in enumerate(header))
    return plain_lines(Table(titles, tuple(tuple(map(Span, row)) for row in rows)))


def plain_lines(table: Table) -> list[str]:
    """Return lines of a table without styles, as wide as they are."""
    return [text_of(line).rstrip() for line in laid_out(table, Screen())]
