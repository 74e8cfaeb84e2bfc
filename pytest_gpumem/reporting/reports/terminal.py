"""Make the end of a session's terminal output: tables, details on measurements, and the accounting line. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.command_name import command_name
from pytest_gpumem.base.units import format_bytes
from pytest_gpumem.facts.values.option_words import NO_CUDA
from pytest_gpumem.reporting.reports.causes import MOST_CAUSES, cause_notes, cause_table
from pytest_gpumem.reporting.reports.explanation import composition_table, part_layout
from pytest_gpumem.reporting.reports.layout import NOTHING, Column, Span, Table, as_lines
from pytest_gpumem.reporting.reports.matrix import matrices, matrix_pieces
from pytest_gpumem.reporting.reports.ranks import peaks_by_rank, rank_table
from pytest_gpumem.reporting.reports.summary import (
    STYLES,
    device_lines,
    first_remarks,
    not_shown,
    notes,
    reasons,
    recording_notes,
    summary_table,
    to_be_shown,
    unmeasured_processes,
    unstored_times,
)
from pytest_gpumem.reporting.reports.values import change, shown
from pytest_gpumem.reporting.reports.view import rows_of, shown_measurements

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.base.units import UnitSystem
    from pytest_gpumem.facts.values.composition import Explanation
    from pytest_gpumem.judging.gate.verdict import MetricVerdict
    from pytest_gpumem.reporting.reports.layout import Line, Piece, Screen, Style
    from pytest_gpumem.reporting.reports.session_report import SessionReport
    from pytest_gpumem.reporting.reports.view import ShownMeasurement


MOST_COMPOSITIONS = 10
MOST_ROWS = 5
MOST_ROWS_OF_ALL = 15
PHASES = ("forward", "backward", "optimizer")
_UNEXPLAINED = "compositions of other peaks were not recorded; --gpumem-explain=always records them"


def compositions(measured: Iterable[ShownMeasurement], units: UnitSystem, *, everything: bool) -> list[Piece]:
    """Return the compositions at the peak for the first `MOST_COMPOSITIONS` measurements, or for all with ``everything``."""
    explained = [
        (shown_measurement, explanation)
        for shown_measurement in measured
        if (explanation := shown_measurement.verdict.measurement.explanation) is not None
    ]
    pieces: list[Piece] = []
    for shown_measurement, explanation in explained[: None if everything else MOST_COMPOSITIONS]:
        total = format_bytes(explanation.peak.total, units)
        pieces.append((Span(shown_measurement.title, "heading"), Span(f": {total} at the peak")))
        pieces += [*_composition(explanation, units, MOST_ROWS), NOTHING]
    more = len(explained) - MOST_COMPOSITIONS
    if more > 0 and not everything:
        pieces += [(Span(f"... and {more} more; -v shows all"),), NOTHING]
    return pieces


def details(measured: Iterable[ShownMeasurement], units: UnitSystem) -> list[Piece]:
    """Return each measurement's phases, and the composition at the peak if it was recorded."""
    pieces: list[Piece] = []
    unexplained = False
    for shown_measurement in measured:
        phases = phase_table(shown_measurement, units)
        explanation = shown_measurement.verdict.measurement.explanation
        unexplained |= explanation is None and phases is not None
        if phases is None and explanation is None:
            continue
        pieces.append((Span(shown_measurement.title, "heading"),))
        if phases is not None:
            pieces.append(phases)
        if explanation is not None:
            pieces.append((Span(f"  {format_bytes(explanation.peak.total, units)} at the peak"),))
            pieces += _composition(explanation, units, MOST_ROWS_OF_ALL)
        pieces.append(NOTHING)
    if unexplained:
        pieces += [(Span(_UNEXPLAINED, "aside"),), NOTHING]
    return pieces


def phase_table(shown_measurement: ShownMeasurement, units: UnitSystem) -> Table | None:
    """Return a table with each phase's peak and time and their changes; ``None`` if the step has no phases."""
    phases = {
        phase: (shown_measurement.verdict.of(f"peak_{phase}"), shown_measurement.verdict.of(f"{phase}_time"))
        for phase in PHASES
        if shown_measurement.verdict.of(f"peak_{phase}") is not None
    }
    if not phases:
        return None
    has_times = any(time is not None for _, time in phases.values())
    times = (Column("time", weight=2), Column("change", weight=0)) if has_times else ()
    columns = (Column("phase", left=True), Column("peak"), Column("change", weight=1), *times)
    rows = []
    for phase, (peak, time) in phases.items():
        figures = [*_figure(peak, units), *(_figure(time, units) if has_times else ())]
        rows.append((Span(phase), *map(Span, figures)))
    return Table(columns, tuple(rows), indent=2)


def _figure(metric: MetricVerdict | None, units: UnitSystem) -> tuple[str, str]:
    if metric is None:
        return "-", ""
    return shown(metric.metric, metric.value, units), change(metric, units)


def _composition(explanation: Explanation, units: UnitSystem, most: int) -> list[Piece]:
    table = composition_table("", explanation.peak, units, most)
    sentences = (*table.last, *(f"note: {note}" for note in explanation.peak.notes))
    return [part_layout(table, indent=2), *((Span(f"  {sentence}"),) for sentence in sentences)]


MARKUP: dict[Style | None, dict[str, bool]] = {
    None: {},
    "good": {"green": True},
    "bad": {"red": True},
    "doubtful": {"yellow": True},
    "heading": {"bold": True},
    "aside": {"light": True},
}
"""The arguments to pytest's terminal writer for each style."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The end of a session's output: ``tables`` under a heading, and ``lines`` below the tables."""

    tables: tuple[Line, ...]
    lines: tuple[Line, ...]


def terminal_text(report: SessionReport, screen: Screen, verbosity: int = 0, *, explain_all: bool = False) -> Summary:
    """Return the end of a session's output in the terminal.

    Args:
        report: The session's report.
        screen: The terminal's width and encoding.
        verbosity: pytest's verbosity. Below 0, only the accounting line and the reasons for a red session are shown. 0 adds
            measurements with a problem or a change, 1 adds all others, and 2 adds phases and compositions at peaks.
        explain_all: True to show compositions at peaks also at verbosity 0 (``--gpumem-explain=always``).
    """
    quiet, everything, units = verbosity < 0, verbosity > 0, report.terms.units
    measured = shown_measurements(report.results, report.terms.update)
    causes = report.causes
    pieces: list[Piece] = []
    if causes.concern_several_tests and not quiet:
        most = None if everything else MOST_CAUSES
        pieces += [cause_table(causes, units, most)] if causes.causes else []
        pieces += [*map(_line, cause_notes(causes, units, most, hint="-v shows all")), NOTHING]
    chosen = [] if quiet else measured
    if not quiet and not everything:
        chosen = to_be_shown(measured, causes.explained, gating=report.terms.baseline)
    if chosen:
        pieces.append(summary_table(chosen, units, everything=everything))
        pieces += [_line(text, "aside") for text in not_shown(measured, chosen)]
        pieces += map(_line, device_lines(chosen, units))
    if not quiet:
        compared = (result.verdict for result in report.results if result.verdict.verdicts)
        remarks = [
            *reasons(compared, units, report.terms.update),
            *notes(measured),
            *(f"note: {clause}" for clause in unmeasured_processes(result.verdict for result in report.results)),
        ]
        pieces += map(_line, remarks if everything else first_remarks(remarks))
        pieces += [NOTHING] if pieces else []
        ranks = peaks_by_rank(report.results)
        pieces += [rank_table(ranks, units), NOTHING] if ranks else []
        if everything or not report.terms.baseline:
            for title, rows in matrices(report.results).items():
                # If no config in the matrix was measured, the accounting line gives the reason.
                if everything or any(row.peak is not None for row in rows):
                    pieces += [*matrix_pieces(title, rows, units), NOTHING]
        if verbosity > 1:
            pieces += details(measured, units)
        elif explain_all:
            pieces += compositions(measured, units, everything=everything)
    warnings = [*report.warnings]
    # Without -q, the line about the store has a note on disturbed times. With -q, a warning replaces this note.
    warnings += unstored_times(report) if quiet else () if verbosity > 1 else recording_notes(report.results)
    lines = [
        *(_line(f"gpumem: {warning}", "doubtful") for warning in warnings),
        *(_line(f"gpumem {text}") for text in (() if quiet else report.closing_lines)),
        *_ending(report),
    ]
    return Summary(tuple(as_lines(pieces, screen)), tuple(as_lines(lines, screen)))


def failure_lines(report: SessionReport, screen: Screen) -> list[Line]:
    """Return a line with the reason for each failed or unfinished test, like pytest's short summary."""
    failed = [row for row in rows_of(report) if row.status.fails]
    return as_lines(
        [_line(f"{'FAILED' if row.result else 'NOT RUN'} {row.title} - {row.headline}", "bad") for row in failed],
        screen,
    )


WITHOUT_GPU = (
    "gpumem: without a GPU, choose where steps run, here or as `device` in [tool.gpumem]:",
    f"  --gpumem-device=emulated:h100   an emulated GPU: see `{command_name()} doctor` for what it needs on this machine",
    "  --gpumem-device=cpu             the CPU, with baselines of its own",
    "  --gpumem-device=auto            the GPU if there is one, else the CPU",
)
"""The advice if tests were not measured because the machine has no GPU."""


def _ending(report: SessionReport) -> list[Line]:
    """Return the reasons for a red session, and the accounting line."""
    nothing = [report.nothing_done] if report.nothing_done is not None else []
    grown = [sentence for sentence in report.renamed_and_grown if sentence in report.problems]
    problems = [*report.errors, *grown, *nothing]
    lines = [_line(f"gpumem: {problem}", "bad") for problem in problems]
    if any((result.verdict.unmeasured or "").startswith(NO_CUDA) for result in report.results):
        lines += map(_line, WITHOUT_GPU)
    if report.results or report.not_run:
        lines.append(_line(report.accounting, _style_of(report)))
    elif report.terms.baseline and not problems:
        lines.append(_line("gpumem: nothing to gate: no measured test was selected", "doubtful"))
    return lines


def _style_of(report: SessionReport) -> Style | None:
    """Return the accounting line's style, which is the worst outcome's style. It is ``good`` only if a test was gated."""
    styles = {STYLES[result.verdict.outcome] for result in report.not_accepted}
    # Ignore failed tests that are not measured, because the line does not count them.
    if "bad" in styles or not replace(report, unmeasured_failures=0).passed:
        return "bad"
    if "doubtful" in styles or any(result.verdict.unmeasured_processes for result in report.results):
        return "doubtful"
    return "good" if any(result.verdict.gated for result in report.results) else None


def _line(text: str, style: Style | None = None) -> Line:
    return (Span(text, style),)
