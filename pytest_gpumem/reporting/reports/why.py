"""Make a report on a single test from a session's report, as ``pytest -vv`` prints it. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.reporting.reports.layout import NOTHING, Span, as_lines
from pytest_gpumem.reporting.reports.matrix import matrices, matrix_pieces
from pytest_gpumem.reporting.reports.terminal import terminal_text
from pytest_gpumem.reporting.reports.view import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.reporting.reports.layout import Line, Piece, Screen
    from pytest_gpumem.reporting.reports.session_report import SessionReport
    from pytest_gpumem.reporting.reports.view import ReportRow


def tests_of(report: SessionReport) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return the names of each test's measurements, by (file, test). Tests that did not finish have none."""
    names_by_test: dict[tuple[str, str], tuple[str, ...]] = dict.fromkeys(report.not_run, ())
    for result in report.results:
        verdict = result.verdict
        names = tuple(part.measurement.name for part in verdict.verdicts)
        names_by_test[verdict.file, verdict.test] = (*names_by_test.get((verdict.file, verdict.test), ()), *names)
    return names_by_test


def why_lines(report: SessionReport, file: str, test: str, screen: Screen) -> list[Line]:
    """Return the lines on a single test: how the test ended and why, its figures, and the explanation of the figures.

    If shards measured the test on several devices, the lines say for each device how the test ended.

    Args:
        report: The session's report.
        file: The test's file.
        test: The test's id without its file.
        screen: The terminal's width and encoding.
    """
    results = [result for result in report.results if (result.verdict.file, result.verdict.test) == (file, test)]
    test_rows = [row for row in rows_of(report) if (row.file, row.test) == (file, test)]
    lines = as_lines([piece for row in test_rows for piece in _end(row)], screen)
    lines += as_lines([(Span(_session(report), "aside"),), NOTHING], screen)
    # If the test belongs to a matrix, the matrix also has rows for other tests. So leave the matrix out of these tables, and
    # add it below them.
    without_cells = tuple(replace(result, verdict=replace(result.verdict, cell=None)) for result in results)
    lines += terminal_text(replace(report, results=without_cells, not_run=()), screen, 2).tables
    cells = {result.verdict.cell.matrix for result in results if result.verdict.cell is not None}
    related = [
        result for result in report.results if result.verdict.cell is not None and result.verdict.cell.matrix in cells
    ]
    for title, rows in matrices(related).items():
        lines += as_lines([*matrix_pieces(title, rows, report.terms.units), NOTHING], screen)
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _end(row: ReportRow) -> Iterator[Piece]:
    note = f", {row.status.note}" if row.status.note else ""
    yield (Span(row.title, "heading"), Span(f": {row.status.words}{note}"))
    location = row.result.verdict.location if row.result is not None else None
    if location is not None:
        yield (Span(f"{location.file}:{location.line}", "aside"),)
    yield from ((Span(f"{clause}"),) for clause in row.notes)
    if row.why:
        yield NOTHING
        yield from ((Span(line),) for line in row.why.split("\n"))
        yield NOTHING


def _session(report: SessionReport) -> str:
    """Return a line about the report's session."""
    ended = report.ended.replace("T", " ").replace("Z", " UTC")
    commit = f", commit {report.commit}" if report.commit else ""
    return f"from the session that ended {ended}{commit}: {report.terms.asked_for}"
