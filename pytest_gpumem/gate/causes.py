"""Causes of what grew in a session: lines of code, or what else differs, that explain growth of several tests at once. Pure.

A test's own explanation has many rows, of which most follow from one: the peak has moved, and other tensors are there. So the
causes are those lines that explain most of the growth of most tests, as few as that takes.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Literal, NamedTuple

from pytest_gpumem.gate.growths import ENOUGH, KEPT, LEAST, growths_of, proven
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.units import counted
from pytest_gpumem.values.composition import KEPT_IN
from pytest_gpumem.values.source_lines import file_and_line, package_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from pytest_gpumem.gate.growths import Alternatives, Explained, Growth, Part, Place
    from pytest_gpumem.gate.verdict import TestVerdict

_MOST_MODULES = 2
"""Modules of a cause that are named."""
_SEVERAL = 2
"""Tests that have to exceed one budget to have a cause in common; of a single one, its own text says it all."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a growth that a cause explains, in the metric's unit."""

    growth: Growth
    amount: float


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that explains growth of one or several tests.

    ``lines`` are those that explain most first. They are empty for what is known by its module alone, or by its category, and
    where it is packages whose releases differ, or a budget. Of a holder they are the lines that made the tensors.
    """

    kind: Literal["line", "holder", "packages", "budget"]
    lines: tuple[str, ...]
    modules: tuple[str, ...]
    """Paths of the modules that its lines ran in, those of most growths first: where one is the model itself, its class."""
    operator: str
    what: str
    """The tensors, or of a budget its metric and limit."""
    category: str
    reason: str
    shares: tuple[Share, ...]
    holder: str = ""
    """The path to what keeps the tensors alive: ``"Net.seen[...]"``."""
    packages: tuple[str, ...] = ()
    """Packages whose releases differ from those of the baseline in each of its tests, as clauses."""

    @property
    def module(self) -> str:
        """Its modules as one path: ``*.attn`` where all paths end so, else the first of them, as ``*.attn, Attention``."""
        if len(self.modules) < 2:
            return "".join(self.modules)
        end = _common_end([module.split(".") for module in self.modules])
        if set(end) - {"*"}:
            return ".".join(end if end[0] == "*" else ("*", *end))
        more = len(self.modules) - _MOST_MODULES
        named = ", ".join(self.modules[:_MOST_MODULES])
        return f"{named} and {counted(more, 'other')}" if more > 0 else named

    @property
    def has_tensors(self) -> bool:
        """True if `what` is tensors."""
        return self.kind in ("line", "holder")

    @property
    def lacks_holder(self) -> bool:
        """True if it is tensors that are kept, and their holder was not found."""
        return self.kind == "line" and any(share.growth.metric in KEPT for share in self.shares)

    @property
    def tests(self) -> tuple[str, ...]:
        """The ids of its tests."""
        return tuple(sorted({share.growth.test for share in self.shares}))

    @property
    def metric(self) -> str:
        """The metric by which it is counted: the one that most of its shares are of, of several the most important.

        A holder is counted by what is kept.
        """
        shares = [share for share in self.shares if share.growth.metric in KEPT or not self.holder] or self.shares
        counts = Counter(share.growth.metric for share in shares)
        return min(counts, key=lambda name: (-counts[name], METRICS[name].precedence))

    @property
    def total(self) -> float:
        """The sum of its shares of `metric`, in its unit."""
        return sum(share.amount for share in self._counted)

    @property
    def largest(self) -> Share:
        """The largest of its shares of `metric`."""
        return min(self._counted, key=lambda share: (-share.amount, share.growth))

    @property
    def _counted(self) -> list[Share]:
        return [share for share in self.shares if share.growth.metric == self.metric]


class Unproven(NamedTuple):
    """Lines or holders that may be the cause. Nothing proves which of them it is."""

    lines: tuple[str, ...]
    """Lines, or clauses on holders: ``kept in Net.seen[...]``."""
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Causes:
    """Causes, those of most tests first, and what none of them explains: the shares of a growth add up to it exactly."""

    causes: tuple[Cause, ...] = ()
    not_explained: tuple[Share, ...] = ()
    unproven: tuple[Unproven, ...] = ()
    """Alternatives for a part of `not_explained`, sorted by their number of tests."""

    def of(self, test: str) -> tuple[Cause, ...]:
        """Return the causes of a test."""
        return tuple(cause for cause in self.causes if test in cause.tests)

    @property
    def unexplained(self) -> tuple[Share, ...]:
        """Shares that no cause explains, of growth that has no cause, or not enough of it."""
        return tuple(share for share in self.not_explained if share.amount > (1 - ENOUGH) * share.growth.amount)


def causes_of(tests: Iterable[TestVerdict]) -> Causes:
    """Return the causes of what grew in tests: the same in whichever order these are."""
    growths = growths_of(tests)
    growths = proven(growths, _chosen(growths))
    first_of = _joined(_chosen(growths), growths)
    shares: dict[Place, list[tuple[Explained, float]]] = defaultdict(list)
    for one in growths:
        for first, amount in _shares(one, first_of).items():
            shares[first].append((one, amount))
    places_of: dict[Place, list[Place]] = defaultdict(list)
    for place, first in first_of.items():
        places_of[first].append(place)
    found = [_cause_at(places, shares[first]) for first, places in places_of.items() if first in shares]
    for kind in ("packages", "budget"):
        explained = {share.growth for cause in found for share in cause.shares}
        found += _other_causes(kind, [one for one in growths if one.growth not in explained])
    left = {one.growth: one.growth.amount for one in growths}
    for cause in found:
        for share in cause.shares:
            left[share.growth] -= share.amount
    not_explained = tuple(Share(growth, amount) for growth, amount in left.items() if amount)
    return Causes(tuple(sorted(found, key=_order)), not_explained, _unproven(growths))


def _unproven(growths: Iterable[Explained]) -> tuple[Unproven, ...]:
    """Return the remaining alternatives, joined if their lines and holders are equal apart from package releases."""
    groups: dict[frozenset[str], list[tuple[Growth, Alternatives]]] = defaultdict(list)
    for explained in growths:
        for alternatives in explained.alternatives:
            lines = frozenset(place.holder or place.line for place in alternatives.parts if place.holder or place.line)
            if lines and alternatives.amount >= LEAST * explained.growth.amount:
                groups[lines].append((explained.growth, alternatives))
    unproven = [
        Unproven(
            tuple(sorted({line for _, each in group for place in each.parts for line in _named(place, each)})),
            tuple(Share(growth, each.amount) for growth, each in group),
        )
        for group in groups.values()
    ]
    return tuple(sorted(unproven, key=lambda each: (-len({share.growth.test for share in each.shares}), each.lines)))


def _named(place: Place, alternatives: Alternatives) -> tuple[str, ...]:
    """Return a clause on the holder at a place, or else the lines there."""
    return (f"{KEPT_IN} {place.holder}",) if place.holder else alternatives.parts[place].lines


def _order(cause: Cause) -> tuple[object, ...]:
    return -len(cause.tests), METRICS[cause.metric].precedence, -cause.total, cause.lines, cause.module, cause.what


def _chosen(growths: Sequence[Explained]) -> list[Place]:
    """Return the fewest places that explain `ENOUGH` of each growth, as far as they can: always the one that explains most."""
    left = {one.growth: one.growth.amount for one in growths}
    at: dict[Place, list[Explained]] = defaultdict(list)
    for one in growths:
        for place in one.parts:
            if one.at(place) > 0:
                at[place].append(one)

    def gain(place: Place) -> tuple[float, float]:
        """Return how much more of the growths a place explains, as a sum of ratios; a metric has a unit of its own."""
        ratios = [
            min(one.at(place), left[one.growth]) / one.growth.amount
            for one in at[place]
            if left[one.growth] > (1 - ENOUGH) * one.growth.amount
        ]
        return sum(ratio for ratio in ratios if ratio >= LEAST), sum(one.at(place) for one in at[place])

    # What a place explains becomes only less while others are chosen.
    heap = [(-first, -total, place) for place in at for first, total in [gain(place)] if first > 0]
    heapq.heapify(heap)
    chosen: list[Place] = []
    while heap:
        before, _, place = heapq.heappop(heap)
        now, total = gain(place)
        if now <= 0:
            continue
        if -now > before and heap and (-now, -total, place) > heap[0]:
            heapq.heappush(heap, (-now, -total, place))
            continue
        chosen.append(place)
        for one in at[place]:
            left[one.growth] -= one.at(place)
    return chosen


def _joined(chosen: Sequence[Place], growths: Sequence[Explained]) -> dict[Place, Place]:
    """Return the first place of the cause of each.

    Lines of one module in one file are one where they explain the same tests; a later one may explain fewer than the first.
    """
    tests: dict[Place, set[str]] = {place: set() for place in chosen}
    for one in growths:
        for place in one.parts:
            if place in tests and one.at(place) > 0:
                tests[place].add(one.growth.test)
    firsts: dict[tuple[str, str], list[Place]] = defaultdict(list)
    first_of: dict[Place, Place] = {}
    explained: dict[Place, set[str]] = {}
    for places in _by_line(chosen, growths):
        file, mine = _file(places[0]), set[str]().union(*(tests[place] for place in places))
        earlier = [one for place in places for one in firsts[file, place.module]] if file else []
        first = next((one for one in earlier if mine <= explained[one]), places[0])
        explained.setdefault(first, mine)
        for place in places:
            first_of[place] = first
            if first not in earlier:
                firsts[file, place.module].append(first)
    return first_of


def _by_line(chosen: Sequence[Place], growths: Sequence[Explained]) -> Collection[list[Place]]:
    """Return places in groups: those of a line of the project, and each other one by itself.

    A line of the project is one cause in whichever modules it ran: a model has a module by its attribute, a test of the module
    alone by its class.
    """
    of_packages = {
        place
        for one in growths
        for place, part in one.parts.items()
        if one.at(place) > 0 and any(map(package_of, part.lines))
    }
    groups: dict[Place | str, list[Place]] = defaultdict(list)
    for place in chosen:
        groups[place if place in of_packages or not place.line else place.line].append(place)
    return groups.values()


def _file(place: Place) -> str:
    return file_and_line(place.line)[0] if place.line else ""


def _shares(one: Explained, first_of: Mapping[Place, Place]) -> dict[Place, float]:
    """Return the share of each cause in a growth, by its first place.

    Where something else has shrunk, shares are less than what there is more.
    """
    more: dict[Place, float] = {}
    for place in one.parts:
        if place in first_of and one.at(place) > 0:
            more[first_of[place]] = more.get(first_of[place], 0) + one.at(place)
    every, amount = sum(more.values()), one.growth.amount
    if every <= amount:
        return more
    shares = {first: amount * part // every for first, part in more.items()}
    shares[max(more, key=lambda first: (more[first], first))] += amount - sum(shares.values())
    return {first: share for first, share in shares.items() if share}


def _cause_at(places: Sequence[Place], mine: Sequence[tuple[Explained, float]]) -> Cause:
    """Return the cause at some places, of the growths that it explains and its share in each."""
    parts: dict[Place, Part] = {}
    for one, _ in mine:
        for place in places:
            if one.at(place) > 0:
                parts[place] = parts[place] + one.parts[place] if place in parts else one.parts[place]
    by_size = sorted(parts, key=lambda place: (-parts[place].amount, place))
    shown = parts[by_size[0]]
    explained = [one for one, _ in mine]
    holder = places[0].holder
    return Cause(
        "holder" if holder else "line",
        tuple(dict.fromkeys(line for place in by_size for line in parts[place].lines)),
        _modules(parts, explained, shown.module),
        shown.operator,
        shown.what,
        shown.category,
        shown.reason,
        tuple(Share(one.growth, share) for one, share in mine),
        holder,
        _in_all(explained),
    )


def _modules(parts: Iterable[Place], growths: Sequence[Explained], shown: str) -> tuple[str, ...]:
    """Return the modules of places, those of most growths first; of a single one ``shown``, the path of its largest row."""
    counts = Counter(place.module for one in growths for place in parts if one.at(place) > 0)
    names = sorted((name for name in counts if name), key=lambda name: (-counts[name], name))
    if len(names) > 1:
        return tuple(names)
    return tuple(filter(None, [shown or "".join(names)]))


def _common_end(paths: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the parts that all paths end with."""
    from_the_end = zip(*(reversed(path) for path in paths), strict=False)
    return tuple(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, from_the_end))[::-1]


def _in_all(growths: Sequence[Explained]) -> tuple[str, ...]:
    """Return the packages that differ from the baseline's in all of these."""
    return tuple(clause for clause in growths[0].packages if all(clause in one.packages for one in growths))


def _other_causes(kind: Literal["packages", "budget"], growths: Sequence[Explained]) -> Iterator[Cause]:
    """Yield the causes of growth that no line explains: the same packages differ, or several tests exceed the same budget."""
    groups: dict[tuple[str, tuple[str, ...]], list[Explained]] = defaultdict(list)
    for one in growths:
        if kind == "packages" and one.packages:
            groups["", one.packages].append(one)
        elif kind == "budget" and one.budget:
            groups[f"{one.growth.metric} {one.budget}", ()].append(one)
    for (what, packages), mine in groups.items():
        if kind == "budget" and len({one.growth.test for one in mine}) < _SEVERAL:
            continue
        shares = tuple(Share(one.growth, one.growth.amount) for one in mine)
        yield Cause(kind, (), (), "", what, "", "", shares, packages=packages)
