"""Make the table for a matrix of step configs. Pure.

For each config, the table shows the saved memory and the cost in time, relative to the first config. For example,
``checkpoint=blocks`` saves 40 % memory and costs 25 % time, so its return on investment (ROI) is 1.6.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import format_bytes, format_ratio, format_seconds
from pytest_gpumem.facts.values.rates import WORTH_IT, return_on
from pytest_gpumem.reporting.reports.layout import LEAST_NAME, Column, Span, Table, columns

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.base.units import UnitSystem
    from pytest_gpumem.reporting.reports.layout import Piece
    from pytest_gpumem.reporting.reports.results import TestResult

EFFICIENT = "*"
"""The mark for a Pareto-efficient row: every other row needs more memory or more time, or exactly as much memory and time."""

_WEIGHTS = {"ROI": 0, "cost": 1, "step time": 2, "saving": 3}
"""The weights of the columns in a matrix. A narrow terminal omits columns with smaller weights first."""


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """A config with its peak in bytes and its step time in seconds. If both are missing, ``why_not`` gives the reason."""

    config: str
    peak: int | None = None
    time: float | None = None
    why_not: str = ""


def matrices(results: Iterable[TestResult]) -> dict[str, list[MatrixRow]]:
    """Return each matrix's rows, by the test's id without the config. The configs have the same order as in the marker.

    If a test measures several steps, each step has its own table. If shards used several devices, each device has its own
    table.
    """
    cells = [(result.verdict, cell) for result in results if (cell := result.verdict.cell) is not None]
    devices = {
        (cell.matrix, verdict.measurement.environment.device) for test, cell in cells for verdict in test.verdicts
    }
    device_counts = Counter(matrix for matrix, _ in devices)
    rows_by_title: dict[str, list[MatrixRow]] = {}
    for test, cell in sorted(cells, key=lambda entry: (entry[1].matrix, entry[1].index)):
        if test.unmeasured:
            rows_by_title.setdefault(cell.matrix, []).append(MatrixRow(cell.config, why_not=test.unmeasured))
        for verdict in test.verdicts if not test.unmeasured else ():
            measurement = verdict.measurement
            title = f"{cell.matrix} ({measurement.name})" if len(test.verdicts) > 1 else cell.matrix
            title += f" on {measurement.environment.device}" if device_counts[cell.matrix] > 1 else ""
            row = MatrixRow(cell.config, measurement.peak_allocated, measurement.metrics.get("step_time"))
            rows_by_title.setdefault(title, []).append(row)
    return rows_by_title


def efficient(rows: Sequence[MatrixRow]) -> set[int]:
    """Return the numbers of the Pareto-efficient rows. Without times, these are the rows with the smallest peak."""
    measured = [(number, row.peak, row.time or 0.0) for number, row in enumerate(rows) if row.peak is not None]
    return {
        number
        for number, peak, time in measured
        if not any(p <= peak and t <= time and (p, t) != (peak, time) for _, p, t in measured)
    }


def matrix_table(title: str, rows: Sequence[MatrixRow], units: UnitSystem) -> list[str]:
    """Return the table as lines of text. Savings and costs are relative to the first measured config."""
    header, cells = matrix_cells(rows, units)
    lines = columns([title, *header], cells, left=(0, len(header)))
    legend = legend_of(rows)
    return [*lines, f"  {legend}"] if legend else lines


def matrix_pieces(title: str, rows: Sequence[MatrixRow], units: UnitSystem) -> list[Piece]:
    """Return the table for a matrix of step configs, followed by a legend."""
    note = legend_of(rows)
    header, lines = matrix_cells(rows, units)
    table_columns = (
        Column(title, left=True, least=LEAST_NAME),
        *(Column(name, weight=_WEIGHTS.get(name)) for name in header[:-1]),
        Column(header[-1], left=True, least=12),
    )
    return [
        Table(table_columns, tuple(tuple(map(Span, line)) for line in lines)),
        *([(Span(f"  {note}", "aside"),)] if note else []),
    ]


def matrix_cells(rows: Sequence[MatrixRow], units: UnitSystem) -> tuple[list[str], list[list[str]]]:
    """Return the titles of all columns but the first, and each row's cells. The first column contains the configs."""
    first = next((row for row in rows if row.peak is not None), None)
    best = efficient(rows)
    timed = any(row.time is not None for row in rows)
    return ["peak", "saving", *(("step time", "cost", "ROI") if timed else ()), ""], [
        [*_cells(row, first, units, timed=timed), EFFICIENT if number in best else row.why_not]
        for number, row in enumerate(rows)
    ]


def legend_of(rows: Sequence[MatrixRow]) -> str | None:
    """Return the line below a table that explains the columns; ``None`` if the table compares nothing."""
    first = next((row for row in rows if row.peak is not None), None)
    if first is None or len(rows) < 2:
        return None
    return (
        f"saving and cost are relative to {first.config}; ROI is saving / cost, above {WORTH_IT} is recommended; "
        f"{EFFICIENT} marks a Pareto-efficient config"
    )


def _cells(row: MatrixRow, first: MatrixRow | None, units: UnitSystem, *, timed: bool) -> list[str]:
    if row.peak is None or first is None or first.peak is None:
        return [row.config, *["-"] * (5 if timed else 2)]
    # A report from another program may contain a value of 0, which cannot be a divisor.
    saving = (first.peak - row.peak) / first.peak if first.peak else None
    cost = (row.time - first.time) / first.time if row.time is not None and first.time else None
    roi = None if saving is None or cost is None else return_on(saving, cost)
    is_first = row is first
    cells = [
        row.config,
        format_bytes(row.peak, units),
        "" if is_first else "-" if saving is None else format_ratio(saving),
    ]
    if not timed:
        return cells
    if row.time is None or first.time is None:
        return [*cells, "-", "-", "-"]
    if is_first:
        return [*cells, format_seconds(row.time), "", ""]
    shown = "-" if roi is None else "free" if roi == float("inf") else f"{roi:.1f}"
    return [*cells, format_seconds(row.time), "-" if cost is None else format_ratio(cost), shown]
