"""Make the table at the end of a session, and the reasons and notes below the table. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import counted
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.judging.baselines.update import ACCEPTS
from pytest_gpumem.judging.gate.speed import not_compared_with
from pytest_gpumem.judging.gate.verdict import CHANGED, Outcome, worst
from pytest_gpumem.reporting.reports.layout import LEAST_NAME, Column, Screen, Span, Style, Table
from pytest_gpumem.reporting.reports.results import first_line, why_unmeasured
from pytest_gpumem.reporting.reports.values import deciding_change, has_column, peaks_by_device, shown

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from pytest_gpumem.base.units import UnitSystem
    from pytest_gpumem.facts.values.option_words import UpdateMode
    from pytest_gpumem.judging.gate.verdict import TestVerdict, Verdict
    from pytest_gpumem.reporting.reports.results import TestResult
    from pytest_gpumem.reporting.reports.session_report import SessionReport
    from pytest_gpumem.reporting.reports.view import ShownMeasurement

MOST_FIGURES = 60
"""The table shows at most this many measurements without a comparison, unless the user asks for all."""
MOST_EXPLAINED = 30
"""The table shows at most this many measurements whose growth has a known cause, unless the user asks for all."""
MOST_REMARKS = 20
"""At most this many reasons and notes follow the table, unless the user asks for all."""
_MOST_NOTES = 3
_MOST_TESTS = 3
"""A note on a process that was not measured names at most this many tests."""
STYLES: dict[Outcome, Style | None] = {
    **dict.fromkeys((Outcome.RECORDED, Outcome.NEW)),
    **dict.fromkeys((Outcome.OK, Outcome.IMPROVED), "good"),
    **dict.fromkeys((Outcome.FOREIGN, Outcome.STALE, Outcome.UNMEASURED, Outcome.UNCERTAIN), "doubtful"),
    **dict.fromkeys((Outcome.MISSING, Outcome.REGRESSED, Outcome.OVER_BUDGET), "bad"),
}
_WITHOUT_BASELINE = (Outcome.NEW, Outcome.FOREIGN, Outcome.STALE)
"""The outcomes of metrics without a comparable baseline."""
_FIGURES = (Outcome.RECORDED, Outcome.NEW, Outcome.FOREIGN)
"""The outcomes without a comparison. For such measurements, the table shows figures, and no changes."""
_CHANGE = 1 + max(metric.weight or 0 for metric in METRICS.values())
"""The weight of the column with changes. A narrow terminal omits this column after the metrics' columns."""


def to_be_shown(
    measured: Iterable[ShownMeasurement], explained: Collection[str] = (), *, gating: bool
) -> list[ShownMeasurement]:
    """Return the measurements for the table. Measurements with the outcome ``ok`` are omitted.

    A gating session also omits ``recorded`` measurements. A session without a gate shows ``recorded`` measurements, because
    people run such a session to see figures.

    Args:
        measured: All measurements in the session.
        explained: The ids of tests whose growth has known causes. Only the first `MOST_EXPLAINED` of their measurements are
            returned, and only the first `MOST_FIGURES` measurements without a comparison.
        gating: True if the session compares figures with baselines.
    """
    chosen: list[ShownMeasurement] = []
    figure_count = explained_count = 0
    for measurement in measured:
        outcome = measurement.outcome
        if outcome is Outcome.OK or (gating and outcome is Outcome.RECORDED):
            continue
        figure_count += outcome in _FIGURES
        explained_count += measurement.test.nodeid in explained
        if measurement.test.nodeid in explained and explained_count > MOST_EXPLAINED:
            continue
        if outcome not in _FIGURES or figure_count <= MOST_FIGURES:
            chosen.append(measurement)
    return chosen


def not_shown(measured: Sequence[ShownMeasurement], chosen: Sequence[ShownMeasurement]) -> list[str]:
    """Return a line with the number of omitted measurements; empty if the table shows all."""
    left_out = Counter(measurement.outcome for measurement in measured)
    left_out.subtract(measurement.outcome for measurement in chosen)
    counts = [f"{left_out[outcome]} {outcome.words}" for outcome in Outcome if left_out[outcome]]
    return [f"... and {', '.join(counts)} (-v shows all)"] if counts else []


def summary_table(measured: Sequence[ShownMeasurement], units: UnitSystem, *, everything: bool) -> Table:
    """Return a table with a row for each measurement and a column for each metric.

    A count has a column only if it changed.

    Args:
        measured: The measurements.
        units: The unit system for bytes.
        everything: True to show unchanged counts as well.
    """
    columns = [Column("test", left=True, least=LEAST_NAME)]
    rows = [[Span(measurement.title)] for measurement in measured]

    def add(column: Column, texts: Iterable[str]) -> None:
        columns.append(column)
        for row, text in zip(rows, texts, strict=True):
            row.append(Span(text))

    changes = [deciding_change(measurement.verdict, units) for measurement in measured]
    for name, metric in METRICS.items():
        verdicts = [measurement.verdict.of(name) for measurement in measured]
        available = [verdict for verdict in verdicts if verdict is not None]
        has_changed = any(verdict.outcome in CHANGED for verdict in available)
        changed = has_changed or (everything and bool(available))
        if has_column(name, [verdict.value for verdict in available], changed=changed):
            # A narrow terminal omits the columns of changed metrics last.
            weight = None if metric.weight is None else metric.weight + (_CHANGE + 1 if has_changed else 0)
            texts = ("-" if verdict is None else shown(name, verdict.value, units, verdict.of) for verdict in verdicts)
            add(Column(metric.short or name.replace("_", " "), weight=weight), texts)
        if len(columns) == 2 and any(changes):
            add(Column("change", weight=_CHANGE), changes)
    for row, measurement in zip(rows, measured, strict=True):
        outcome = measurement.outcome
        row.append(Span(measurement.words_of(outcome), "good" if outcome in measurement.accepted else STYLES[outcome]))
    return Table((*columns, Column("verdict", left=True)), tuple(map(tuple, rows)))


def device_lines(measured: Iterable[ShownMeasurement], units: UnitSystem) -> list[str]:
    """Return a line for each measurement on several GPUs, with the peak on each GPU."""
    return [
        f"{measurement.title}: {peaks}"
        for measurement in measured
        if (peaks := peaks_by_device(measurement.verdict.measurement, units)) is not None
    ]


def reasons(tests: Iterable[TestVerdict], units: UnitSystem, update: UpdateMode | None = None) -> list[str]:
    """Return each reason for which tests, measurements or figures were not measured or compared, with their number.

    For example: ``"new: there is no baseline for CPU (x86_64) yet (2 measurements)"``.

    A reason is omitted if its test's failure text already contains it. If only one measurement has a reason, its peak and the
    baseline's peak follow, because the table has no column for baselines. For a time without a baseline, the reason begins with
    ``note``. It is omitted if the session's ``update`` adds the time to the baseline.

    Args:
        tests: The verdicts on the measured tests.
        units: The unit system for bytes.
        update: The session's ``--gpumem-update``.
    """
    peaks: dict[str, str] = {}
    by_test: Counter[str] = Counter()
    by_measurement: Counter[str] = Counter()
    by_figure: Counter[str] = Counter()
    for test in tests:
        if test.missing_text is not None:
            by_test[f"{Outcome.MISSING.words}: {first_line(test.missing_text)}"] += 1
        elif test.unmeasured:
            by_test[f"{Outcome.UNMEASURED.words}: {why_unmeasured(test)}"] += 1
        for verdict in () if test.unmeasured else test.verdicts:
            if verdict.reason and not _is_in_failure(test, verdict.reason):
                reason = f"{_not_compared(verdict)}: {verdict.reason}"
                by_measurement[reason] += 1
                peaks[reason] = _both_peaks(verdict, units) if by_measurement[reason] == 1 else ""
            for metric in verdict.metrics:
                if (
                    metric.reason
                    and not _is_in_failure(test, metric.reason)
                    and not (metric.lacks_time and Outcome.NEW in ACCEPTS[update])
                ):
                    word = "note" if metric.lacks_time and test.failure is None else metric.outcome.words
                    by_figure[f"{word}: {metric.reason}"] += 1
    return [
        f"{reason}{peaks.get(reason, '')}{f' ({counted(number, noun)})' if number > 1 else ''}"
        for noun, counts in (("test", by_test), ("measurement", by_measurement), ("figure", by_figure))
        for reason, number in counts.items()
    ]


def _is_in_failure(test: TestVerdict, text: str) -> bool:
    """Return whether a test's failure text already contains ``text``, a reason or a note."""
    return test.failure is not None and (text in test.failure or Screen().legible(text) in test.failure)


def _both_peaks(verdict: Verdict, units: UnitSystem) -> str:
    """Return ``"; peak 4.00 MB, baseline 22.00 MB"`` if the baseline has another workload; else an empty text."""
    peak = verdict.of("peak_allocated")
    if peak is None or peak.outcome is not Outcome.STALE or peak.baseline in (None, peak.value):
        return ""
    return f"; peak {shown(peak.metric, peak.value, units)}, baseline {shown(peak.metric, peak.baseline, units)}"


def _not_compared(verdict: Verdict) -> str:
    """Return the words for a measurement without a comparison, even if the measurement exceeds its budget."""
    outcome = worst(metric.outcome for metric in verdict.metrics if metric.outcome in _WITHOUT_BASELINE)
    grew = any(metric.outcome in (Outcome.REGRESSED, Outcome.UNCERTAIN) for metric in verdict.metrics)
    return "another workload" if grew else outcome.words if outcome in _WITHOUT_BASELINE else "not compared"


def unstored_times(report: SessionReport) -> list[str]:
    """Return a sentence on disturbed times, which an update stores only for display; empty without disturbed times."""
    timed = [
        verdict
        for result in report.results
        for verdict in result.verdict.verdicts
        if verdict.measurement.times is not None
    ]
    updated = {"new": [verdict for verdict in timed if _time_is(verdict, Outcome.NEW, Outcome.RECORDED)], "all": timed}
    verdicts = updated.get(report.terms.update or "", [])
    samples = [verdict.measurement.times.best for verdict in verdicts if verdict.measurement.times]
    left_out = [sample.invalid for sample in samples if sample.invalid is not None and not sample.is_a_measure]
    if not left_out:
        return []
    return [f"of {counted(len(timed), 'timed step')}, {not_compared_with(len(left_out), left_out[0])}"]


def _time_is(verdict: Verdict, *outcomes: Outcome) -> bool:
    speed = verdict.of("step_time")
    return speed is not None and speed.outcome in outcomes


def notes(measured: Iterable[ShownMeasurement]) -> list[str]:
    """Return each note once, with its first measurement and the number of its other measurements.

    A note is omitted if its test's failure text already contains it.
    """
    titles_by_note: dict[str, list[str]] = {}
    for measurement in measured:
        for note in (
            note for note in measurement.verdict.measurement.notes if not _is_in_failure(measurement.test, note)
        ):
            titles_by_note.setdefault(note, []).append(measurement.title)
    return [f"note: {note}" for note in _with_titles(titles_by_note)]


def unmeasured_processes(tests: Iterable[TestVerdict]) -> list[str]:
    """Return a clause for each process that was not measured, with its first tests and the number of its other tests.

    A clause is omitted if its test's failure text already contains it.
    """
    titles_by_note: dict[str, list[str]] = {}
    for test in tests:
        for process in test.unmeasured_processes:
            if not _is_in_failure(test, process):
                titles_by_note.setdefault(process, []).append(test.nodeid)
    return _with_titles(titles_by_note, _MOST_TESTS)


def _with_titles(titles_by_note: Mapping[str, Sequence[str]], most: int = 1) -> list[str]:
    return [f"{_first_of(titles, most)}: {note}" for note, titles in titles_by_note.items()]


def recording_notes(results: Iterable[TestResult]) -> list[str]:
    """Return each note on the recording of an explanation once, with its first test.

    A note is omitted if its test's failure text already contains it.
    """
    notes: dict[str, str] = {}
    for result in results:
        for part in result.verdict.verdicts:
            explanation = part.measurement.explanation
            for note in explanation.peak.notes if explanation is not None else ():
                if result.verdict.failure is not None and note in result.verdict.failure:
                    continue
                notes.setdefault(note, f"{result.verdict.file}::{result.verdict.test}: {note}")
    distinct = list(notes.values())
    more = len(distinct) - _MOST_NOTES
    return [*distinct[:_MOST_NOTES], *([f"... and {counted(more, 'more note')} on recordings"] if more > 0 else [])]


def first_remarks(remarks: Sequence[str]) -> list[str]:
    """Return the first `MOST_REMARKS` reasons and notes, and a line with the number of all others."""
    more = len(remarks) - MOST_REMARKS
    return (
        [*remarks[:MOST_REMARKS], f"... and {counted(more, 'other note')} (-v shows all)"] if more > 0 else [*remarks]
    )


def _first_of(titles: Sequence[str], most: int) -> str:
    first, more = ", ".join(titles[:most]), len(titles) - most
    return f"{first} and {counted(more, 'other')}" if more > 0 else first
