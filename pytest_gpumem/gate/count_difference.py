"""The difference of two counts, operator by operator and line by line. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.gate.difference import grouped
from pytest_gpumem.values.operator_counts import (
    NOWHERE,
    OperatorSite,
    Tally,
    each_layer,
    in_layers,
    layer_of,
    of_any_layer,
    of_layers,
    summed,
    total,
)
from pytest_gpumem.values.source_lines import file_and_line, without_release

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pytest_gpumem.values.layers import Numbers

Key = Callable[[Tally], object]


def _file_and_line(tally: Tally) -> tuple[str, int]:
    return file_and_line(tally.place.library or tally.place.site)


_SAME: tuple[Key, ...] = (
    lambda tally: (tally.operator, replace(tally.place, library=without_release(tally.place.library))),
    # Moved lines.
    lambda tally: (tally.operator, tally.place.module, _file_and_line(tally)[0]),
    # Of other layers, or of which is not known; renamed modules.
    lambda tally: (tally.operator, of_any_layer(tally.place)),
    lambda tally: (tally.operator, of_any_layer(tally.place).module, _file_and_line(tally)[0]),
    lambda tally: (tally.operator, of_any_layer(tally.place).module),
    lambda tally: (tally.operator, _file_and_line(tally)[0]),
)
"""Keys by which calls are equal, from the strictest to the loosest."""


def changed_tallies(before: Sequence[Tally], after: Sequence[Tally]) -> tuple[Tally, ...]:
    """Return the calls that came, and with a negative amount those that went; together they are the change of the count.

    An operator has only one of both, so that calls which moved show nothing. If several lines may be the one where an operator
    came, it is that where other operators came, too, and otherwise the one that is furthest from where it was before.

    Of the places with the smallest amounts a baseline keeps the operators alone. Calls at places that may be among these are
    held against them, and what they have more is told without its line, as it may be any of theirs.
    """
    before, after = ([one for tally in side for one in each_layer(tally)] for side in (before, after))
    before, after = _spread(before, after), _spread(after, before)
    (old, rest), (new, rest_now) = _apart(before), _apart(after)
    rest, rest_now = rest - rest_now, rest_now - rest
    for key in _SAME:
        old, new = _without_common(old, new, key)
    unknown = _unknown(before, after)
    loose = {tally for tally in new if rest[tally.operator] and unknown(tally)}
    old, new = _without_common(old, new, lambda tally: tally.operator, last=frozenset(loose))
    changes = []
    for operator in {tally.operator for tally in (*old, *new)}:
        gone, came = ([tally for tally in side if tally.operator == operator] for side in (old, new))
        inside = [tally for tally in came if rest[operator] and unknown(tally)]
        more = total(inside) - rest[operator]
        if inside and more > 0:
            modules = {of_any_layer(tally.place).module for tally in inside}
            changes.append(Tally(operator, more, OperatorSite(modules.pop()) if len(modules) == 1 else NOWHERE))
        changes += _without([tally for tally in came if tally not in inside], max(0, -more))
        changes += [replace(tally, amount=-tally.amount) for tally in _without(gone, rest_now[operator])]
        rest[operator] -= total(came)
        rest_now[operator] -= total(gone)
    changes += [Tally(operator, amount) for operator, amount in (+rest_now).items()]
    changes += [Tally(operator, -amount) for operator, amount in (+rest).items()]
    return of_layers(summed(changes), {})


def _spread(tallies: Sequence[Tally], others: Sequence[Tally]) -> list[Tally]:
    """Return tallies with those of all layers in equal parts, where the other side tells the layers of their module apart."""
    layers: dict[tuple[str, str], set[Numbers]] = {}
    for tally in others:
        numbers = layer_of(tally.place)
        if numbers is not None:
            layers.setdefault((tally.operator, of_any_layer(tally.place).module), set()).add(numbers)
    return [
        part for tally in tallies for part in in_layers(tally, layers.get((tally.operator, tally.place.module), ()))
    ]


def _apart(tallies: Iterable[Tally]) -> tuple[list[Tally], Counter[str]]:
    """Return the tallies that have a place, and the amounts of the others by operator."""
    placed, rest = [], Counter[str]()
    for tally in tallies:
        if tally.place == NOWHERE:
            rest[tally.operator] += tally.amount
        else:
            placed.append(tally)
    return placed, rest


def _unknown(before: Iterable[Tally], after: Iterable[Tally]) -> Callable[[Tally], bool]:
    """Return a function that tells whether calls that came may be at places of which ``before`` kept the operators alone.

    Not if it kept their place, nor if they are more than at the smallest place that it kept.
    """
    were, are = Counter[OperatorSite](), Counter[OperatorSite]()
    for amounts, tallies in ((were, before), (are, after)):
        for tally in tallies:
            if tally.place != NOWHERE:
                amounts[of_any_layer(tally.place)] += tally.amount
    most = min(were.values(), default=max(are.values(), default=0))
    return lambda tally: of_any_layer(tally.place) not in were and tally.amount <= most


def _without_common(
    old: list[Tally], new: list[Tally], key: Key, last: Collection[Tally] = ()
) -> tuple[list[Tally], list[Tally]]:
    """Return both sides without the amount that each group has on both, those in ``last`` at the end."""
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

        def rank(tally: Tally, lines: Sequence[int] = lines) -> tuple[bool, int, int, int]:
            line = _file_and_line(tally)[1]
            distance = min((abs(line - was) for was in lines), default=0)
            # Of the layers of a module, those with the least are as they all were.
            return tally in last, came[_where(tally)], distance, tally.amount

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
