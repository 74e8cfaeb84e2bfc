"""What opens beneath a test: a panel for each of its measurements. Pure, frozen values."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.gate.verdict import FAILING
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports.counts import count_tables, grown_counts
from pytest_gpumem.reports.explanation import category_of, places_of, retained_title
from pytest_gpumem.reports.html.charts import over_time_chart, rounds_chart
from pytest_gpumem.reports.html.texts import in_lines, in_one_line
from pytest_gpumem.reports.values import MetricTexts, texts_of
from pytest_gpumem.reports.view import origin_line
from pytest_gpumem.units import format_bytes, format_bytes_change
from pytest_gpumem.values.composition import CATEGORIES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.gate.difference import Change, Difference
    from pytest_gpumem.gate.verdict import MetricVerdict, Verdict
    from pytest_gpumem.reports.counts import CountTable
    from pytest_gpumem.units import UnitSystem
    from pytest_gpumem.values.composition import Composition

MOST_ROWS = 30
"""Of a table that explains; the others are one row together."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A value beside what it is held against, as fractions of the track, which is twice its baseline, or else its budget.

    So one glance compares rows: the marks that they are held against stand beneath each other, and a change of 10 % is as
    long in every row. What is longer than its track ends with it, and is said to.
    """

    now: float
    baseline: float | None = None
    limit: float | None = None
    """The most that is tolerated."""
    budget: float | None = None
    cut: bool = False
    """Whether the value is longer than the track."""
    beyond: str = ""
    """A budget that is: how many times the baseline. It has no place on the track then."""


@dataclass(frozen=True, slots=True)
class MetricRow:
    """A metric against its baseline and its budget, as texts, and as a bar."""

    texts: MetricTexts
    fails: bool
    bar: Bar | None
    """``None`` where it was held against nothing."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PartRow:
    """Blocks that are alike, or a change of such: where they come from. ``share`` is of the largest row, for a bar."""

    category: str
    nbytes: str
    places: tuple[str, ...]
    """Module, line, operator, and what they are."""
    share: float = 0.0
    before: str = ""
    after: str = ""
    reason: str = ""
    shrank: bool = False
    colour: str = ""
    """The category that its bar has the colour of."""


@dataclass(frozen=True, slots=True)
class PartTable:
    """What a number of bytes is made of, or by what it changed."""

    title: str
    rows: tuple[PartRow, ...]
    rest: str = ""
    changes: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """What there is to say of a measurement."""

    name: str
    workload: tuple[str, ...]
    metrics: tuple[MetricRow, ...]
    origin: str
    growth: PartTable | None
    """What changed at the peak."""
    counts: tuple[CountTable, ...]
    """By which operators counts are more."""
    compositions: tuple[PartTable, ...]
    over_time: dict[str, Any] | None
    rounds: dict[str, Any] | None
    notes: tuple[str, ...]


def panel_of(verdict: Verdict, units: UnitSystem) -> Panel:
    """What there is to say of a measurement."""
    measurement, explanation = verdict.measurement, verdict.measurement.explanation
    over_time = None if explanation is None else explanation.over_time
    return Panel(
        in_one_line(measurement.name),
        _workload(verdict),
        tuple(_metric(metric, units) for metric in verdict.metrics),
        "" if verdict.origin is None else in_one_line(origin_line(verdict.origin, reason=True)),
        _growth(verdict.growth, units) if verdict.growth is not None and verdict.growth.changes else None,
        tuple(_counts(verdict, units)),
        tuple(_compositions(verdict, units)),
        over_time_chart(over_time, verdict.of("peak_allocated"), units)
        if over_time is not None and over_time.time_ns
        else None,
        rounds_chart(verdict),
        _notes(verdict),
    )


def _workload(verdict: Verdict) -> tuple[str, ...]:
    workload = verdict.measurement.workload
    said = [workload.step]
    if workload.config is not None:
        said.append(workload.config)
    if workload.parameters is not None:
        said.append(f"{workload.parameters:,} parameters")
    if workload.batch is not None:
        said.append(f"batch {workload.batch}")
    said.append(verdict.measurement.environment.device)
    return tuple(in_one_line(text) for text in said)


def _metric(metric: MetricVerdict, units: UnitSystem) -> MetricRow:
    return MetricRow(
        MetricTexts(*map(in_one_line, astuple(texts_of(metric, units)))),
        metric.outcome in FAILING,
        bar_of(metric),
        in_lines(metric.reason or ""),
    )


def bar_of(metric: MetricVerdict) -> Bar | None:
    """The bar of a metric that has something to be held against that is more than nothing; nothing in it is longer than 1."""
    middle = metric.baseline or metric.budget
    if not middle or middle < 0 or not all(map(math.isfinite, (metric.value, middle))):
        return None
    limit = None
    if metric.baseline is not None and metric.allowed is not None:
        limit = metric.baseline + (-metric.allowed if METRICS[metric.metric].larger_is_better else metric.allowed)

    def times(value: float) -> float:
        return value / middle

    def part(value: float | None) -> float | None:
        return None if value is None else min(1.0, max(0.0, times(value) / 2))

    far = metric.budget is not None and times(metric.budget) > 2
    return Bar(
        part(metric.value) or 0.0,
        part(metric.baseline),
        part(limit),
        None if far else part(metric.budget),
        cut=times(metric.value) > 2,
        beyond=_multiple(times(metric.budget)) if far and metric.budget is not None else "",
    )


def _multiple(ratio: float) -> str:
    return f"{ratio:.1f} x" if ratio < 10 else f"{ratio:,.0f} x" if ratio < 10_000 else "> 9,999 x"


def _compositions(verdict: Verdict, units: UnitSystem) -> Iterable[PartTable]:
    explanation = verdict.measurement.explanation
    if explanation is None:
        return
    peak = format_bytes(explanation.peak.total, units)
    if explanation.asked is not None:
        title = f"What was there when {format_bytes(explanation.asked, units)} more were asked for: {peak}"
    else:
        title = f"What the peak is made of: {peak}"
    yield _composition(title, explanation.peak, units)
    for what, composition in (
        (retained_title(verdict).capitalize(), explanation.retained),
        ("What only the cyclic collector freed", explanation.garbage),
    ):
        if composition.rows:
            yield _composition(f"{what}: {format_bytes(composition.total, units)}", composition, units)


def _counts(verdict: Verdict, units: UnitSystem) -> Iterable[CountTable]:
    for table in count_tables(verdict, grown_counts(verdict), units, MOST_ROWS):
        rows = tuple(
            replace(
                row,
                operator=in_one_line(row.operator),
                module=in_one_line(row.module),
                line=in_one_line(row.line),
            )
            for row in table.rows
        )
        yield replace(table, rows=rows)


def _growth(growth: Difference, units: UnitSystem) -> PartTable:
    shown_changes = growth.changes[:MOST_ROWS]
    largest = max((abs(one.nbytes) for one in shown_changes), default=0)
    rest = growth.growth - sum(one.nbytes for one in shown_changes)
    return PartTable(
        f"What changed at the peak: {format_bytes_change(growth.growth, units)}",
        tuple(_change(one, largest, units) for one in shown_changes),
        format_bytes_change(rest, units) if len(growth.changes) > MOST_ROWS else "",
        changes=True,
    )


def _change(one: Change, largest: int, units: UnitSystem) -> PartRow:
    row = one.row
    return PartRow(
        in_one_line(category_of(row)),
        format_bytes_change(one.nbytes, units),
        tuple(map(in_one_line, places_of(row))),
        abs(one.nbytes) / largest if largest else 0.0,
        format_bytes(one.before.nbytes, units) if one.before else "",
        format_bytes(one.after.nbytes, units) if one.after else "",
        in_one_line(one.reason),
        shrank=one.nbytes < 0,
    )


def _composition(title: str, composition: Composition, units: UnitSystem) -> PartTable:
    rows = composition.rows[:MOST_ROWS]
    largest = max((row.nbytes for row in rows), default=0)
    rest = composition.total - sum(row.nbytes for row in rows)
    return PartTable(
        title,
        tuple(
            PartRow(
                in_one_line(category_of(row)),
                format_bytes(row.nbytes, units),
                tuple(map(in_one_line, places_of(row))),
                max(0.0, row.nbytes / largest) if largest else 0.0,
                colour=row.category if row.category in CATEGORIES else "",
            )
            for row in rows
        ),
        format_bytes(rest, units) if rest else "",
    )


def _notes(verdict: Verdict) -> tuple[str, ...]:
    explanation = verdict.measurement.explanation
    notes = [*([verdict.reason] if verdict.reason else []), *verdict.measurement.notes]
    if not verdict.measurement.settled:
        notes.append("the step had not settled: two consecutive steps did not give the same peak")
    if verdict.measurement.recomputed:
        notes.append(f"{verdict.measurement.recomputed} module calls were repeated in backward")
    if explanation is not None:
        notes += explanation.peak.notes
        notes += [f"kept in: {holder}" for holder in explanation.holders]
        notes += [f"cycle: {cycle}" for cycle in explanation.cycles]
    times = verdict.measurement.times
    for sample in times.samples if times is not None else ():
        if sample.invalid is not None:
            notes.append(f"no verdict may rest on a sample of its times: {sample.invalid}")
    return tuple(in_lines(note) for note in dict.fromkeys(notes))
