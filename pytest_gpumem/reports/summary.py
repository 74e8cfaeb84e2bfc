"""The table of measured tests at the end of a session."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pytest_gpumem.gate.verdict import Outcome, TestVerdict, Verdict
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports.columns import columns
from pytest_gpumem.reports.values import change, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.results import TestResult
    from pytest_gpumem.units import UnitSystem

MOST_ROWS = 60
_SHOWN = ("peak_allocated", "peak_forward", "peak_backward", "peak_optimizer", "peak_reserved", "retained")
_TITLES = {
    "peak_allocated": "peak",
    "peak_forward": "forward",
    "peak_backward": "backward",
    "peak_optimizer": "optimizer",
    "peak_reserved": "reserved",
    "cyclic_garbage": "cycles",
    "step_time": "step time",
}
_COUNTS = tuple(name for name, metric in METRICS.items() if metric.unit == "count")
_TOLD_OF_COUNTS = (Outcome.IMPROVED, Outcome.UNCERTAIN, Outcome.REGRESSED)
_QUIET = (Outcome.OK, Outcome.RECORDED)


def table(results: Iterable[TestResult], units: UnitSystem, *, everything: bool) -> list[str]:
    """Lines of the table: a row a measurement, a column a metric that any of them has.

    With more than `MOST_ROWS` rows only those with something to say are shown, unless ``everything`` is asked for.
    """
    rows = [
        (result.verdict, one)
        for result in results
        for one in (result.verdict.verdicts if not result.verdict.unmeasured else ())
    ]
    loud = [(test, one) for test, one in rows if one.outcome not in _QUIET]
    kept = rows if everything or len(rows) <= MOST_ROWS else loud
    if not kept:
        return []
    told = (*_SHOWN, "cyclic_garbage", *_COUNTS, "step_time", "throughput")
    metrics = [name for name in told if _is_told(name, kept, everything=everything)]
    titles = [_TITLES.get(name, name) for name in metrics]
    if any(_change(one, units) for _, one in kept):
        titles.insert(1, "change")
    lines = columns(
        ("test", *titles, "verdict"),
        [_row(test, one, metrics, units, changes="change" in titles) for test, one in kept],
        left=(0, len(titles) + 1),
    )
    if len(kept) < len(rows):
        lines.append(f"... and {len(rows) - len(kept)} more that are ok or recorded (-v shows them)")
    reasons = Counter((one.outcome.words, one.reason) for _, one in kept if one.reason)
    reasons.update((m.outcome.words, m.reason) for _, one in kept for m in one.metrics if m.reason)
    lines += [f"{outcome}: {reason}{f' ({n} times)' if n > 1 else ''}" for (outcome, reason), n in reasons.items()]
    # A step that had not settled says so where that decides something.
    notes = [
        (_title(test, one), note) for test, one in rows if one.measurement.settled for note in one.measurement.notes
    ]
    lines += [f"note: {title}: {note}" for title, note in notes]
    return lines


def _is_told(name: str, rows: list[tuple[TestVerdict, Verdict]], *, everything: bool) -> bool:
    found = [metric for _, one in rows if (metric := one.of(name)) is not None]
    if name in _COUNTS and not everything:
        # A step has many; they are of interest where they changed.
        return any(metric.outcome in _TOLD_OF_COUNTS for metric in found)
    values = [metric.value for metric in found]
    # A leak or a cycle is the exception: a column of zeros says nothing.
    return any(values) if name in ("retained", "cyclic_garbage") else bool(values)


def _change(verdict: Verdict, units: UnitSystem) -> str:
    peak = verdict.of("peak_allocated")
    return change(peak, units) if peak else ""


def _row(test: TestVerdict, verdict: Verdict, metrics: list[str], units: UnitSystem, *, changes: bool) -> list[str]:
    cells = [shown(name, metric.value, units, metric.of) if (metric := verdict.of(name)) else "-" for name in metrics]
    if changes:
        cells.insert(1, _change(verdict, units))
    return [_title(test, verdict), *cells, verdict.outcome.words]


def _title(test: TestVerdict, verdict: Verdict) -> str:
    title = f"{test.file}::{test.test}"
    return f"{title} ({verdict.measurement.name})" if len(test.verdicts) > 1 else title
