"""The tables of a report in Markdown: tests, metrics, what grew, configs, the environment. Each a function of values."""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING

from pytest_gpumem.gate.difference import REST
from pytest_gpumem.gate.verdict import FAILING, Outcome
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports.counts import count_tables, grown_counts
from pytest_gpumem.reports.escaping import code_in_table, plain, table
from pytest_gpumem.reports.explanation import MOST_ROWS, category_of, retained_title
from pytest_gpumem.reports.matrix import matrix_cells, said_of
from pytest_gpumem.reports.values import change, shown, texts_of
from pytest_gpumem.reports.view import measured_in
from pytest_gpumem.units import format_bytes, format_bytes_change

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.gate.difference import Difference
    from pytest_gpumem.gate.verdict import MetricVerdict, Verdict
    from pytest_gpumem.measurement import Environment
    from pytest_gpumem.reports.counts import CountTable
    from pytest_gpumem.reports.matrix import Row as ConfigRow
    from pytest_gpumem.reports.session_report import SessionReport
    from pytest_gpumem.reports.view import Measured, Row
    from pytest_gpumem.units import UnitSystem
    from pytest_gpumem.values.composition import Composition
    from pytest_gpumem.values.composition import Row as CompositionRow

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
    """What grew; or, where that is not known, what is there at the peak; and what was left behind."""
    explanation = verdict.measurement.explanation
    found = []
    if explanation is not None and explanation.retained.rows:
        found.append(composition(retained_title(verdict), explanation.retained, units))
        found.append("\n".join(f"- kept in: {plain(holder)}" for holder in explanation.holders))
    if verdict.growth is not None and verdict.growth.growth > 0:
        found.append(growth(verdict.growth, units))
    elif explanation is not None and explanation.peak.rows:
        found.append(composition("what is there at the peak", explanation.peak, units))
    if explanation is not None and explanation.garbage.rows:
        found.append(composition("held by cycles", explanation.garbage, units))
        found.append("\n".join(f"- cycle: {plain(cycle)}" for cycle in explanation.cycles))
    found += [counts(one) for one in count_tables(verdict, grown_counts(verdict), units)]
    return [one for one in found if one]


def growth(difference: Difference, units: UnitSystem) -> str:
    """What grew: the rows that explain most of it, and what the others make up together."""
    told = difference.explaining()
    rows = []
    for one in told:
        sizes = ["" if row is None else format_bytes(row.nbytes, units) for row in (one.before, one.after)]
        category, *places = _cells(one.row)
        rows.append([category, *sizes, format_bytes_change(one.nbytes, units), *places, plain(one.reason)])
    others = len(difference.changes) - len(told)
    if others:
        rest = difference.growth - sum(one.nbytes for one in told)
        name = f"{others} other change{'' if others == 1 else 's'}"
        rows.append([name, "", "", format_bytes_change(rest, units), *[""] * 5])
    header = ["what grew", "baseline", "now", "change", "module", "line", "operator", "tensors", "why"]
    return table(header, rows, (0, 4, 5, 6, 7, 8))


def counts(of: CountTable) -> str:
    """The operators by which a count is more, and at which lines."""
    rows = [
        [code_in_table(row.operator), plain(row.amount), code_in_table(row.module), code_in_table(row.line)]
        for row in of.rows
    ]
    if of.others:
        rows.append([plain(of.others), *[""] * 3])
    found = table([of.title, "now" if of.note else "change", "module", "line"], rows, (0, 2, 3))
    return f"{found}\n\n{plain(of.note)}" if of.note else found


def composition(title: str, of: Composition, units: UnitSystem) -> str:
    """The largest rows of a composition, and what the others make up together."""
    shown_rows = of.rows[:MOST_ROWS]
    rows = []
    for row in shown_rows:
        category, *others = _cells(row)
        rows.append([category, format_bytes(row.nbytes, units), *others])
    rest = of.total - sum(row.nbytes for row in shown_rows)
    if rest:
        rows.append(["the rest", format_bytes(rest, units), *[""] * 4])
    return table([title, "bytes", "module", "line", "operator", "tensors"], rows, (0, 2, 3, 4, 5))


def _cells(row: CompositionRow) -> list[str]:
    """What blocks are for, and where they are made; of those that are only known together, nothing but that."""
    if row.operator == REST:
        return [REST, "", "", "", ""]
    return [plain(category_of(row)), *map(code_in_table, (row.module, row.where, row.operator, row.what))]


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
