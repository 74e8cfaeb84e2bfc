"""A session's report in GitHub's Markdown: for a file, a job's summary and a comment in a pull request. Pure.

What stands first is what a reader must know. Where there is not room for all of it, whole parts are left out, and said to be.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from pytest_gpumem.baselines.selecting import unused_line
from pytest_gpumem.reports import markdown_tables as tables
from pytest_gpumem.reports.escaping import block, code, details, html_code, plain
from pytest_gpumem.reports.matrix import matrices
from pytest_gpumem.reports.summary import reasons
from pytest_gpumem.reports.view import origin_line, rows_of, state_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.reports.session_report import SessionReport
    from pytest_gpumem.reports.view import Row
    from pytest_gpumem.units import UnitSystem

MOST_OF_A_SUMMARY = 2**20
"""Bytes of a step's summary. Of more GitHub shows nothing, and reports an error:
https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands#step-isolation-and-limits."""
MOST_OF_A_COMMENT = 65_536
"""Characters of a comment; with more it is refused: ``Body is too long (maximum is 65536 characters)``."""
FEWEST = 300
"""Bytes in which a verdict always has room."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the report that can be left out whole: those of the highest ``rank`` first, of one rank the last first."""

    rank: int
    what: str
    text: str


_HEAD, _PROBLEM, _FAILED, _NOT_RUN, _DETAILS, _CHANGED, _NOT_COMPARED, _SAID, _ENVIRONMENT, _MATRIX, _ALL = range(11)
_MANY = {
    _PROBLEM: "problems",
    _FAILED: "tests that failed",
    _NOT_RUN: "files with tests that did not finish",
    _DETAILS: "tests' details",
    _MATRIX: "tables of configs",
}
_VERDICTS = {"passed": "✅ gpumem passed", "failed": "❌ gpumem failed", "idle": "⚪ gpumem gated nothing"}


def markdown(report: SessionReport, *, most: int | None = None) -> str:
    """The report in at most ``most`` bytes of UTF-8, or whole.

    `MOST_OF_A_SUMMARY` and `MOST_OF_A_COMMENT` are GitHub's limits. What is left out is said at the end; the verdict never
    is. Raises ``ValueError`` where ``most`` is less than `FEWEST`.
    """
    if most is not None and most < FEWEST:
        raise ValueError(f"most is {most}, and a verdict needs {FEWEST} bytes")
    parts = list(_parts(report))
    text = _joined(parts, [])
    if most is None or _size(text) <= most:
        return text
    kept = dict(enumerate(parts))
    left_out: list[_Part] = []
    # Sizes are added up, so that a report of many tests is not joined over and over.
    size = sum(_size(part.text) + 2 for part in parts)
    for number in sorted(kept, key=lambda number: (-parts[number].rank, -number)):
        if parts[number].rank == _HEAD or size + _size(_omitted(left_out)) <= most:
            break
        left_out.append(kept.pop(number))
        size -= _size(left_out[-1].text) + 2
    text = _joined(list(kept.values()), left_out)
    # An accounting line of kilobytes: reasons that tests gave.
    return text if _size(text) <= most else f"### {_VERDICTS[state_of(report)]}\n\n{_omitted([])}\n"


def _parts(report: SessionReport) -> Iterator[_Part]:
    units = report.terms.units
    rows = rows_of(report)[: len(report.results)]
    line = report.accounting.removeprefix("gpumem: ")
    yield _Part(_HEAD, "", f"### {_VERDICTS[state_of(report)]}: {plain(line)}")
    for problem in report.problems:
        yield _Part(_PROBLEM, "the problems", f"- **{plain(problem)}**")
    for file, tests in groupby(report.not_run, key=lambda test: test[0]):
        ids = ", ".join(code(f"{file}::{test}") for _, test in tests)
        yield _Part(_NOT_RUN, "the tests that did not finish", f"- Did not finish: {ids}")
    for row in [row for row in rows if row.status.fails]:
        yield _Part(_FAILED, "a test that failed", f"❌ {code(row.title)}  \n{plain(row.headline)}")
        figures = _figures(row, units)
        if figures:
            yield _Part(_DETAILS, "a test's details", details("What was measured", figures))
    others = [row for row in rows if not row.status.fails]
    changed = tables.changed([one for row in others for one in row.measured], units)
    if changed:
        title = "Changed, and not failed for it"
        yield _Part(_CHANGED, "what changed without failing", f"#### {title}\n\n{changed}")
    why_not = reasons(result.verdict for result in report.results if not result.failed)
    if why_not:
        yield _Part(_NOT_COMPARED, "what was not compared", "\n".join(f"- {plain(reason)}" for reason in why_not))
    unused = [unused_line(report.unused)] if report.unused and report.passed else []
    said = [*report.said, *report.selection.idle_budgets, *unused]
    if said:
        yield _Part(_SAID, "what became of the store", "\n".join(f"- {plain(one)}" for one in said))
    every = tables.all_tests(rows, units)
    if every:
        yield _Part(_ALL, "the table of all tests", details("All measured tests", every))
    for title, configs in matrices(report.results).items():
        table = tables.matrix(configs, units)
        yield _Part(_MATRIX, "a table of configs", details(f"Configs of {html_code(title)}", table))
    yield _Part(_ENVIRONMENT, "the environment", details("Environment", tables.environment(report)))


def _figures(row: Row, units: UnitSystem) -> str:
    """What was measured against what, what grew, and the command that accepts it."""
    found = []
    for measured in row.measured:
        one = measured.verdict
        if len(row.measured) > 1:
            found.append(f"**{plain(one.measurement.name)}**")
        found.append(tables.metrics(one, units))
        found += tables.explained(one, units)
        notes = [*(metric.reason for metric in one.metrics if metric.reason), *one.measurement.notes]
        if notes:
            found.append("\n".join(f"- {plain(note)}" for note in dict.fromkeys(notes)))
        if one.origin is not None:
            found.append(f"Baseline: {plain(origin_line(one.origin, reason=True))}")
    if row.accept:
        found.append(f"To accept it:\n\n{block(row.accept)}")
    return "\n\n".join(found)


def _omitted(left_out: list[_Part]) -> str:
    if not left_out:
        return "*The rest has no room here; the JSON and HTML reports have it.*"
    words = []
    for rank, parts in groupby(sorted(left_out, key=lambda part: part.rank), key=lambda part: part.rank):
        same = list(parts)
        words.append(same[0].what if len(same) == 1 else f"{len(same)} {_MANY[rank]}")
    return f"*Left out for want of room: {', '.join(words)}. The JSON and HTML reports have it all.*"


def _joined(parts: list[_Part], left_out: list[_Part]) -> str:
    texts = [part.text for part in parts]
    return "\n\n".join([*texts, *([_omitted(left_out)] if left_out else [])]) + "\n"


def _size(text: str) -> int:
    return len(text.encode("utf-8"))
