"""Growth per step: the bytes that every further step keeps, from what is live after each of several steps. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

SETTLING_STEPS = 6
"""Steps in which a cache, or a list that forgets its oldest entries, may fill before growth is read."""
WINDOW = 12
"""Steps over which growth is read: a multiple of 2 and 3, so that a step that keeps bytes every second or third time has
the same growth wherever the window begins. What is emptied at least once within them is no growth."""


def grows(live: Sequence[int]) -> bool:
    """Whether bytes that are live after each of some steps grow: they never fall after their lowest and end higher.

    Or they go up and down, but both their lowest and their highest are higher in the later half than in the earlier one.
    """
    since_lowest = live[live.index(min(live)) :]
    if since_lowest[-1] > since_lowest[0] and list(since_lowest) == sorted(since_lowest):
        return True
    return _is_higher_later(live)


def growth_per_step(live: Sequence[int]) -> int:
    """Return the bytes that each step keeps, 0 where memory does not grow.

    It grows where both the lowest and the highest of ``live`` are higher in the later half than in the earlier one: what is
    emptied now and then may be at any point of its course.

    Args:
        live: The bytes that are live before the first step and after each one, garbage collected.
    """
    if len(live) < 2 or not _is_higher_later(live):
        return 0
    return max(0, round((live[-1] - live[0]) / (len(live) - 1)))


def _is_higher_later(live: Sequence[int]) -> bool:
    early, late = live[: len(live) // 2], live[len(live) // 2 :]
    return min(late) > min(early) and max(late) > max(early)
