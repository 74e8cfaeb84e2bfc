"""Make the panels in the HTML page. Each panel shows a single measurement. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.units import format_bytes, format_bytes_change
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.judging.gate.growths import KEPT_METRICS, kept_rows
from pytest_gpumem.judging.gate.verdict import CHANGED, FAILING, WORSE
from pytest_gpumem.reporting.reports.explanation import (
    change_table,
    composition_table,
    count_tables,
    explained_on,
    grown_counts,
    holder_lines,
    kept_notes,
    retained_title,
)
from pytest_gpumem.reporting.reports.html.charts import over_time_chart, rounds_chart
from pytest_gpumem.reporting.reports.results import ACCEPTED
from pytest_gpumem.reporting.reports.values import MetricTexts, peaks_by_device, remarks_on, texts_of
from pytest_gpumem.reporting.reports.view import origin_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.base.units import UnitSystem
    from pytest_gpumem.facts.values.composition import Composition, Row
    from pytest_gpumem.judging.gate.verdict import MetricVerdict, Outcome, Verdict
    from pytest_gpumem.reporting.reports.explanation import PartTable

MOST_ROWS = 30
"""A table has at most this many rows. If there are more, a further row has the sum of the others."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar for a metric's value, with marks for the baseline and the limits.

    All numbers are fractions of the bar's full length, which is twice the baseline, or twice the budget without a baseline. The
    baseline's mark therefore has the same position in every row, and a change of 10 % has the same length. A value beyond the
    bar's full length is cut.

    Example: a peak of 6 MB, with a baseline of 4 MB and a budget of 10 MB, has ``value=0.75``, ``baseline=0.5`` and
    ``beyond="2.5 x"``.
    """

    value: float
    baseline: float | None = None
    limit: float | None = None
    """The largest tolerated value."""
    budget: float | None = None
    cut: bool = False
    """True if the value is larger than the bar's full length."""
    beyond: str = ""
    """The budget as a multiple of the baseline, if the budget is beyond the bar's full length; else empty."""


@dataclass(frozen=True, slots=True)
class MetricRow:
    """A metric with its baseline and its budget, as texts and as a bar."""

    texts: MetricTexts
    fails: bool
    bar: Bar | None
    """The bar; ``None`` if the metric has no baseline and no budget."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A measurement's panel on the page."""

    name: str
    workload: tuple[str, ...]
    metrics: tuple[MetricRow, ...]
    origin: str
    changes: tuple[PartTable, ...]
    """The tables that explain changed metrics: kept bytes, the peak, and counts."""
    compositions: tuple[PartTable, ...]
    """The other tables, for example the peak's composition."""
    over_time: dict[str, Any] | None
    rounds: dict[str, Any] | None
    notes: tuple[str, ...]


def panel_of(verdict: Verdict, units: UnitSystem, accepted: frozenset[Outcome] = frozenset()) -> Panel:
    """Return the panel for a measurement. ``accepted`` contains the outcomes whose figures became the baseline."""
    measurement, explanation, difference = verdict.measurement, verdict.measurement.explanation, verdict.difference
    over_time = None if explanation is None else explanation.over_time
    changes = count_tables(verdict, grown_counts(verdict), units, MOST_ROWS)
    kept_tables, other_tables = _compositions(verdict, units)
    if difference is not None and difference.changes:
        title = f"What changed at the peak{explained_on(verdict)}: {format_bytes_change(difference.nbytes, units)}"
        table = change_table(difference, units, MOST_ROWS, title)
        has_changed = any(METRICS[metric.metric].peak and metric.outcome in CHANGED for metric in verdict.metrics)
        (changes if has_changed else other_tables).insert(0, table)
    return Panel(
        measurement.name,
        tuple(_workload(verdict)),
        tuple(
            MetricRow(
                replace(texts_of(metric, units), **({"words": ACCEPTED} if metric.outcome in accepted else {})),
                metric.outcome in FAILING - accepted,
                bar_of(metric),
                metric.reason or "",
            )
            for metric in verdict.metrics
        ),
        "" if verdict.origin is None else origin_line(verdict.origin, reason=True),
        (*kept_tables, *changes),
        tuple(other_tables),
        over_time_chart(over_time, verdict.of("peak_allocated"), units)
        if over_time is not None and over_time.time_ns
        else None,
        rounds_chart(verdict),
        tuple(dict.fromkeys(_notes(verdict, units))),
    )


def _workload(verdict: Verdict) -> Iterable[str]:
    workload = verdict.measurement.workload
    yield workload.step
    if workload.config is not None:
        yield workload.config
    if workload.parameters is not None:
        yield f"{workload.parameters:,} parameters"
    if workload.batch is not None:
        yield f"batch {workload.batch}"
    yield verdict.measurement.environment.device


def bar_of(metric: MetricVerdict) -> Bar | None:
    """Return a bar for a metric; ``None`` unless the metric has a baseline or a budget above zero."""
    reference = metric.baseline or metric.budget
    if not reference or reference < 0 or not all(map(math.isfinite, (metric.value, reference))):
        return None
    limit = None
    if metric.baseline is not None and metric.allowed is not None:
        limit = metric.baseline + (-metric.allowed if METRICS[metric.metric].larger_is_better else metric.allowed)

    def times(value: float) -> float:
        return value / reference

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


def _compositions(verdict: Verdict, units: UnitSystem) -> tuple[list[PartTable], list[PartTable]]:
    """Return the compositions that explain worse metrics, and all other compositions, as tables."""
    explanation = verdict.measurement.explanation
    if explanation is None:
        return [], []
    title = f"What the peak is made of{explained_on(verdict)}"
    if explanation.asked is not None:
        title = f"What was there when {format_bytes(explanation.asked, units)} more were asked for"
    retained, garbage = explanation.retained, explanation.garbage
    worse = {metric.metric for metric in verdict.metrics if metric.outcome in WORSE}
    cycles = tuple(f"cycle: {cycle}" for cycle in explanation.cycles)
    explaining: list[PartTable] = []
    other_tables = [_table_of(title, explanation.peak, units)]
    retained_rows = kept_rows(verdict)
    holders = (*holder_lines(retained_rows.holders(explanation.holders), units), *kept_notes(retained_rows, units))
    for heading, composition, metrics, reasons, rows in (
        (retained_title(verdict).capitalize(), retained, KEPT_METRICS, holders, retained_rows.rows),
        ("What only the cyclic collector freed", garbage, {"cyclic_garbage"}, cycles, None),
    ):
        if composition.rows:
            table = replace(_table_of(heading, composition, units, rows), sentences=reasons)
            (other_tables if worse.isdisjoint(metrics) else explaining).append(table)
    return explaining, other_tables


def _table_of(
    heading: str, composition: Composition, units: UnitSystem, rows: Sequence[Row] | None = None
) -> PartTable:
    return composition_table(
        f"{heading}: {format_bytes(composition.total, units)}", composition, units, MOST_ROWS, rows
    )


def _notes(verdict: Verdict, units: UnitSystem) -> Iterable[str]:
    measurement, explanation = verdict.measurement, verdict.measurement.explanation
    by_device = peaks_by_device(measurement, units)
    if by_device is not None:
        yield by_device
    if verdict.reason:
        yield verdict.reason
    yield from remarks_on(measurement)
    if not measurement.settled:
        yield "the step had not settled: the step's runs did not have the same peak"
    if measurement.recomputed:
        yield f"{measurement.recomputed} module calls were repeated in backward"
    if explanation is not None:
        yield from explanation.peak.notes
        yield from explanation.retained.notes
    for sample in measurement.times.samples if measurement.times is not None else ():
        if sample.invalid is not None:
            yield f"a sample of the step's times cannot decide a verdict: {sample.invalid}"
