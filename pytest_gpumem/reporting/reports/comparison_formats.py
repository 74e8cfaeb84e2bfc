"""Format a comparison as a table for the terminal, as Markdown, or as JSON. Pure."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.git import Revision
from pytest_gpumem.base.units import counted, format_ratio
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.plain import to_plain
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.reporting.reports import escaping
from pytest_gpumem.reporting.reports.causes import (
    cause_notes,
    cause_table,
    causes_in_markdown,
)
from pytest_gpumem.reporting.reports.comparison import NOTHING_COMPARED
from pytest_gpumem.reporting.reports.derived_keys import cause_of, shares_of
from pytest_gpumem.reporting.reports.explanation import explanation_blocks
from pytest_gpumem.reporting.reports.json_report import without_infinity
from pytest_gpumem.reporting.reports.layout import Column, Span, Table, laid_out
from pytest_gpumem.reporting.reports.short_failures import cause_lines, explained_before
from pytest_gpumem.reporting.reports.values import difference, shown, tolerated

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.base.units import UnitSystem
    from pytest_gpumem.reporting.reports.comparison import (
        ComparedChange,
        ComparedRow,
        ComparisonReport,
        OmittedTest,
        StoredKey,
    )
    from pytest_gpumem.reporting.reports.layout import Line, Screen, Style

FORMAT = 1
"""The version number of the JSON format."""
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
    """The table's header and the JSON keys for `gpumem compare` or `gpumem ab`, in the order of the output."""

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


def _form(report: ComparisonReport) -> _Form:
    return _COMPARE if report.pairs is None else _AB


def lines(report: ComparisonReport, units: UnitSystem, screen: Screen) -> list[Line | str]:
    """Return a comparison's lines for a terminal: causes, table, explanations, remarks, and a last line with the counts."""
    form = _form(report)
    text: list[Line | str] = []
    if report.causes.concern_several_tests:
        text += laid_out(cause_table(report.causes, units), screen) if report.causes.causes else []
        text += [*map(screen.legible, cause_notes(report.causes, units)), ""]
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


def explanations(report: ComparisonReport, units: UnitSystem) -> Iterator[tuple[str, list[str | None]]]:
    """Yield each regressed measurement's title, and the lines of its explanation. ``None`` is an empty line."""
    explained_tests = explained_before(report.causes, report.grown)
    for row in report.rows:
        regressed_metrics = [change.metric for change in row.changes if change.outcome is Outcome.REGRESSED]
        if row.verdict is None or not regressed_metrics:
            continue
        test = f"{row.key.file}::{row.key.test}"
        if test in explained_tests:
            yield row.title, list(cause_lines(test, explained_tests[test], units))
            continue
        packages = [f"packages: {', '.join(row.verdict.changed_packages)}"] if row.verdict.changed_packages else []
        blocks = [*([packages] if packages else []), *explanation_blocks(row.verdict, regressed_metrics, units)]
        if blocks:
            yield row.title, [line for block in blocks for line in (*block, None)][:-1]


def remarks(report: ComparisonReport) -> list[str]:
    """Return the lines below the table. Each line is about a single test, or about two devices that were compared."""
    pairs = sorted({(row.old_slug, row.slug) for row in report.rows if row.old_slug is not None})
    return [
        *(f"devices: {old} and {new}; one of the two devices is emulated" for old, new in pairs),
        *(f"stale: {row.title}: {row.reason}" for row in report.rows if row.reason),
        *(
            f"{change.word or 'note'}: {row.title}: {METRICS[change.metric].title}: {change.reason}"
            for row in report.rows
            for change in row.shown_changes
            if change.reason
        ),
        *(f"note: {row.title}: {note}" for row in report.rows for note in row.notes),
        *(
            f"{omitted_test.word}: {omitted_test.title}: {omitted_test.reason}"
            for omitted_test in report.omitted_tests
            if omitted_test.reason is not None
        ),
    ]


def accounting(report: ComparisonReport) -> str:
    """Return the last line, with counts: ``"12 compared, 1 regressed, 9 unchanged, 1 new; old main (abc1234), new a.json"``."""
    form = _form(report)
    counts = Counter(row.outcome.words for row in report.rows if row.outcome in _OUTCOMES)
    counts.update(omitted_test.word for omitted_test in report.omitted_tests)
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


def markdown(report: ComparisonReport, units: UnitSystem, *, finished: bool = True, most: int | None = None) -> str:
    """Return a section in GitHub's Markdown, for a comment or a job's summary.

    If the text is longer than ``most`` characters, explanations are removed, the last first. If this is not enough, half of the
    table's rows are removed, repeatedly, until the text fits.

    Args:
        report: The comparison.
        units: The unit system for bytes.
        finished: False if the command was interrupted.
        most: The maximum length in characters; ``None`` for no limit.
    """
    explained = list(explanations(report, units))
    cells = _cells(report, units)
    shown_rows = len(cells)
    text = _markdown(report, cells, explained, units, finished=finished)
    while most is not None and len(text) > most and (explained or shown_rows):
        if explained:
            explained.pop()
        else:
            shown_rows //= 2
        text = _markdown(report, cells[:shown_rows], explained, units, finished=finished)
        text += "\nThe text is shortened, because the full text would be too long.\n"
    return text if most is None else text[:most]


def _markdown(
    report: ComparisonReport,
    cells_of_rows: list[Cells],
    explained: list[tuple[str, list[str | None]]],
    units: UnitSystem,
    *,
    finished: bool,
) -> str:
    form = _form(report)
    title = f"### gpumem {form.command}: {escaping.plain(str(report.old))} and {escaping.plain(str(report.new))}"
    text = [title, "", *([] if finished else ["Not finished: the figures are incomplete.", ""])]
    text += [f"{escaping.plain(accounting(report))}.", ""]
    if report.causes.concern_several_tests:
        text += [causes_in_markdown(report.causes, units), ""]
    rows = [[escaping.code_in_table(cells[0]), *map(escaping.plain, cells[1:])] for cells in cells_of_rows]
    if rows:
        text += [escaping.table(list(form.header), rows, _LEFT), ""]
    for title, explanation_lines in explained:
        text += [escaping.code(title), "", escaping.block("\n".join(line or "" for line in explanation_lines)), ""]
    # Only the Markdown lists the packages, because the terminal already showed them during their installation.
    packages = [f"packages: {'; '.join(map(str, report.packages))}"] if report.packages else []
    text += [f"- {escaping.plain(remark)}" for remark in (*packages, *remarks(report))]
    return "\n".join(text).rstrip() + "\n"


def _cells(report: ComparisonReport, units: UnitSystem) -> list[Cells]:
    """Return the table's rows: each changed metric, and in `gpumem ab` also the first metric of each test without a change."""
    shown_changes = [
        (row, row.shown_changes or (row.changes[:1] if report.pairs is not None else ())) for row in report.rows
    ]
    rows = [(row.title, *_changed(change, report, units)) for row, changes in shown_changes for change in changes]
    # A test that `gpumem ab` could not compare has a remark instead of a row.
    return rows + [
        _on_one_side(omitted_test, units)
        for omitted_test in report.omitted_tests
        if omitted_test.word not in ("broken", "not compared")
    ]


def _changed(change: ComparedChange, report: ComparisonReport, units: UnitSystem) -> Cells:
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


def _on_one_side(omitted_test: OmittedTest, units: UnitSystem) -> Cells:
    if omitted_test.stored_key is None:
        return (omitted_test.title, "", "", "", "", "", omitted_test.word)
    peak = shown("peak_allocated", omitted_test.peak, units)
    old, new = ("", peak) if omitted_test.word == "new" else (peak, "")
    return (omitted_test.title, METRICS["peak_allocated"].title, old, new, "", "", omitted_test.word)


def to_json(report: ComparisonReport, *, finished: bool = True) -> str:
    """Return the comparison as JSON, with values in bytes, counts, seconds and items per second.

    Infinite numbers and NaN become the texts ``"Infinity"``, ``"-Infinity"`` and ``"NaN"``, because JSON has no such numbers.
    """
    form = _form(report)
    old, new = form.sides
    sides = {"exit_status": report.exit_status, old: _plain_side(report.old), new: _plain_side(report.new)}
    tests = [_plain_row(row, form) for row in report.rows]
    plain: dict[str, Any]
    if form is _AB:
        not_compared = [
            {"test": omitted_test.title, "reason": omitted_test.reason, "broken": omitted_test.word == "broken"}
            for omitted_test in report.omitted_tests
        ]
        in_turns = {"pairs": report.pairs, "max_slowdown": report.tolerance}
        packages = [
            {
                "name": package.name,
                "base": package.old,
                "head": package.new,
                "requested": package.requested,
                "url": package.url,
            }
            for package in report.packages
        ]
        plain = {
            "finished": finished,
            "accounting": f"gpumem ab: {accounting(report)}",
            "passed": finished and report.exit_status == 0,
            **sides,
            **in_turns,
            "packages": packages,
            "tests": tests,
            "not_compared": not_compared,
        }
    else:
        one_sided = [
            (omitted_test, {**_plain_key(omitted_test.stored_key), "peak_allocated": omitted_test.peak})
            for omitted_test in report.omitted_tests
            if omitted_test.stored_key
        ]
        plain = {
            **sides,
            "tests": tests,
            "added": [stored_key for omitted_test, stored_key in one_sided if omitted_test.word == "new"],
            "gone": [
                {**stored_key, "reason": omitted_test.reason, "failed": omitted_test.word == "failed"}
                for omitted_test, stored_key in one_sided
                if omitted_test.word != "new"
            ],
            "failed": [
                {"file": failure.file, "test": failure.test, "reason": failure.why} for failure in report.failed
            ],
        }
    plain["causes"] = [to_plain(cause_of(cause)) for cause in report.causes.causes]
    plain["not_explained"] = list(map(to_plain, shares_of(report.causes.not_explained)))
    return json.dumps(without_infinity({"format": FORMAT, **plain}), indent=2, allow_nan=False) + "\n"


def failure_as_json(why: str) -> str:
    """Return the JSON for a comparison in which nothing could be compared. ``why`` is the reason."""
    plain = {"finished": False, "accounting": "", "passed": False, "exit_status": NOTHING_COMPARED}
    return json.dumps({"format": FORMAT, **plain, "why": why, "tests": [], "not_compared": []}, indent=2) + "\n"


def failure_as_markdown(why: str) -> str:
    """Return the Markdown for a comparison in which nothing could be compared.

    ``why`` is the reason: a sentence in the first line, and lines from a log after it.
    """
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
