"""Format a bisection's result (the change, the added memory and the trials) for a terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import format_ratio
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.reporting.reports import escaping
from pytest_gpumem.reporting.reports.comparison_formats import FORMAT, explanations
from pytest_gpumem.reporting.reports.layout import Column, Span, Table, laid_out
from pytest_gpumem.reporting.reports.values import difference, shown

if TYPE_CHECKING:
    from pytest_gpumem.reporting.reports.comparison import ComparisonReport
    from pytest_gpumem.reporting.reports.layout import Line, Screen, Style
    from pytest_gpumem.tools.bisect.candidates import Candidate
    from pytest_gpumem.tools.bisect.driver import SearchResult
    from pytest_gpumem.tools.bisect.red_report import RegressedTest

_SMALL_PART = 0.5
"""If the found change explains less than this share of the growth, a note says how to find the other changes."""


def lines(search: SearchResult, screen: Screen) -> list[Line | str]:
    """Return the table of trials, the added memory by module and line, and a last line that names the change."""
    units = search.settings.units
    columns = (
        Column("tried", left=True),
        Column(METRICS[search.metric].title),
        Column("verdict", left=True),
        Column("", left=True, weight=1),
    )
    styles: dict[str, Style] = {"bad": "bad", "good": "good", "skipped": "doubtful"}
    rows = tuple(
        (
            Span(trial.candidate.name),
            Span(shown(search.metric, trial.value, units)),
            Span(trial.answer, styles[trial.answer]),
            Span(trial.why or trial.candidate.description),
        )
        for trial in search.trials
    )
    above: list[Line | str] = [*laid_out(Table(columns, rows).without_empty((0, 1, 2)), screen), ""]
    for title, blocks in explanations(search.step, units):
        above += [screen.legible(title), *("" if line is None else f"  {screen.legible(line)}" for line in blocks), ""]
    return [
        *above,
        *(screen.legible(f"note: {note}") for note in notes(search)),
        screen.legible(f"gpumem bisect: {result(search)}"),
    ]


def markdown(search: SearchResult, red: RegressedTest | None = None) -> str:
    """Return a section in GitHub's Markdown, for an issue or a job's summary. ``red`` is the test found by ``--from``."""
    units = search.settings.units
    text = [f"### gpumem bisect: {escaping.plain(culprit(search))}", "", f"{escaping.plain(result(search))}.", ""]
    text += [f"- {escaping.plain(note)}" for note in ([] if red is None else red.notes)]
    text += [""] if red is not None else []
    for title, blocks in explanations(search.step, units):
        text += [escaping.code(title), "", escaping.block("\n".join(line or "" for line in blocks)), ""]
    rows = [
        [
            escaping.code_in_table(trial.candidate.name),
            shown(search.metric, trial.value, units),
            trial.answer,
            escaping.plain(trial.why or trial.candidate.description),
        ]
        for trial in search.trials
    ]
    text += [escaping.table(["tried", METRICS[search.metric].title, "verdict", ""], rows, (0, 2, 3)), ""]
    text += [f"- {escaping.plain(note)}" for note in notes(search)]
    return "\n".join(text).rstrip() + "\n"


def to_json(search: SearchResult, red: RegressedTest | None = None) -> str:
    """Return the result as JSON. Values are in the metric's unit, for example bytes."""
    good, bad = _values(search.step, search.metric)
    plain = {
        "format": FORMAT,
        "found": True,
        "culprit": culprit(search),
        "result": result(search),
        "test": None if red is None else red.nodeid,
        "metric": search.metric,
        "good": good,
        "bad": bad,
        "after": _in_time(search)[0].name,
    }
    return json.dumps(plain, indent=2) + "\n"


def failure_as_markdown(why: str) -> str:
    """Return the Markdown for a failed bisection. ``why`` is a sentence, which may be followed by lines from a log."""
    first, *log = why.strip().splitlines()
    shown_log = ["", escaping.block("\n".join(log).strip("\n"))] if log else []
    return "\n".join(["### gpumem bisect: nothing was found", "", f"{escaping.plain(first)}.", *shown_log]) + "\n"


def failure_as_json(why: str) -> str:
    """Return the JSON for a failed bisection, with the reason ``why``."""
    return json.dumps({"format": FORMAT, "found": False, "culprit": None, "why": why}, indent=2) + "\n"


def result(search: SearchResult) -> str:
    """Return the change in a sentence: ``"transformers 4.38.0 did it: peak allocated 9.23 MB to 539.50 MB, after 4.37.2"``."""
    title = METRICS[search.metric].title
    values = _values(search.step, search.metric)
    earlier, _ = _in_time(search)
    old, new = values[::-1] if search.bad.backwards else values
    ratio = f" ({format_ratio(new / old - 1)})" if old and new is not None else ""
    before, after = (shown(search.metric, value, search.settings.units) for value in (old, new))
    effect = "fixed it" if search.bad.backwards else "did it"
    skipped = "; the candidates between could not be judged" if search.skipped else ""
    return f"{culprit(search)} {effect}: {title} {before} to {after}{ratio}, after {earlier.name}{skipped}"


def culprit(search: SearchResult) -> str:
    """Return the change's name, for example ``"transformers 4.38.0"``.

    If candidates were skipped right before the first bad candidate, the text also names these: ``"one of 9d8e7f6, 5a6b7c8"``.
    """
    _, later = _in_time(search)
    if not search.skipped:
        return later.title
    package = f"{later.package} " if later.package else ""
    skipped = search.skipped[::-1] if search.bad.backwards else search.skipped
    return f"one of {package}{', '.join(candidate.name for candidate in (*skipped, later))}"


def _in_time(search: SearchResult) -> tuple[Candidate, Candidate]:
    """Return the candidate before the change, and the candidate with the change, in historical order."""
    return (search.bad, search.good) if search.bad.backwards else (search.good, search.bad)


def notes(search: SearchResult) -> list[str]:
    """Return notes on the result as clauses.

    Example: ``"this is +500.00 kB of +2.00 MB; to find the rest, continue with --good 5a6b7c8"``.
    """
    clauses = []
    first, last = _values(search.ends, search.metric)
    before, after = _values(search.step, search.metric)
    if None not in (first, last, before, after):
        growth, part = (last or 0) - (first or 0), (after or 0) - (before or 0)
        if 0 < part < _SMALL_PART * growth:
            units = search.settings.units
            share = f"{difference(search.metric, part, units)} of {difference(search.metric, growth, units)}"
            clauses.append(f"this is {share}; to find the rest, continue with --good {search.bad.name}")
    _, later = _in_time(search)
    if later.parents > 1 and later.parent_commits is None and not search.skipped:
        ends = (later.name, f"{later.name}^") if search.bad.backwards else (f"{later.name}^", later.name)
        clauses.append(f"{later.name} is a merge; to search its branch: --all --good {ends[0]} --bad {ends[1]}")
    return clauses


def _values(report: ComparisonReport, metric: str) -> tuple[float | None, float | None]:
    """Return the old and new value from the test whose metric has grown most."""
    changes = [change for row in report.rows for change in row.changes if change.metric == metric]
    largest = max(changes, key=lambda change: (change.new or 0) - (change.old or 0), default=None)
    return (None, None) if largest is None else (largest.old, largest.new)
