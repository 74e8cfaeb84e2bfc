"""Which operators are more, and where: from the tallies of a baseline and those of now. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pytest_gpumem.values.operator_counts import Tally, summed

if TYPE_CHECKING:
    from collections.abc import Sequence

Key = Callable[[Tally], object]


def _file(tally: Tally) -> str:
    return (tally.place.library or tally.place.site).rpartition(":")[0]


_SAME: tuple[Key, ...] = (
    lambda tally: (tally.operator, tally.place),
    # Moved lines, renamed modules, and what a baseline kept without its place.
    lambda tally: (tally.operator, tally.place.module, _file(tally)),
    lambda tally: (tally.operator, tally.place.module),
    lambda tally: (tally.operator, _file(tally)),
    lambda tally: tally.operator,
)
"""By what calls are those that were there before, from the strictest to the loosest."""


def changed_tallies(before: Sequence[Tally], after: Sequence[Tally]) -> tuple[Tally, ...]:
    """What came, and with a negative amount what went. Together they are the change of the whole count.

    Of an operator there is either, so that calls which only moved show nothing. Where it came is where other operators came
    as well, if several lines may be meant, and otherwise the line that is furthest from where it was before.
    """
    old, new = list(before), list(after)
    for key in _SAME:
        old, new = _without_common(old, new, key)
    return summed([*new, *(Tally(one.operator, -one.amount, one.place) for one in old)])


def _without_common(old: list[Tally], new: list[Tally], key: Key) -> tuple[list[Tally], list[Tally]]:
    """What is left of both when of each group as much as both have is taken away."""
    groups: dict[object, tuple[list[Tally], list[Tally]]] = defaultdict(lambda: ([], []))
    for tally in old:
        groups[key(tally)][0].append(tally)
    for tally in new:
        groups[key(tally)][1].append(tally)
    news = _news_by_line(groups.values())
    left_old, left_new = [], []
    for mine, theirs in groups.values():
        common = min(_amount(mine), _amount(theirs))
        lines = [_line(tally) for tally in mine]
        theirs.sort(key=lambda tally: (news[_where(tally)], min((abs(_line(tally) - was) for was in lines), default=0)))
        left_old += _without(mine, common)
        left_new += _without(theirs, common)
    return left_old, left_new


def _without(tallies: Iterable[Tally], amount: int) -> list[Tally]:
    """Without as much, taken from the first of them."""
    left = []
    for tally in tallies:
        taken = min(amount, tally.amount)
        amount -= taken
        if taken < tally.amount:
            left.append(Tally(tally.operator, tally.amount - taken, tally.place))
    return left


def _news_by_line(groups: Iterable[tuple[list[Tally], list[Tally]]]) -> Counter[tuple[str, str]]:
    """How much there is at each line of what was nowhere before."""
    found: Counter[tuple[str, str]] = Counter()
    for old, new in groups:
        if not old:
            for tally in new:
                found[_where(tally)] += tally.amount
    return found


def _amount(tallies: Iterable[Tally]) -> int:
    return sum(tally.amount for tally in tallies)


def _where(tally: Tally) -> tuple[str, str]:
    return tally.place.site, tally.place.library


def _line(tally: Tally) -> int:
    number = (tally.place.library or tally.place.site).rpartition(":")[2]
    return int(number) if number.isascii() and number.isdecimal() and len(number) <= 18 else 0
