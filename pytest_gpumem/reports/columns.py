"""Aligned columns of text."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_WIDE = 10_000


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Lines of a table without borders; numbers are aligned right, the columns in ``left`` left. Nothing is cut off."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for number, title in enumerate(header):
        table.add_column(title, justify="left" if number in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    console = Console(file=text, width=_WIDE, color_system=None, force_terminal=False, markup=False, highlight=False)
    console.print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]
