"""A comparison as a table for a terminal, as Markdown, and as JSON. Pure."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.gate.causes import causes_of
from pytest_gpumem.gate.verdict import Outcome, TestVerdict
from pytest_gpumem.git import Revision
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports import escaping
from pytest_gpumem.reports.causes import (
    CausesOf,
    cause_notes,
    cause_table,
    causes_in_markdown,
    plain_causes,
)
from pytest_gpumem.reports.comparison import NOTHING_COMPARED
from pytest_gpumem.reports.explanation import explanation_blocks
from pytest_gpumem.reports.json_report import without_infinity
from pytest_gpumem.reports.layout import Column, Span, Table, laid_out
from pytest_gpumem.reports.told_causes import cause_lines, told_before
from pytest_gpumem.reports.values import difference, shown, tolerated
from pytest_gpumem.units import counted, format_ratio
from pytest_gpumem.values.plain import to_plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.gate.verdict import Verdict
    from pytest_gpumem.reports.comparison import Compared, ComparedChange, ComparedRow, LeftOut, StoredKey
    from pytest_gpumem.reports.layout import Line, Screen, Style
    from pytest_gpumem.units import UnitSystem

FORMAT = 1
"""The number of the JSON's format."""
_LEAST_NAME = 24
_LEFT = (0, 1, 6)
_STYLES: dict[str, Style] = {
    **dict.fromkeys(("regressed", "slower", "failed"), "bad"),
    **dict.fromkeys(("improved", "faster"), "good"),
    **dict.fromkeys(("uncertain", "stale"), "doubtful"),
}
_OUTCOMES = (Outcome.REGRESSED, Outcome.IMPROVED, Outcome.UNCERTAIN, Outcome.STALE)
_COUNTED = (
    *("compared", *(outcome.words for outcome in _OUTCOMES), "unchanged"),
    *("new", "failed", "unmeasured", "gone", "broken", "not compared"),
)
_SPEEDS = ("slower", "faster", "uncertain", "not slower")

Cells = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Form:
    """The header of a command's table, and the keys of its JSON in their order."""

    command: str
    header: Cells
    of_test: tuple[str, ...]
    of_metric: tuple[str, ...]

    @property
    def sides(self) -> Cells:
        return self.header[2:4]


_COMPARE = _Form(
    "compare",
    ("test", "metric", "old", "new", "change", "allowed", ""),
    ("file", "test", "name", "slug", "old_slug", "outcome", "reason", "metrics"),
    ("metric", "outcome", "old", "new", "allowed", "reason"),
)
_AB = _Form(
    "ab",
    ("test", "metric", "base", "head", "change", "interval", "verdict"),
    ("file", "test", "name", "outcome", "metrics", "notes", "growth"),
    ("metric", "outcome", "base", "head", "ratio", "low", "high", "allowed", "reason"),
)


def _form(report: Compared) -> _Form:
    return _COMPARE if report.pairs is None else _AB


def lines(report: Compared, units: UnitSystem, screen: Screen) -> list[Line | str]:
    """Return causes, the table, remarks on single tests, and a last line that counts, for a terminal."""
    form = _form(report)
    text: list[Line | str] = []
    found = causes_between(report)
    if found.tell:
        text += laid_out(cause_table(found, units), screen) if found.causes.causes else []
        text += [*map(screen.legible, cause_notes(found, units)), ""]
    rows = [tuple(Span(cell, _STYLES.get(cells[-1])) for cell in cells) for cells in _cells(report, units)]
    name, metric, *figures, last, verdict = form.header
    columns = (
        *(Column(name, left=True, least=_LEAST_NAME), Column(metric, left=True)),
        *map(Column, figures),
        *(Column(last, weight=0), Column(verdict, left=True)),
    )
    text += [*laid_out(Table(columns, tuple(rows)), screen), ""] if rows else []
    for title, blocks in explanations(report, units):
        text += [screen.legible(title), *("" if line is None else f"  {screen.legible(line)}" for line in blocks), ""]
    return [*text, *remarks(report), f"gpumem {form.command}: {accounting(report)}"]


def explanations(report: Compared, units: UnitSystem) -> Iterator[tuple[str, list[str | None]]]:
    """Yield each test that has regressed, and lines on why; ``None`` is an empty one."""
    found = causes_between(report)
    before = told_before(found.causes, _grown(report)) if found.tell else {}
    for row in report.rows:
        worse = [one.metric for one in row.changes if one.outcome is Outcome.REGRESSED]
        if row.verdict is None or not worse:
            continue
        test = f"{row.key.file}::{row.key.test}"
        if test in before:
            yield row.title, list(cause_lines(test, before[test], units))
            continue
        packages = [f"packages: {', '.join(row.verdict.changed_packages)}"] if row.verdict.changed_packages else []
        blocks = [*([packages] if packages else []), *explanation_blocks(row.verdict, worse, units)]
        if blocks:
            yield row.title, [line for block in blocks for line in (*block, None)][:-1]


def causes_between(report: Compared) -> CausesOf:
    """Return the causes of what grew from one side to the other."""
    tests = _grown(report)
    return CausesOf(causes_of(tests), len({(row.key.file, row.key.test) for row in report.rows}))


def _grown(report: Compared) -> list[TestVerdict]:
    """Return the tests with the measurements of which anything is worse, as verdicts of the gate."""
    found: dict[tuple[str, str], list[Verdict]] = {}
    for row in report.rows:
        if row.verdict is not None and row.outcome is Outcome.REGRESSED:
            found.setdefault((row.key.file, row.key.test), []).append(row.verdict)
    return [TestVerdict(file, test, tuple(verdicts)) for (file, test), verdicts in found.items()]


def remarks(report: Compared) -> list[str]:
    """Return sentences on single tests."""
    pairs = sorted({(row.old_slug, row.slug) for row in report.rows if row.old_slug is not None})
    return [
        *(f"devices: {old} and {new}, of which one is emulated" for old, new in pairs),
        *(f"stale: {row.title}: {row.reason}" for row in report.rows if row.reason),
        *(
            f"{change.word or 'note'}: {row.title}: {METRICS[change.metric].title}: {change.reason}"
            for row in report.rows
            for change in row.shown_changes
            if change.reason
        ),
        *(f"note: {row.title}: {note}" for row in report.rows for note in row.notes),
        *(f"{one.word}: {one.title}: {one.reason}" for one in report.left_out if one.reason is not None),
    ]


def accounting(report: Compared) -> str:
    """Return the line that counts: ``"12 compared, 1 regressed, 9 unchanged, 1 new; old main (abc1234), new a.json"``."""
    form = _form(report)
    counts = Counter(row.outcome.words for row in report.rows if row.outcome in _OUTCOMES)
    counts.update(one.word for one in report.left_out)
    counts["compared"] = sum(row.compared for row in report.rows)
    if form is _COMPARE:
        counts["unchanged"] = sum(row.compared and not row.shown_changes for row in report.rows)
    outcomes = ", ".join(f"{counts[word]} {word}" for word in _COUNTED if counts[word] or word == "compared")
    sides = f"{form.sides[0]} {report.old}, {form.sides[1]} {report.new}"
    if form is _COMPARE:
        return f"{outcomes}; {sides}"
    speeds = Counter(speed.word for speed in report.speeds.values())
    words = ", ".join(f"{speeds[word]} {word}" for word in _SPEEDS if speeds[word])
    times = f" step times: {words};" if words else ""
    pairs = counted(report.pairs or 0, "pair of runs", "pairs of runs")
    return f"{outcomes};{times} {pairs}, {sides}, slowdown tolerated {format_ratio(report.tolerance).lstrip('+')}"


def markdown(report: Compared, units: UnitSystem, *, finished: bool = True, most: int | None = None) -> str:
    """Return a section in GitHub's Markdown, for a comment or a job's summary.

    Of more than ``most`` characters the explanations are left out, the last ones first, and then rows of the table.
    """
    told = list(explanations(report, units))
    cells = _cells(report, units)
    shown_rows = len(cells)
    text = _markdown(report, cells, told, units, finished=finished)
    while most is not None and len(text) > most and (told or shown_rows):
        if told:
            told.pop()
        else:
            shown_rows //= 2
        text = _markdown(report, cells[:shown_rows], told, units, finished=finished)
        text += "\nThere is not room for all of it here.\n"
    return text if most is None else text[:most]


def _markdown(
    report: Compared,
    cells_of_rows: list[Cells],
    told: list[tuple[str, list[str | None]]],
    units: UnitSystem,
    *,
    finished: bool,
) -> str:
    form = _form(report)
    title = f"### gpumem {form.command}: {escaping.plain(str(report.old))} and {escaping.plain(str(report.new))}"
    text = [title, "", *([] if finished else ["Not finished: this is what was known when it ended.", ""])]
    text += [f"{escaping.plain(accounting(report))}.", ""]
    causes = causes_between(report)
    if causes.tell:
        text += [causes_in_markdown(causes, units), ""]
    rows = [[escaping.code_in_table(cells[0]), *map(escaping.plain, cells[1:])] for cells in cells_of_rows]
    if rows:
        text += [escaping.table(list(form.header), rows, _LEFT), ""]
    for title, found in told:
        text += [escaping.code(title), "", escaping.block("\n".join(line or "" for line in found)), ""]
    # In a terminal it was said when they were installed.
    packages = [f"packages: {'; '.join(map(str, report.packages))}"] if report.packages else []
    text += [f"- {escaping.plain(remark)}" for remark in (*packages, *remarks(report))]
    return "\n".join(text).rstrip() + "\n"


def _cells(report: Compared, units: UnitSystem) -> list[Cells]:
    """Return the rows: what changed and, of runs in turns, also a first metric of each test that did not change."""
    shown_changes = [
        (row, row.shown_changes or (row.changes[:1] if report.pairs is not None else ())) for row in report.rows
    ]
    rows = [(row.title, *_changed(change, report, units)) for row, changes in shown_changes for change in changes]
    # Of what could not be compared in turns there is a remark instead.
    return rows + [_on_one_side(one, units) for one in report.left_out if one.word not in ("broken", "not compared")]


def _changed(change: ComparedChange, report: Compared, units: UnitSystem) -> Cells:
    metric, old, new, ratio = change.metric, change.old, change.new, change.ratio
    moved = ""
    if old is not None and new is not None:
        moved = difference(metric, new, units) if ratio is None else format_ratio(ratio - 1)
    last = ""
    if report.pairs is None:
        last = tolerated(metric, change.allowed, old, units)
    elif change.interval is not None:
        last = f"{format_ratio(change.interval.low - 1)} to {format_ratio(change.interval.high - 1)}"
    return METRICS[metric].title, shown(metric, old, units), shown(metric, new, units), moved, last, change.word


def _on_one_side(one: LeftOut, units: UnitSystem) -> Cells:
    if one.stored_key is None:
        return (one.title, "", "", "", "", "", one.word)
    peak = shown("peak_allocated", one.peak, units)
    old, new = ("", peak) if one.word == "new" else (peak, "")
    return (one.title, METRICS["peak_allocated"].title, old, new, "", "", one.word)


def to_json(report: Compared, *, finished: bool = True) -> str:
    """Return the comparison as JSON; values are in bytes, counts, seconds and items a second.

    A number that JSON does not have is the text ``"Infinity"``, ``"-Infinity"`` or ``"NaN"``, as in a report.
    """
    form = _form(report)
    old, new = form.sides
    known = {"exit_status": report.exit_status, old: _plain_side(report.old), new: _plain_side(report.new)}
    tests = [_plain_row(row, form) for row in report.rows]
    plain: dict[str, Any]
    if form is _AB:
        not_compared = [
            {"test": one.title, "reason": one.reason, "broken": one.word == "broken"} for one in report.left_out
        ]
        in_turns = {"pairs": report.pairs, "max_slowdown": report.tolerance}
        packages = [
            {"name": one.name, "base": one.old, "head": one.new, "requested": one.requested, "url": one.url}
            for one in report.packages
        ]
        plain = {
            "finished": finished,
            "accounting": f"gpumem ab: {accounting(report)}",
            "passed": finished and report.exit_status == 0,
            **known,
            **in_turns,
            "packages": packages,
            "tests": tests,
            "not_compared": not_compared,
        }
    else:
        measured = [
            (one, {**_plain_key(one.stored_key), "peak_allocated": one.peak})
            for one in report.left_out
            if one.stored_key
        ]
        plain = {
            **known,
            "tests": tests,
            "added": [stored_key for one, stored_key in measured if one.word == "new"],
            "gone": [
                {**stored_key, "reason": one.reason, "failed": one.word == "failed"}
                for one, stored_key in measured
                if one.word != "new"
            ],
            "failed": [{"file": one.file, "test": one.test, "reason": one.why} for one in report.failed],
        }
    plain |= plain_causes(causes_between(report))
    return json.dumps(without_infinity({"format": FORMAT, **plain}), indent=2, allow_nan=False) + "\n"


def nothing_as_json(why: str) -> str:
    """Return the JSON of a comparison that came to nothing, and ``why``."""
    plain = {"finished": False, "accounting": "", "passed": False, "exit_status": NOTHING_COMPARED}
    return json.dumps({"format": FORMAT, **plain, "why": why, "tests": [], "not_compared": []}, indent=2) + "\n"


def nothing_as_markdown(why: str) -> str:
    """Return the Markdown of a comparison that came to nothing, and ``why``: a sentence, and lines of a log."""
    first, *log = why.strip().splitlines()
    shown_log = ["", escaping.block("\n".join(log).strip("\n"))] if log else []
    return "\n".join(["### gpumem ab: nothing was compared", "", f"{escaping.plain(first)}.", *shown_log]) + "\n"


def _plain_side(side: str | Revision) -> str | dict[str, str]:
    return {"name": side.name, "commit": side.commit} if isinstance(side, Revision) else side


def _plain_row(row: ComparedRow, form: _Form) -> dict[str, Any]:
    plain = {
        **_plain_key((row.key, row.slug)),
        **({} if row.old_slug is None else {"old_slug": row.old_slug}),
        "outcome": row.outcome.value,
        "reason": row.reason,
        "notes": row.notes,
        "growth": None if row.verdict is None else to_plain(row.verdict.difference),
        "metrics": [_plain_change(change, form) for change in row.changes],
    }
    return {key: plain[key] for key in form.of_test if key in plain}


def _plain_change(change: ComparedChange, form: _Form) -> dict[str, Any]:
    interval = change.interval
    plain = {
        "metric": change.metric,
        "outcome": change.outcome.value,
        form.sides[0]: change.old,
        form.sides[1]: change.new,
        "ratio": change.ratio,
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
        "allowed": change.allowed,
        "reason": change.reason,
    }
    return {key: plain[key] for key in form.of_metric}


def _plain_key(stored_key: StoredKey) -> dict[str, Any]:
    key, slug = stored_key
    return {"file": key.file, "test": key.test, "name": key.name, "slug": slug}
