"""Binary search for the first bad one of a row that begins with a good one, of which some cannot be judged. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Answer = Literal["good", "bad", "skipped"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The part of a row that is left: after ``good``, the last that is known good, up to ``bad``, the first known bad."""

    good: int
    bad: int


def bounds(count: int, known: Mapping[int, Answer]) -> Bounds:
    """Return the bounds of a row of ``count``, whose first is good and last is bad, by what is known of those between."""
    bad = min((at for at, answer in known.items() if answer == "bad"), default=count - 1)
    good = max((at for at, answer in known.items() if answer == "good" and at < bad), default=0)
    return Bounds(good, bad)


def next_ones(count: int, known: Mapping[int, Answer], jobs: int = 1) -> tuple[int, ...]:
    """Return which to judge next, at most ``jobs`` at a time; none where the first bad one is known as well as it can be.

    They divide what is left evenly. In place of one that was skipped it is the nearest to it.
    """
    left = bounds(count, known)
    open_ones = [at for at in range(left.good + 1, left.bad) if at not in known]
    wanted: list[int] = []
    for part in range(1, jobs + 1):
        middle = left.good + (left.bad - left.good) * part / (jobs + 1)
        found = min((at for at in open_ones if at not in wanted), key=lambda at: (abs(at - middle), at), default=None)
        if found is not None:
            wanted.append(found)
    return tuple(sorted(wanted))
