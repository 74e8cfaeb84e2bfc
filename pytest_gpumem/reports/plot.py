"""A plot of a few numbers in the cells of a terminal. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.reports.text_width import Screen, cells

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MARKS = "▁─▔"
_LEVELS = len(_MARKS)
"""A mark low, in the middle and high in a cell."""
_WIDEST = 8
"""How many cells a number takes at most."""


def plot(values: Sequence[float | None], label: Callable[[float], str], screen: Screen, height: int = 6) -> list[str]:
    """A mark for each of ``values``, the last at the right; ``None`` is a gap. Nothing where there are not two to tell apart.

    The axis begins at the smallest and ends at the largest, which ``label`` names; a last line says so where that is not 0.
    So nothing is filled beneath a mark: how long that were would mean nothing. Where there is no room for all, the earliest
    are left out.
    """
    known = [value for value in values if value is not None]
    if len(set(known)) < 2:
        return []
    low, high = min(known), max(known)
    margin = max(cells(screen.legible(label(value))) for value in (low, high)) + 1
    room = max(8, (screen.width or 80) - margin - 1)
    shown = values[-room:]
    wide = min(_WIDEST, room // len(shown))
    marks = _MARKS if screen.legible(_MARKS) == _MARKS else '_-"'
    levels = [
        None if value is None else round((value - low) / (high - low) * (height * _LEVELS - 1)) for value in shown
    ]
    lines = []
    for row in reversed(range(height)):
        name = label(high) if row == height - 1 else label(low) if row == 0 else ""
        cells_of_row = (
            marks[level % _LEVELS] if level is not None and level // _LEVELS == row else " " for level in levels
        )
        columns = "".join(_column(mark, wide) for mark in cells_of_row)
        lines.append(f"{screen.legible(name).rjust(margin)} {columns}".rstrip())
    if low != 0:
        told = f"(the axis begins at {screen.legible(label(low))}, not at 0)"
        lines.append(told.rjust(min(screen.width or 80, margin + 1 + cells(told))))
    return lines


def _column(mark: str, wide: int) -> str:
    """A mark, with a blank that keeps it apart from the next where there is room."""
    return mark * wide if wide == 1 else mark * (wide - 1) + " "
