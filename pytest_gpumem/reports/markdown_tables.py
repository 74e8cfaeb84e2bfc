"""The tables of a report in Markdown: tests, metrics, what grew, configs, the environment. Each a function of values."""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING

from pytest_gpumem.gate.verdict import FAILING, Outcome
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports import explanation
from pytest_gpumem.reports.escaping import code_in_table, plain, table
from pytest_gpumem.reports.explanation import grown_counts
from pytest_gpumem.reports.matrix import matrix_cells, said_of
from pytest_gpumem.reports.values import change, shown, texts_of
from pytest_gpumem.reports.view import measured_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.gate.verdict import MetricVerdict, Verdict
    from pytest_gpumem.measurement import Environment
    from pytest_gpumem.reports.explanation import PartTable
    from pytest_gpumem.reports.matrix import Row as ConfigRow
    from pytest_gpumem.reports.session_report import SessionReport
    from pytest_gpumem.reports.view import Measured, Row
    from pytest_gpumem.units import UnitSystem

_CHANGED = (Outcome.IMPROVED, Outcome.UNCERTAIN, Outcome.REGRESSED, Outcome.OVER_BUDGET)


def metrics(verdict: Verdict, units: UnitSystem) -> str:
    """What each metric of a measurement is, was and may be. Columns that say nothing of any are left out."""
    rows = [
        [*map(plain, astuple(texts_of(one, units))[:-1]), "" if one.outcome is Outcome.RECORDED else _loud(one.outcome)]
        for one in verdict.metrics
    ]
    header = ["metric", "baseline", "now", "change", "allowed", "budget", "verdict"]
    used = [number for number in range(len(header)) if number in (0, 2, 6) or any(row[number] for row in rows)]
    return table(
        [header[number] for number in used], [[row[number] for number in used] for row in rows], (0, len(used) - 1)
    )


def _loud(outcome: Outcome) -> str:
    return f"**{outcome.words}**" if outcome in FAILING else outcome.words


def explained(verdict: Verdict, units: UnitSystem) -> list[str]:
    """Return tables of what was left behind, what grew or is there at the peak, and the operators of grown counts."""
    metrics = ("retained", "peak_allocated", "cyclic_garbage", *grown_counts(verdict))
    found = []
    for one in explanation.explained(verdict, metrics, units):
        if one.table.parts or one.table.changes:
            found.append(_parts(one.table))
        if one.lines:
            found.append("\n".join(f"- {plain(line)}" for line in one.lines))
    return found


def _parts(of: PartTable) -> str:
    name = plain if of.of_blocks else code_in_table
    why = ["why"] if of.changes else []
    header = [of.title, *of.figures, *("module", "line", "operator", "tensors")[: 4 if of.of_blocks else 2], *why]
    rows = [
        [
            name(part.name),
            *map(plain, part.figures),
            *map(code_in_table, part.places),
            *([plain(part.reason)] if why else []),
        ]
        for part in of.parts
    ]
    if of.others:
        first = [of.others, *[""] * (len(of.figures) - 1), of.rest] if of.of_blocks else [plain(of.rest_line)]
        rows.append([*first, *[""] * (len(header) - len(first))])
    numbers = range(1, 1 + len(of.figures))
    found = table(header, rows, tuple(number for number in range(len(header)) if number not in numbers))
    return f"{found}\n\n{plain(of.note)}" if of.note else found


def changed(measured: Iterable[Measured], units: UnitSystem) -> str:
    """The metrics that changed; empty where none did."""
    rows = [
        [
            code_in_table(each.title),
            *map(plain, astuple(texts_of(one, units))[:4]),
            _loud(one.outcome),
        ]
        for each in measured
        for one in each.verdict.metrics
        if one.outcome in _CHANGED
    ]
    return table(["test", "metric", "baseline", "now", "change", "verdict"], rows, (0, 1, 5)) if rows else ""


def all_tests(tests: Sequence[Row], units: UnitSystem) -> str:
    """A row a measurement, and one a test that has none; empty where there is no test."""
    verdicts = [one.verdict for row in tests for one in row.measured]
    values = {
        name: [found.value for verdict in verdicts if (found := verdict.of(name)) is not None] for name in METRICS
    }
    used = [name for name, metric in METRICS.items() if metric.has_column(values[name])]
    lines = []
    for row in tests:
        for one in row.measured:
            cells = [cell for name in used for cell in _value_and_change(one.verdict.of(name), units)]
            lines.append([code_in_table(one.title), *cells, _loud(one.verdict.outcome)])
        if row.result is not None and not row.measured:
            test = row.result.verdict
            why = "held by relations" if test.relations and not test.unmeasured else plain(test.outcome.words)
            lines.append([code_in_table(row.title), *[""] * (2 * len(used)), why])
    header = ["test", *(cell for name in used for cell in (METRICS[name].title, "change")), "verdict"]
    # Where nothing was compared, no column of changes.
    kept = [number for number, name in enumerate(header) if name != "change" or any(line[number] for line in lines)]
    rows_kept = [[line[number] for number in kept] for line in lines]
    return table([header[number] for number in kept], rows_kept, (0, len(kept) - 1)) if lines else ""


def _value_and_change(one: MetricVerdict | None, units: UnitSystem) -> tuple[str, str]:
    return ("", "") if one is None else (plain(shown(one.metric, one.value, units, one.of)), change(one, units))


def matrix(rows: Sequence[ConfigRow], units: UnitSystem) -> str:
    """A table of step configs, and what its columns are."""
    header, cells = matrix_cells(rows, units)
    lines = [[code_in_table(config), *map(plain, others)] for config, *others in cells]
    found = table(["config", *header], lines, (0, len(header)))
    said = said_of(rows)
    return f"{found}\n\n{plain(said)}" if said else found


def environment(report: SessionReport) -> str:
    """Where the session ran, with which versions, and when it ended."""
    rows = [["ended", code_in_table(report.ended)], ["pytest-gpumem", code_in_table(report.version)]]
    if report.commit:
        rows.append(["commit", code_in_table(report.commit)])
    if report.shards > 1:
        rows.append(["shards", str(report.shards)])
    found: list[Environment] = []
    for one in measured_in(report.results):
        if one.verdict.measurement.environment not in found:
            found.append(one.verdict.measurement.environment)
    for environment in found:
        rows.append(["device", plain(environment.device)])
        rows += [[plain(name), plain(str(value))] for name, value in environment.details.items()]
    return table(["", ""], rows, (0, 1))
