"""A plot of a few numbers in the cells of a terminal. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.reports.screen import Screen, cells

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"
_LEVELS = len(_BLOCKS) - 1
_WIDEST = 8
"""How many cells a number takes at most."""


def plot(values: Sequence[float | None], label: Callable[[float], str], screen: Screen, height: int = 6) -> list[str]:
    """Columns for ``values``, the last at the right; ``None`` leaves a gap. Nothing where there are not two to tell apart.

    The axis begins at the smallest and ends at the largest, which ``label`` names. Where there is no room for all, the
    earliest are left out.
    """
    known = [value for value in values if value is not None]
    if len(set(known)) < 2:
        return []
    low, high = min(known), max(known)
    margin = max(cells(screen.legible(label(value))) for value in (low, high)) + 1
    room = max(8, (screen.width or 80) - margin - 1)
    shown = values[-room:]
    wide = min(_WIDEST, room // len(shown))
    blocks = _BLOCKS if screen.legible(_BLOCKS) == _BLOCKS else " ___####@"[: _LEVELS + 1]
    # The smallest has a level of its own: a gap is something else.
    levels = [
        0 if value is None else 1 + round((value - low) / (high - low) * (height * _LEVELS - 1)) for value in shown
    ]
    lines = []
    for row in reversed(range(height)):
        name = label(high) if row == height - 1 else label(low) if row == 0 else ""
        filled = (blocks[min(_LEVELS, max(0, level - row * _LEVELS))] for level in levels)
        columns = "".join(_column(block, wide) for block in filled)
        lines.append(f"{screen.legible(name).rjust(margin)} {columns}".rstrip())
    return lines


def _column(block: str, wide: int) -> str:
    """A block of a column, with a blank that keeps it apart from the next where there is room."""
    return block * wide if wide == 1 else block * (wide - 1) + " "
