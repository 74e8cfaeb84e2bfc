"""Compare a baseline's operator calls with the current operator calls, by operator and line. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.facts.values.operator_counts import (
    NOWHERE,
    OperatorSite,
    Tally,
    each_layer,
    in_layers,
    layer_of,
    of_any_layer,
    of_layers,
    sum_tallies,
    total,
)
from pytest_gpumem.facts.values.source_lines import file_and_line, without_release
from pytest_gpumem.judging.gate.difference import grouped

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pytest_gpumem.facts.values.layers import Numbers

Key = Callable[[Tally], object]


def _file_and_line(tally: Tally) -> tuple[str, int]:
    return file_and_line(tally.place.library or tally.place.site)


_EQUAL_BY: tuple[Key, ...] = (
    lambda tally: (tally.operator, replace(tally.place, library=without_release(tally.place.library))),
    # An edit above a line moves the line, so this key has the file without the line number.
    lambda tally: (tally.operator, tally.place.module, _file_and_line(tally)[0]),
    # All further keys ignore the layers' numbers: the same calls may be in another layer now, or their layers may be unknown.
    # The last key also ignores the module, because it may have been renamed.
    lambda tally: (tally.operator, of_any_layer(tally.place)),
    lambda tally: (tally.operator, of_any_layer(tally.place).module, _file_and_line(tally)[0]),
    lambda tally: (tally.operator, of_any_layer(tally.place).module),
    lambda tally: (tally.operator, _file_and_line(tally)[0]),
)
"""Keys for finding the baseline's calls among the current calls, from the strictest to the loosest."""


def changed_tallies(before: Sequence[Tally], after: Sequence[Tally]) -> tuple[Tally, ...]:
    """Return the new calls, and the disappeared calls with negative amounts. The amounts add up to the count's change.

    For each operator, the result has either new calls or disappeared calls, so moved calls are not in the result. If nothing
    proves which of an operator's lines has the new calls, the result has a line at which other operators are new, too. If
    there is no such line, the result has the line farthest from the operator's line in the baseline.

    A baseline lists only the places with the largest amounts. For the other places it stores one amount for each operator. New
    calls at unlisted places are compared with this amount. If they exceed it, the excess has no line, because any unlisted
    place may have grown.

    Example:
        The baseline has 8 ``addmm`` at ``mlp.py:12`` and this step has 8 at ``mlp.py:14`` and 4 at ``head.py:7``. The result
        is one tally with 4 ``addmm`` at ``head.py:7``.
    """
    before, after = ([part for tally in side for part in each_layer(tally)] for side in (before, after))
    before, after = _split_into_layers(before, after), _split_into_layers(after, before)
    (old, old_rest), (new, new_rest) = _split_by_place(before), _split_by_place(after)
    old_rest, new_rest = old_rest - new_rest, new_rest - old_rest
    for key in _EQUAL_BY:
        old, new = _without_common(old, new, key)
    may_be_unlisted = _may_be_unlisted(before, after)
    unlisted = {tally for tally in new if old_rest[tally.operator] and may_be_unlisted(tally)}
    old, new = _without_common(old, new, lambda tally: tally.operator, last=frozenset(unlisted))
    changes = []
    for operator in {tally.operator for tally in (*old, *new)}:
        disappeared, appeared = ([tally for tally in side if tally.operator == operator] for side in (old, new))
        in_rest = [tally for tally in appeared if old_rest[operator] and may_be_unlisted(tally)]
        growth_of_rest = total(in_rest) - old_rest[operator]
        if in_rest and growth_of_rest > 0:
            modules = {of_any_layer(tally.place).module for tally in in_rest}
            changes.append(
                Tally(operator, growth_of_rest, OperatorSite(modules.pop()) if len(modules) == 1 else NOWHERE)
            )
        changes += _without_amount([tally for tally in appeared if tally not in in_rest], max(0, -growth_of_rest))
        changes += [replace(tally, amount=-tally.amount) for tally in _without_amount(disappeared, new_rest[operator])]
        old_rest[operator] -= total(appeared)
        new_rest[operator] -= total(disappeared)
    changes += [Tally(operator, amount) for operator, amount in (+new_rest).items()]
    changes += [Tally(operator, -amount) for operator, amount in (+old_rest).items()]
    return of_layers(sum_tallies(changes), {})


def _split_into_layers(tallies: Sequence[Tally], other_side: Sequence[Tally]) -> list[Tally]:
    """Split each tally for all layers into equal parts, if ``other_side`` has tallies for single layers of the same module."""
    layers: dict[tuple[str, str], set[Numbers]] = {}
    for tally in other_side:
        numbers = layer_of(tally.place)
        if numbers is not None:
            layers.setdefault((tally.operator, of_any_layer(tally.place).module), set()).add(numbers)
    return [
        part for tally in tallies for part in in_layers(tally, layers.get((tally.operator, tally.place.module), ()))
    ]


def _split_by_place(tallies: Iterable[Tally]) -> tuple[list[Tally], Counter[str]]:
    """Return the tallies with a place, and the sum by operator over the tallies without a place."""
    placed, unplaced = [], Counter[str]()
    for tally in tallies:
        if tally.place == NOWHERE:
            unplaced[tally.operator] += tally.amount
        else:
            placed.append(tally)
    return placed, unplaced


def _may_be_unlisted(before: Iterable[Tally], after: Iterable[Tally]) -> Callable[[Tally], bool]:
    """Return a function for checking whether current calls may have existed in the baseline, at a place missing in ``before``.

    The function returns ``False`` if the place of the calls is listed in the baseline. It also returns ``False`` if the calls
    have a larger amount than the smallest listed place, because a baseline lists the places with the largest amounts.
    """
    old_amounts, new_amounts = Counter[OperatorSite](), Counter[OperatorSite]()
    for amounts, tallies in ((old_amounts, before), (new_amounts, after)):
        for tally in tallies:
            if tally.place != NOWHERE:
                amounts[of_any_layer(tally.place)] += tally.amount
    most = min(old_amounts.values(), default=max(new_amounts.values(), default=0))
    return lambda tally: of_any_layer(tally.place) not in old_amounts and tally.amount <= most


def _without_common(
    old: list[Tally], new: list[Tally], key: Key, last: Collection[Tally] = ()
) -> tuple[list[Tally], list[Tally]]:
    """Subtract the common amount of each key from ``old`` and ``new``.

    In ``new``, the amount is first subtracted from tallies at lines without new operators, and only at the end from the tallies
    in ``last``.
    """
    groups = grouped(old, new, key).values()
    # The amount of new calls at each line. Calls are new if the baseline has no calls with the same key.
    new_at_line: Counter[tuple[str, str]] = Counter()
    for old_group, new_group in groups:
        for tally in new_group if not old_group else ():
            new_at_line[_line(tally)] += tally.amount
    remaining_old, remaining_new = [], []
    for old_group, new_group in groups:
        common = min(total(old_group), total(new_group))
        lines = [_file_and_line(tally)[1] for tally in old_group]

        def rank(tally: Tally, lines: Sequence[int] = lines) -> tuple[bool, int, int, int]:
            line = _file_and_line(tally)[1]
            distance = min((abs(line - old_line) for old_line in lines), default=0)
            # Tallies with small amounts come first, so they count as unchanged, and the result has the larger ones.
            return tally in last, new_at_line[_line(tally)], distance, tally.amount

        remaining_old += _without_amount(old_group, common)
        remaining_new += _without_amount(sorted(new_group, key=rank), common)
    return remaining_old, remaining_new


def _without_amount(tallies: Iterable[Tally], amount: int) -> list[Tally]:
    """Subtract ``amount`` from the tallies, beginning with the first tally. Tallies without a remaining amount are dropped."""
    remaining = []
    for tally in tallies:
        taken = min(amount, tally.amount)
        amount -= taken
        if taken < tally.amount:
            remaining.append(Tally(tally.operator, tally.amount - taken, tally.place))
    return remaining


def _line(tally: Tally) -> tuple[str, str]:
    return tally.place.site, tally.place.library
