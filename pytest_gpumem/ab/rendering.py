"""A report as a table for a terminal, as Markdown, and as JSON. Pure."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from pytest_gpumem.ab.report import STEP_TIME, Figure
from pytest_gpumem.gate.verdict import Outcome
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports.columns import columns
from pytest_gpumem.reports.escaping import code_in_table, plain
from pytest_gpumem.reports.values import shown
from pytest_gpumem.units import format_bytes_change, format_ratio

if TYPE_CHECKING:
    from pytest_gpumem.ab.report import Report, Row
    from pytest_gpumem.units import UnitSystem

FORMAT = 1
"""The number of the JSON's format."""
HEADER = ("test", "metric", "base", "head", "change", "interval", "verdict")
_LEFT = (0, 1, len(HEADER) - 1)


def table(report: Report, units: UnitSystem) -> list[str]:
    """Lines for a terminal: the table, what is to be said about it, and a last line that accounts for every test."""
    rows = [(row.title, *cells) for row in report.rows for cells in _lines(row, units)]
    lines = [*columns(HEADER, rows, left=_LEFT), ""] if rows else []
    lines += [f"{what}: {said}" for what, said in remarks(report)]
    return [*lines, f"gpumem ab: {accounting(report)}"]


def remarks(report: Report) -> list[tuple[str, str]]:
    """What is to be said about single tests: a word for what it is, and a sentence."""
    said = [
        (figure.outcome.words, f"{row.title}: {METRICS[figure.metric].title}: {figure.reason}")
        for row in report.rows
        for figure in row.figures
        if figure.reason
    ]
    said += [("note", f"{row.title}: {note}") for row in report.rows for note in row.notes]
    said += [("broken" if one.broke else "not compared", f"{one.title}: {one.reason}") for one in report.left_out]
    return said


def accounting(report: Report) -> str:
    """The line that accounts for every test: ``"12 compared, 1 regressed; step times: 1 slower; 5 pairs of runs, ..."``."""
    parts = [f"{len(report.rows)} compared"]
    counts = Counter(row.outcome for row in report.rows)
    parts += [
        f"{counts[outcome]} {outcome.words}"
        for outcome in (Outcome.REGRESSED, Outcome.IMPROVED, Outcome.UNCERTAIN)
        if counts[outcome]
    ]
    broken = sum(one.broke for one in report.left_out)
    parts += [
        f"{count} {what}"
        for count, what in ((broken, "broken"), (len(report.left_out) - broken, "not compared"))
        if count
    ]
    speeds = Counter(figure.word for figure in report.speeds.values())
    said = ", ".join(
        f"{speeds[word]} {word}" for word in ("slower", "faster", "uncertain", "not slower") if speeds[word]
    )
    times = f" step times: {said};" if said else ""
    runs = f"{report.pairs} pair{'' if report.pairs == 1 else 's'} of runs"
    tolerated = format_ratio(report.tolerance).lstrip("+")
    return f"{', '.join(parts)};{times} {runs}, base {report.base}, head {report.head}, slowdown tolerated {tolerated}"


def _lines(row: Row, units: UnitSystem) -> list[tuple[str, ...]]:
    """The cells after the title: of its time, and of what changed. Where nothing did, of its peak."""
    told = [one for one in row.figures if one.metric == STEP_TIME or one.base != one.head]
    return [_cells(one, units) for one in told or row.figures[:1]]


def _cells(figure: Figure, units: UnitSystem) -> tuple[str, ...]:
    title, base, head = (
        METRICS[figure.metric].title,
        shown(figure.metric, figure.base, units),
        shown(figure.metric, figure.head, units),
    )
    return title, base, head, _change(figure, units), _interval(figure), figure.word


def _change(figure: Figure, units: UnitSystem) -> str:
    if figure.interval is not None:
        return format_ratio(figure.interval.ratio - 1)
    if figure.base:
        return format_ratio(figure.head / figure.base - 1)
    if METRICS[figure.metric].unit == "bytes":
        return format_bytes_change(int(figure.head), units)
    return f"{figure.head:+.0f}"


def _interval(figure: Figure) -> str:
    if figure.interval is None:
        return ""
    return f"{format_ratio(figure.interval.low - 1)} to {format_ratio(figure.interval.high - 1)}"


def markdown(report: Report, units: UnitSystem, *, finished: bool) -> str:
    """A section in GitHub's Markdown, for a comment or a job's summary."""
    lines = [f"### gpumem ab: {plain(str(report.base))} and {plain(str(report.head))}", ""]
    if not finished:
        lines += ["Not finished: this is what was known when it ended.", ""]
    lines += [f"{plain(accounting(report))}.", ""]
    rows = [(code_in_table(row.title), *map(plain, cells)) for row in report.rows for cells in _lines(row, units)]
    if rows:
        rule = ["---" if number in _LEFT else "---:" for number in range(len(HEADER))]
        lines += [f"| {' | '.join(cells)} |" for cells in (HEADER, rule, *rows)]
        lines += [""]
    lines += [f"- {what}: {plain(said)}" for what, said in remarks(report)]
    return "\n".join(lines).rstrip() + "\n"


def to_json(report: Report, *, finished: bool) -> str:
    """The report for programs; values are in bytes, seconds and counts."""
    plain = {
        "format": FORMAT,
        "finished": finished,
        "exit_status": report.exit_status,
        "base": {"name": report.base.name, "commit": report.base.commit},
        "head": {"name": report.head.name, "commit": report.head.commit},
        "pairs": report.pairs,
        "max_slowdown": report.tolerance,
        "tests": [_plain_row(row) for row in report.rows],
        "not_compared": [{"test": one.title, "reason": one.reason, "broken": one.broke} for one in report.left_out],
    }
    return json.dumps(plain, indent=2, allow_nan=False) + "\n"


def _plain_row(row: Row) -> dict[str, Any]:
    return {
        "file": row.file,
        "test": row.test,
        "name": row.name,
        "outcome": row.outcome.value,
        "metrics": [
            {
                "metric": one.metric,
                "outcome": one.outcome.value,
                "base": one.base,
                "head": one.head,
                "ratio": one.interval.ratio if one.interval is not None else _ratio(one.head, one.base),
                "low": None if one.interval is None else one.interval.low,
                "high": None if one.interval is None else one.interval.high,
                "allowed": one.allowed,
                "reason": one.reason,
            }
            for one in row.figures
        ],
        "notes": list(row.notes),
    }


def _ratio(head: float, base: float) -> float | None:
    return head / base if base else None
