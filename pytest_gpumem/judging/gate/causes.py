"""Find the causes of growth in a session: code lines, packages or budgets that explain growth in several tests at once. Pure.

In a single test, many rows may have grown, and most of them only as a consequence: the peak moved to another moment in the
step, with other live tensors. So the causes are the few lines that together explain most of the growth in most tests.

Example: six tests have a larger peak. In each test several rows grew, and in all six a row at ``tiny_models/gpt.py:38`` grew.
If this line explains at least 80 % of the growth in each test, it is the only cause.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from pytest_gpumem.base.units import counted
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.composition import KEPT_IN
from pytest_gpumem.facts.values.rank import in_words, rank_in
from pytest_gpumem.facts.values.source_lines import file_and_line, package_of
from pytest_gpumem.judging.gate.growths import ENOUGH, KEPT_METRICS, LEAST, growths_of, with_proven_places
from pytest_gpumem.judging.gate.verdict import FAILING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from pytest_gpumem.judging.gate.growths import Alternatives, ExplainedGrowth, Growth, Part, Place
    from pytest_gpumem.judging.gate.verdict import TestVerdict

_MOST_MODULES = 2
"""If the paths of a cause's modules have no common end, the cause's text names this many modules and counts the others."""
_SEVERAL = 2
"""A budget is a cause if at least this many tests exceed it. If only one test exceeds it, this test's own failure says so."""


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a growth: either the part explained by a cause, or the part without a cause."""

    growth: Growth
    amount: float
    """The size of the part, in the metric's unit."""

    @property
    def needs_cause(self) -> bool:
        """True if the part is larger than 20 % of its growth.

        An unexplained part of at most 20 % needs no cause of its own. It counts as a consequence of the causes that explain the
        rest.
        """
        return self.amount > (1 - ENOUGH) * self.growth.amount


@dataclass(frozen=True, slots=True)
class Cause:
    """A change that explains growth in one or several tests.

    ``lines`` begins with the line that explains the largest part of the growth. ``lines`` is empty for packages and budgets,
    and if only the module or the category of the tensors is known. If the cause is a holder, which is an object that keeps
    tensors alive, ``lines`` has the lines that allocated these tensors.

    Example:
        In the example project, six tests fail because ``tiny_models/gpt.py:38`` computes attention with an explicit softmax.
        The cause has the kind ``line``, the module ``blocks.*.attention`` and the operator ``_softmax``. Its six shares of
        ``peak_allocated`` add up to 126.48 MB, and the largest share is 33.69 MB.
    """

    kind: Literal["line", "holder", "packages", "budget"]
    lines: tuple[str, ...]
    modules: tuple[str, ...]
    """Paths to the modules in which the lines ran, the most frequent first. The model itself is named by its class."""
    operator: str
    tensors: str
    """The tensors with the most growth in the cause's `metric`: ``4 x float32[8, 4, 256, 256]``. For a budget, the metric and
    the limit."""
    category: str
    reason: str
    shares: tuple[Share, ...]
    holder: str = ""
    """The path to the object that keeps the tensors alive: ``"Net.seen[...]"``."""
    packages: tuple[str, ...] = ()
    """A clause for each package whose release differs from the baseline's in all tests with this cause. For example:
    ``"transformers 4.38.2, was 4.37.2"``."""

    @property
    def module(self) -> str:
        """The modules in a single text.

        If the paths of all modules end alike, the text is their common end: ``*.attn``. If they do not end alike, the text
        names the first paths: ``blocks.*.attn, Attention``.
        """
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
        """True if ``tensors`` describes tensors. For a budget, this text names the limit, and for packages it is empty."""
        return self.kind in ("line", "holder")

    @property
    def lacks_holder(self) -> bool:
        """True if the tests keep tensors, and no holder was found."""
        return self.kind == "line" and any(share.growth.metric in KEPT_METRICS for share in self.shares)

    @property
    def tests(self) -> tuple[str, ...]:
        """The ids of the tests with this cause."""
        return tuple(sorted({share.growth.test for share in self.shares}))

    @property
    def only_on(self) -> tuple[str, ...]:
        """Clauses such as ``only on rank 1 of 4``, one for each job size, if only some ranks have the cause."""
        ranks = {rank for share in self.shares if (rank := rank_in(share.growth.name)) is not None}
        numbers_by_world = {
            world: sorted(rank.number for rank in ranks if rank.world == world)
            for world in sorted({rank.world for rank in ranks})
        }
        return tuple(
            f"only on {in_words(numbers)} of {world}"
            for world, numbers in numbers_by_world.items()
            if len(numbers) < world
        )

    @property
    def metric(self) -> str:
        """The metric in which this cause explains the most growths. Among metrics with equally many, the most important.

        For a holder, only growths in the metrics ``growth`` and ``retained`` count, if there are any.
        """
        return _metric_of([share.growth for share in self.shares], self.holder)

    @property
    def total(self) -> float:
        """The sum over the shares in the cause's `metric`, in the metric's unit."""
        return sum(share.amount for share in self._counted)

    @property
    def largest(self) -> Share:
        """The largest share in the cause's `metric`."""
        return min(self._counted, key=lambda share: (-share.amount, share.growth))

    @property
    def _counted(self) -> list[Share]:
        return [share for share in self.shares if share.growth.metric == self.metric]


class CandidateCause(NamedTuple):
    """Several lines or holders, of which at least one caused a growth. Nothing proves which line or holder did."""

    lines: tuple[str, ...]
    """The possible lines, and a clause for each possible holder: ``kept in Net.seen[...]``."""
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Causes:
    """The causes of growth in a session, the cause with the most tests first, and the tests whose growth they explain.

    For each growth, its shares in ``causes`` and ``not_explained`` add up to the growth exactly.

    Example:
        Six of 21 measured tests fail because of ``tiny_models/gpt.py:38``. One of them is also slower. There is one cause, the
        other five tests are ``explained``, and the slower test is ``partly_explained``.
    """

    causes: tuple[Cause, ...]
    not_explained: tuple[Share, ...]
    unproven: tuple[CandidateCause, ...]
    """The possible causes of parts in ``not_explained``, sorted by their number of tests."""
    by_test: Mapping[str, tuple[Cause, ...]]
    """The causes for each test that has a cause, by the test's id."""
    partly_explained: frozenset[str]
    """The ids of tests that have a cause, but also growth or another failing metric without a cause."""
    explained: frozenset[str]
    """The ids of tests that fail only because of their causes; empty if `concern_several_tests` is ``False``."""
    concern_several_tests: bool
    """True if several tests grew. If only a single test grew, its own failure text already explains the growth."""
    measured: int
    """The number of measured tests in the session."""

    def of(self, test: str) -> tuple[Cause, ...]:
        """Return the causes of a test."""
        return self.by_test.get(test, ())

    @property
    def unexplained(self) -> tuple[Share, ...]:
        """The shares in ``not_explained`` that are larger than 20 % of their growth, so they still need a cause."""
        return tuple(share for share in self.not_explained if share.needs_cause)


def causes_of(tests: Iterable[TestVerdict], measured: int | None = None) -> Causes:
    """Return the causes for the growth in these tests. The tests' order does not matter.

    Args:
        tests: The tests' verdicts. A test that ran on several devices has several verdicts.
        measured: The number of measured tests in the session, if ``tests`` lacks some of them. By default, the measured tests
            in ``tests`` are counted.
    """
    tests = list(tests)
    causes, not_explained, unproven = _causes(growths_of(test for test in tests if not test.unmeasured))
    by_test: dict[str, tuple[Cause, ...]] = {}
    for cause in causes:
        for name in cause.tests:
            by_test[name] = (*by_test.get(name, ()), cause)
    unexplained = [share.growth for share in not_explained if share.needs_cause]
    # No cause ever explains a longer time. So a test that only became slower counts only if the session has causes.
    without_cause = {
        growth.test for growth in unexplained if causes or METRICS[growth.metric].kind in ("memory", "work")
    }
    concern_several_tests = len(by_test.keys() | without_cause) > 1
    with_cause = [test for test in tests if test.nodeid in by_test]
    partly_explained = {growth.test for growth in unexplained if growth.test in by_test}
    # If shards ran a test on several devices, the test has several verdicts. It is explained only if its causes explain all
    # failures in each of these verdicts.
    partly_explained |= {test.nodeid for test in with_cause if _fails_for_more(test, by_test[test.nodeid])}
    failed_otherwise = {test.nodeid for test in with_cause if test.missing or test.failed_by_itself}
    return Causes(
        causes,
        not_explained,
        unproven,
        MappingProxyType(by_test),
        frozenset(partly_explained),
        frozenset(by_test.keys() - partly_explained - failed_otherwise if concern_several_tests else ()),
        concern_several_tests,
        len({test.nodeid for test in tests if not test.unmeasured}) if measured is None else measured,
    )


def _fails_for_more(test: TestVerdict, causes: Sequence[Cause]) -> bool:
    """Return whether a test's metrics also fail for reasons that its causes do not explain.

    Examples are a slower step, ranks with different peaks, a budget without a cause, or more operators at an unrelated line.
    """
    failing = {metric.metric for verdict in test.verdicts for metric in verdict.metrics if metric.outcome in FAILING}
    if "imbalance" in failing or any(METRICS[name].is_timed for name in failing):
        return True
    # A budget explains only its own metric. A line or a package may make other metrics grow as well.
    if any(cause.kind == "budget" for cause in causes):
        shares = [share for cause in causes for share in cause.shares if share.growth.test == test.nodeid]
        if not failing <= {share.growth.metric for share in shares}:
            return True
    files = {file_and_line(line)[0] for cause in causes for line in cause.lines}
    modules = {module for cause in causes for module in cause.modules}
    grown = (
        tally.place
        for verdict in test.verdicts
        for name, tallies in verdict.count_changes.items()
        for tally in tallies
        if name in failing and tally.amount > 0
    )
    lines = ((place.named or place.library or place.site, place.module) for place in grown)
    return any(line and file_and_line(line)[0] not in files and module not in modules for line, module in lines)


def _causes(
    growths: Sequence[ExplainedGrowth],
) -> tuple[tuple[Cause, ...], tuple[Share, ...], tuple[CandidateCause, ...]]:
    """Return the causes of these growths, the parts without a cause, and the candidate causes."""
    growths = with_proven_places(growths, _chosen(growths))
    first_of = _joined(_chosen(growths), growths)
    shares: dict[Place, list[tuple[ExplainedGrowth, float]]] = defaultdict(list)
    for explained in growths:
        for first, amount in _shares(explained, first_of).items():
            shares[first].append((explained, amount))
    places_of: dict[Place, list[Place]] = defaultdict(list)
    for place, first in first_of.items():
        places_of[first].append(place)
    causes = [_cause_at(places, shares[first]) for first, places in places_of.items() if first in shares]
    for kind in ("packages", "budget"):
        has_cause = {share.growth for cause in causes for share in cause.shares}
        causes += _other_causes(kind, [explained for explained in growths if explained.growth not in has_cause])
    unexplained = {explained.growth: explained.growth.amount for explained in growths}
    for cause in causes:
        for share in cause.shares:
            unexplained[share.growth] -= share.amount
    not_explained = tuple(Share(growth, amount) for growth, amount in unexplained.items() if amount)
    return tuple(sorted(causes, key=_order)), not_explained, _unproven(growths)


def _unproven(growths: Iterable[ExplainedGrowth]) -> tuple[CandidateCause, ...]:
    """Return the candidate causes: groups of places with growth, if nothing proves which place in a group grew.

    A group must have at least the share `LEAST` (10 %) of a test's growth. Groups with the same lines or holders become a
    single candidate. Package releases in the lines are ignored.
    """
    groups: dict[frozenset[str], list[tuple[Growth, Alternatives]]] = defaultdict(list)
    for explained in growths:
        for alternatives in explained.alternatives:
            lines = frozenset(place.holder or place.line for place in alternatives.parts if place.holder or place.line)
            if lines and alternatives.amount >= LEAST * explained.growth.amount:
                groups[lines].append((explained.growth, alternatives))
    unproven = [
        CandidateCause(
            tuple(
                sorted(
                    {
                        line
                        for _, alternatives in group
                        for place in alternatives.parts
                        for line in _named(place, alternatives)
                    }
                )
            ),
            tuple(Share(growth, alternatives.amount) for growth, alternatives in group),
        )
        for group in groups.values()
    ]
    return tuple(sorted(unproven, key=lambda cause: (-len({share.growth.test for share in cause.shares}), cause.lines)))


def _named(place: Place, alternatives: Alternatives) -> tuple[str, ...]:
    """Return a clause on the holder at a place, or the place's lines if no holder is known."""
    return (f"{KEPT_IN} {place.holder}",) if place.holder else alternatives.parts[place].lines


def _order(cause: Cause) -> tuple[object, ...]:
    return -len(cause.tests), METRICS[cause.metric].precedence, -cause.total, cause.lines, cause.module, cause.tensors


def _chosen(growths: Sequence[ExplainedGrowth]) -> list[Place]:
    """Return a few places that together explain the share `ENOUGH` of each growth, if possible.

    The algorithm is greedy: in each round it chooses the place with the largest gain. So there may be a smaller set of places.

    Example:
        Two tests grew by 10 MB each. Line A explains 9 MB in both tests, and line B explains 1 MB in the first test. A is
        chosen first. Then 90 % of both growths are explained, which is more than `ENOUGH`, so B is not chosen.
    """
    unexplained = {explained.growth: explained.growth.amount for explained in growths}
    growths_at: dict[Place, list[ExplainedGrowth]] = defaultdict(list)
    for explained in growths:
        for place in explained.parts:
            if explained.at(place) > 0:
                growths_at[place].append(explained)

    def gain(place: Place) -> tuple[float, float]:
        """Return how much more of the growths this place would explain, and the growth at the place.

        The first number is a sum of ratios, because amounts in different units (bytes, calls) cannot be added. For example, a
        place that explains half of two growths has a gain of 1.0.
        """
        ratios = [
            min(explained.at(place), unexplained[explained.growth]) / explained.growth.amount
            for explained in growths_at[place]
            if unexplained[explained.growth] > (1 - ENOUGH) * explained.growth.amount
        ]
        return sum(ratio for ratio in ratios if ratio >= LEAST), sum(
            explained.at(place) for explained in growths_at[place]
        )

    # A place's gain never rises when other places are chosen. So if its recomputed gain is still the largest, it is chosen.
    heap = [
        (-first_gain, -total, place) for place in growths_at for first_gain, total in [gain(place)] if first_gain > 0
    ]
    heapq.heapify(heap)
    chosen: list[Place] = []
    while heap:
        previous_gain, _, place = heapq.heappop(heap)
        current_gain, total = gain(place)
        if current_gain <= 0:
            continue
        if -current_gain > previous_gain and heap and (-current_gain, -total, place) > heap[0]:
            heapq.heappush(heap, (-current_gain, -total, place))
            continue
        chosen.append(place)
        for explained in growths_at[place]:
            unexplained[explained.growth] -= explained.at(place)
    return chosen


def _joined(chosen: Sequence[Place], growths: Sequence[ExplainedGrowth]) -> dict[Place, Place]:
    """Join places into causes. Return for each place the first place of its cause.

    A line joins the cause of a line that was chosen before it if both lines have the same file and module, and if this cause
    already has every test in which the new line explains growth.
    """
    tests: dict[Place, set[str]] = {place: set() for place in chosen}
    for explained in growths:
        for place in explained.parts:
            if place in tests and explained.at(place) > 0:
                tests[place].add(explained.growth.test)
    firsts: dict[tuple[str, str], list[Place]] = defaultdict(list)
    first_of: dict[Place, Place] = {}
    tests_of_cause: dict[Place, set[str]] = {}
    for places in _by_line(chosen, growths):
        file, line_tests = _file(places[0]), set[str]().union(*(tests[place] for place in places))
        earlier = [first for place in places for first in firsts[file, place.module]] if file else []
        first = next((first for first in earlier if line_tests <= tests_of_cause[first]), places[0])
        tests_of_cause.setdefault(first, line_tests)
        for place in places:
            first_of[place] = first
            if first not in earlier:
                firsts[file, place.module].append(first)
    return first_of


def _by_line(chosen: Sequence[Place], growths: Sequence[ExplainedGrowth]) -> Collection[list[Place]]:
    """Group places by their line, if the line is in the project. Every other place is a group by itself.

    A project line is a single cause even if its places have different modules. For example, the same module is called
    ``blocks.*.attn`` in a model, and ``Attention`` in a test that runs only this module.
    """
    package_places = {
        place
        for explained in growths
        for place, part in explained.parts.items()
        if explained.at(place) > 0 and any(map(package_of, part.lines))
    }
    groups: dict[Place | str, list[Place]] = defaultdict(list)
    for place in chosen:
        groups[place if place in package_places or not place.line else place.line].append(place)
    return groups.values()


def _file(place: Place) -> str:
    return file_and_line(place.line)[0] if place.line else ""


def _shares(explained: ExplainedGrowth, first_of: Mapping[Place, Place]) -> dict[Place, float]:
    """Return each cause's share in a growth, by the cause's first place.

    If other tensors shrank, the parts at all causes add up to more than the growth. The shares are then reduced in proportion.

    Example:
        A peak grew by 6 MB, because line A has 8 MB more, line B has 2 MB more, and other lines have 4 MB less. The shares are
        4.8 MB for A and 1.2 MB for B.
    """
    growth_at: dict[Place, float] = {}
    for place in explained.parts:
        if place in first_of and explained.at(place) > 0:
            growth_at[first_of[place]] = growth_at.get(first_of[place], 0) + explained.at(place)
    total, amount = sum(growth_at.values()), explained.growth.amount
    if total <= amount:
        return growth_at
    shares = {first: amount * part // total for first, part in growth_at.items()}
    shares[max(growth_at, key=lambda first: (growth_at[first], first))] += amount - sum(shares.values())
    return {first: share for first, share in shares.items() if share}


def _cause_at(places: Sequence[Place], explained_shares: Sequence[tuple[ExplainedGrowth, float]]) -> Cause:
    """Return a cause from its places.

    Args:
        places: The cause's places, in the order in which they were chosen.
        explained_shares: Each explained growth, with the cause's share in this growth.
    """
    explained_growths = [explained for explained, _ in explained_shares]
    holder = places[0].holder
    metric = _metric_of([explained.growth for explained in explained_growths], holder)
    parts = _parts_at(places, explained_growths)
    # A peak may have the tensors of several steps, and `growth` has those of one step.
    counted_parts = _parts_at(places, [each for each in explained_growths if each.growth.metric == metric])
    by_size = sorted(parts, key=lambda place: (-parts[place].amount, place))
    largest_part = min(counted_parts.items(), key=lambda item: (-item[1].amount, item[0]))[1]
    return Cause(
        "holder" if holder else "line",
        tuple(dict.fromkeys(line for place in by_size for line in parts[place].lines)),
        _modules(parts, explained_growths, largest_part.module),
        largest_part.operator,
        largest_part.tensors,
        largest_part.category,
        largest_part.reason,
        tuple(Share(explained.growth, share) for explained, share in explained_shares),
        holder,
        _in_all(explained_growths),
    )


def _parts_at(places: Iterable[Place], growths: Iterable[ExplainedGrowth]) -> dict[Place, Part]:
    """Return the parts at these places, added up over the growths."""
    parts: dict[Place, Part] = {}
    for explained in growths:
        for place in places:
            if explained.at(place) > 0:
                parts[place] = parts[place] + explained.parts[place] if place in parts else explained.parts[place]
    return parts


def _metric_of(growths: Sequence[Growth], holder: str) -> str:
    """Return a cause's metric, as `Cause.metric` describes it."""
    kept = [growth for growth in growths if growth.metric in KEPT_METRICS or not holder]
    counts = Counter(growth.metric for growth in kept or growths)
    return min(counts, key=lambda name: (-counts[name], METRICS[name].precedence))


def _modules(parts: Iterable[Place], growths: Sequence[ExplainedGrowth], path_of_largest: str) -> tuple[str, ...]:
    """Return the modules at these places, the most frequent first.

    If all places have the same module, the result is ``path_of_largest``, which also has the module's layer numbers.
    """
    counts = Counter(place.module for explained in growths for place in parts if explained.at(place) > 0)
    names = sorted((name for name in counts if name), key=lambda name: (-counts[name], name))
    if len(names) > 1:
        return tuple(names)
    return tuple(filter(None, [path_of_largest or "".join(names)]))


def _common_end(paths: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the paths' longest common end: ``("attn", "qkv")`` for ``a.attn.qkv`` and ``b.attn.qkv``."""
    from_the_end = zip(*(reversed(path) for path in paths), strict=False)
    return tuple(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, from_the_end))[::-1]


def _in_all(growths: Sequence[ExplainedGrowth]) -> tuple[str, ...]:
    """Return the clauses on changed packages that occur in all growths."""
    return tuple(clause for clause in growths[0].packages if all(clause in explained.packages for explained in growths))


def _other_causes(kind: Literal["packages", "budget"], growths: Sequence[ExplainedGrowth]) -> Iterator[Cause]:
    """Yield the causes for growths that neither a line nor a holder explains.

    With the kind ``packages``, a cause is a set of packages whose releases differ from the baseline's. With the kind
    ``budget``, several tests exceed the same budget.
    """
    groups: dict[tuple[str, tuple[str, ...]], list[ExplainedGrowth]] = defaultdict(list)
    for explained in growths:
        if kind == "packages" and explained.packages:
            groups["", explained.packages].append(explained)
        elif kind == "budget" and explained.budget:
            groups[f"{explained.growth.metric} {explained.budget}", ()].append(explained)
    for (budget, packages), group in groups.items():
        if kind == "budget" and len({explained.growth.test for explained in group}) < _SEVERAL:
            continue
        shares = tuple(Share(explained.growth, explained.growth.amount) for explained in group)
        yield Cause(kind, (), (), "", budget, "", "", shares, packages=packages)
