"""The table of measurements at the end of a session: which of them have something to say, and what stands beneath. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pytest_gpumem.gate.verdict import Outcome, worst
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports.layout import Column, Span, Style, Table
from pytest_gpumem.reports.values import change, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.gate.verdict import TestVerdict, Verdict
    from pytest_gpumem.reports.session_report import SessionReport
    from pytest_gpumem.reports.view import Measured
    from pytest_gpumem.units import UnitSystem

MOST_FIGURES = 60
"""So many rows that only have figures are shown where nobody asked for all of them."""
LEAST_NAME = 30
"""A test's id is shortened to no fewer cells than that."""
STYLES: dict[Outcome, Style | None] = {
    Outcome.RECORDED: None,
    Outcome.OK: "good",
    Outcome.IMPROVED: "good",
    Outcome.NEW: None,
    Outcome.FOREIGN: "doubtful",
    Outcome.STALE: "doubtful",
    Outcome.UNMEASURED: "doubtful",
    Outcome.UNCERTAIN: "doubtful",
    Outcome.MISSING: "bad",
    Outcome.REGRESSED: "bad",
    Outcome.OVER_BUDGET: "bad",
}
_WITHOUT_BASELINE = (Outcome.NEW, Outcome.FOREIGN, Outcome.STALE)
"""What a metric is where there is nothing that its measurement may be compared with."""
_FIGURES = (Outcome.RECORDED, Outcome.NEW, Outcome.FOREIGN)
"""Nothing was found of them; what there is to see is what was measured."""
_FOUND = (Outcome.IMPROVED, Outcome.UNCERTAIN, Outcome.REGRESSED, Outcome.OVER_BUDGET)
_CHANGE = 1 + max(metric.weight or 0 for metric in METRICS.values())
"""The weight of the column of changes: it gives way when those of metrics have."""


_NO_TIMES_HELP = "the baseline has no times; --gpumem-update=new adds them when little else is at work"


def to_be_shown(measured: Iterable[Measured], *, gating: bool) -> list[Measured]:
    """Those with something to say: all but the ``ok``, and but the ``recorded`` where a session is ``gating``.

    Elsewhere figures are what a session is for. Of those that have nothing but figures the first `MOST_FIGURES` are shown.
    """
    told: list[Measured] = []
    figures = 0
    for one in measured:
        outcome = one.verdict.outcome
        if outcome is Outcome.OK or (gating and outcome is Outcome.RECORDED):
            continue
        figures += outcome in _FIGURES
        if outcome not in _FIGURES or figures <= MOST_FIGURES:
            told.append(one)
    return told


def not_shown(measured: Sequence[Measured], told: Sequence[Measured]) -> list[str]:
    """A line that counts those that the table leaves out, if there are any."""
    left_out = Counter(one.verdict.outcome for one in measured)
    left_out.subtract(one.verdict.outcome for one in told)
    counts = [f"{left_out[outcome]} {outcome.words}" for outcome in Outcome if left_out[outcome]]
    return [f"... and {', '.join(counts)} (-v shows all)"] if counts else []


def summary_table(measured: Sequence[Measured], units: UnitSystem, *, everything: bool) -> Table:
    """A row a measurement, a column a metric that any of them has; counts where they changed, or with ``everything``."""
    metrics = [name for name in METRICS if _is_told(name, measured, everything=everything)]
    columns = [_column(name, measured) for name in metrics]
    changes = any(_change(one, units) for one in measured)
    if changes:
        columns.insert(1, Column("change", weight=_CHANGE))
    return Table(
        (Column("test", left=True, least=LEAST_NAME), *columns, Column("verdict", left=True)),
        tuple(_row(one, metrics, units, changes=changes) for one in measured),
    )


def reasons(tests: Iterable[TestVerdict]) -> list[str]:
    """Why something was not compared, or not measured: each reason once, with how often."""
    everything = list(tests)
    verdicts = [one for test in everything if not test.unmeasured for one in test.verdicts]
    counted = Counter(
        [reason for test in everything for reason in _test_reasons(test)]
        + [reason for one in verdicts for reason in _whole_reasons(one)]
        + [f"{one.outcome.words}: {one.reason}" for verdict in verdicts for one in verdict.metrics if one.reason]
    )
    return [f"{reason}{f' ({times} times)' if times > 1 else ''}" for reason, times in counted.items()]


def _test_reasons(test: TestVerdict) -> list[str]:
    """Why something of a whole test was not compared, after the outcome that says so."""
    if test.missing_text is not None:
        return [f"{Outcome.MISSING.words}: {test.missing_text}"]
    return [f"{Outcome.UNMEASURED.words}: {test.unmeasured}"] if test.unmeasured else []


def _whole_reasons(verdict: Verdict) -> list[str]:
    """Why a whole measurement was not compared, after the outcome that says so: a budget may have been broken all the same."""
    if not verdict.reason:
        return []
    without = worst(metric.outcome for metric in verdict.metrics if metric.outcome in _WITHOUT_BASELINE)
    grew = any(metric.outcome in (Outcome.REGRESSED, Outcome.UNCERTAIN) for metric in verdict.metrics)
    said = "another workload" if grew else without.words if without in _WITHOUT_BASELINE else "not compared"
    return [f"{said}: {verdict.reason}"]


def ungated_times(report: SessionReport) -> list[str]:
    """Of how many timed steps the time is not gated though it was asked for, as a sentence: their baselines have no times.

    A run while too much else is at work is no measure for later ones, so that a store may have none at all.
    """
    timed = _timed(report)
    lacking = [one for one in timed if _time_is(one, Outcome.NEW) and one.reason is None]
    if not lacking or report.terms.update is not None or not report.terms.baseline:
        return []
    return [f"{_share(lacking, timed)} not gated: {_NO_TIMES_HELP}"]


def unstored_times(report: SessionReport) -> list[str]:
    """Of how many timed steps an update leaves the time out, as a sentence."""
    timed = _timed(report)
    wanted = {"new": [one for one in timed if _time_is(one, Outcome.NEW, Outcome.RECORDED)], "all": timed}
    measures = [
        one.measurement.times.best for one in wanted.get(report.terms.update or "", []) if one.measurement.times
    ]
    left_out = [one for one in measures if not one.is_a_measure]
    return [f"{_share(left_out, timed)} not stored: {left_out[0].invalid}"] if left_out else []


def _timed(report: SessionReport) -> list[Verdict]:
    return [one for result in report.results for one in result.verdict.verdicts if one.measurement.times is not None]


def _share(some: Sequence[object], timed: Sequence[Verdict]) -> str:
    return f"of {len(timed)} timed step{'' if len(timed) == 1 else 's'}, the time of {len(some)} is"


def _time_is(verdict: Verdict, *outcomes: Outcome) -> bool:
    speed = verdict.of("step_time")
    return speed is not None and speed.outcome in outcomes


def notes(measured: Iterable[Measured]) -> list[str]:
    """What measurements have to say of themselves. A step that had not settled says so where that decides something."""
    return [
        f"note: {one.title}: {note}"
        for one in measured
        if one.verdict.measurement.settled
        for note in one.verdict.measurement.notes
    ]


def _column(name: str, measured: Iterable[Measured]) -> Column:
    row = METRICS[name]
    title = row.short or name.replace("_", " ")
    if row.weight is None:
        return Column(title)
    found = any(metric.outcome in _FOUND for one in measured if (metric := one.verdict.of(name)) is not None)
    # What a verdict rests on gives way last.
    return Column(title, weight=row.weight + (_CHANGE + 1 if found else 0))


def _is_told(name: str, measured: Iterable[Measured], *, everything: bool) -> bool:
    found = [metric for one in measured if (metric := one.verdict.of(name)) is not None]
    if METRICS[name].shown == "if changed":
        return bool(found) if everything else any(metric.outcome in _FOUND for metric in found)
    return METRICS[name].has_column([metric.value for metric in found])


def _change(one: Measured, units: UnitSystem) -> str:
    peak = one.verdict.of("peak_allocated")
    return change(peak, units) if peak else ""


def _row(one: Measured, metrics: Iterable[str], units: UnitSystem, *, changes: bool) -> tuple[Span, ...]:
    verdict = one.verdict
    figures = [
        shown(name, metric.value, units, metric.of) if (metric := verdict.of(name)) is not None else "-"
        for name in metrics
    ]
    if changes:
        figures.insert(1, _change(one, units))
    return (Span(one.title), *map(Span, figures), Span(verdict.outcome.words, STYLES[verdict.outcome]))
