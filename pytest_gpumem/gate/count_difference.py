"""The difference of two counts, operator by operator and line by line. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pytest_gpumem.gate.difference import grouped
from pytest_gpumem.values.operator_counts import Tally, summed, total

if TYPE_CHECKING:
    from collections.abc import Sequence

Key = Callable[[Tally], object]


def _file_and_line(tally: Tally) -> tuple[str, int]:
    file, _, number = (tally.place.library or tally.place.site).rpartition(":")
    return file, int(number) if number.isascii() and number.isdecimal() and len(number) <= 18 else 0


_SAME: tuple[Key, ...] = (
    lambda tally: (tally.operator, tally.place),
    # Moved lines, renamed modules, and what a baseline kept without its place.
    lambda tally: (tally.operator, tally.place.module, _file_and_line(tally)[0]),
    lambda tally: (tally.operator, tally.place.module),
    lambda tally: (tally.operator, _file_and_line(tally)[0]),
    lambda tally: tally.operator,
)
"""Keys by which calls are equal, from the strictest to the loosest."""


def changed_tallies(before: Sequence[Tally], after: Sequence[Tally]) -> tuple[Tally, ...]:
    """Return the calls that came, and with a negative amount those that went; together they are the change of the count.

    An operator has only one of both, so that calls which moved show nothing. If several lines may be the one where an operator
    came, it is that where other operators came, too, and otherwise the one that is furthest from where it was before.
    """
    old, new = list(before), list(after)
    for key in _SAME:
        old, new = _without_common(old, new, key)
    return summed([*new, *(Tally(one.operator, -one.amount, one.place) for one in old)])


def _without_common(old: list[Tally], new: list[Tally], key: Key) -> tuple[list[Tally], list[Tally]]:
    """Return both sides without the amount that each group has on both."""
    groups = grouped(old, new, key).values()
    # The amount at each line whose group was not there before.
    came: Counter[tuple[str, str]] = Counter()
    for mine, theirs in groups:
        for tally in theirs if not mine else ():
            came[_where(tally)] += tally.amount
    left_old, left_new = [], []
    for mine, theirs in groups:
        common = min(total(mine), total(theirs))
        lines = [_file_and_line(tally)[1] for tally in mine]

        def rank(tally: Tally, lines: Sequence[int] = lines) -> tuple[int, int]:
            line = _file_and_line(tally)[1]
            return came[_where(tally)], min((abs(line - was) for was in lines), default=0)

        left_old += _without(mine, common)
        left_new += _without(sorted(theirs, key=rank), common)
    return left_old, left_new


def _without(tallies: Iterable[Tally], amount: int) -> list[Tally]:
    """Return the tallies without an amount, taken from the first of them."""
    left = []
    for tally in tallies:
        taken = min(amount, tally.amount)
        amount -= taken
        if taken < tally.amount:
            left.append(Tally(tally.operator, tally.amount - taken, tally.place))
    return left


def _where(tally: Tally) -> tuple[str, str]:
    return tally.place.site, tally.place.library
