"""Everything that a report has about one test, as the lines that ``pytest -vv`` shows of it. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.reports.layout import Span
from pytest_gpumem.reports.matrix import matrices
from pytest_gpumem.reports.terminal import NOTHING, as_lines, matrix_pieces, terminal_text
from pytest_gpumem.reports.view import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.reports.layout import Line, Screen
    from pytest_gpumem.reports.session_report import SessionReport
    from pytest_gpumem.reports.terminal import Piece
    from pytest_gpumem.reports.view import ReportRow


def tests_of(report: SessionReport) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return the measured tests of a report as (file, test), each with the names of its measurements."""
    found: dict[tuple[str, str], tuple[str, ...]] = dict.fromkeys(report.not_run, ())
    for result in report.results:
        verdict = result.verdict
        names = tuple(one.measurement.name for one in verdict.verdicts)
        found[verdict.file, verdict.test] = (*found.get((verdict.file, verdict.test), ()), *names)
    return found


def why_lines(report: SessionReport, file: str, test: str, screen: Screen) -> list[Line]:
    """Return what is to be said of a test of the report: how it ended, why, its figures, and what they are made of.

    A test that shards measured on several devices has an end on each.
    """
    results = [one for one in report.results if (one.verdict.file, one.verdict.test) == (file, test)]
    mine = [row for row in rows_of(report) if (row.file, row.test) == (file, test)]
    lines = as_lines([piece for row in mine for piece in _end(row)], screen)
    lines += as_lines([(Span(_session(report), "aside"),), NOTHING], screen)
    # A matrix is of all its tests.
    alone = tuple(replace(one, verdict=replace(one.verdict, cell=None)) for one in results)
    lines += terminal_text(replace(report, results=alone, not_run=()), screen, 2).tables
    cells = {one.verdict.cell.matrix for one in results if one.verdict.cell is not None}
    related = [one for one in report.results if one.verdict.cell is not None and one.verdict.cell.matrix in cells]
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
    """Return which session it is of."""
    ended = report.ended.replace("T", " ").replace("Z", " UTC")
    commit = f", commit {report.commit}" if report.commit else ""
    return f"of the session that ended {ended}{commit}: {report.terms.asked_for}"
