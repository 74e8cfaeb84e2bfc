"""The table of a matrix of step configs: saving and cost of each against the first. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.reports.layout import columns
from pytest_gpumem.units import format_bytes, format_ratio, format_seconds
from pytest_gpumem.values.rates import WORTH_IT, return_on

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.reports.results import TestResult
    from pytest_gpumem.units import UnitSystem

EFFICIENT = "*"
"""Marks rows that no other one beats in both memory and time."""


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """A config with its peak in bytes and its step time in seconds, or a clause that says why it has none."""

    config: str
    peak: int | None = None
    time: float | None = None
    why_not: str = ""


def matrices(results: Iterable[TestResult]) -> dict[str, list[MatrixRow]]:
    """Return the rows of each matrix, by its tests' common id, in the order of the marker.

    A test that measures several steps gives a table for each of their names, and shards on several devices one for each device.
    """
    cells = [(result.verdict, cell) for result in results if (cell := result.verdict.cell) is not None]
    devices = {(cell.matrix, one.measurement.environment.device) for test, cell in cells for one in test.verdicts}
    several = Counter(matrix for matrix, _ in devices)
    found: dict[str, list[MatrixRow]] = {}
    for test, cell in sorted(cells, key=lambda entry: (entry[1].matrix, entry[1].index)):
        if test.unmeasured:
            found.setdefault(cell.matrix, []).append(MatrixRow(cell.config, why_not=test.unmeasured))
        for one in test.verdicts if not test.unmeasured else ():
            measured = one.measurement
            title = f"{cell.matrix} ({measured.name})" if len(test.verdicts) > 1 else cell.matrix
            title += f" on {measured.environment.device}" if several[cell.matrix] > 1 else ""
            row = MatrixRow(cell.config, measured.peak_allocated, measured.metrics.get("step_time"))
            found.setdefault(title, []).append(row)
    return found


def efficient(rows: Sequence[MatrixRow]) -> set[int]:
    """Return the numbers of the Pareto-efficient rows; where no time was taken, of the smallest one."""
    measured = [(number, row.peak, row.time or 0.0) for number, row in enumerate(rows) if row.peak is not None]
    return {
        number
        for number, peak, time in measured
        if not any(p <= peak and t <= time and (p, t) != (peak, time) for _, p, t in measured)
    }


def matrix_table(title: str, rows: Sequence[MatrixRow], units: UnitSystem) -> list[str]:
    """Return the table as lines: peak and step time of each config, against the first row that was measured."""
    header, cells = matrix_cells(rows, units)
    lines = columns([title, *header], cells, left=(0, len(header)))
    against = legend_of(rows)
    return [*lines, f"  {against}"] if against else lines


def matrix_cells(rows: Sequence[MatrixRow], units: UnitSystem) -> tuple[list[str], list[list[str]]]:
    """Return the titles of the columns beside the config's, and the cells of each row, the config first."""
    first = next((row for row in rows if row.peak is not None), None)
    best = efficient(rows)
    timed = any(row.time is not None for row in rows)
    return ["peak", "saving", *(("step time", "cost", "ROI") if timed else ()), ""], [
        [*_cells(row, first, units, timed=timed), EFFICIENT if number in best else row.why_not]
        for number, row in enumerate(rows)
    ]


def legend_of(rows: Sequence[MatrixRow]) -> str | None:
    """Return the line beneath a table that explains its columns; ``None`` where nothing is compared."""
    first = next((row for row in rows if row.peak is not None), None)
    if first is None or len(rows) < 2:
        return None
    return (
        f"saving and cost against {first.config}; ROI is saving over cost, above {WORTH_IT} is recommended; "
        f"{EFFICIENT} is Pareto-efficient"
    )


def _cells(row: MatrixRow, first: MatrixRow | None, units: UnitSystem, *, timed: bool) -> list[str]:
    if row.peak is None or first is None or first.peak is None:
        return [row.config, *["-"] * (5 if timed else 2)]
    # A report of another program may have a figure of 0, to which nothing has a ratio.
    saving = (first.peak - row.peak) / first.peak if first.peak else None
    is_first = row is first
    cells = [row.config, format_bytes(row.peak, units), "" if is_first else _ratio(saving)]
    if not timed:
        return cells
    if row.time is None or first.time is None:
        return [*cells, "-", "-", "-"]
    if is_first:
        return [*cells, format_seconds(row.time), "", ""]
    cost = (row.time - first.time) / first.time if first.time else None
    roi = None if saving is None or cost is None else return_on(saving, cost)
    shown = "-" if roi is None else "free" if roi == float("inf") else f"{roi:.1f}"
    return [*cells, format_seconds(row.time), _ratio(cost), shown]


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else format_ratio(ratio)
