"""Compare base and head by pairs of runs: times by each pair's ratio, and bytes and counts by the gate's judge.

All functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import format_ratio
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.judging.changed_code.marks import with_changed_code
from pytest_gpumem.judging.gate.baseline import Key
from pytest_gpumem.judging.gate.speed import OUTCOMES
from pytest_gpumem.judging.times.comparison import compare_pairs, typical_seconds
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
    """Compare two variants, base and head, by pairs of runs.

    For example, three pairs have step times of 1.00 and 1.02 s, 1.01 and 1.03 s, and 0.99 and 1.01 s. Times are compared by
    each pair's ratio, here about 1.02 in each pair. For bytes, the base value and the head value that are closest to each other
    among all runs are compared (`closest`): base 10 and 12 with head 15 and 14 compares 12 with 14.

    Args:
        pairs: The pairs, each as (base's run, head's run).
        base: Base's name in reports.
        head: Head's name in reports.
        tolerance: The tolerated slowdown as a ratio: 0.015 means 1.5 %.
        tolerances: The tolerances for bytes and counts, by metric.

    Returns:
        The report. It also lists the tests that cannot be compared, each with the reason.
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
    """Return a test's measurements in a run, by the measurement's name. ``verdict`` is ``None`` if the test did not run."""
    if verdict is None or verdict.unmeasured:
        return {}
    return {part.measurement.name: part.measurement for part in verdict.verdicts}


def _error(runs: Sequence[Run], nodeid: str) -> str:
    """Return a test's exception message from the first of ``runs`` with a message, or otherwise an empty text."""
    return next((run.errors[nodeid] for run in runs if nodeid in run.errors), "")


def _fails(verdicts: Sequence[TestVerdict | None]) -> bool:
    """Return whether a test failed in each of its runs, for another reason than a gate."""
    ran = [verdict for verdict in verdicts if verdict is not None]
    return bool(ran) and all(verdict.failed_by_itself for verdict in ran)


def _why_not(
    bases: Sequence[TestVerdict | None], heads: Sequence[TestVerdict | None], errors: Sequence[str]
) -> str | None:
    """Return the reason why a test cannot be compared, or ``None`` if base and head both measured the test.

    Example: ``"it asserts relations but measures no figures, in base and in head"``.

    Args:
        bases: The test's verdicts in base's runs. A verdict is ``None`` if the run does not contain the test.
        heads: The test's verdicts in head's runs.
        errors: The test's exception messages in base and in head. A message is empty if the test did not fail.
    """
    reasons = {}
    for side, verdicts, other, error in (("base", bases, "head", errors[0]), ("head", heads, "base", errors[1])):
        ran = [verdict for verdict in verdicts if verdict is not None]
        if not ran:
            return f"it ran in {other} only"
        if not any(map(_figures, ran)):
            why = ran[-1].unmeasured or "it asserts relations but measures no figures"
            reasons[side] = f"{why} ({_in_a_line(error)})" if error and ran[-1].failed_by_itself else why
    if len(reasons) == 2 and reasons["base"] == reasons["head"]:
        return f"{reasons['head']}, in base and in head"
    return "; ".join(f"{reason}, in {side}" for side, reason in reasons.items()) or None


def with_marked_lines(report: ComparisonReport, changed: ChangedCode) -> ComparisonReport:
    """Mark changed lines in a comparison's explanations, list these lines first, and return the new comparison."""
    rows = (
        row if row.verdict is None else replace(row, verdict=with_changed_code(row.verdict, changed))
        for row in report.rows
    )
    return replace(report, rows=tuple(rows))


_MOST_CHARACTERS = 400
"""The maximum number of characters to show from an exception's message."""


def _in_a_line(message: str) -> str:
    """Return an exception's message as a single line without empty lines, shortened to 400 characters."""
    line = "; ".join(line.strip() for line in message.splitlines() if line.strip())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]} ..."


@dataclass(frozen=True, slots=True)
class _Series:
    """The same measurement in each pair (base, head). An entry is ``None`` if a run did not take the measurement."""

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
        """Return the gate's verdict on the first pair, whose runs explain their peaks.

        Return ``None`` if a run in this pair did not take the measurement.
        """
        base, head = self.runs[0]
        if base is None or head is None:
            return None
        return judged_by(base, "base", head, tolerances)

    def values(self, metric: str) -> dict[str, list[float]]:
        """Return a metric's values in all runs, for base and head: ``{"base": [10, 12], "head": [14, 15]}``."""
        sides = {"base": self.bases, "head": self.heads}
        return {
            side: [measurement.metrics[metric] for measurement in measurements if metric in measurement.metrics]
            for side, measurements in sides.items()
        }


def _compare(
    series: _Series, tolerance: float, tolerances: Mapping[str, Tolerance]
) -> tuple[tuple[ComparedChange, ...], tuple[str, ...]] | str:
    """Return a measurement's changes and notes, or the reason why the measurement cannot be compared."""
    reason = _not_comparable(series)
    if reason is not None:
        return reason
    exact = _exact_changes(series, tolerances)
    differences = series.heads[-1].workload.differences(series.bases[-1].workload)
    if differences:
        # If the workloads differ, only an increase in bytes is judged. Nothing else can be compared.
        another = f"another workload: {'; '.join(differences)}"
        return (exact, (another, *_notes(series))) if exact else f"{another}{_both_peaks(series)}"
    speed = _speed(series, tolerance)
    if speed is not None:
        return (speed, *exact), tuple(_notes(series))
    timed = [measurement.times is not None for measurement in (*series.bases, *series.heads)]
    once = f"timed in {'base' if series.bases[-1].times else 'head'} only"
    return exact, (*([once] if any(timed) else []), *_notes(series))


def _both_peaks(series: _Series) -> str:
    """Return ``"; peak 22.00 MB in base, 4.00 MB in head"``, or an empty text if the peaks are equal."""
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
    return None if series.pairs else "no pair of runs measured it both in base and in head"


def _speed(series: _Series, tolerance: float) -> ComparedChange | None:
    """Return the change in step time, or ``None`` if no pair has a time for both base and head."""
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
    """Return the changes in bytes, counts and ratios. If the runs of base or head differ, the `closest` values are compared."""
    metrics = [name for name, metric in METRICS.items() if not metric.is_timed]
    values = {name: closest(*sides) for name in metrics if all(sides := series.values(name).values())}
    # Times are left out here, because `_speed` judges times.
    base, head = (
        replace(side[-1], metrics={name: pair[index] for name, pair in values.items()}, times=None, explanation=None)
        for index, side in enumerate((series.bases, series.heads))
    )
    changes, _ = changes_of(base, head, tolerances)
    return tuple(change for change in changes if change.allowed is not None)


def _notes(series: _Series) -> Iterator[str]:
    """Yield notes on a measurement.

    A note names a metric without a value in base or in head, or a metric that differs between runs of the same variant. If
    some runs did not take the measurement, a note says how many did.
    """
    for name, metric in METRICS.items():
        sides = {} if metric.is_timed else series.values(name)
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
    return f"{least} to {most}" if least != most else f"by {max(values) - min(values):.12g}"


def closest(base: Sequence[float], head: Sequence[float]) -> tuple[float, float]:
    """Return the base value and the head value that are closest to each other. If the ranges overlap, both are the same.

    Example: ``[10, 12]`` and ``[15, 14]`` give ``(12, 14)``; ``[10, 13]`` and ``[12, 15]`` give ``(12, 12)``.
    """
    if min(head) > max(base):
        return max(base), min(head)
    if max(head) < min(base):
        return min(base), max(head)
    shared = max(min(base), min(head))
    return shared, shared
