"""Details of measurements for a terminal: phases, and compositions of peaks. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.reports.explanation import composition_table, part_layout
from pytest_gpumem.reports.layout import Column, Line, Span, Table
from pytest_gpumem.reports.values import change, shown
from pytest_gpumem.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.gate.verdict import MetricVerdict
    from pytest_gpumem.reports.view import Measured
    from pytest_gpumem.units import UnitSystem
    from pytest_gpumem.values.composition import Explanation

Piece = Table | Line

MOST_TOLD = 10
MOST_ROWS = 5
MOST_ROWS_OF_ALL = 15
PHASES = ("forward", "backward", "optimizer")
NOTHING: Line = ()
_UNEXPLAINED = "what other peaks are made of was not recorded; --gpumem-explain=always records it"


def compositions(measured: Iterable[Measured], units: UnitSystem, *, everything: bool) -> list[Piece]:
    """Return the compositions of the peaks that were explained: of the first `MOST_TOLD`, or of all with ``everything``."""
    explained = [
        (one, explanation) for one in measured if (explanation := one.verdict.measurement.explanation) is not None
    ]
    pieces: list[Piece] = []
    for one, explanation in explained[: None if everything else MOST_TOLD]:
        total = format_bytes(explanation.peak.total, units)
        pieces.append((Span(one.title, "heading"), Span(f": {total} at the peak")))
        pieces += [*_composition(explanation, units, MOST_ROWS), NOTHING]
    more = len(explained) - MOST_TOLD
    if more > 0 and not everything:
        pieces += [(Span(f"... and {more} more; -v shows them all"),), NOTHING]
    return pieces


def details(measured: Iterable[Measured], units: UnitSystem) -> list[Piece]:
    """Return the phases of each measurement, and the composition of its peak where that was recorded."""
    pieces: list[Piece] = []
    unexplained = False
    for one in measured:
        phases = phase_table(one, units)
        explanation = one.verdict.measurement.explanation
        unexplained |= explanation is None and phases is not None
        if phases is None and explanation is None:
            continue
        pieces.append((Span(one.title, "heading"),))
        if phases is not None:
            pieces.append(phases)
        if explanation is not None:
            pieces.append((Span(f"  {format_bytes(explanation.peak.total, units)} at the peak"),))
            pieces += _composition(explanation, units, MOST_ROWS_OF_ALL)
            pieces += [(Span(f"  note: {note}"),) for note in explanation.peak.notes]
        pieces.append(NOTHING)
    if unexplained:
        pieces += [(Span(_UNEXPLAINED, "aside"),), NOTHING]
    return pieces


def phase_table(one: Measured, units: UnitSystem) -> Table | None:
    """Return the peak and time of each phase, with their changes; ``None`` where the step has no phases."""
    found = {
        phase: (one.verdict.of(f"peak_{phase}"), one.verdict.of(f"{phase}_time"))
        for phase in PHASES
        if one.verdict.of(f"peak_{phase}") is not None
    }
    if not found:
        return None
    timed = any(time is not None for _, time in found.values())
    times = (Column("time", weight=2), Column("change", weight=0)) if timed else ()
    columns = (Column("phase", left=True), Column("peak"), Column("change", weight=1), *times)
    rows = []
    for phase, (peak, time) in found.items():
        figures = [*_figure(peak, units), *(_figure(time, units) if timed else ())]
        rows.append((Span(phase), *map(Span, figures)))
    return Table(columns, tuple(rows), indent=2)


def _figure(metric: MetricVerdict | None, units: UnitSystem) -> tuple[str, str]:
    if metric is None:
        return "-", ""
    return shown(metric.metric, metric.value, units), change(metric, units)


def _composition(explanation: Explanation, units: UnitSystem, most: int) -> list[Piece]:
    table = composition_table("", explanation.peak, units, most)
    return [part_layout(table, indent=2), *([(Span(f"  {table.rest_line}"),)] if table.others else [])]
