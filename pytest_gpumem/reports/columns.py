"""Aligned columns of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.reports.layout import Column, Span, Table, laid_out, text_of
from pytest_gpumem.reports.text_width import Screen

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Lines of a table without borders; numbers are aligned right, the columns in ``left`` left. Nothing is cut off."""
    titles = tuple(Column(title, left=number in left) for number, title in enumerate(header))
    return plain_lines(Table(titles, tuple(tuple(map(Span, row)) for row in rows)))


def plain_lines(table: Table) -> list[str]:
    """Lines of a table without styles, as wide as they are."""
    return [text_of(line).rstrip() for line in laid_out(table, Screen())]
