"""Find the first row and the project's lines of code in a test's explanation. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import format_bytes, format_bytes_change
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.operator_counts import MADE_OF_OPERATORS
from pytest_gpumem.judging.gate.failing import failing_metrics
from pytest_gpumem.judging.gate.growths import KEPT_METRICS, kept_rows
from pytest_gpumem.judging.gate.verdict import CHANGED, FAILING, Outcome
from pytest_gpumem.reporting.reports.explanation import (
    alternatives_title,
    category_of,
    holder_lines,
    listed_rows,
    ranked,
    rows_of,
)
from pytest_gpumem.reporting.reports.values import difference

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pytest_gpumem.base.units import UnitSystem
    from pytest_gpumem.facts.values.composition import Row
    from pytest_gpumem.facts.values.operator_counts import OperatorSite
    from pytest_gpumem.judging.gate.difference import Change
    from pytest_gpumem.judging.gate.verdict import Verdict
    from pytest_gpumem.reporting.reports.view import ReportRow

_SITE = re.compile(r"(?P<file>.+):(?P<line>[1-9]\d*)")


Place = tuple[str, int]
"""A file, relative to the root directory, and a line number."""


@dataclass(frozen=True, slots=True)
class FirstRow:
    """The first row in a failed test's explanation."""

    text: str
    """The row as a clause: ``"+1.00 GB activations at model.py:88, by _softmax in blocks.*.attn: was bfloat16"``."""
    place: Place | None = None
    """The line in the project's code that grew; ``None`` if another line or a package may be responsible."""


def grown_lines(row: ReportRow) -> Iterator[Place]:
    """Yield the project's lines of code in the explanation of a test's growth.

    Lines with retained bytes come first. Lines with growth at the peak follow, the largest growth first, and lines with more
    operators come last.
    """
    for measured in row.measured:
        verdict, explanation = measured.verdict, measured.verdict.measurement.explanation
        if explanation is not None and not KEPT_METRICS.isdisjoint(
            failing_metrics(verdict, CHANGED - {Outcome.IMPROVED})
        ):
            yield from filter(None, map(_place_of, kept_rows(verdict).rows))
    for measured in row.measured:
        changes = measured.verdict.difference.changes if measured.verdict.difference is not None else ()
        for change in sorted(changes, key=lambda change: -change.nbytes):
            if change.nbytes > 0 and (place := _place_of(change.row)):
                yield place
    for measured in row.measured:
        for tallies in measured.verdict.count_changes.values():
            for tally in tallies:
                if tally.amount > 0 and (place := _place_of(tally.place)):
                    yield place


def first_row(row: ReportRow, units: UnitSystem) -> FirstRow | None:
    """Return the first row in a failed test's explanation; ``None`` if the test has no explanation.

    The failure text begins with the same row. Later rows explain less growth, and may not be a cause.
    """
    outcomes = {metric.outcome for measured in row.measured for metric in measured.verdict.metrics}
    # In strict mode an uncertain metric also fails a test, but it explains the failure only if no other metric failed.
    failing = FAILING if outcomes & FAILING else {Outcome.UNCERTAIN}
    for measured in row.measured:
        verdict = measured.verdict
        metrics = [*failing_metrics(verdict, failing), *failing_metrics(verdict, failing, "work")]
        if metrics:
            rows = (_kept_row, _peak_row, _count_row)
            return next((result for make in rows if (result := make(verdict, metrics, units)) is not None), None)
    return None


def _kept_row(verdict: Verdict, metrics: Collection[str], units: UnitSystem) -> FirstRow | None:
    explanation = verdict.measurement.explanation
    if explanation is None or KEPT_METRICS.isdisjoint(metrics):
        return None
    retained_rows = kept_rows(verdict)
    holders = "; ".join(holder_lines(retained_rows.holders(explanation.holders), units))
    for row in retained_rows.rows:
        place: Place | None = _place_of(row)
        text = f"{format_bytes(row.nbytes, units)}{_category(row)}{_place_text(row, row.path)}"
        if row in retained_rows.uncertain:
            # Do not blame a single line if nothing proves that its bytes are new.
            place = None
            size = format_bytes(int(retained_rows.growth), units)
            text = f"{size} in {rows_of(retained_rows)}, the first{_place_text(row, row.path)}"
        text = f"{text}, kept afterwards"
        return FirstRow(f"{text}: {holders}" if holders else text, place)
    return None


def _peak_row(verdict: Verdict, metrics: Collection[str], units: UnitSystem) -> FirstRow | None:
    if not any(METRICS[name].peak for name in metrics):
        return None
    if verdict.difference is not None and verdict.difference.nbytes > 0:
        return next((_first_change(change, units) for change in verdict.difference.explaining()), None)
    explanation = verdict.measurement.explanation
    for row in [] if explanation is None else listed_rows(explanation.peak):
        size = f"{format_bytes(row.nbytes, units)}{_category(row)}"
        return FirstRow(f"largest at the peak: {size}{_place_text(row, row.path)}")
    return None


def _count_row(verdict: Verdict, metrics: Collection[str], units: UnitSystem) -> FirstRow | None:
    for name in sorted(set(MADE_OF_OPERATORS).intersection(metrics), key=lambda name: METRICS[name].precedence):
        for tally in ranked(verdict.count_changes.get(name, ())):
            place, change = tally.place, f"{difference(name, tally.amount, units)} {METRICS[name].title}"
            reason = f": {place.reason}" if place.reason else ""
            text = f"{change}{_place_text(place, place.module, tally.operator)}{reason}"
            return FirstRow(text, _place_of(place) if tally.amount > 0 else None)
    return None


def _first_change(change: Change, units: UnitSystem) -> FirstRow:
    grown = format_bytes_change(change.nbytes, units)
    if change.alternatives:
        return FirstRow(f"{grown} of {alternatives_title(change)}, the largest{_place_text(change.alternatives[0])}")
    reason = f": {change.reason}" if change.reason else ""
    row = change.row
    return FirstRow(f"{grown}{_category(row)}{_place_text(row, row.path)}{reason}", _place_of(row))


def _category(row: Row) -> str:
    """Return a row's category after a blank: `` activations``. The text is empty for the category ``other``."""
    return "" if row.category == "other" else f" {category_of(row)}"


def _place_text(place: Row | OperatorSite, module: str = "", operator: str = "") -> str:
    """Return `` at model.py:88, by _softmax in blocks.*.attn``. An unknown line, operator or module is omitted."""
    operator = operator or getattr(place, "operator", "")
    return "".join(
        f"{word}{text}" for word, text in ((" at ", place.where), (", by ", operator), (" in ", module)) if text
    )


def _place_of(row: Row | OperatorSite) -> Place | None:
    return _file_and_line(row.named) or _file_and_line(row.site)


def _file_and_line(site: str) -> Place | None:
    """Return the file and the line number in ``site``; ``None`` for a file outside of the root directory."""
    match = _SITE.fullmatch(site)
    if match is None or match["file"].startswith(("/", "..")) or re.match(r"[A-Za-z]:", site):
        return None
    return match["file"], int(match["line"])
