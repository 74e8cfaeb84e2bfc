"""Find the growths in a session: metrics that became worse, and the places in the code that explain the growth. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.composition import FIRST_USE, REST
from pytest_gpumem.facts.values.rank import rank_in, without_rank
from pytest_gpumem.facts.values.source_lines import without_release
from pytest_gpumem.judging.gate.verdict import WORSE, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.facts.values.composition import Holder, Row
    from pytest_gpumem.facts.values.operator_counts import Tally
    from pytest_gpumem.judging.gate.difference import Change, Difference
    from pytest_gpumem.judging.gate.graph_changes import GraphChange
    from pytest_gpumem.judging.gate.verdict import MetricVerdict, TestVerdict, Verdict

T = TypeVar("T")
ENOUGH = 0.8
"""If causes explain this share of a growth (80 %), the remaining part counts as their consequence and needs no cause."""
LEAST = 0.1
"""A line has to explain this share of a growth to be a cause."""
_SUMS = ("processes", "launch")
"""The steps in the workloads of sums over processes."""


@dataclass(frozen=True, slots=True, order=True)
class Growth:
    """A metric that is worse than its baseline or budget in a test's measurement."""

    test: str
    """The test's id."""
    name: str
    """The name of the measurement."""
    metric: str
    device: str
    amount: float = field(compare=False)
    """The difference from the baseline or budget, in the metric's unit."""

    def is_beside(self, other: Growth) -> bool:
        """Return whether both growths come from the same measurement."""
        return (self.test, self.name, self.device) == (other.test, other.name, other.device)


class Place(NamedTuple):
    """A place in the code to which growth is assigned: a line without its package's release, and a module.

    Tensors from before the step have no line, so their place is their category. The place of kept tensors is their holder: the
    object that keeps them alive. The line that allocated kept tensors does not matter.

    Example:
        ``Place("tiny_models/gpt.py:38", "blocks.*.attention")``, or ``Place("", "", holder="Net.seen[...]")`` for a list that
        keeps tensors.
    """

    line: str
    module: str
    category: str = ""
    holder: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """The growth at one place, which may come from several rows. Module, operator and tensors come from the largest row.

    Example: ``activation`` rows at ``gpt.py:38`` grew by 6 MB and 2 MB. The part has the amount 8 MB and the text of the row
    with 6 MB.
    """

    amount: float
    """The growth of all rows together."""
    largest: float
    """The growth of the largest row."""
    lines: tuple[str, ...]
    """The lines that allocated the tensors. The largest row's line comes first."""
    module: str
    operator: str
    tensors: str
    category: str = ""
    reason: str = ""

    def __add__(self, other: Part) -> Part:
        smaller, larger = sorted(
            (self, other), key=lambda part: (part.largest, part.lines, part.module, part.operator, part.tensors)
        )
        lines = {without_release(line): line for line in reversed((*larger.lines, *smaller.lines))}
        return replace(larger, amount=self.amount + other.amount, lines=tuple(reversed(lines.values())))


class Alternatives(NamedTuple):
    """Several places. Memory or a count grew at one or more of them, but nothing proves at which."""

    amount: float
    """The total growth at these places, in bytes or calls. Each place's share is not known."""
    parts: Mapping[Place, Part]
    """The part at each place, if memory grew there."""


@dataclass(frozen=True, slots=True)
class ExplainedGrowth:
    """A growth and its possible explanations from the same measurement."""

    growth: Growth
    parts: Mapping[Place, Part]
    """The parts of the growth whose place is proven."""
    packages: tuple[str, ...]
    """A clause for each package whose release differs from the baseline's."""
    budget: str
    """The limit, if the metric exceeds only its budget and not its baseline; otherwise empty."""
    alternatives: tuple[Alternatives, ...] = ()
    """The parts of the growth whose place is not proven."""

    def at(self, place: Place) -> float:
        """Return the growth at a place, or 0 if nothing grew there."""
        part = self.parts.get(place)
        return max(0, part.amount) if part is not None else 0


def growths_of(tests: Iterable[TestVerdict]) -> list[ExplainedGrowth]:
    """Return the growths in these tests, sorted. If a line's module has different paths in them, the shortest path is used."""
    growths = (
        growth
        for test in tests
        for verdict in test.verdicts
        for growth in _beside_processes(_growths(test.nodeid, verdict), verdict, test.verdicts)
    )
    return _with_inner_modules(sorted(growths, key=lambda explained: explained.growth))


def _beside_processes(
    growths: Iterable[ExplainedGrowth], verdict: Verdict, verdicts: Iterable[Verdict]
) -> Iterator[ExplainedGrowth]:
    """Yield a measurement's growths. If it is a sum over processes, subtract the growth of processes that are worse as well.

    A growth is left out if at most 20 % of it remain.

    Example:
        ``call: serve.py`` grew by 20 MB, and ``call: all processes`` by 40 MB. The sum's growth is 20 MB.

    Args:
        growths: The measurement's growths.
        verdict: The measurement's verdict.
        verdicts: The verdicts on all measurements in the test.
    """
    parts = [part for part in verdicts if _is_in_sum(part.measurement, verdict.measurement)]
    for explained in growths:
        growth, metric = explained.growth, verdict.of(explained.growth.metric)
        of_parts = sum(
            _amount(of_part)
            for part in parts
            if (of_part := part.of(growth.metric)) is not None
            and metric is not None
            and of_part.outcome in WORSE
            and _exceeds_only_budget(of_part) == _exceeds_only_budget(metric)
        )
        remaining = growth.amount - of_parts
        if not of_parts:
            yield explained
        elif remaining > (1 - ENOUGH) * growth.amount:
            yield replace(explained, growth=replace(growth, amount=remaining))


def _is_in_sum(part: Measurement, whole: Measurement) -> bool:
    """Return whether ``whole`` is a sum over processes, and ``part`` the measurement of one of these processes."""
    if whole.workload.step not in _SUMS or part.workload.step in _SUMS:
        return False
    name = without_rank(whole.name).removesuffix(": all processes")
    is_beside = (part.environment.device, rank_in(part.name)) == (whole.environment.device, rank_in(whole.name))
    # The test's own process has the name itself: ``call``, and ``call: serve.py`` for another process.
    return is_beside and f"{without_rank(part.name)}: ".startswith(f"{name}: ")


def _growths(test: str, verdict: Verdict) -> Iterator[ExplainedGrowth]:
    """Yield a measurement's growths: metrics that are worse, without metrics that only follow from others.

    Growth in kept bytes, in the peak, in cyclic garbage and in syncs is yielded. If none of these metrics grew, the most
    important other count that grew is yielded, or the time if no count grew. If memory grew, but no place in the code is known
    for this memory, the most important count is yielded as well.
    """
    worse = {metric.metric: metric for metric in verdict.metrics if metric.outcome in WORSE and _amount(metric) > 0}
    names = sorted(worse, key=lambda name: METRICS[name].precedence)
    memory, work = ([name for name in names if METRICS[name].kind == kind] for kind in ("memory", "work"))
    measurement, explanation = verdict.measurement, verdict.measurement.explanation
    # If memory grew, more operators are often a consequence, so they are left out. More syncs are kept, because they have their
    # own cause: a line that reads a value.
    syncs = [name for name in work if name == "syncs"]
    chosen = [*_first_of_each_kind(memory), *syncs] or work[:1] or names[:1]
    holders_at: dict[Place, tuple[_HeldRows, ...]] = {}
    if explanation is not None:
        keeping_holders = () if KEPT_METRICS.isdisjoint(chosen) else explanation.holders
        holders_at = _holder_places(explanation.holders_of_inputs, keeping_holders, is_again="growth" in chosen)
        if any(_baseline_bytes(worse[name]) for name in KEPT_METRICS.intersection(chosen)):
            # If several holders keep tensors from a line, some may have kept them in the baseline already, and the peak did not
            # grow because of those. So use only lines with a single holder.
            holders_at = {line: holders for line, holders in holders_at.items() if len(holders) == 1}
    parts = {name: _parts(verdict, name, holders_at) for name in chosen}
    alternatives = {name: _alternatives(verdict, name, holders_at) for name in chosen}
    for name in LEFT_BEHIND.intersection(chosen):
        kept_parts = parts[name]
        new = _new_parts(
            {place: part.amount for place, part in kept_parts.items()},
            _amount(worse[name]),
            _baseline_bytes(worse[name]),
        )
        parts[name] = {place: kept_parts[place] for place in new.certain}
        alternatives[name] += (
            (Alternatives(new.missing, {place: kept_parts[place] for place in new.uncertain}),) if new.uncertain else ()
        )
    if memory and not any(part.amount > 0 for name in memory for part in parts.get(name, {}).values()):
        # No place in the code explains the memory, for example because the test was not recorded. Counts have places.
        parts |= {name: _parts(verdict, name, holders_at) for name in work[:1]}
    for name, metric_parts in parts.items():
        metric = worse[name]
        yield ExplainedGrowth(
            Growth(test, measurement.name, name, measurement.environment.device, _amount(metric)),
            metric_parts,
            verdict.changed_packages,
            f"{metric.budget}" if metric.outcome is Outcome.OVER_BUDGET and _exceeds_only_budget(metric) else "",
            alternatives.get(name, ()),
        )


KEPT_METRICS = frozenset({"growth", "retained"})
"""Metrics for kept bytes. The cause of such growth is the holder: the object that keeps the tensors alive."""
LEFT_BEHIND = KEPT_METRICS | {"cyclic_garbage"}
"""Metrics for the bytes that a step leaves behind. A baseline stores these bytes without their composition."""


def _baseline_bytes(metric: MetricVerdict) -> float:
    """Return the metric's bytes in the baseline, or 0 if the metric exceeds only a budget."""
    return 0 if metric.baseline is None or _exceeds_only_budget(metric) else metric.baseline


def _exceeds_only_budget(metric: MetricVerdict) -> bool:
    return metric.baseline is None or metric.value <= metric.baseline


@dataclass(frozen=True, slots=True)
class _NewParts(Generic[T]):
    """The parts of the kept bytes that are certainly new since the baseline, and the parts that may be new."""

    certain: tuple[T, ...]
    """The certainly new parts."""
    uncertain: tuple[T, ...] = ()
    """The parts of which some are new and some were already kept in the baseline."""
    missing: float = 0
    """The bytes by which all ``uncertain`` parts together grew."""


def _new_parts(kept_bytes: Mapping[T, float], amount: float, baseline_bytes: float) -> _NewParts[T]:
    """Return which parts of the kept bytes are new since the baseline.

    A baseline stores how many bytes were kept, but not in which rows or by which holders. So any part with at most this many
    bytes may already have been kept in the baseline.

    Example:
        In the baseline 1 MB was kept. Now the lists ``A`` and ``B`` keep 1 MB each. Either ``A`` or ``B`` is new, so both are
        ``uncertain``, and ``missing`` is 1 MB.

    Args:
        kept_bytes: The bytes of each part.
        amount: The growth of all kept bytes since the baseline.
        baseline_bytes: The kept bytes in the baseline.
    """
    new = tuple(part for part, nbytes in kept_bytes.items() if nbytes - baseline_bytes >= LEAST * amount)
    other_parts = tuple(part for part in kept_bytes if part not in new)
    missing = amount - sum(kept_bytes[part] for part in new)
    if missing < LEAST * amount:
        return _NewParts(new)
    if not baseline_bytes or len(other_parts) < 2 or sum(kept_bytes[part] for part in other_parts) <= missing:
        return _NewParts(tuple(kept_bytes))
    return _NewParts(new, other_parts, missing)


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The rows in the memory kept by a step or call. New rows since the baseline come first."""

    rows: tuple[Row, ...] = ()
    """All rows: certainly new rows, then ``uncertain`` rows, then rows from the baseline."""
    uncertain: tuple[Row, ...] = ()
    """The rows of which some are new and some were kept in the baseline, if nothing proves which rows are new."""
    before: float = 0
    """The kept bytes in the baseline. A baseline does not store the rows of these bytes."""
    growth: float = 0
    """The growth of the kept bytes since the baseline."""

    def holders(self, holders: Iterable[Holder]) -> tuple[Holder, ...]:
        """Return the holders in the order in which their first rows occur in ``rows``."""
        order = {_alike(row): number for number, row in reversed([*enumerate(self.rows)])}

        def first(holder: Holder) -> int:
            return min((order.get(_alike(row), len(order)) for row in holder.kept.rows), default=len(order))

        return tuple(sorted(holders, key=first) if self.before else holders)


def kept_rows(verdict: Verdict) -> KeptRows:
    """Return the kept rows in a measurement.

    If bytes were kept in the baseline as well, growth at the peak shows which kept rows may be new.
    """
    explanation = verdict.measurement.explanation
    # A row has negative bytes if the step freed older blocks. Such a row explains nothing.
    rows = () if explanation is None else explanation.retained.rows
    rows = tuple(row for row in rows if row.operator != REST and row.nbytes > 0)
    worse = [
        metric
        for metric in verdict.metrics
        if metric.metric in KEPT_METRICS and metric.outcome in WORSE and _baseline_bytes(metric)
    ]
    if not worse:
        return KeptRows(rows)
    metric = min(worse, key=lambda metric: METRICS[metric.metric].precedence)
    baseline_bytes, growth = _baseline_bytes(metric), _amount(metric)
    new = _new_parts({row: row.nbytes for row in rows}, growth, baseline_bytes)
    changes = verdict.difference.changes if verdict.difference is not None else ()
    grown = {_alike(change.row) for change in changes if change.nbytes > 0}
    at_peak = tuple(row for row in new.uncertain if _alike(row) in grown)
    is_proven = bool(at_peak) and sum(row.nbytes for row in at_peak) <= new.missing
    uncertain = () if is_proven else at_peak or new.uncertain
    first = (*new.certain, *(at_peak if is_proven else uncertain))
    return KeptRows((*first, *(row for row in rows if row not in first)), uncertain, baseline_bytes, growth)


def _alike(row: Row) -> tuple[str, ...]:
    return row.module, row.site, without_release(row.library), row.operator, row.tensor


def _first_of_each_kind(memory: Sequence[str]) -> list[str]:
    """Return the first metric in ``memory`` for kept bytes, the first metric for peaks, and the first metric for garbage.

    A ratio between peaks counts as a peak, so it is left out if a peak grew as well.
    """
    first: dict[object, str] = {}
    for name in memory:
        is_of_peaks = METRICS[name].peak or METRICS[name].unit == "ratio"
        first.setdefault("kept" if name in KEPT_METRICS else is_of_peaks or name, name)
    return list(first.values())


def _amount(metric: MetricVerdict) -> float:
    """Return by how much a metric is worse than its baseline, or than its budget if it is not worse than its baseline."""
    sign = -1 if METRICS[metric.metric].larger_is_better else 1
    differences = [sign * (metric.value - limit) for limit in (metric.baseline, metric.budget) if limit is not None]
    return next((amount for amount in differences if amount > 0), 0)


def _parts(verdict: Verdict, metric: str, holders_at: Mapping[Place, Sequence[_HeldRows]]) -> dict[Place, Part]:
    """Return the parts of a metric's growth whose place is proven, by place. ``holders_at`` comes from `_holder_places`."""
    explanation = verdict.measurement.explanation
    if metric in verdict.count_changes:
        return _summed(_part_of_tally(tally) for tally in verdict.count_changes[metric])
    if METRICS[metric].peak:
        return _parts_of_peak(verdict, holders_at)
    if explanation is None or metric not in LEFT_BEHIND:
        return {}
    if metric in KEPT_METRICS and explanation.holders:
        certain = (holder for holder in explanation.holders if not holder.alternatives)
        return _summed(_held_part(holder, row) for holder in certain for row in holder.kept.rows)
    composition = explanation.retained if metric in KEPT_METRICS else explanation.garbage
    return _summed(_part_of_row(row, row.nbytes) for row in composition.rows)


def _held_part(holder: Holder, row: Row) -> tuple[Place, Part] | None:
    """Turn a kept row into a part. Its place is the holder, or the row's line if no holder was found."""
    row_part = _part_of_row(row, row.nbytes, FIRST_USE if holder.first_use else "")
    if not holder.path:
        return row_part
    _, part = row_part or (None, Part(row.nbytes, row.nbytes, (), "", "", "", row.category))
    return Place("", "", holder=holder.path), part


class _HeldRows(NamedTuple):
    """Kept rows from one line with the same holder."""

    holder: Place
    rows: tuple[Row, ...]
    is_again: bool
    """True if each step keeps such tensors again. The peak may then include the tensors from several steps."""

    def bytes_like(self, row: Row) -> int:
        """Return how many bytes the holder keeps in tensors with the operator, dtype and shape of ``row``.

        ``row`` may have the category ``input`` instead of the kept row's category, because tensors that the previous step kept
        are inputs of the recorded step.
        """
        return sum(
            kept_row.nbytes
            for kept_row in self.rows
            if (kept_row.operator, kept_row.tensor) == (row.operator, row.tensor)
            and row.category in ("input", kept_row.category)
        )


def _holder_places(
    of_inputs: Iterable[Holder], of_kept: Iterable[Holder], *, is_again: bool
) -> dict[Place, tuple[_HeldRows, ...]]:
    """Return the holders of kept tensors, by the allocating line.

    `_at_holders` uses the result to assign a row at the peak to its holder instead of its line, because kept tensors are live
    only because of their holder. Lines with an uncertain holder are left out. Kept rows without a line and a module are also
    left out, because a row at the peak without a line may have other tensors.

    Args:
        of_inputs: The holders of inputs, from `Explanation.holders_of_inputs`.
        of_kept: The holders of kept tensors, from `Explanation.holders`.
        is_again: Whether each step keeps tensors like those in ``of_kept`` again.
    """
    rows: dict[Place, dict[Place, list[Row]]] = defaultdict(lambda: defaultdict(list))
    each_step_places: set[Place] = set()
    uncertain: set[Place] = set()
    for holders, each_step in ((of_inputs, False), (of_kept, is_again)):
        for holder, row in ((kept_holder, row) for kept_holder in holders for row in kept_holder.kept.rows):
            row_part, holder_part = _part_of_row(row, row.nbytes), _held_part(holder, row)
            if row_part is not None and holder_part is not None:
                rows[row_part[0]][holder_part[0]].append(row)
                each_step_places |= {row_part[0]} if each_step else set()
                uncertain |= {row_part[0]} if holder.alternatives else set()
    return {
        place: tuple(
            _HeldRows(holder, tuple(holder_rows), place in each_step_places) for holder, holder_rows in at_line.items()
        )
        for place, at_line in rows.items()
        if place not in uncertain and not place.category
    }


def _at_holders(
    row: Row, nbytes: int, holders_at: Mapping[Place, Sequence[_HeldRows]], reason: str = ""
) -> list[tuple[Place, Part]]:
    """Turn a row at the peak into parts: one for each holder of its tensors, or a single part at its line without a holder.

    If several holders keep tensors from the row's line, the row's bytes are divided in proportion to the holders' bytes.
    """
    row_part = _part_of_row(row, nbytes, reason)
    if row_part is None:
        return []
    place, part = row_part
    # The places in holders_at come from rows without a named caller, so look up this row's place without its caller.
    unnamed_part = _part_of_row(replace(row, named=""), nbytes) if row.named else None
    kept_bytes = {
        held_rows: row_bytes
        for held_rows in holders_at.get(place if unnamed_part is None else unnamed_part[0], ())
        if (row_bytes := held_rows.bytes_like(row))
    }
    total = sum(kept_bytes.values())
    is_again = all(held_rows.is_again for held_rows in kept_bytes)
    # If there are several holders, some may keep tensors from another row, unless this row has exactly their bytes together.
    is_all_kept = nbytes <= total if len(kept_bytes) == 1 else nbytes == total
    if not kept_bytes or not (is_again or is_all_kept):
        return [row_part]
    shares = {held_rows: nbytes * row_bytes // total for held_rows, row_bytes in kept_bytes.items()}
    shares[next(iter(kept_bytes))] += nbytes - sum(shares.values())
    return [(held_rows.holder, replace(part, amount=share, largest=share)) for held_rows, share in shares.items()]


def _parts_of_peak(verdict: Verdict, holders_at: Mapping[Place, Sequence[_HeldRows]]) -> dict[Place, Part]:
    """Return the parts of the peak's growth whose place is proven, by place.

    If the known rows explain less than the share `ENOUGH`, because most of the growth is in a sum over smaller rows, the rows
    that the step retained are added, because they were live at the peak as well.
    """
    difference, explanation = verdict.difference, verdict.measurement.explanation
    if difference is None:
        return {}
    parts = _summed(part for change in difference.changes for part in _parts_of_change(change, difference, holders_at))
    if explanation is not None and difference.moved is not None and not any(part.amount > 0 for part in parts.values()):
        # The peak moved to a backward pass that the baseline did not have, because autograd records more calls now.
        graph_rows = (
            (cause, row) for cause in difference.graph for row in explanation.peak.rows if cause.explains(row)
        )
        parts |= _summed(_part_of_graph(cause, row, row.nbytes) for cause, row in graph_rows)
    if explanation is not None and sum(max(0, part.amount) for part in parts.values()) < ENOUGH * difference.nbytes:
        retained = explanation.retained.rows
        parts = {**_summed(part for row in retained for part in _at_holders(row, row.nbytes, holders_at)), **parts}
    return parts


def _alternatives(
    verdict: Verdict, metric: str, holders_at: Mapping[Place, Sequence[_HeldRows]]
) -> tuple[Alternatives, ...]:
    """Return the parts of a metric's growth whose place is not proven. ``holders_at`` comes from `_holder_places`."""
    explanation = verdict.measurement.explanation
    if METRICS[metric].peak:
        return _alternatives_of_peak(verdict, holders_at)
    if metric not in KEPT_METRICS or explanation is None:
        return ()
    uncertain = [_alternative_holders(holder) for holder in explanation.holders if holder.alternatives]
    # Unlisted smaller rows may have grown instead of an alternative. So a single alternative proves nothing.
    return tuple(alternatives for alternatives in uncertain if len(alternatives.parts) > 1)


def _alternative_holders(holder: Holder) -> Alternatives:
    """Return the parts that each possible holder may keep. The place of a part is the holder, or the row's line if unknown."""
    places = (
        _summed(_held_part(replace(holder, path=path, alternatives=()), row) for row in holder.kept.rows)
        for path in holder.alternatives
    )
    return Alternatives(holder.kept.total, {place: part for path_parts in places for place, part in path_parts.items()})


def _alternatives_of_peak(
    verdict: Verdict, holders_at: Mapping[Place, Sequence[_HeldRows]]
) -> tuple[Alternatives, ...]:
    """Return the parts of a peak's growth whose place is not proven, the largest first."""
    peak_alternatives = []
    for change in verdict.difference.changes if verdict.difference is not None else ():
        parts: dict[Place, Part] = {}
        for row in change.alternatives:
            for place, part in _at_holders(row, min(change.nbytes, row.nbytes), holders_at):
                # Add each place only once: several rows at a place cannot together have grown by more than the change.
                parts.setdefault(place, part)
        peak_alternatives += [Alternatives(change.nbytes, parts)] if parts else []
    return tuple(peak_alternatives)


def with_proven_places(growths: Sequence[ExplainedGrowth], causes: Sequence[Place]) -> list[ExplainedGrowth]:
    """Return the growths after choosing among alternatives: an alternative is proven if another growth has a cause at its line.

    Alternatives with a cause in the same measurement are preferred to alternatives with a cause in another measurement. If
    several alternatives remain, they are proven only if their parts together do not exceed the alternatives' total growth.
    """
    named: dict[Place | str, set[Growth]] = defaultdict(set)
    for place in causes:
        named[place.line or place] |= {explained.growth for explained in growths if explained.at(place) > 0}
    return [_proven(explained, named) for explained in growths]


def _proven(explained: ExplainedGrowth, named: Mapping[Place | str, set[Growth]]) -> ExplainedGrowth:
    parts, remaining = [*explained.parts.items()], []
    growth = explained.growth
    for alternatives in explained.alternatives:
        lines: dict[Place | str, list[tuple[Place, Part]]] = defaultdict(list)
        for place, part in alternatives.parts.items():
            lines[place.line or place].append((place, part))
        growths_at = {line: named.get(line, set()) - {growth} for line in lines}
        same_measurement_lines = [
            line for line in lines if any(other_growth.is_beside(growth) for other_growth in growths_at[line])
        ]
        proven_lines = same_measurement_lines or [line for line in lines if growths_at[line]]
        decided = [_at_line(lines[line]) for line in proven_lines]
        if len(decided) == 1 or (decided and sum(part.amount for _, part in decided) <= alternatives.amount):
            parts += decided
        else:
            remaining.append(alternatives)
    return replace(explained, parts=_summed(parts), alternatives=tuple(remaining))


def _at_line(parts: Sequence[tuple[Place, Part]]) -> tuple[Place, Part]:
    """Return the first part at a line. If the line has several parts, the result names no module: any of them may be right."""
    place, part = parts[0]
    return parts[0] if len(parts) == 1 else (place._replace(module=""), replace(part, module=""))


def _summed(parts: Iterable[tuple[Place, Part] | None]) -> dict[Place, Part]:
    sums: dict[Place, Part] = {}
    for place, part in filter(None, parts):
        sums[place] = sums[place] + part if place in sums else part
    return sums


def _part_of_row(row: Row, nbytes: int, reason: str = "") -> tuple[Place, Part] | None:
    """Turn a row into a part, and return it with the row's place; ``None`` for a sum over smaller rows."""
    line = row.named or row.library or row.site
    if row.operator == REST:
        return None
    place = Place(without_release(line), row.module, "" if line or row.module else row.category)
    lines = (line,) if line else ()
    return place, Part(nbytes, nbytes, lines, row.path, row.operator, row.what, row.category, reason)


def _parts_of_change(
    change: Change, difference: Difference, holders_at: Mapping[Place, Sequence[_HeldRows]]
) -> list[tuple[Place, Part]]:
    """Turn a change into parts.

    If the change follows from a graph change, the place is the module's caller. If it does not, the place is the tensors'
    holder in ``holders_at``, or the allocating line if the tensors have no holder.
    """
    cause = next(
        (graph_change for graph_change in difference.graph if change.nbytes > 0 and graph_change.explains(change.row)),
        None,
    )
    graph_part = None if cause is None else _part_of_graph(cause, change.row, change.nbytes)
    return _at_holders(change.row, change.nbytes, holders_at, change.reason) if graph_part is None else [graph_part]


def _part_of_graph(cause: GraphChange, row: Row, nbytes: int) -> tuple[Place, Part] | None:
    """Turn a row into a part whose cause is a graph change, and return it with its place."""
    row_part = _part_of_row(row, nbytes)
    if row_part is None:
        return None
    lines = cause.lines if len(cause.lines) == 1 or cause.is_of_a_part else ()
    # The place names all possible calling lines. So calls to the same module from other lines become a separate cause.
    place = Place(" or ".join(map(without_release, cause.lines)), cause.module)
    return place, replace(row_part[1], lines=lines, module=cause.module, reason=cause.sentence)


def _part_of_tally(tally: Tally) -> tuple[Place, Part]:
    line, module = tally.place.named or tally.place.library or tally.place.site, tally.place.module
    # Kernel launches have no line, so their place is the kernel's name.
    place = Place(without_release(line), module) if line or module else Place("", tally.operator)
    lines = (line,) if line else ()
    return place, Part(tally.amount, tally.amount, lines, module, tally.operator, "", reason=tally.place.reason)


def _with_inner_modules(growths: Sequence[ExplainedGrowth]) -> list[ExplainedGrowth]:
    """Return the growths after giving each line's module the same path in all tests: the shortest path.

    Example:
        One test runs the whole model, so the line's module is ``model.blocks.*.attn``. Another test runs only a block, so the
        same module is ``attn``. In the result, both growths have the module ``attn``.
    """
    modules: dict[str, set[str]] = defaultdict(set)
    for explained in growths:
        for place in chain(explained.parts, *(alternatives.parts for alternatives in explained.alternatives)):
            modules[place.line].add(place.module)
    inner: dict[tuple[str, str], str] = {}
    for line, names in modules.items():
        for name in names:
            ends = {part for part in _ends(name) if line and part in names}
            inner[line, name] = min(ends, key=len, default=name)

    def with_inner_names(parts: Mapping[Place, Part]) -> dict[Place, Part]:
        return _summed((place._replace(module=inner[place.line, place.module]), part) for place, part in parts.items())

    return [
        replace(
            explained,
            parts=with_inner_names(explained.parts),
            alternatives=tuple(
                alternatives._replace(parts=with_inner_names(alternatives.parts))
                for alternatives in explained.alternatives
            ),
        )
        for explained in growths
    ]


def _ends(module: str) -> Iterator[str]:
    """Yield the ends of a path: ``model.blocks.*.attn``, ``blocks.*.attn``, ``*.attn`` and ``attn``."""
    parts = module.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)) if module)
