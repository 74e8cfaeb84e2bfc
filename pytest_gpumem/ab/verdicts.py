"""The comparison of pairs of runs: times by pairs, bytes and counts by the judge. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.changed_code.marks import with_changed_code
from pytest_gpumem.gate.baseline import Budget, Key, baseline_of
from pytest_gpumem.gate.judge import judge
from pytest_gpumem.gate.speed import OUTCOMES
from pytest_gpumem.metrics import METRICS, WHOLE
from pytest_gpumem.reports.comparison import Compared, ComparedChange, ComparedRow, LeftOut, changes_of
from pytest_gpumem.reports.values import shown
from pytest_gpumem.timing.comparison import compare_pairs, typical_seconds
from pytest_gpumem.units import format_ratio

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_gpumem.ab.runs import Run
    from pytest_gpumem.changed_code.marks import ChangedCode
    from pytest_gpumem.gate.verdict import TestVerdict, Verdict
    from pytest_gpumem.git import Revision
    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.metrics import Tolerance


def compare_runs(
    pairs: Sequence[tuple[Run, Run]],
    base: str | Revision,
    head: str | Revision,
    tolerance: float,
    tolerances: Mapping[str, Tolerance],
) -> Compared:
    """Compare ``pairs`` of runs (base, head). ``tolerance`` is for times, ``tolerances`` for everything else."""
    rows: list[ComparedRow] = []
    left_out: list[LeftOut] = []
    for file, test in sorted({key for pair in pairs for run in pair for key in run.tests}):
        bases, heads = ([run.tests.get((file, test)) for run in side] for side in zip(*pairs, strict=True))
        errors = [_error(side, f"{file}::{test}") for side in zip(*pairs, strict=True)]
        reason = _why_not(bases, heads, errors)
        if reason is not None:
            held = any(_figures(one) or (one is not None and one.relations > 0) for one in bases)
            broke = held and _fails(heads) and not _fails(bases)
            left_out.append(LeftOut(f"{file}::{test}", "broken" if broke else "not compared", reason))
            continue
        runs = [(_figures(base), _figures(head)) for base, head in zip(bases, heads, strict=True)]
        names = list(dict.fromkeys(name for pair in runs for side in pair for name in side))
        for name in names:
            key = Key(file, test, name)
            title = str(key) if len(names) > 1 else f"{file}::{test}"
            taken = _Taken(tuple((base.get(name), head.get(name)) for base, head in runs))
            found = _compare(taken, tolerance, tolerances)
            if isinstance(found, str):
                left_out.append(LeftOut(title, "not compared", found))
            else:
                changes, notes = found
                slug = taken.heads[-1].environment.slug
                rows.append(ComparedRow(key, slug, title, changes, notes=notes, verdict=taken.explained(tolerances)))
    return Compared(base, head, tuple(rows), tuple(left_out), pairs=len(pairs), tolerance=tolerance)


def _figures(verdict: TestVerdict | None) -> dict[str, Measurement]:
    """Return the measurements of a test in one run, by name."""
    if verdict is None or verdict.unmeasured:
        return {}
    return {one.measurement.name: one.measurement for one in verdict.verdicts}


def _error(runs: Sequence[Run], nodeid: str) -> str:
    """Return the message of the first exception that failed a test in one of these runs; empty where none did."""
    return next((run.errors[nodeid] for run in runs if nodeid in run.errors), "")


def _fails(verdicts: Sequence[TestVerdict | None]) -> bool:
    """Return whether the test failed by itself in every run that had it."""
    ran = [verdict for verdict in verdicts if verdict is not None]
    return bool(ran) and all(verdict.failed_by_itself for verdict in ran)


def _why_not(
    bases: Sequence[TestVerdict | None], heads: Sequence[TestVerdict | None], errors: Sequence[str]
) -> str | None:
    """Return why a test cannot be compared, as a clause; ``None`` when both sides measured it.

    ``errors`` are the messages of the exceptions that failed it in base and in head, empty where none did.
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


def with_marked_lines(report: Compared, changed: ChangedCode) -> Compared:
    """Return a comparison whose explanations say which lines have changed, and name these first."""
    rows = (
        row if row.verdict is None else replace(row, verdict=with_changed_code(row.verdict, changed))
        for row in report.rows
    )
    return replace(report, rows=tuple(rows))


_MOST_OF_A_MESSAGE = 400
"""Characters of an exception's message that are shown."""


def _in_a_line(message: str) -> str:
    """Return the lines of an exception's message as one, without those that are empty, and cut where it is long."""
    line = "; ".join(line.strip() for line in message.splitlines() if line.strip())
    return line if len(line) <= _MOST_OF_A_MESSAGE else f"{line[:_MOST_OF_A_MESSAGE]} ..."


@dataclass(frozen=True, slots=True)
class _Taken:
    """One measurement of a test in each pair of runs (base, head); ``None`` where a run did not take it."""

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
        """Return the gate's verdict on the first pair, which was explained; ``None`` where a run did not take it."""
        base, head = self.runs[0]
        if base is None or head is None:
            return None
        return judge(head, Budget(), baseline_of(base, "", None), tolerances)

    def values(self, metric: str) -> dict[str, list[float]]:
        """Return the values of a metric that the runs of each side took."""
        sides = {"base": self.bases, "head": self.heads}
        return {side: [one.metrics[metric] for one in ran if metric in one.metrics] for side, ran in sides.items()}


def _compare(
    taken: _Taken, tolerance: float, tolerances: Mapping[str, Tolerance]
) -> tuple[tuple[ComparedChange, ...], tuple[str, ...]] | str:
    """Return the changes of a measurement and notes on it, or why it cannot be compared, as a clause."""
    reason = _not_comparable(taken)
    if reason is not None:
        return reason
    exact = _exact_changes(taken, tolerances)
    differences = taken.heads[-1].workload.differences(taken.bases[-1].workload)
    if differences:
        # An increase in bytes is judged with another workload, too; nothing else can be compared.
        another = f"another workload: {'; '.join(differences)}"
        return (exact, (another, *_notes(taken))) if exact else f"{another}{_both_peaks(taken)}"
    speed = _speed(taken, tolerance)
    if speed is not None:
        return (speed, *exact), tuple(_notes(taken))
    timed = [one.times is not None for one in (*taken.bases, *taken.heads)]
    once = f"timed in {'base' if taken.bases[-1].times else 'head'} only"
    return exact, (*([once] if any(timed) else []), *_notes(taken))


def _both_peaks(taken: _Taken) -> str:
    """Return ``"; peak 22.00 MB in base, 4.00 MB in head"``, or nothing if the peaks are equal."""
    base, head = closest(*taken.values("peak_allocated").values())
    texts = [f"{shown('peak_allocated', peak, 'si')} in {side}" for side, peak in (("base", base), ("head", head))]
    return "" if base == head else f"; peak {', '.join(texts)}"


def _not_comparable(taken: _Taken) -> str | None:
    if not taken.heads:
        return "it is measured in base only"
    if not taken.bases:
        return "it is measured in head only"
    base, head = taken.bases[-1].environment, taken.heads[-1].environment
    if base.slug != head.slug:
        return f"it was measured on {base.device} in base, on {head.device} in head"
    return None if taken.pairs else "no pair of neighbouring runs measured it"


def _speed(taken: _Taken, tolerance: float) -> ComparedChange | None:
    """Return the change of the step time; ``None`` where no pair of runs took times on both sides."""
    samples = [(base.times.best, head.times.best) for base, head in taken.pairs if base.times and head.times]
    if not samples:
        return None
    found = compare_pairs(samples, tolerance)
    base, head = typical_seconds(samples)
    reason = found.reason if found.outcome == "uncertain" else None
    if found.outcome == "not slower" and found.high > 1 + tolerance:
        reason = f"a slowdown of up to {format_ratio(found.high - 1).lstrip('+')} would not have been seen"
    return ComparedChange("step_time", base, head, OUTCOMES[found.outcome], tolerance * base, reason, found.seconds)


def _exact_changes(taken: _Taken, tolerances: Mapping[str, Tolerance]) -> tuple[ComparedChange, ...]:
    """Return the changes of bytes and counts that both sides have: of runs of a side that differ, by the closest figures."""
    metrics = [name for name, metric in METRICS.items() if metric.unit in WHOLE]
    values = {name: closest(*sides) for name in metrics if all(sides := taken.values(name).values())}
    # Times are judged by pairs.
    base, head = (
        replace(side[-1], metrics={name: pair[which] for name, pair in values.items()}, times=None, explanation=None)
        for which, side in enumerate((taken.bases, taken.heads))
    )
    changes, _ = changes_of(base, head, tolerances)
    return tuple(change for change in changes if change.allowed is not None)


def _notes(taken: _Taken) -> Iterator[str]:
    """Yield notes on a measurement: what one side lacks, and where runs of one side differ."""
    for name, metric in METRICS.items():
        sides = taken.values(name) if metric.unit in WHOLE else {}
        have = [side for side, values in sides.items() if values]
        if len(have) == 1:
            yield f"{metric.title} in {have[0]} only"
        for side, values in sides.items():
            if len(set(values)) > 1 and metric.repeats:
                yield f"{metric.title} differs between the runs of {side}: {_spread(name, values)}"
    for side, ran in (("base", taken.bases), ("head", taken.heads)):
        if len(ran) < len(taken.runs):
            yield f"measured in {len(ran)} of {len(taken.runs)} runs of {side}"


def _spread(metric: str, values: Sequence[float]) -> str:
    least, most = (shown(metric, value, "si") for value in (min(values), max(values)))
    return f"{least} to {most}" if least != most else f"by {max(values) - min(values):.0f}"


def closest(base: Sequence[float], head: Sequence[float]) -> tuple[float, float]:
    """Return the closest figures of two sides; the same one twice where their ranges overlap."""
    if min(head) > max(base):
        return max(base), min(head)
    if max(head) < min(base):
        return min(base), max(head)
    both = max(min(base), min(head))
    return both, both
