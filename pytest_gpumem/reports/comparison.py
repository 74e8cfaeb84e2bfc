"""What changed between two sides as a table for a terminal, as Markdown, and as JSON. Pure."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from pytest_gpumem.gate.verdict import Outcome
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports import escaping
from pytest_gpumem.reports.json_report import without_infinity
from pytest_gpumem.reports.layout import Column, Span, Table
from pytest_gpumem.reports.values import difference, shown
from pytest_gpumem.units import format_ratio

if TYPE_CHECKING:
    from pytest_gpumem.reports.comparing import Change, Compared, OneSided, Row
    from pytest_gpumem.reports.layout import Style
    from pytest_gpumem.units import UnitSystem

FORMAT = 1
"""The number of the JSON's format."""
_HEADER = ("test", "metric", "old", "new", "change", "allowed", "")
_LEAST_NAME = 24
_LEFT = (0, 1, 6)
_FAILED = "failed"
_STYLES: dict[str, Style] = {
    Outcome.REGRESSED.words: "bad",
    _FAILED: "bad",
    Outcome.IMPROVED.words: "good",
    Outcome.UNCERTAIN.words: "doubtful",
    Outcome.STALE.words: "doubtful",
}

Cells = tuple[str, ...]


def table(report: Compared, units: UnitSystem) -> Table | None:
    """A line for each metric that changed, each measurement that only one side has, and each test that failed."""
    lines = [tuple(Span(cell, _STYLES.get(cells[-1])) for cell in cells) for cells in _cells(report, units)]
    columns = (
        Column(_HEADER[0], left=True, least=_LEAST_NAME),
        *(Column(title, left=number in _LEFT) for number, title in enumerate(_HEADER) if 0 < number < 5),
        Column(_HEADER[5], weight=0),
        Column(_HEADER[6], left=True),
    )
    return Table(columns, tuple(lines)) if lines else None


def remarks(report: Compared) -> list[str]:
    """What is to be said about single tests, each as a sentence."""
    several = _has_several_devices(report)
    pairs = sorted({(row.old_slug, row.slug) for row in report.rows if row.old_slug is not None})
    said = [f"devices: {old} and {new}, of which one is emulated" for old, new in pairs]
    said += [f"stale: {_title(row, several=several)}: {row.reason}" for row in report.rows if row.reason]
    said += [
        f"{change.outcome.words}: {_title(row, several=several)}: {METRICS[change.metric].title}: {change.reason}"
        for row in report.rows
        for change in row.changes
        if change.reason and change.is_news
    ]
    said += [
        f"{_word(one)}: {_title(one, several=several)}: {one.missing.why}"
        for one in report.gone
        if one.missing is not None
    ]
    return said + [f"{_FAILED}: {one.file}::{one.test}: {one.why}" for one in report.untold]


def accounting(report: Compared) -> str:
    """The line that counts: ``"12 compared, 1 regressed, 9 unchanged, 1 new; old main (abc1234), new a.json"``."""
    counts = Counter(row.outcome for row in report.rows)
    unchanged = sum(row.compared and not any(change.is_news for change in row.changes) for row in report.rows)
    words = Counter([*map(_word, report.gone), *(_FAILED for _ in report.untold)])
    counted = [
        (sum(row.compared for row in report.rows), "compared"),
        *((counts[one], one.words) for one in (Outcome.REGRESSED, Outcome.IMPROVED, Outcome.UNCERTAIN, Outcome.STALE)),
        (unchanged, "unchanged"),
        (len(report.added), "new"),
        *((words[word], word) for word in (_FAILED, "unmeasured", "gone")),
    ]
    parts = [f"{count} {word}" for count, word in counted if count or word == "compared"]
    return f"{', '.join(parts)}; old {report.old}, new {report.new}"


def markdown(report: Compared, units: UnitSystem) -> str:
    """A section in GitHub's Markdown, for a comment or a job's summary."""
    lines = [
        f"### gpumem compare: {escaping.plain(report.old)} and {escaping.plain(report.new)}",
        "",
        f"{escaping.plain(accounting(report))}.",
        "",
    ]
    rows = [[escaping.code_in_table(cells[0]), *map(escaping.plain, cells[1:])] for cells in _cells(report, units)]
    if rows:
        lines += [escaping.table(list(_HEADER), rows, _LEFT), ""]
    lines += [f"- {escaping.plain(said)}" for said in remarks(report)]
    return "\n".join(lines).rstrip() + "\n"


def to_json(report: Compared, exit_status: int) -> str:
    """The comparison for programs; values are in bytes, counts, seconds and items a second.

    A number that JSON does not have is the text ``"Infinity"``, ``"-Infinity"`` or ``"NaN"``, as in a report.
    """
    plain = {
        "format": FORMAT,
        "exit_status": exit_status,
        "old": report.old,
        "new": report.new,
        "tests": [
            {
                **_plain_place(row),
                **({} if row.old_slug is None else {"old_slug": row.old_slug}),
                "outcome": row.outcome.value,
                "reason": row.reason,
                "metrics": [
                    {
                        "metric": one.metric,
                        "outcome": one.outcome.value,
                        "old": one.old,
                        "new": one.new,
                        "allowed": one.allowed,
                        "reason": one.reason,
                    }
                    for one in row.changes
                ],
            }
            for row in report.rows
        ],
        "added": [{**_plain_place(one), "peak_allocated": one.peak} for one in report.added],
        "gone": [
            {
                **_plain_place(one),
                "peak_allocated": one.peak,
                "reason": None if one.missing is None else one.missing.why,
                "failed": one.missing is not None and one.missing.failed,
            }
            for one in report.gone
        ],
        "failed": [{"file": one.file, "test": one.test, "reason": one.why} for one in report.failed],
    }
    return json.dumps(without_infinity(plain), indent=2, allow_nan=False) + "\n"


def _plain_place(one: Row | OneSided) -> dict[str, Any]:
    return {"file": one.key.file, "test": one.key.test, "name": one.key.name, "slug": one.slug}


def _cells(report: Compared, units: UnitSystem) -> list[Cells]:
    several = _has_several_devices(report)
    lines = [
        (_title(row, several=several), *_changed(change, units))
        for row in report.rows
        for change in row.changes
        if change.is_news
    ]
    peak = METRICS["peak_allocated"].title
    for one in report.added:
        lines.append((_title(one, several=several), peak, "", shown("peak_allocated", one.peak, units), "", "", "new"))
    for one in report.gone:
        value = shown("peak_allocated", one.peak, units)
        lines.append((_title(one, several=several), peak, value, "", "", "", _word(one)))
    lines += [(f"{one.file}::{one.test}", "", "", "", "", "", _FAILED) for one in report.untold]
    return lines


def _changed(change: Change, units: UnitSystem) -> Cells:
    old, new = change.old, change.new
    moved = allowed = ""
    if old is not None and new is not None:
        moved = format_ratio(new / old - 1) if old else difference(change.metric, new, units)
    if change.allowed is not None and old is not None:
        allowed = format_ratio(change.allowed / old) if old else difference(change.metric, change.allowed, units)
    word = "" if change.outcome is Outcome.RECORDED else change.outcome.words
    return (
        METRICS[change.metric].title,
        shown(change.metric, old, units),
        shown(change.metric, new, units),
        moved,
        allowed,
        word,
    )


def _word(gone: OneSided) -> str:
    if gone.missing is None:
        return "gone"
    return _FAILED if gone.missing.failed else "unmeasured"


def _has_several_devices(report: Compared) -> bool:
    slugs = {row.slug for row in report.rows} | {one.slug for one in (*report.added, *report.gone)}
    return len(slugs) > 1


def _title(one: Row | OneSided, *, several: bool) -> str:
    return f"{one.key} on {one.slug}" if several else str(one.key)
