"""Where the explanation of a test points to: its first row, and lines of the project's own code. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.gate.growths import KEPT
from pytest_gpumem.gate.judge import failing_metrics
from pytest_gpumem.gate.verdict import CHANGED, FAILING, Outcome
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports.explanation import alternatives_title, category_of, holder_lines, listed_rows, ranked
from pytest_gpumem.reports.values import difference
from pytest_gpumem.units import format_bytes, format_bytes_change
from pytest_gpumem.values.operator_counts import MADE_OF_OPERATORS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.gate.difference import Change
    from pytest_gpumem.gate.verdict import Verdict
    from pytest_gpumem.reports.view import ReportRow
    from pytest_gpumem.units import UnitSystem
    from pytest_gpumem.values.composition import Row
    from pytest_gpumem.values.operator_counts import OperatorSite

_SITE = re.compile(r"(?P<file>.+):(?P<line>[1-9]\d*)")


Place = tuple[str, int]
"""A file from the root directory, and a line in it."""


@dataclass(frozen=True, slots=True)
class FirstRow:
    """The row that the explanation of a failed test begins with."""

    what: str
    """The row as a clause: ``"+1.00 GB activations at model.py:88, by _softmax in blocks.*.attn: was bfloat16"``."""
    grew_at: Place | None = None
    """The line of the project that allocates more, or works more. ``None`` if it is not sure to, as for one of several rows."""


def grown_lines(row: ReportRow) -> Iterator[Place]:
    """Yield file and line of each row that explains a test, the most bytes first: of what is kept, of the peak, of counts."""
    for one in row.measured:
        explanation = one.verdict.measurement.explanation
        if explanation is not None and not KEPT.isdisjoint(failing_metrics(one.verdict, CHANGED - {Outcome.IMPROVED})):
            yield from filter(None, map(_place_of, explanation.retained.rows))
    for one in row.measured:
        changes = one.verdict.difference.changes if one.verdict.difference is not None else ()
        for change in sorted(changes, key=lambda change: -change.nbytes):
            if change.nbytes > 0 and (place := _place_of(change.row)):
                yield place
    for one in row.measured:
        for tallies in one.verdict.count_changes.values():
            for tally in tallies:
                if tally.amount > 0 and (place := _place_of(tally.place)):
                    yield place


def first_row(row: ReportRow, units: UnitSystem) -> FirstRow | None:
    """Return the first row of a failed test's explanation, in the order of the failure's text; ``None`` if nothing explains it.

    No later row is looked at: it explains less than the first, and may be innocent.
    """
    outcomes = {metric.outcome for one in row.measured for metric in one.verdict.metrics}
    # In strict mode a test fails by what is uncertain as well. Beside what is certain, that is not why.
    failing = FAILING if outcomes & FAILING else {Outcome.UNCERTAIN}
    for one in row.measured:
        metrics = [*failing_metrics(one.verdict, failing), *failing_metrics(one.verdict, failing, "work")]
        if metrics:
            return _first_row(one.verdict, metrics, units)
    return None


def _first_row(verdict: Verdict, metrics: list[str], units: UnitSystem) -> FirstRow | None:
    explanation, growth = verdict.measurement.explanation, verdict.difference
    if explanation is not None and not KEPT.isdisjoint(metrics):
        kept = listed_rows(explanation.retained)[:1]
        for row in kept:
            held = "; ".join(holder_lines(explanation.holders, units))
            what = f"{_bytes_of(row, units)}{_place_text(row, row.path)}, kept afterwards"
            return FirstRow(f"{what}: {held}" if held else what, _place_of(row))
    if any(METRICS[name].peak for name in metrics):
        if growth is not None and growth.nbytes > 0:
            return next((_first_change(change, units) for change in growth.explaining()), None)
        for row in [] if explanation is None else listed_rows(explanation.peak)[:1]:
            return FirstRow(f"the most at the peak: {_bytes_of(row, units)}{_place_text(row, row.path)}")
    for name in sorted(set(MADE_OF_OPERATORS).intersection(metrics), key=lambda name: METRICS[name].precedence):
        for tally in ranked(verdict.count_changes.get(name, ()))[:1]:
            what = f"{difference(name, tally.amount, units)} {METRICS[name].title}"
            place = tally.place
            reason = f": {place.reason}" if place.reason else ""
            where = _place_text(place, place.module, tally.operator)
            return FirstRow(f"{what}{where}{reason}", _place_of(place) if tally.amount > 0 else None)
    return None


def _first_change(change: Change, units: UnitSystem) -> FirstRow:
    grown = format_bytes_change(change.nbytes, units)
    if change.alternatives:
        return FirstRow(f"{grown} of {alternatives_title(change)}, the largest{_place_text(change.alternatives[0])}")
    reason = f": {change.reason}" if change.reason else ""
    row = change.row
    return FirstRow(f"{grown}{_named(row)}{_place_text(row, row.path)}{reason}", _place_of(row))


def _bytes_of(row: Row, units: UnitSystem) -> str:
    return f"{format_bytes(row.nbytes, units)}{_named(row)}"


def _named(row: Row) -> str:
    """Return `` activations``; nothing for what has no better name than ``other``."""
    return "" if row.category == "other" else f" {category_of(row)}"


def _place_text(place: Row | OperatorSite, module: str = "", operator: str = "") -> str:
    """Return `` at model.py:88, by _softmax in blocks.*.attn``, without what is not known."""
    operator = operator or getattr(place, "operator", "")
    return "".join(
        f"{word}{text}" for word, text in ((" at ", place.where), (", by ", operator), (" in ", module)) if text
    )


def _place_of(row: Row | OperatorSite) -> Place | None:
    return _file_and_line(row.named) or _file_and_line(row.site)


def _file_and_line(site: str) -> Place | None:
    """Return file and line; ``None`` for what lies outside of the root directory, which no repository has."""
    match = _SITE.fullmatch(site)
    if match is None or match["file"].startswith(("/", "..")) or re.match(r"[A-Za-z]:", site):
        return None
    return match["file"], int(match["line"])
