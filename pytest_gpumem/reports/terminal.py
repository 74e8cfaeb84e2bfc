"""What a session has to say at the end, for people in front of a terminal. A pure function of its report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.gate.verdict import FAILING, Outcome
from pytest_gpumem.reports.details import NOTHING, Piece, compositions, details
from pytest_gpumem.reports.layout import Column, Line, Span, Style, Table, laid_out
from pytest_gpumem.reports.matrix import matrices, matrix_cells, said_of
from pytest_gpumem.reports.results import recording_notes
from pytest_gpumem.reports.summary import (
    LEAST_NAME,
    not_shown,
    notes,
    reasons,
    summary_table,
    to_be_shown,
    ungated_times,
    unstored_times,
)
from pytest_gpumem.reports.view import measured_in, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.reports.layout import Screen
    from pytest_gpumem.reports.matrix import Row
    from pytest_gpumem.reports.session_report import SessionReport
    from pytest_gpumem.reports.view import Measured
    from pytest_gpumem.units import UnitSystem

MARKUP: dict[Style | None, dict[str, bool]] = {
    None: {},
    "good": {"green": True},
    "bad": {"red": True},
    "doubtful": {"yellow": True},
    "heading": {"bold": True},
    "aside": {"light": True},
}
"""Styles in pytest's words; whether there are colours at all is pytest's to say."""
_WEIGHTS = {"ROI": 0, "cost": 1, "step time": 2, "saving": 3}
"""The columns of a matrix that give way in a narrow terminal, the lightest first."""
_DOUBTFUL = frozenset({Outcome.FOREIGN, Outcome.STALE, Outcome.UNMEASURED, Outcome.UNCERTAIN})


@dataclass(frozen=True, slots=True)
class Said:
    """``tables``, with what explains them, stand under a heading of their own; ``lines`` come after them."""

    tables: tuple[Line, ...]
    lines: tuple[Line, ...]


def terminal_text(report: SessionReport, screen: Screen, verbosity: int = 0, *, explain_all: bool = False) -> Said:
    """What is shown of a report.

    ``verbosity`` is pytest's: below 0 the accounting line, times that are not gated, and why the session is red; at 0 what has
    something to say; at 1 everything that was measured; at 2 phases, and what peaks are made of. With ``explain_all``
    (``--gpumem-explain=always``) that is asked for at 0, too.
    """
    quiet, everything = verbosity < 0, verbosity > 0
    measured = measured_in(report.results)
    told = measured if everything else [] if quiet else to_be_shown(measured, gating=report.terms.baseline)
    pieces: list[Piece] = []
    if told:
        pieces.append(summary_table(told, report.terms.units, everything=everything))
        pieces += [_line(said, "aside") for said in not_shown(measured, told)]
    if not quiet:
        pieces += map(
            _line, [*reasons(one.verdict for one in report.results if one.verdict.verdicts), *notes(measured)]
        )
        pieces += [NOTHING] if pieces else []
        pieces += _figures(report, measured, verbosity, explain_all=explain_all)
    warnings = [*report.selection.idle_budgets, *ungated_times(report)]
    # What an update writes is told by the store's line, which a quiet session has not.
    warnings += unstored_times(report) if quiet else () if verbosity > 1 else recording_notes(report.results)
    lines = [
        *(_line(f"gpumem: {warning}", "doubtful") for warning in warnings),
        *(_line(f"gpumem {said}") for said in (() if quiet else report.said)),
        *_ending(report),
    ]
    return Said(tuple(_shown(pieces, screen)), tuple(_shown(lines, screen)))


def failure_lines(report: SessionReport, screen: Screen) -> list[Line]:
    """A line for each test that failed or did not run to its end, with why: what pytest tells of a session's own tests."""
    failed = [row for row in rows_of(report) if row.status.fails]
    return _shown(
        [_line(f"{'FAILED' if row.result else 'NOT RUN'} {row.title} - {row.headline}", "bad") for row in failed],
        screen,
    )


def _figures(report: SessionReport, measured: Sequence[Measured], verbosity: int, *, explain_all: bool) -> list[Piece]:
    """What is shown for its figures: matrices, and what peaks are made of."""
    units, pieces = report.terms.units, list[Piece]()
    if verbosity > 0 or not report.terms.baseline:
        for title, rows in matrices(report.results).items():
            # Why nothing of it was measured, the accounting tells.
            if verbosity > 0 or any(row.peak is not None for row in rows):
                pieces += [*_matrix(title, rows, units), NOTHING]
    if verbosity > 1:
        pieces += details(measured, units)
    elif explain_all:
        pieces += compositions(measured, units, everything=verbosity > 0)
    return pieces


def _matrix(title: str, rows: Sequence[Row], units: UnitSystem) -> list[Piece]:
    header, lines = matrix_cells(rows, units)
    columns = (
        Column(title, left=True, least=LEAST_NAME),
        *(Column(name, weight=_WEIGHTS.get(name)) for name in header[:-1]),
        Column(header[-1], left=True, least=12),
    )
    said = said_of(rows)
    return [
        Table(columns, tuple(tuple(map(Span, line)) for line in lines)),
        *([_line(f"  {said}", "aside")] if said else []),
    ]


def _ending(report: SessionReport) -> list[Line]:
    """Why the session is red, and the line that accounts for every test."""
    nothing = [report.nothing_gated] if report.nothing_gated is not None else []
    problems = [*report.errors, *nothing]
    lines = [_line(f"gpumem: {problem}", "bad") for problem in problems]
    if report.results or report.not_run:
        lines.append(_line(report.accounting, _style_of(report)))
    elif report.terms.baseline and not problems:
        lines.append(_line("gpumem: nothing to gate: no measured test was selected", "doubtful"))
    return lines


def _style_of(report: SessionReport) -> Style | None:
    """The worst of what the accounting line tells; good only where something was held against a baseline or a budget."""
    outcomes = {result.verdict.outcome for result in report.results}
    # Of tests that are not measured the line tells nothing.
    if not replace(report, others_failed=0).passed or not outcomes.isdisjoint(FAILING):
        return "bad"
    if not outcomes.isdisjoint(_DOUBTFUL):
        return "doubtful"
    return "good" if any(result.verdict.gated for result in report.results) else None


def _line(text: str, style: Style | None = None) -> Line:
    return (Span(text, style),)


def _shown(pieces: Sequence[Piece], screen: Screen) -> list[Line]:
    lines: list[Line] = []
    for piece in pieces:
        if isinstance(piece, Table):
            lines += laid_out(piece, screen)
        else:
            lines.append(tuple(Span(screen.legible(span.text), span.style) for span in piece))
    return lines
