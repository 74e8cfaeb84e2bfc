"""Causes of what grew in a session: lines of code, or what else differs, that explain growth of several tests at once. Pure.

A test's own explanation has many rows, of which most follow from one: the peak has moved, and other tensors are there. So the
causes are those lines that explain most of the growth of most tests, as few as that takes.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from pytest_gpumem.gate.verdict import Outcome
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.values.composition import REST
from pytest_gpumem.values.source_lines import file_and_line, without_release

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pytest_gpumem.gate.verdict import MetricVerdict, TestVerdict, Verdict
    from pytest_gpumem.values.composition import Row
    from pytest_gpumem.values.operator_counts import Tally

WORSE = (Outcome.REGRESSED, Outcome.OVER_BUDGET, Outcome.UNCERTAIN)
ENOUGH = 0.8
"""Share of a growth that its causes have to explain; the rest of it are consequences."""
LEAST = 0.1
"""Share of a growth that a line has to explain at least to be one of its causes."""


@dataclass(frozen=True, slots=True, order=True)
class Growth:
    """A metric that is worse: of a measurement of a test, by so much. The amount is in the metric's unit."""

    test: str
    """The test's id."""
    name: str
    metric: str
    device: str
    amount: float = field(compare=False)


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a growth that a cause explains, in the metric's unit."""

    growth: Growth
    amount: float


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that explains growth of one or several tests.

    ``lines`` are of one module, those that explain most first. They are empty for what is known by its module alone, or by its
    category, and where it is packages whose releases differ, or a budget.
    """

    kind: Literal["line", "packages", "budget"]
    lines: tuple[str, ...]
    module: str
    operator: str
    what: str
    """The tensors, or of a budget its metric and limit."""
    category: str
    reason: str
    shares: tuple[Share, ...]
    holders: tuple[str, ...] = ()
    """Attributes and variables that keep the tensors, of those that each step keeps."""
    packages: tuple[str, ...] = ()
    """Packages whose releases differ from those of the baseline in each of its tests, as clauses."""

    @property
    def tests(self) -> tuple[str, ...]:
        """The ids of its tests."""
        return tuple(sorted({share.growth.test for share in self.shares}))

    @property
    def metric(self) -> str:
        """The metric by which it is counted: the one that most of its shares are of, of several the most important."""
        counts = Counter(share.growth.metric for share in self.shares)
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


@dataclass(frozen=True, slots=True)
class Causes:
    """Causes, those of most tests first, and what none of them explains: the shares of a growth add up to it exactly."""

    causes: tuple[Cause, ...] = ()
    not_explained: tuple[Share, ...] = ()

    def of(self, test: str) -> tuple[Cause, ...]:
        """Return the causes of a test."""
        return tuple(cause for cause in self.causes if test in cause.tests)

    @property
    def unexplained(self) -> tuple[Share, ...]:
        """Shares that no cause explains, of growth that has no cause, or not enough of it."""
        return tuple(share for share in self.not_explained if share.amount > (1 - ENOUGH) * share.growth.amount)


class _Place(NamedTuple):
    """A line without the release of its package, and a module; of tensors made before the step, their category."""

    line: str
    module: str
    category: str = ""


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one growth at one place: their sum, and what a report shows of the largest."""

    amount: float
    largest: float
    line: str
    module: str
    operator: str
    what: str
    category: str = ""
    reason: str = ""

    def __add__(self, other: _Part) -> _Part:
        larger = max(self, other, key=lambda one: (one.largest, one.line, one.module, one.operator, one.what))
        return replace(larger, amount=self.amount + other.amount)


@dataclass(frozen=True, slots=True)
class _Explained:
    """A growth, its parts by place, and what else may be its cause."""

    growth: Growth
    parts: Mapping[_Place, _Part]
    holders: tuple[str, ...]
    packages: tuple[str, ...]
    budget: str
    """The limit that is exceeded, where there is no more than in a baseline; else empty."""

    def at(self, place: _Place) -> float:
        """Return by how much more there is at a place; 0 where it is not more."""
        part = self.parts.get(place)
        return max(0, part.amount) if part is not None else 0


def causes_of(tests: Iterable[TestVerdict]) -> Causes:
    """Return the causes of what grew in tests: the same in whichever order these are."""
    all_of_them = (one for test in tests for verdict in test.verdicts for one in _growths(test.nodeid, verdict))
    growths = _of_inner_modules(sorted(all_of_them, key=lambda one: one.growth))
    first_of = _joined(_chosen(growths), growths)
    shares: dict[_Place, list[tuple[_Explained, float]]] = defaultdict(list)
    for one in growths:
        for first, amount in _shares(one, first_of).items():
            shares[first].append((one, amount))
    places_of: dict[_Place, list[_Place]] = defaultdict(list)
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
    return Causes(tuple(sorted(found, key=_order)), not_explained)


def _order(cause: Cause) -> tuple[object, ...]:
    return -len(cause.tests), METRICS[cause.metric].precedence, -cause.total, cause.lines, cause.module, cause.what


# What grew


def _growths(test: str, verdict: Verdict) -> Iterator[_Explained]:
    """Yield what grew in a measurement: bytes that are kept, the peak, garbage, and syncs; else other work; else time."""
    worse = {one.metric: one for one in verdict.metrics if one.outcome in WORSE and _amount(one) > 0}
    names = sorted(worse, key=lambda name: METRICS[name].precedence)
    memory, work = ([name for name in names if METRICS[name].kind == kind] for kind in ("memory", "work"))
    measurement, explanation = verdict.measurement, verdict.measurement.explanation
    # More operators are what memory grows by; who reads a value may do so anywhere.
    syncs = [name for name in work if name == "syncs"]
    for name in [*_one_of_each(memory), *syncs] or work[:1] or names[:1]:
        one = worse[name]
        kept = name in _KEPT and explanation is not None
        no_more = one.baseline is None or one.value <= one.baseline
        yield _Explained(
            Growth(test, measurement.name, name, measurement.environment.device, _amount(one)),
            _parts(verdict, name),
            explanation.holders if kept and explanation is not None else (),
            verdict.changed_packages,
            f"{one.budget}" if one.outcome is Outcome.OVER_BUDGET and no_more else "",
        )


_KEPT = ("growth", "retained")


def _one_of_each(memory: Sequence[str]) -> list[str]:
    """Return the first metric of each kind of memory: of what is kept, of peaks, and garbage."""
    found: dict[object, str] = {}
    for name in memory:
        found.setdefault("kept" if name in _KEPT else METRICS[name].peak or name, name)
    return list(found.values())


def _amount(one: MetricVerdict) -> float:
    """Return by how much a metric is worse than its baseline, or than its budget where it is not."""
    sign = -1 if METRICS[one.metric].larger_is_better else 1
    by = [sign * (one.value - against) for against in (one.baseline, one.budget) if against is not None]
    return next((amount for amount in by if amount > 0), 0)


def _parts(verdict: Verdict, metric: str) -> dict[_Place, _Part]:
    """Return what explains a metric of a measurement, by place."""
    explanation = verdict.measurement.explanation
    if metric in verdict.count_changes:
        return _summed(_of_tally(tally) for tally in verdict.count_changes[metric])
    if METRICS[metric].peak:
        return _parts_of_peak(verdict)
    if explanation is None or metric not in (*_KEPT, "cyclic_garbage"):
        return {}
    left = explanation.retained if metric in _KEPT else explanation.garbage
    return _summed(_of_row(row, row.nbytes) for row in left.rows)


def _parts_of_peak(verdict: Verdict) -> dict[_Place, _Part]:
    """Return what grew at the peak; where that is many small rows, also what was left, which was there at the peak."""
    difference, explanation = verdict.difference, verdict.measurement.explanation
    if difference is None:
        return {}
    parts = _summed(_of_row(change.row, change.nbytes, change.reason) for change in difference.changes)
    if explanation is not None and sum(max(0, part.amount) for part in parts.values()) < ENOUGH * difference.nbytes:
        parts = {**_summed(_of_row(row, row.nbytes) for row in explanation.retained.rows), **parts}
    return parts


def _summed(parts: Iterable[tuple[_Place, _Part] | None]) -> dict[_Place, _Part]:
    found: dict[_Place, _Part] = {}
    for place, part in filter(None, parts):
        found[place] = found[place] + part if place in found else part
    return found


def _of_row(row: Row, nbytes: int, reason: str = "") -> tuple[_Place, _Part] | None:
    """Return the place of a row, and the row as a part; ``None`` for the sum of small rows."""
    line = row.library or row.site
    if row.operator == REST:
        return None
    place = _Place(without_release(line), row.module, "" if line or row.module else row.category)
    return place, _Part(nbytes, nbytes, line, row.path, row.operator, row.what, row.category, reason)


def _of_tally(tally: Tally) -> tuple[_Place, _Part]:
    line, module = tally.place.library or tally.place.site, tally.place.module
    # Of kernels the lines are not known.
    place = _Place(without_release(line), module) if line or module else _Place("", tally.operator)
    return place, _Part(tally.amount, tally.amount, line, module, tally.operator, "")


def _of_inner_modules(growths: Sequence[_Explained]) -> list[_Explained]:
    """Return growths in which a module at a line has one name in all tests, without those of what is around it in some."""
    modules: dict[str, set[str]] = defaultdict(set)
    for one in growths:
        for place in one.parts:
            modules[place.line].add(place.module)
    inner: dict[tuple[str, str], str] = {}
    for line, names in modules.items():
        for name in names:
            ends = {part for part in _ends(name) if line and part in names}
            inner[line, name] = min(ends, key=len, default=name)
    return [
        replace(
            one,
            parts=_summed(
                (place._replace(module=inner[place.line, place.module]), part) for place, part in one.parts.items()
            ),
        )
        for one in growths
    ]


def _ends(module: str) -> Iterator[str]:
    """Yield ``model.blocks.*.attn``, ``blocks.*.attn``, ``*.attn``, ``attn``."""
    parts = module.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)) if module)


# Which places explain it


def _chosen(growths: Sequence[_Explained]) -> list[_Place]:
    """Return the fewest places that explain `ENOUGH` of each growth, as far as they can: always the one that explains most."""
    left = {one.growth: one.growth.amount for one in growths}
    at: dict[_Place, list[_Explained]] = defaultdict(list)
    for one in growths:
        for place in one.parts:
            if one.at(place) > 0:
                at[place].append(one)

    def gain(place: _Place) -> tuple[float, float]:
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
    chosen: list[_Place] = []
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


def _joined(chosen: Sequence[_Place], growths: Sequence[_Explained]) -> dict[_Place, _Place]:
    """Return the first place of the cause of each: lines of one module in one file are one where they explain the same tests.

    A later one may explain fewer tests than the first.
    """
    tests: dict[_Place, set[str]] = {place: set() for place in chosen}
    for one in growths:
        for place in one.parts:
            if place in tests and one.at(place) > 0:
                tests[place].add(one.growth.test)
    firsts: dict[tuple[str, str], list[_Place]] = defaultdict(list)
    first_of = {}
    for place in chosen:
        earlier = firsts[_file(place), place.module]
        first_of[place] = next((one for one in earlier if _file(place) and tests[place] <= tests[one]), place)
        if first_of[place] == place:
            earlier.append(place)
    return first_of


def _file(place: _Place) -> str:
    return file_and_line(place.line)[0] if place.line else ""


def _shares(one: _Explained, first_of: Mapping[_Place, _Place]) -> dict[_Place, float]:
    """Return the share of each cause in a growth, by its first place.

    Where something else has shrunk, shares are less than what there is more.
    """
    more: dict[_Place, float] = {}
    for place in one.parts:
        if place in first_of and one.at(place) > 0:
            more[first_of[place]] = more.get(first_of[place], 0) + one.at(place)
    every, amount = sum(more.values()), one.growth.amount
    if every <= amount:
        return more
    shares = {first: amount * part // every for first, part in more.items()}
    shares[max(more, key=lambda first: (more[first], first))] += amount - sum(shares.values())
    return {first: share for first, share in shares.items() if share}


def _cause_at(places: Sequence[_Place], mine: Sequence[tuple[_Explained, float]]) -> Cause:
    """Return the cause at some places, of the growths that it explains and its share in each."""
    parts: dict[_Place, _Part] = {}
    for one, _ in mine:
        for place in places:
            if one.at(place) > 0:
                parts[place] = parts[place] + one.parts[place] if place in parts else one.parts[place]
    by_size = sorted(parts, key=lambda place: (-parts[place].amount, place))
    shown = parts[by_size[0]]
    explained = [one for one, _ in mine]
    return Cause(
        "line",
        tuple(parts[place].line for place in by_size if place.line),
        shown.module,
        shown.operator,
        shown.what,
        shown.category,
        shown.reason,
        tuple(Share(one.growth, share) for one, share in mine),
        tuple(dict.fromkeys(holder for one in explained for holder in one.holders)),
        _in_all(explained),
    )


def _in_all(growths: Sequence[_Explained]) -> tuple[str, ...]:
    """Return the packages that differ from the baseline's in all of these."""
    return tuple(clause for clause in growths[0].packages if all(clause in one.packages for one in growths))


def _other_causes(kind: Literal["packages", "budget"], growths: Sequence[_Explained]) -> Iterator[Cause]:
    """Yield the causes of growth that no line explains: the same packages differ, or the same budget is exceeded."""
    groups: dict[tuple[str, tuple[str, ...]], list[_Explained]] = defaultdict(list)
    for one in growths:
        if kind == "packages" and one.packages:
            groups["", one.packages].append(one)
        elif kind == "budget" and one.budget:
            groups[f"{one.growth.metric} {one.budget}", ()].append(one)
    for (what, packages), mine in groups.items():
        shares = tuple(Share(one.growth, one.growth.amount) for one in mine)
        yield Cause(kind, (), "", "", what, "", "", shares, packages=packages)
