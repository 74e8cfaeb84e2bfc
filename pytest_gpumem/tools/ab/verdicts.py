"""Comparison of runs in pairs: times by their ratios, bytes and counts by the gate's judge. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import format_ratio
from pytest_gpumem.facts.metrics import METRICS, WHOLE
from pytest_gpumem.judging.changed_code.marks import with_changed_code
from pytest_gpumem.judging.gate.baseline import Key
from pytest_gpumem.judging.gate.speed import OUTCOMES
from pytest_gpumem.measuring.timing.comparison import compare_pairs, typical_seconds
from pytest_gpumem.reporting.reports.comparison import (
    ComparedChange,
    ComparedRow,
    ComparisonReport,
    OmittedTest,
    changes_of,
    judged_by,
)
from pytest_gpumem.reporting.reports.values import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_gpumem.base.git import Revision
    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.facts.metrics import Tolerance
    from pytest_gpumem.judging.changed_code.marks import ChangedCode
    from pytest_gpumem.judging.gate.verdict import TestVerdict, Verdict
    from pytest_gpumem.tools.ab.runs import Run


def compare_runs(
    pairs: Sequence[tuple[Run, Run]],
    base: str | Revision,
    head: str | Revision,
    tolerance: float,
    tolerances: Mapping[str, Tolerance],
) -> ComparisonReport:
    """Compare two variants by their runs.

    For example, three pairs with step times 1.00 and 1.02 s, 1.01 and 1.03 s, and 0.99 and 1.01 s are compared by each pair's
    ratio. Bytes from the same runs are compared by the closest values on both sides.

    Args:
        pairs: The runs as (base, head).
        base: Base's name in reports.
        head: Head's name in reports.
        tolerance: The tolerated slowdown, as a ratio.
        tolerances: The tolerances for bytes and counts, by metric.

    Returns:
        The report, with the tests that cannot be compared and why.
    """
    rows: list[ComparedRow] = []
    omitted_tests: list[OmittedTest] = []
    for file, test in sorted({key for pair in pairs for run in pair for key in run.tests}):
        bases, heads = ([run.tests.get((file, test)) for run in side] for side in zip(*pairs, strict=True))
        errors = [_error(side, f"{file}::{test}") for side in zip(*pairs, strict=True)]
        reason = _why_not(bases, heads, errors)
        if reason is not None:
            is_measured = any(_figures(verdict) or (verdict is not None and verdict.relations > 0) for verdict in bases)
            broke = is_measured and _fails(heads) and not _fails(bases)
            omitted_tests.append(OmittedTest(f"{file}::{test}", "broken" if broke else "not compared", reason))
            continue
        runs = [(_figures(base), _figures(head)) for base, head in zip(bases, heads, strict=True)]
        names = list(dict.fromkeys(name for pair in runs for side in pair for name in side))
        for name in names:
            key = Key(file, test, name)
            title = str(key) if len(names) > 1 else f"{file}::{test}"
            series = _Series(tuple((base.get(name), head.get(name)) for base, head in runs))
            result = _compare(series, tolerance, tolerances)
            if isinstance(result, str):
                omitted_tests.append(OmittedTest(title, "not compared", result))
            else:
                changes, notes = result
                slug = series.heads[-1].environment.slug
                rows.append(ComparedRow(key, slug, title, changes, notes=notes, verdict=series.explained(tolerances)))
    return ComparisonReport(base, head, tuple(rows), tuple(omitted_tests), pairs=len(pairs), tolerance=tolerance)


def _figures(verdict: TestVerdict | None) -> dict[str, Measurement]:
    """Return a test's measurements in a run, by name."""
    if verdict is None or verdict.unmeasured:
        return {}
    return {part.measurement.name: part.measurement for part in verdict.verdicts}


def _error(runs: Sequence[Run], nodeid: str) -> str:
    """Return the first exception message of a failed test in these runs; empty if there is none."""
    return next((run.errors[nodeid] for run in runs if nodeid in run.errors), "")


def _fails(verdicts: Sequence[TestVerdict | None]) -> bool:
    """Return whether the test failed by itself in every run that contains it."""
    ran = [verdict for verdict in verdicts if verdict is not None]
    return bool(ran) and all(verdict.failed_by_itself for verdict in ran)


def _why_not(
    bases: Sequence[TestVerdict | None], heads: Sequence[TestVerdict | None], errors: Sequence[str]
) -> str | None:
    """Return why a test cannot be compared, as a clause; ``None`` if both sides measured it.

    Example: ``"it asserts relations only, in base and in head"``.

    Args:
        bases: The verdicts in base's runs; ``None`` for a run without the test.
        heads: The verdicts in head's runs.
        errors: The exception messages in base and in head; empty if there is none.
    """
    reasons = {}
    for side, verdicts, other, error in (("base", bases, "head", errors[0]), ("head", heads, "base", errors[1])):
        ran = [verdict for verdict in verdicts if verdict is not None]
        if not ran:
            return f"it ran in {other} only"
        if not any(map(_figures, ran)):
            why = ran[-1].unmeasured or "it asserts relations only"
            reasons[side] = f"{why} ({_in_a_line(error)})" if error and ran[-1].failed_by_itself else why
    if len(reasons) == 2 and reasons["base"] == reasons["head"]:
        return f"{reasons['head']}, in base and in head"
    return "; ".join(f"{reason}, in {side}" for side, reason in reasons.items()) or None


def with_marked_lines(report: ComparisonReport, changed: ChangedCode) -> ComparisonReport:
    """Return the comparison with changed lines marked in its explanations and named first."""
    rows = (
        row if row.verdict is None else replace(row, verdict=with_changed_code(row.verdict, changed))
        for row in report.rows
    )
    return replace(report, rows=tuple(rows))


_MOST_CHARACTERS = 400
"""The largest number of characters to show from an exception's message."""


def _in_a_line(message: str) -> str:
    """Return an exception's message as a single line without empty lines, shortened to 400 characters."""
    line = "; ".join(line.strip() for line in message.splitlines() if line.strip())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]} ..."


@dataclass(frozen=True, slots=True)
class _Series:
    """A measurement in each pair of runs (base, head); ``None`` if a run did not take it."""

    runs: tuple[tuple[Measurement | None, Measurement | None], ...]

    @property
    def bases(self) -> list[Measurement]:
        return [base for base, _ in self.runs if base is not None]

    @property
    def heads(self) -> list[Measurement]:
        return [head for _, head in self.runs if head is not None]

    @property
    def pairs(self) -> list[tuple[Measurement, Measurement]]:
        return [(base, head) for base, head in self.runs if base is not None and head is not None]

    def explained(self, tolerances: Mapping[str, Tolerance]) -> Verdict | None:
        """Return the gate's verdict on the first pair, which is explained; ``None`` if a run did not take the measurement."""
        base, head = self.runs[0]
        if base is None or head is None:
            return None
        return judged_by(base, "base", head, tolerances)

    def values(self, metric: str) -> dict[str, list[float]]:
        """Return a metric's values by side."""
        sides = {"base": self.bases, "head": self.heads}
        return {
            side: [measurement.metrics[metric] for measurement in measurements if metric in measurement.metrics]
            for side, measurements in sides.items()
        }


def _compare(
    series: _Series, tolerance: float, tolerances: Mapping[str, Tolerance]
) -> tuple[tuple[ComparedChange, ...], tuple[str, ...]] | str:
    """Return a measurement's changes with notes, or a clause that says why it cannot be compared."""
    reason = _not_comparable(series)
    if reason is not None:
        return reason
    exact = _exact_changes(series, tolerances)
    differences = series.heads[-1].workload.differences(series.bases[-1].workload)
    if differences:
        # With another workload, only an increase in bytes is judged. Nothing else can be compared.
        another = f"another workload: {'; '.join(differences)}"
        return (exact, (another, *_notes(series))) if exact else f"{another}{_both_peaks(series)}"
    speed = _speed(series, tolerance)
    if speed is not None:
        return (speed, *exact), tuple(_notes(series))
    timed = [measurement.times is not None for measurement in (*series.bases, *series.heads)]
    once = f"timed in {'base' if series.bases[-1].times else 'head'} only"
    return exact, (*([once] if any(timed) else []), *_notes(series))


def _both_peaks(series: _Series) -> str:
    """Return ``"; peak 22.00 MB in base, 4.00 MB in head"``, or nothing if the peaks are equal."""
    base, head = closest(*series.values("peak_allocated").values())
    texts = [f"{shown('peak_allocated', peak, 'si')} in {side}" for side, peak in (("base", base), ("head", head))]
    return "" if base == head else f"; peak {', '.join(texts)}"


def _not_comparable(series: _Series) -> str | None:
    if not series.heads:
        return "it is measured in base only"
    if not series.bases:
        return "it is measured in head only"
    base, head = series.bases[-1].environment, series.heads[-1].environment
    if base.slug != head.slug:
        return f"it was measured on {base.device} in base, on {head.device} in head"
    return None if series.pairs else "no pair of neighbouring runs measured it"


def _speed(series: _Series, tolerance: float) -> ComparedChange | None:
    """Return the change in step time; ``None`` if no pair has times on both sides."""
    samples = [(base.times.best, head.times.best) for base, head in series.pairs if base.times and head.times]
    if not samples:
        return None
    speed = compare_pairs(samples, tolerance)
    base, head = typical_seconds(samples)
    reason = speed.reason if speed.outcome == "uncertain" else None
    if speed.outcome == "not slower" and speed.high > 1 + tolerance:
        reason = f"a slowdown of up to {format_ratio(speed.high - 1).lstrip('+')} would not have been seen"
    return ComparedChange("step_time", base, head, OUTCOMES[speed.outcome], tolerance * base, reason, speed.seconds)


def _exact_changes(series: _Series, tolerances: Mapping[str, Tolerance]) -> tuple[ComparedChange, ...]:
    """Return the changes in bytes and counts. If runs on the same side differ, the closest values are compared."""
    metrics = [name for name, metric in METRICS.items() if metric.unit in WHOLE]
    values = {name: closest(*sides) for name in metrics if all(sides := series.values(name).values())}
    # Times are left out here, because they are judged by pairs.
    base, head = (
        replace(side[-1], metrics={name: pair[index] for name, pair in values.items()}, times=None, explanation=None)
        for index, side in enumerate((series.bases, series.heads))
    )
    changes, _ = changes_of(base, head, tolerances)
    return tuple(change for change in changes if change.allowed is not None)


def _notes(series: _Series) -> Iterator[str]:
    """Yield notes on a measurement: metrics that only one side has, and runs that differ on the same side."""
    for name, metric in METRICS.items():
        sides = series.values(name) if metric.unit in WHOLE else {}
        measured = [side for side, values in sides.items() if values]
        if len(measured) == 1:
            yield f"{metric.title} in {measured[0]} only"
        for side, values in sides.items():
            if len(set(values)) > 1 and metric.repeats:
                yield f"{metric.title} differs between the runs of {side}: {_spread(name, values)}"
    for side, measurements in (("base", series.bases), ("head", series.heads)):
        if len(measurements) < len(series.runs):
            yield f"measured in {len(measurements)} of {len(series.runs)} runs of {side}"


def _spread(metric: str, values: Sequence[float]) -> str:
    least, most = (shown(metric, value, "si") for value in (min(values), max(values)))
    return f"{least} to {most}" if least != most else f"by {max(values) - min(values):.0f}"


def closest(base: Sequence[float], head: Sequence[float]) -> tuple[float, float]:
    """Return the closest values from two sides, or the same value twice if the ranges overlap.

    Example: ``[10, 12]`` and ``[15, 14]`` give ``(12, 14)``; ``[10, 13]`` and ``[12, 15]`` give ``(12, 12)``.
    """
    if min(head) > max(base):
        return max(base), min(head)
    if max(head) < min(base):
        return min(base), max(head)
    shared = max(min(base), min(head))
    return shared, shared
