"""The table of measurements at the end of a session, and the reasons and notes beneath it. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pytest_gpumem.baselines.update import ACCEPTS
from pytest_gpumem.gate.speed import not_compared_with
from pytest_gpumem.gate.verdict import CHANGED, Outcome, worst
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports.layout import Column, Span, Style, Table
from pytest_gpumem.reports.values import deciding_change, peaks_by_device, shown
from pytest_gpumem.units import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from pytest_gpumem.gate.verdict import TestVerdict, Verdict
    from pytest_gpumem.reports.session_report import SessionReport
    from pytest_gpumem.reports.view import ShownMeasurement
    from pytest_gpumem.units import UnitSystem
    from pytest_gpumem.values.option_words import UpdateMode

MOST_FIGURES = 60
"""Rows that only have figures, unless all are asked for."""
MOST_EXPLAINED = 30
"""Rows of tests that causes explain, unless all are asked for."""
MOST_REMARKS = 20
"""Reasons and notes, unless all are asked for."""
LEAST_NAME = 30
"""Cells of the screen that a shortened test id has at least."""
STYLES: dict[Outcome, Style | None] = {
    **dict.fromkeys((Outcome.RECORDED, Outcome.NEW)),
    **dict.fromkeys((Outcome.OK, Outcome.IMPROVED), "good"),
    **dict.fromkeys((Outcome.FOREIGN, Outcome.STALE, Outcome.UNMEASURED, Outcome.UNCERTAIN), "doubtful"),
    **dict.fromkeys((Outcome.MISSING, Outcome.REGRESSED, Outcome.OVER_BUDGET), "bad"),
}
_WITHOUT_BASELINE = (Outcome.NEW, Outcome.FOREIGN, Outcome.STALE)
"""Outcomes of a metric whose measurement has no comparable baseline."""
_FIGURES = (Outcome.RECORDED, Outcome.NEW, Outcome.FOREIGN)
"""Outcomes of measurements that were not compared."""
_CHANGE = 1 + max(metric.weight or 0 for metric in METRICS.values())
"""The weight of the column of changes: it is left out after those of metrics."""


def to_be_shown(
    measured: Iterable[ShownMeasurement], explained: Collection[str] = (), *, gating: bool
) -> list[ShownMeasurement]:
    """Return the measurements for the table: all but the ``ok``, and in a session that is ``gating`` the ``recorded``.

    A session without a gate is run for its figures. Of those that have nothing but figures the first `MOST_FIGURES` are shown,
    and of tests that ``explained`` has, since causes explain them, the first `MOST_EXPLAINED`.
    """
    chosen: list[ShownMeasurement] = []
    figures = of_causes = 0
    for one in measured:
        outcome = one.outcome
        if outcome is Outcome.OK or (gating and outcome is Outcome.RECORDED):
            continue
        figures += outcome in _FIGURES
        of_causes += one.test.nodeid in explained
        if one.test.nodeid in explained and of_causes > MOST_EXPLAINED:
            continue
        if outcome not in _FIGURES or figures <= MOST_FIGURES:
            chosen.append(one)
    return chosen


def not_shown(measured: Sequence[ShownMeasurement], chosen: Sequence[ShownMeasurement]) -> list[str]:
    """Return a line that counts those that the table leaves out, if there are any."""
    left_out = Counter(one.outcome for one in measured)
    left_out.subtract(one.outcome for one in chosen)
    counts = [f"{left_out[outcome]} {outcome.words}" for outcome in Outcome if left_out[outcome]]
    return [f"... and {', '.join(counts)} (-v shows all)"] if counts else []


def summary_table(measured: Sequence[ShownMeasurement], units: UnitSystem, *, everything: bool) -> Table:
    """Return a row for each measurement and a column for each metric; counts where they changed, or with ``everything``."""
    columns = [Column("test", left=True, least=LEAST_NAME)]
    rows = [[Span(one.title)] for one in measured]

    def add(column: Column, texts: Iterable[str]) -> None:
        columns.append(column)
        for row, text in zip(rows, texts, strict=True):
            row.append(Span(text))

    changes = [deciding_change(one.verdict, units) for one in measured]
    for name, metric in METRICS.items():
        verdicts = [one.verdict.of(name) for one in measured]
        known = [one for one in verdicts if one is not None]
        found = any(one.outcome in CHANGED for one in known)
        changed = found or (everything and bool(known))
        if metric.has_column([one.value for one in known], changed=changed):
            # What a verdict rests on gives way last.
            weight = None if metric.weight is None else metric.weight + (_CHANGE + 1 if found else 0)
            texts = ("-" if one is None else shown(name, one.value, units, one.of) for one in verdicts)
            add(Column(metric.short or name.replace("_", " "), weight=weight), texts)
        if len(columns) == 2 and any(changes):
            add(Column("change", weight=_CHANGE), changes)
    for row, one in zip(rows, measured, strict=True):
        outcome = one.outcome
        row.append(Span(one.words_of(outcome), "good" if outcome in one.accepted else STYLES[outcome]))
    return Table((*columns, Column("verdict", left=True)), tuple(map(tuple, rows)))


def device_lines(measured: Iterable[ShownMeasurement], units: UnitSystem) -> list[str]:
    """Return a line with the peak of each GPU for each measurement that used several."""
    return [
        f"{one.title}: {peaks}"
        for one in measured
        if (peaks := peaks_by_device(one.verdict.measurement, units)) is not None
    ]


def reasons(tests: Iterable[TestVerdict], units: UnitSystem, update: UpdateMode | None = None) -> list[str]:
    """Return why something was not compared or measured: each reason once, with the number of tests, measurements or figures.

    For example: ``"new: there is no baseline for CPU (x86_64) yet (2 measurements)"``.

    A reason in the failure of its test is left out. A reason that a single test has comes with both of its peaks, because
    the table has no column of baselines. That there is no
    baseline of time yet is a note, and nothing to tell where this session's ``update`` adds one.
    """
    peaks: dict[str, str] = {}
    counts: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    metrics: Counter[str] = Counter()
    for test in tests:
        if test.missing_text is not None:
            counts[f"{Outcome.MISSING.words}: {test.missing_text}"] += 1
        elif test.unmeasured:
            counts[f"{Outcome.UNMEASURED.words}: {test.unmeasured}"] += 1
        for one in () if test.unmeasured else test.verdicts:
            if one.reason and not _is_told(test, one.reason):
                reason = f"{_not_compared(one)}: {one.reason}"
                whole[reason] += 1
                peaks[reason] = _both_peaks(one, units) if whole[reason] == 1 else ""
            for metric in one.metrics:
                if (
                    metric.reason
                    and not _is_told(test, metric.reason)
                    and not (metric.lacks_time and Outcome.NEW in ACCEPTS[update])
                ):
                    word = "note" if metric.lacks_time and test.failure is None else metric.outcome.words
                    metrics[f"{word}: {metric.reason}"] += 1
    return [
        f"{reason}{peaks.get(reason, '')}{f' ({counted(number, noun)})' if number > 1 else ''}"
        for noun, having in (("test", counts), ("measurement", whole), ("figure", metrics))
        for reason, number in having.items()
    ]


def _is_told(test: TestVerdict, text: str) -> bool:
    """Return whether the failure of a test has a reason or a note already."""
    return test.failure is not None and text in test.failure


def _both_peaks(verdict: Verdict, units: UnitSystem) -> str:
    """Return ``"; peak 4.00 MB, baseline 22.00 MB"`` for another workload that was not judged; else nothing."""
    peak = verdict.of("peak_allocated")
    if peak is None or peak.outcome is not Outcome.STALE or peak.baseline in (None, peak.value):
        return ""
    return f"; peak {shown(peak.metric, peak.value, units)}, baseline {shown(peak.metric, peak.baseline, units)}"


def _not_compared(verdict: Verdict) -> str:
    """Return what happened to a measurement that has a reason; its budget may have been exceeded all the same."""
    without = worst(metric.outcome for metric in verdict.metrics if metric.outcome in _WITHOUT_BASELINE)
    grew = any(metric.outcome in (Outcome.REGRESSED, Outcome.UNCERTAIN) for metric in verdict.metrics)
    return "another workload" if grew else without.words if without in _WITHOUT_BASELINE else "not compared"


def unstored_times(report: SessionReport) -> list[str]:
    """Return a sentence on timed steps whose time an update keeps only to show it, as it was disturbed."""
    timed = [one for result in report.results for one in result.verdict.verdicts if one.measurement.times is not None]
    updated = {"new": [one for one in timed if _time_is(one, Outcome.NEW, Outcome.RECORDED)], "all": timed}
    best = [one.measurement.times.best for one in updated.get(report.terms.update or "", []) if one.measurement.times]
    left_out = [one.invalid for one in best if one.invalid is not None and not one.is_a_measure]
    if not left_out:
        return []
    return [f"of {counted(len(timed), 'timed step')}, {not_compared_with(len(left_out), left_out[0])}"]


def _time_is(verdict: Verdict, *outcomes: Outcome) -> bool:
    speed = verdict.of("step_time")
    return speed is not None and speed.outcome in outcomes


def notes(measured: Iterable[ShownMeasurement]) -> list[str]:
    """Return the notes of measurements, each once, with the first measurement that has it and how many others do.

    A note in the failure of its test is left out.
    """
    having: dict[str, list[str]] = {}
    for one in measured:
        for note in (note for note in one.verdict.measurement.notes if not _is_told(one.test, note)):
            having.setdefault(note, []).append(one.title)
    return [f"note: {_first_of(titles)}: {note}" for note, titles in having.items()]


def first_remarks(remarks: Sequence[str]) -> list[str]:
    """Return the first `MOST_REMARKS` reasons and notes, and a line that counts the others."""
    more = len(remarks) - MOST_REMARKS
    return (
        [*remarks[:MOST_REMARKS], f"... and {counted(more, 'other note')} (-v shows all)"] if more > 0 else [*remarks]
    )


def _first_of(titles: Sequence[str]) -> str:
    return titles[0] if len(titles) == 1 else f"{titles[0]} and {counted(len(titles) - 1, 'other')}"
