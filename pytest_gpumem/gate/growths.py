"""Growths of a session: each metric of a measurement that is worse, with what explains it by its place in the code. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from pytest_gpumem.gate.verdict import WORSE, Outcome
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.values.composition import FIRST_USE, REST
from pytest_gpumem.values.source_lines import without_release

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pytest_gpumem.gate.difference import Change, Difference
    from pytest_gpumem.gate.graph_changes import GraphChange
    from pytest_gpumem.gate.verdict import MetricVerdict, TestVerdict, Verdict
    from pytest_gpumem.values.composition import Holder, Row
    from pytest_gpumem.values.operator_counts import Tally

T = TypeVar("T")
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

    def is_beside(self, other: Growth) -> bool:
        """Return whether both are of the same measurement."""
        return (self.test, self.name, self.device) == (other.test, other.name, other.device)


class Place(NamedTuple):
    """A line without the release of its package, and a module; of tensors made before the step, their category.

    Of what is kept it is the holder, wherever the tensors were made: ``Place("", "", holder="Net.seen[...]")``.
    """

    line: str
    module: str
    category: str = ""
    holder: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one growth at one place: their sum, and what a report shows of the largest."""

    amount: float
    largest: float
    lines: tuple[str, ...]
    """The lines, that of the largest row first."""
    module: str
    operator: str
    what: str
    category: str = ""
    reason: str = ""

    def __add__(self, other: Part) -> Part:
        smaller, larger = sorted(
            (self, other), key=lambda one: (one.largest, one.lines, one.module, one.operator, one.what)
        )
        lines = {without_release(line): line for line in reversed((*larger.lines, *smaller.lines))}
        return replace(larger, amount=self.amount + other.amount, lines=tuple(reversed(lines.values())))


class Alternatives(NamedTuple):
    """Places for a part of a growth. Nothing proves which place it is."""

    amount: float
    parts: Mapping[Place, Part]
    """The part at each place."""


@dataclass(frozen=True, slots=True)
class Explained:
    """A growth, its parts by place, and what else may be its cause."""

    growth: Growth
    parts: Mapping[Place, Part]
    packages: tuple[str, ...]
    budget: str
    """The limit that is exceeded, where there is no more than in a baseline; else empty."""
    alternatives: tuple[Alternatives, ...] = ()
    """Parts without a proven place."""

    def at(self, place: Place) -> float:
        """Return by how much more there is at a place; 0 where it is not more."""
        part = self.parts.get(place)
        return max(0, part.amount) if part is not None else 0


def growths_of(tests: Iterable[TestVerdict]) -> list[Explained]:
    """Return what grew in tests, sorted: a module at a line has one name in all of them."""
    all_of_them = (one for test in tests for verdict in test.verdicts for one in _growths(test.nodeid, verdict))
    return _of_inner_modules(sorted(all_of_them, key=lambda one: one.growth))


def _growths(test: str, verdict: Verdict) -> Iterator[Explained]:
    """Yield what grew in a measurement: bytes that are kept, the peak, garbage, and syncs; else other work; else time.

    Where nothing is known of what the bytes are, there is other work, too.
    """
    worse = {one.metric: one for one in verdict.metrics if one.outcome in WORSE and _amount(one) > 0}
    names = sorted(worse, key=lambda name: METRICS[name].precedence)
    memory, work = ([name for name in names if METRICS[name].kind == kind] for kind in ("memory", "work"))
    measurement, explanation = verdict.measurement, verdict.measurement.explanation
    # More operators are what memory grows by; who reads a value may do so anywhere.
    syncs = [name for name in work if name == "syncs"]
    chosen = [*_one_of_each(memory), *syncs] or work[:1] or names[:1]
    held: dict[Place, tuple[_Held, ...]] = {}
    if explanation is not None:
        kept = () if KEPT.isdisjoint(chosen) else explanation.holders
        held = _holder_places(explanation.holders_of_inputs, kept, is_again="growth" in chosen)
        if any(_kept_before(worse[name]) for name in KEPT.intersection(chosen)):
            # Some of the holders are not new, so they have no share in the growth of the peak.
            held = {line: holders for line, holders in held.items() if len(holders) == 1}
    parts = {name: _parts(verdict, name, held) for name in chosen}
    alternatives = {name: _alternatives(verdict, name, held) for name in chosen}
    for name in LEFT_BEHIND.intersection(chosen):
        here = parts[name]
        new = _new(
            {place: part.amount for place, part in here.items()}, _amount(worse[name]), _kept_before(worse[name])
        )
        parts[name] = {place: here[place] for place in new.certain}
        alternatives[name] += (
            (Alternatives(new.missing, {place: here[place] for place in new.uncertain}),) if new.uncertain else ()
        )
    if memory and not any(part.amount > 0 for name in memory for part in parts.get(name, {}).values()):
        # Of tests that were not recorded the work is known at least.
        parts |= {name: _parts(verdict, name, held) for name in work[:1]}
    for name, mine in parts.items():
        one = worse[name]
        no_more = one.baseline is None or one.value <= one.baseline
        yield Explained(
            Growth(test, measurement.name, name, measurement.environment.device, _amount(one)),
            mine,
            verdict.changed_packages,
            f"{one.budget}" if one.outcome is Outcome.OVER_BUDGET and no_more else "",
            alternatives.get(name, ()),
        )


KEPT = frozenset({"growth", "retained"})
"""Metrics whose cause is the holder."""
LEFT_BEHIND = KEPT | {"cyclic_garbage"}
"""Metrics whose composition no baseline stores."""


def _kept_before(one: MetricVerdict) -> float:
    """Return the bytes in the baseline, or 0 if the metric exceeds only a budget."""
    return one.baseline if one.baseline is not None and one.value > one.baseline else 0


@dataclass(frozen=True, slots=True)
class _New(Generic[T]):
    """Parts of what is kept."""

    certain: tuple[T, ...]
    """Parts that are new."""
    uncertain: tuple[T, ...] = ()
    """Parts of which only some are new."""
    missing: float = 0
    """The bytes of the growth in ``uncertain``."""


def _new(kept: Mapping[T, float], amount: float, before: float) -> _New[T]:
    """Return which parts of what is kept are new.

    A baseline stores how many bytes were kept, not where. A part with no more bytes may have been there before.

    Example:
        A baseline keeps 1 MB. Now ``A`` and ``B`` keep 1 MB each. One of them is new.

    Args:
        kept: The bytes of each part.
        amount: The growth in bytes.
        before: The bytes in the baseline.
    """
    new = tuple(part for part, nbytes in kept.items() if nbytes - before >= LEAST * amount)
    others = tuple(part for part in kept if part not in new)
    missing = amount - sum(kept[part] for part in new)
    if missing < LEAST * amount:
        return _New(new)
    if not before or len(others) < 2 or sum(kept[part] for part in others) <= missing:
        return _New(tuple(kept))
    return _New(new, others, missing)


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The rows of what a step or a call keeps, those that are new first."""

    rows: tuple[Row, ...] = ()
    uncertain: tuple[Row, ...] = ()
    """The first rows after those that are new for certain, if only some of them are new and nothing proves which."""
    before: float = 0
    """The bytes that the baseline kept, too. It does not store their rows."""
    growth: float = 0

    def holders(self, holders: Iterable[Holder]) -> tuple[Holder, ...]:
        """Return holders in the order of the rows that they keep."""
        order = {_alike(row): number for number, row in reversed([*enumerate(self.rows)])}

        def first(holder: Holder) -> int:
            return min((order.get(_alike(row), len(order)) for row in holder.kept.rows), default=len(order))

        return tuple(sorted(holders, key=first) if self.before else holders)


def kept_rows(verdict: Verdict) -> KeptRows:
    """Return the rows of what is kept. Rows that grew at the peak decide which are new, if the baseline kept bytes, too."""
    explanation = verdict.measurement.explanation
    # If other owners' blocks were freed meanwhile, a row is negative. People cannot use it.
    rows = () if explanation is None else explanation.retained.rows
    rows = tuple(row for row in rows if row.operator != REST and row.nbytes > 0)
    worse = [one for one in verdict.metrics if one.metric in KEPT and one.outcome in WORSE and _kept_before(one)]
    if not worse:
        return KeptRows(rows)
    metric = min(worse, key=lambda one: METRICS[one.metric].precedence)
    before, growth = _kept_before(metric), _amount(metric)
    new = _new({row: row.nbytes for row in rows}, growth, before)
    changes = verdict.difference.changes if verdict.difference is not None else ()
    grown = {_alike(change.row) for change in changes if change.nbytes > 0}
    at_peak = tuple(row for row in new.uncertain if _alike(row) in grown)
    is_proven = bool(at_peak) and sum(row.nbytes for row in at_peak) <= new.missing
    uncertain = () if is_proven else at_peak or new.uncertain
    first = (*new.certain, *(at_peak if is_proven else uncertain))
    return KeptRows((*first, *(row for row in rows if row not in first)), uncertain, before, growth)


def _alike(row: Row) -> tuple[str, ...]:
    return row.module, row.site, without_release(row.library), row.operator, row.tensor


def _one_of_each(memory: Sequence[str]) -> list[str]:
    """Return the first metric of each kind of memory: of what is kept, of peaks, and garbage."""
    found: dict[object, str] = {}
    for name in memory:
        found.setdefault("kept" if name in KEPT else METRICS[name].peak or name, name)
    return list(found.values())


def _amount(one: MetricVerdict) -> float:
    """Return by how much a metric is worse than its baseline, or than its budget where it is not."""
    sign = -1 if METRICS[one.metric].larger_is_better else 1
    by = [sign * (one.value - against) for against in (one.baseline, one.budget) if against is not None]
    return next((amount for amount in by if amount > 0), 0)


def _parts(verdict: Verdict, metric: str, held: Mapping[Place, Sequence[_Held]]) -> dict[Place, Part]:
    """Return what explains a metric of a measurement, by place. ``held`` are `_holder_places`."""
    explanation = verdict.measurement.explanation
    if metric in verdict.count_changes:
        return _summed(_of_tally(tally) for tally in verdict.count_changes[metric])
    if METRICS[metric].peak:
        return _parts_of_peak(verdict, held)
    if explanation is None or metric not in LEFT_BEHIND:
        return {}
    if metric in KEPT and explanation.holders:
        certain = (holder for holder in explanation.holders if not holder.alternatives)
        return _summed(_held(holder, row) for holder in certain for row in holder.kept.rows)
    left = explanation.retained if metric in KEPT else explanation.garbage
    return _summed(_of_row(row, row.nbytes) for row in left.rows)


def _held(holder: Holder, row: Row) -> tuple[Place, Part] | None:
    """Return the place of a row that a holder keeps: the holder, if it was found."""
    found = _of_row(row, row.nbytes, FIRST_USE if holder.first_use else "")
    if not holder.path:
        return found
    _, part = found or (None, Part(row.nbytes, row.nbytes, (), "", "", "", row.category))
    return Place("", "", holder=holder.path), part


class _Held(NamedTuple):
    """Rows of one place that a single holder keeps."""

    holder: Place
    rows: tuple[Row, ...]
    is_again: bool
    """True if each step keeps such rows once more. The peak may then have more of them than one step keeps."""

    def alike(self, row: Row) -> int:
        """Return the bytes of the holder's tensors that are as those of a row.

        A step finds what the step before it kept as an input.
        """
        return sum(
            kept.nbytes
            for kept in self.rows
            if (kept.operator, kept.tensor) == (row.operator, row.tensor) and row.category in ("input", kept.category)
        )


def _holder_places(
    of_inputs: Iterable[Holder], of_kept: Iterable[Holder], *, is_again: bool
) -> dict[Place, tuple[_Held, ...]]:
    """Return the holders for each line whose tensors they keep: these are at the peak because they keep them.

    A line is left out if one of its holders is not certain. A row without a line and a module may be other tensors, and is
    left out, too.

    Args:
        of_inputs: The holders of inputs.
        of_kept: The holders of what a step or a call keeps.
        is_again: Whether each step keeps ``of_kept`` once more.
    """
    rows: dict[Place, dict[Place, list[Row]]] = defaultdict(lambda: defaultdict(list))
    again: set[Place] = set()
    uncertain: set[Place] = set()
    for holders, each_step in ((of_inputs, False), (of_kept, is_again)):
        for holder, row in ((each, row) for each in holders for row in each.kept.rows):
            found, held = _of_row(row, row.nbytes), _held(holder, row)
            if found is not None and held is not None:
                rows[found[0]][held[0]].append(row)
                again |= {found[0]} if each_step else set()
                uncertain |= {found[0]} if holder.alternatives else set()
    return {
        place: tuple(_Held(holder, tuple(its_rows), place in again) for holder, its_rows in at_line.items())
        for place, at_line in rows.items()
        if place not in uncertain and not place.category
    }


def _at_holders(
    row: Row, nbytes: int, held: Mapping[Place, Sequence[_Held]], reason: str = ""
) -> list[tuple[Place, Part]]:
    """Return a row of a peak as parts: at the holders of its tensors if these are certain, else at its line.

    Several holders of tensors from one line have shares as large as what they keep.
    """
    of_row = _of_row(row, nbytes, reason)
    if of_row is None:
        return []
    place, part = of_row
    # Rows of a holder have no changed caller that is named before their line.
    unnamed = _of_row(replace(row, named=""), nbytes) if row.named else None
    alike = {each: kept for each in held.get(place if unnamed is None else unnamed[0], ()) if (kept := each.alike(row))}
    total = sum(alike.values())
    is_again = all(each.is_again for each in alike)
    # Of several holders one may have another tensor of the row, unless the row is all that they keep.
    is_theirs = nbytes <= total if len(alike) == 1 else nbytes == total
    if not alike or not (is_again or is_theirs):
        return [of_row]
    shares = {each: nbytes * kept // total for each, kept in alike.items()}
    shares[next(iter(alike))] += nbytes - sum(shares.values())
    return [(each.holder, replace(part, amount=share, largest=share)) for each, share in shares.items()]


def _parts_of_peak(verdict: Verdict, held: Mapping[Place, Sequence[_Held]]) -> dict[Place, Part]:
    """Return what grew at the peak; where that is many small rows, also what was left, which was there at the peak."""
    difference, explanation = verdict.difference, verdict.measurement.explanation
    if difference is None:
        return {}
    parts = _summed(part for change in difference.changes for part in _of_change(change, difference, held))
    if explanation is not None and difference.moved is not None and not any(part.amount > 0 for part in parts.values()):
        # The peak moved to the backward of what autograd records now.
        kept = ((cause, row) for cause in difference.graph for row in explanation.peak.rows if cause.explains(row))
        parts |= _summed(_of_graph(cause, row, row.nbytes) for cause, row in kept)
    if explanation is not None and sum(max(0, part.amount) for part in parts.values()) < ENOUGH * difference.nbytes:
        retained = explanation.retained.rows
        parts = {**_summed(part for row in retained for part in _at_holders(row, row.nbytes, held)), **parts}
    return parts


def _alternatives(verdict: Verdict, metric: str, held: Mapping[Place, Sequence[_Held]]) -> tuple[Alternatives, ...]:
    """Return the parts of a growth whose place is not proven. ``held`` are `_holder_places`."""
    explanation = verdict.measurement.explanation
    if METRICS[metric].peak:
        return _alternatives_of_peak(verdict, held)
    if metric not in KEPT or explanation is None:
        return ()
    kept = [_alternative_holders(holder) for holder in explanation.holders if holder.alternatives]
    # The line of small rows is not known, so the other holder would seem to be proven.
    return tuple(alternatives for alternatives in kept if len(alternatives.parts) > 1)


def _alternative_holders(holder: Holder) -> Alternatives:
    """Return the alternatives for a holder that is not certain. The line stands for a holder that was not found."""
    places = (
        _summed(_held(replace(holder, path=path, alternatives=()), row) for row in holder.kept.rows)
        for path in holder.alternatives
    )
    return Alternatives(holder.kept.total, {place: part for each in places for place, part in each.items()})


def _alternatives_of_peak(verdict: Verdict, held: Mapping[Place, Sequence[_Held]]) -> tuple[Alternatives, ...]:
    """Return the parts of a peak's growth whose place is not proven, the largest first."""
    peak_alternatives = []
    for change in verdict.difference.changes if verdict.difference is not None else ():
        parts: dict[Place, Part] = {}
        for row in change.alternatives:
            for place, part in _at_holders(row, min(change.nbytes, row.nbytes), held):
                # Rows at one place do not grow together by more than the change.
                parts.setdefault(place, part)
        peak_alternatives += [Alternatives(change.nbytes, parts)] if parts else []
    return tuple(peak_alternatives)


def proven(growths: Sequence[Explained], causes: Sequence[Place]) -> list[Explained]:
    """Return growths without alternatives that have a line that is a cause of another growth.

    Growths of the same measurement decide before others. Several lines decide if they have no more bytes than the growth. A
    single alternative proves nothing, because smaller rows may have grown instead.
    """
    named: dict[Place | str, set[Growth]] = defaultdict(set)
    for place in causes:
        named[place.line or place] |= {explained.growth for explained in growths if explained.at(place) > 0}
    return [_proven(explained, named) for explained in growths]


def _proven(explained: Explained, named: Mapping[Place | str, set[Growth]]) -> Explained:
    parts, remaining = [*explained.parts.items()], []
    growth = explained.growth
    for alternatives in explained.alternatives:
        lines: dict[Place | str, list[tuple[Place, Part]]] = defaultdict(list)
        for place, part in alternatives.parts.items():
            lines[place.line or place].append((place, part))
        others = {line: named.get(line, set()) - {growth} for line in lines}
        own = [line for line in lines if any(one.is_beside(growth) for one in others[line])]
        proven_lines = own or [line for line in lines if others[line]]
        decided = [_at_line(lines[line]) for line in proven_lines]
        if len(decided) == 1 or (decided and sum(part.amount for _, part in decided) <= alternatives.amount):
            parts += decided
        else:
            remaining.append(alternatives)
    return replace(explained, parts=_summed(parts), alternatives=tuple(remaining))


def _at_line(parts: Sequence[tuple[Place, Part]]) -> tuple[Place, Part]:
    """Return the largest of some parts at one line, without its module if another module may be meant."""
    place, part = parts[0]
    return parts[0] if len(parts) == 1 else (place._replace(module=""), replace(part, module=""))


def _summed(parts: Iterable[tuple[Place, Part] | None]) -> dict[Place, Part]:
    found: dict[Place, Part] = {}
    for place, part in filter(None, parts):
        found[place] = found[place] + part if place in found else part
    return found


def _of_row(row: Row, nbytes: int, reason: str = "") -> tuple[Place, Part] | None:
    """Return the place of a row, and the row as a part; ``None`` for the sum of small rows."""
    line = row.named or row.library or row.site
    if row.operator == REST:
        return None
    place = Place(without_release(line), row.module, "" if line or row.module else row.category)
    lines = (line,) if line else ()
    return place, Part(nbytes, nbytes, lines, row.path, row.operator, row.what, row.category, reason)


def _of_change(
    change: Change, difference: Difference, held: Mapping[Place, Sequence[_Held]]
) -> list[tuple[Place, Part]]:
    """Return a change as parts.

    The place is the caller's if the change follows from a change of the graph, else the holder's if there is one in ``held``.
    """
    cause = next((one for one in difference.graph if change.nbytes > 0 and one.explains(change.row)), None)
    of_graph = None if cause is None else _of_graph(cause, change.row, change.nbytes)
    return _at_holders(change.row, change.nbytes, held, change.reason) if of_graph is None else [of_graph]


def _of_graph(cause: GraphChange, row: Row, nbytes: int) -> tuple[Place, Part] | None:
    """Return the place and the part of a row that follows from a change of the graph."""
    of_row = _of_row(row, nbytes)
    if of_row is None:
        return None
    lines = cause.lines if len(cause.lines) == 1 or cause.is_of_a_part else ()
    # Of several possible callers all are the place: calls elsewhere are another cause.
    place = Place(" or ".join(map(without_release, cause.lines)), cause.module)
    return place, replace(of_row[1], lines=lines, module=cause.module, reason=cause.sentence)


def _of_tally(tally: Tally) -> tuple[Place, Part]:
    line, module = tally.place.named or tally.place.library or tally.place.site, tally.place.module
    # Of kernels the lines are not known.
    place = Place(without_release(line), module) if line or module else Place("", tally.operator)
    lines = (line,) if line else ()
    return place, Part(tally.amount, tally.amount, lines, module, tally.operator, "", reason=tally.place.reason)


def _of_inner_modules(growths: Sequence[Explained]) -> list[Explained]:
    """Return growths in which a module at a line has one name in all tests, without those of what is around it in some."""
    modules: dict[str, set[str]] = defaultdict(set)
    for one in growths:
        for place in chain(one.parts, *(alternatives.parts for alternatives in one.alternatives)):
            modules[place.line].add(place.module)
    inner: dict[tuple[str, str], str] = {}
    for line, names in modules.items():
        for name in names:
            ends = {part for part in _ends(name) if line and part in names}
            inner[line, name] = min(ends, key=len, default=name)

    def of_inner(parts: Mapping[Place, Part]) -> dict[Place, Part]:
        return _summed((place._replace(module=inner[place.line, place.module]), part) for place, part in parts.items())

    return [
        replace(
            one,
            parts=of_inner(one.parts),
            alternatives=tuple(each._replace(parts=of_inner(each.parts)) for each in one.alternatives),
        )
        for one in growths
    ]


def _ends(module: str) -> Iterator[str]:
    """Yield ``model.blocks.*.attn``, ``blocks.*.attn``, ``*.attn``, ``attn``."""
    parts = module.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)) if module)
