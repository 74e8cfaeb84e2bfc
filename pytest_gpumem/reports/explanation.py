"""What grew, what is there at a peak, and what was left behind, as lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.gate.difference import REST
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports.counts import count_lines, count_tables
from pytest_gpumem.reports.layout import Column, Span, Table, columns, plain_lines
from pytest_gpumem.units import UnitSystem, format_bytes, format_bytes_change

if TYPE_CHECKING:
    from collections.abc import Collection

    from pytest_gpumem.gate.difference import Difference
    from pytest_gpumem.gate.verdict import Verdict
    from pytest_gpumem.metrics import Unit
    from pytest_gpumem.values.composition import Composition, Explanation, Row

MOST_ROWS = 5

PLURALS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "input": "inputs",
    "activation": "activations",
    "temporary": "temporaries",
    "workspace": "workspaces",
}
"""What every report calls the blocks of a category; the others are called as they are."""


def explanation_blocks(verdict: Verdict, guilty: Collection[str], units: UnitSystem) -> list[list[str]]:
    """Why the metrics in ``guilty`` are what they are: blocks of lines, none where nothing is known."""
    explanation = verdict.measurement.explanation
    counts = [count_lines(table) for table in count_tables(verdict, guilty, units)]
    if explanation is None:
        return counts
    blocks = []
    # A leak first: it is why the peak is higher, too.
    left = {"growth", "retained"}.intersection(guilty)
    if left and explanation.retained.rows:
        blocks.append(
            [
                *composition_lines(retained_title(verdict), explanation.retained, units),
                *(f"kept in: {holder}" for holder in explanation.holders),
            ]
        )
    if any(METRICS[name].peak for name in guilty):
        blocks += _of_the_peak(verdict, explanation, units)
    if "cyclic_garbage" in guilty and explanation.garbage.rows:
        blocks.append(
            [
                *composition_lines("held by cycles", explanation.garbage, units),
                *(f"cycle: {cycle}" for cycle in explanation.cycles),
            ]
        )
    return [*blocks, *counts]


def retained_title(verdict: Verdict) -> str:
    """What stands above the bytes that outlived a step, or a call."""
    return "kept by each step" if verdict.measurement.metrics.get("growth") else "what was retained"


def _of_the_peak(verdict: Verdict, explanation: Explanation, units: UnitSystem) -> list[list[str]]:
    growth, peak = verdict.growth, explanation.peak
    notes = [f"note: {note}" for note in peak.notes]
    if growth is not None and growth.growth > 0:
        return [[*growth_lines(growth, units), *notes]]
    lines = [*composition_lines("what is there at the peak", peak, units), *notes]
    if verdict.origin is not None and verdict.growth is None and not peak.notes:
        lines.append(
            "note: the baseline keeps no composition to compare with; one is kept when it is next accepted "
            "(not under --gpumem-explain=never)"
        )
    return [lines]


def growth_lines(difference: Difference, units: UnitSystem) -> list[str]:
    """The rows that explain most of the growth, with why, and what the others make up together."""
    told = difference.explaining()
    rows = []
    for change in told:
        before = change.before.nbytes if change.before else 0
        after = change.after.nbytes if change.after else 0
        rows.append(
            (
                category_of(change.row),
                format_bytes(before, units) if before else "-",
                format_bytes(after, units) if after else "-",
                format_bytes_change(change.nbytes, units),
                *places_of(change.row),
                change.reason,
            )
        )
    header = ("what grew", "baseline", "now", "change", "module", "line", "operator", "tensors", "")
    used = [n for n in range(len(header)) if n < 4 or any(row[n] for row in rows)]
    left = tuple(place for place, n in enumerate(used) if n == 0 or n > 3)
    lines = columns([header[n] for n in used], [[row[n] for n in used] for row in rows], left=left)
    others = difference.growth - sum(change.nbytes for change in told)
    count = len(difference.changes) - len(told)
    if count:
        lines.append(f"{count} other change{'s' if count > 1 else ''}: {format_bytes_change(others, units)} together")
    return lines


def composition_lines(title: str, composition: Composition, units: UnitSystem, most: int = MOST_ROWS) -> list[str]:
    """The largest rows of a composition, and what the others make up together."""
    rest = the_rest(composition, units, most)
    return [*plain_lines(composition_table(title, composition, units, most)), *([rest] if rest else [])]


def composition_table(title: str, composition: Composition, units: UnitSystem, most: int, *, indent: int = 0) -> Table:
    """The largest rows of a composition."""
    rows = [(category_of(row), format_bytes(row.nbytes, units), *places_of(row)) for row in composition.rows[:most]]
    return Table(
        (
            Column(title, left=True),
            Column("bytes"),
            Column("module", left=True, least=10),
            Column("line", left=True, least=10),
            Column("operator", left=True, least=10, weight=0),
            Column("tensors", left=True, least=24, weight=1),
        ),
        tuple(tuple(map(Span, row)) for row in rows),
        indent,
    )


def the_rest(composition: Composition, units: UnitSystem, most: int) -> str:
    """What all but the largest rows make up together; empty where there are no others."""
    rest = composition.total - sum(row.nbytes for row in composition.rows[:most])
    return f"the rest: {format_bytes(rest, units)}" if rest else ""


def out_of_memory_lines(explanation: Explanation, units: UnitSystem) -> list[str]:
    """Where memory had gone when it ran out."""
    asked = (
        f" when {format_bytes(explanation.asked, units)} more were asked for" if explanation.asked is not None else ""
    )
    total = format_bytes(explanation.peak.total, units)
    return [
        f"memory ran out{asked}; the step held {total} (run once more, recorded)",
        *composition_lines("what was there", explanation.peak, units, most=10),
        *(f"note: {note}" for note in explanation.peak.notes),
    ]


def failing_metrics(verdict: Verdict, failing: Collection[object], unit: Unit = "bytes") -> list[str]:
    """The metrics in a unit for which a measurement fails."""
    return [
        metric.metric for metric in verdict.metrics if metric.outcome in failing and METRICS[metric.metric].unit == unit
    ]


def category_of(row: Row) -> str:
    """What blocks are for, as a person says it."""
    if row.operator == REST:
        return REST
    return PLURALS.get(row.category, row.category)


def places_of(row: Row) -> tuple[str, str, str, str]:
    """The module, the line and the operator that blocks are of, and what they are; of the smaller rows nothing is known."""
    if row.operator == REST:
        return "", "", "", ""
    return row.module or ("(no module)" if row.where else ""), row.where, row.operator, row.what
