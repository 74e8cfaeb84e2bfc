"""Growths of a session: each metric of a measurement that is worse, with what explains it by its place in the code. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.gate.verdict import WORSE, Outcome
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.values.composition import FIRST_USE, REST
from pytest_gpumem.values.source_lines import without_release

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pytest_gpumem.gate.difference import Change, Difference
    from pytest_gpumem.gate.verdict import MetricVerdict, TestVerdict, Verdict
    from pytest_gpumem.values.composition import Holder, Row
    from pytest_gpumem.values.operator_counts import Tally

ENOUGH = 0.8
"""Share of a growth that its causes have to explain; the rest of it are consequences."""


@dataclass(frozen=True, slots=True, order=True)
class Growth:
    """A metric that is worse: of a measurement of a test, by so much. The amount is in the metric's unit."""

    test: str
    """The test's id."""
    name: str
    metric: str
    device: str
    amount: float = field(compare=False)


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
    held: dict[Place, _Held] = {}
    if explanation is not None:
        kept = () if KEPT.isdisjoint(chosen) else explanation.holders
        held = _holder_places(explanation.holders_of_inputs, kept, is_again="growth" in chosen)
    parts = {name: _parts(verdict, name, held) for name in chosen}
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
            _alternatives(verdict, name, held),
        )


KEPT = frozenset({"growth", "retained"})
"""Metrics whose cause is the holder."""


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


def _parts(verdict: Verdict, metric: str, held: Mapping[Place, _Held]) -> dict[Place, Part]:
    """Return what explains a metric of a measurement, by place. ``held`` are `_holder_places`."""
    explanation = verdict.measurement.explanation
    if metric in verdict.count_changes:
        return _summed(_of_tally(tally) for tally in verdict.count_changes[metric])
    if METRICS[metric].peak:
        return _parts_of_peak(verdict, held)
    if explanation is None or metric not in {*KEPT, "cyclic_garbage"}:
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

    def has(self, row: Row, nbytes: int) -> bool:
        """Return whether bytes of a row are tensors of the holder. A step finds what the step before it kept as an input."""
        alike = [
            kept
            for kept in self.rows
            if (kept.operator, kept.tensor) == (row.operator, row.tensor) and row.category in ("input", kept.category)
        ]
        return bool(alike) and (self.is_again or nbytes <= sum(kept.nbytes for kept in alike))


def _holder_places(of_inputs: Iterable[Holder], of_kept: Iterable[Holder], *, is_again: bool) -> dict[Place, _Held]:
    """Return the holder for each line whose tensors it keeps: these are at the peak because it keeps them.

    A line with several holders is left out. A row without a line and a module may be other tensors, and is left out, too.

    Args:
        of_inputs: The holders of inputs.
        of_kept: The holders of what a step or a call keeps.
        is_again: Whether each step keeps ``of_kept`` once more.
    """
    of_place: dict[Place, set[Place]] = defaultdict(set)
    rows: dict[Place, list[Row]] = defaultdict(list)
    again: set[Place] = set()
    for holders, each_step in ((of_inputs, False), (of_kept, is_again)):
        for holder, row in ((each, row) for each in holders for row in each.kept.rows):
            found, held = _of_row(row, row.nbytes), _held(holder, row)
            if found is not None and held is not None:
                of_place[found[0]] |= {held[0], *(Place("", "", holder=path) for path in holder.alternatives)}
                rows[found[0]].append(row)
                again |= {found[0]} if each_step else set()
    return {
        place: _Held(next(iter(some)), tuple(rows[place]), place in again)
        for place, some in of_place.items()
        if len(some) == 1 and not place.category
    }


def _at_holder(row: Row, nbytes: int, held: Mapping[Place, _Held], reason: str = "") -> tuple[Place, Part] | None:
    """Return a row of a peak as a part, at its holder if there is a single holder for its tensors."""
    of_row = _of_row(row, nbytes, reason)
    if of_row is None:
        return None
    place, part = of_row
    # Rows of a holder have no changed caller that is named before their line.
    unnamed = _of_row(replace(row, named=""), nbytes) if row.named else None
    at_line = held.get(place if unnamed is None else unnamed[0])
    return at_line.holder if at_line is not None and at_line.has(row, nbytes) else place, part


def _parts_of_peak(verdict: Verdict, held: Mapping[Place, _Held]) -> dict[Place, Part]:
    """Return what grew at the peak; where that is many small rows, also what was left, which was there at the peak."""
    difference, explanation = verdict.difference, verdict.measurement.explanation
    if difference is None:
        return {}
    parts = _summed(_of_change(change, difference, held) for change in difference.changes)
    if explanation is not None and sum(max(0, part.amount) for part in parts.values()) < ENOUGH * difference.nbytes:
        parts = {**_summed(_at_holder(row, row.nbytes, held) for row in explanation.retained.rows), **parts}
    return parts


def _alternatives(verdict: Verdict, metric: str, held: Mapping[Place, _Held]) -> tuple[Alternatives, ...]:
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


def _alternatives_of_peak(verdict: Verdict, held: Mapping[Place, _Held]) -> tuple[Alternatives, ...]:
    """Return the parts of a peak's growth whose place is not proven, the largest first."""
    peak_alternatives = []
    for change in verdict.difference.changes if verdict.difference is not None else ():
        parts: dict[Place, Part] = {}
        for row in change.alternatives:
            of_row = _at_holder(row, min(change.nbytes, row.nbytes), held)
            if of_row is not None:
                # Rows at one place do not grow together by more than the change.
                parts.setdefault(*of_row)
        peak_alternatives += [Alternatives(change.nbytes, parts)] if parts else []
    return tuple(peak_alternatives)


def proven(growths: Sequence[Explained], causes: Sequence[Place]) -> list[Explained]:
    """Return growths without alternatives that have a single line that is a cause of another growth.

    A single alternative proves nothing, because smaller rows may have grown instead.
    """
    named: dict[Place | str, set[Growth]] = defaultdict(set)
    for place in causes:
        named[place.line or place] |= {explained.growth for explained in growths if explained.at(place) > 0}
    return [_proven(explained, named) for explained in growths]


def _proven(explained: Explained, named: Mapping[Place | str, set[Growth]]) -> Explained:
    parts, remaining = [*explained.parts.items()], []
    for alternatives in explained.alternatives:
        lines: dict[Place | str, list[tuple[Place, Part]]] = defaultdict(list)
        for place, part in alternatives.parts.items():
            lines[place.line or place].append((place, part))
        proven_lines = [line for line in lines if named.get(line, set()) - {explained.growth}]
        if len(proven_lines) == 1:
            parts.append(_at_line(lines[proven_lines[0]]))
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


def _of_change(change: Change, difference: Difference, held: Mapping[Place, _Held]) -> tuple[Place, Part] | None:
    """Return the place of a change and the change as a part.

    The place is the caller's if the change follows from a change of the graph, else the holder's if there is one in ``held``.
    """
    cause = next((one for one in difference.graph if change.nbytes > 0 and one.explains(change.row)), None)
    of_row = _at_holder(change.row, change.nbytes, held, change.reason)
    if cause is None or of_row is None:
        return of_row
    lines = cause.lines if len(cause.lines) == 1 else ()
    part = replace(of_row[1], lines=lines, module=cause.module, reason=cause.sentence)
    # Of several possible callers all are the place: calls elsewhere are another cause.
    return Place(" or ".join(map(without_release, cause.lines)), cause.module), part


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
