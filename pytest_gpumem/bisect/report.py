"""The result of a bisection, for a terminal and as Markdown: the change, what it added where, what was tried. Pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports import escaping
from pytest_gpumem.reports.comparison_formats import FORMAT, explanations
from pytest_gpumem.reports.layout import Column, Span, Table, laid_out
from pytest_gpumem.reports.values import difference, shown
from pytest_gpumem.units import format_ratio

if TYPE_CHECKING:
    from pytest_gpumem.bisect.candidates import Candidate
    from pytest_gpumem.bisect.driver import Found
    from pytest_gpumem.bisect.red_report import Red
    from pytest_gpumem.reports.comparison import Compared
    from pytest_gpumem.reports.layout import Line, Screen, Style

_SMALL_PART = 0.5


def lines(found: Found, screen: Screen) -> list[Line | str]:
    """Return the table of what was tried, what the change added by module and line, and a last line that names it."""
    units = found.settings.units
    columns = (
        Column("tried", left=True),
        Column(METRICS[found.metric].title),
        Column("verdict", left=True),
        Column("", left=True, weight=1),
    )
    styles: dict[str, Style] = {"bad": "bad", "good": "good", "skipped": "doubtful"}
    rows = tuple(
        (
            Span(one.candidate.name),
            Span(shown(found.metric, one.value, units)),
            Span(one.answer, styles[one.answer]),
            Span(one.why or one.candidate.told),
        )
        for one in found.tried
    )
    told: list[Line | str] = [*laid_out(Table(columns, rows).without_empty((0, 1, 2)), screen), ""]
    for title, blocks in explanations(found.step, units):
        told += [screen.legible(title), *("" if line is None else f"  {screen.legible(line)}" for line in blocks), ""]
    return [
        *told,
        *(screen.legible(f"note: {note}") for note in notes(found)),
        screen.legible(f"gpumem bisect: {result(found)}"),
    ]


def markdown(found: Found, red: Red | None = None) -> str:
    """Return a section in GitHub's Markdown, for an issue or a job's summary; ``red`` is where the test is from."""
    units = found.settings.units
    text = [f"### gpumem bisect: {escaping.plain(culprit(found))}", "", f"{escaping.plain(result(found))}.", ""]
    text += [f"- {escaping.plain(note)}" for note in ([] if red is None else red.notes)]
    text += [""] if red is not None else []
    for title, blocks in explanations(found.step, units):
        text += [escaping.code(title), "", escaping.block("\n".join(line or "" for line in blocks)), ""]
    rows = [
        [
            escaping.code_in_table(one.candidate.name),
            shown(found.metric, one.value, units),
            one.answer,
            escaping.plain(one.why or one.candidate.told),
        ]
        for one in found.tried
    ]
    text += [escaping.table(["tried", METRICS[found.metric].title, "verdict", ""], rows, (0, 2, 3)), ""]
    text += [f"- {escaping.plain(note)}" for note in notes(found)]
    return "\n".join(text).rstrip() + "\n"


def to_json(found: Found, red: Red | None = None) -> str:
    """Return the result as JSON, in the same units as the metric."""
    then, now = _values(found.step, found.metric)
    plain = {
        "format": FORMAT,
        "found": True,
        "culprit": culprit(found),
        "result": result(found),
        "test": None if red is None else red.nodeid,
        "metric": found.metric,
        "good": then,
        "bad": now,
        "after": _in_time(found)[0].name,
    }
    return json.dumps(plain, indent=2) + "\n"


def nothing_as_markdown(why: str) -> str:
    """Return the Markdown of a bisection that found nothing, and ``why``: a sentence, and lines of a log."""
    first, *log = why.strip().splitlines()
    shown_log = ["", escaping.block("\n".join(log).strip("\n"))] if log else []
    return "\n".join(["### gpumem bisect: nothing was found", "", f"{escaping.plain(first)}.", *shown_log]) + "\n"


def nothing_as_json(why: str) -> str:
    """Return the JSON of a bisection that found nothing, and ``why``."""
    return json.dumps({"format": FORMAT, "found": False, "culprit": None, "why": why}, indent=2) + "\n"


def result(found: Found) -> str:
    """Return the change in a sentence: ``"transformers 4.38.0 did it: peak allocated 9.23 MB to 539.50 MB, after 4.37.2"``."""
    title = METRICS[found.metric].title
    values = _values(found.step, found.metric)
    earlier, _ = _in_time(found)
    then, now = values[::-1] if found.bad.backwards else values
    ratio = f" ({format_ratio(now / then - 1)})" if then and now is not None else ""
    before, after = (shown(found.metric, value, found.settings.units) for value in (then, now))
    what = "mended it" if found.bad.backwards else "did it"
    open_ones = "; those between could not be judged" if found.skipped else ""
    return f"{culprit(found)} {what}: {title} {before} to {after}{ratio}, after {earlier.name}{open_ones}"


def culprit(found: Found) -> str:
    """Return the change alone: ``"transformers 4.38.0"``, or that it is one of several that could not be told apart."""
    _, later = _in_time(found)
    if not found.skipped:
        return later.title
    package = f"{later.package} " if later.package else ""
    skipped = found.skipped[::-1] if found.bad.backwards else found.skipped
    return f"one of {package}{', '.join(one.name for one in (*skipped, later))}"


def _in_time(found: Found) -> tuple[Candidate, Candidate]:
    """Return the candidate before the change and the one that made it."""
    return (found.bad, found.good) if found.bad.backwards else (found.good, found.bad)


def notes(found: Found) -> list[str]:
    """Return what is to be known of the result, as clauses."""
    told = []
    then, now = _values(found.ends, found.metric)
    before, after = _values(found.step, found.metric)
    if None not in (then, now, before, after):
        whole, part = (now or 0) - (then or 0), (after or 0) - (before or 0)
        if 0 < part < _SMALL_PART * whole:
            units = found.settings.units
            of_whole = f"{difference(found.metric, part, units)} of {difference(found.metric, whole, units)}"
            told.append(f"it is {of_whole}: for the rest go on with --good {found.bad.name}")
    _, later = _in_time(found)
    if later.parents > 1 and later.after is None and not found.skipped:
        ends = (later.name, f"{later.name}^") if found.bad.backwards else (f"{later.name}^", later.name)
        told.append(f"{later.name} is a merge; to look at what it brought: --all --good {ends[0]} --bad {ends[1]}")
    return told


def _values(report: Compared, metric: str) -> tuple[float | None, float | None]:
    """Return both sides' values of the test of which the metric has grown most."""
    changes = [change for row in report.rows for change in row.changes if change.metric == metric]
    most = max(changes, key=lambda one: (one.new or 0) - (one.old or 0), default=None)
    return (None, None) if most is None else (most.old, most.new)
