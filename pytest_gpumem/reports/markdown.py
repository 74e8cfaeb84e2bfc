"""A session's report in GitHub's Markdown: for a file, a job's summary and a comment in a pull request. Pure.

What stands first is what a reader must know. Where there is not room for all of it, whole parts are left out, and said to be.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from pytest_gpumem.reports import markdown_tables as tables
from pytest_gpumem.reports.escaping import block, code, details, html_code, plain
from pytest_gpumem.reports.matrix import matrices
from pytest_gpumem.reports.results import headline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.reports.results import TestResult
    from pytest_gpumem.reports.session_report import SessionReport

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
    _NOT_RUN: "files with tests that did not run to the end",
    _DETAILS: "tests' details",
    _MATRIX: "tables of configs",
}


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
    return text if _size(text) <= most else f"### {_verdict(report)}\n\n{_omitted([])}\n"


def _parts(report: SessionReport) -> Iterator[_Part]:
    units = report.terms.units
    failed = [result for result in report.results if result.failed]
    line = report.accounting.removeprefix("gpumem: ")
    yield _Part(_HEAD, "", f"### {_verdict(report)}: {plain(line)}")
    for problem in report.problems:
        yield _Part(_PROBLEM, "the problems", f"- **{plain(problem)}**")
    for file, tests in groupby(report.not_run, key=lambda test: test[0]):
        ids = ", ".join(code(f"{file}::{test}") for _, test in tests)
        yield _Part(_NOT_RUN, "the tests that did not run to the end", f"- Not run to the end: {ids}")
    for result in failed:
        yield _Part(_FAILED, "a test that failed", f"❌ {code(result.verdict.nodeid)}  \n{plain(headline(result))}")
        figures = _figures(result, report)
        if figures:
            yield _Part(_DETAILS, "a test's details", details("What was measured", figures))
    others = [result for result in report.results if not result.failed]
    changed = tables.changed(others, units)
    if changed:
        title = "Changed, and not failed for it"
        yield _Part(_CHANGED, "what changed without failing", f"#### {title}\n\n{changed}")
    reasons = tables.reasons(others)
    if reasons:
        yield _Part(_NOT_COMPARED, "what was not compared", "\n".join(f"- {plain(reason)}" for reason in reasons))
    said = [*report.said, *report.selection.idle_budgets, *_unused(report)]
    if said:
        yield _Part(_SAID, "what became of the store", "\n".join(f"- {plain(one)}" for one in said))
    every = tables.all_tests(report.results, units)
    if every:
        yield _Part(_ALL, "the table of all tests", details("All measured tests", every))
    for title, rows in matrices(report.results).items():
        yield _Part(
            _MATRIX, "a table of configs", details(f"Configs of {html_code(title)}", tables.matrix(rows, units))
        )
    yield _Part(_ENVIRONMENT, "the environment", details("Environment", tables.environment(report)))


def _verdict(report: SessionReport) -> str:
    if not report.passed:
        return "❌ gpumem failed"
    # Green is for what was held against something.
    return "✅ gpumem passed" if any(result.verdict.gated for result in report.results) else "⚪ gpumem gated nothing"


def _figures(result: TestResult, report: SessionReport) -> str:
    """What was measured against what, what grew, and the command that accepts it."""
    verdict, units = result.verdict, report.terms.units
    found = []
    for one in verdict.verdicts:
        if len(verdict.verdicts) > 1:
            found.append(f"**{plain(one.measurement.name)}**")
        found.append(tables.metrics(one, units))
        found += tables.explained(one, units)
        notes = [*(metric.reason for metric in one.metrics if metric.reason), *one.measurement.notes]
        if notes:
            found.append("\n".join(f"- {plain(note)}" for note in dict.fromkeys(notes)))
        if one.origin is not None:
            origin = one.origin
            commit = f", commit {code(origin.commit)}" if origin.commit else ""
            why = f": {plain(origin.reason)}" if origin.reason else ""
            recorded = plain(f"{origin.recorded}, {origin.device}, torch {origin.torch}")
            found.append(f"Baseline: {recorded}{commit}{why}")
    command = (verdict.failure or "").rpartition("\n  accept:   ")[2] if verdict.failure else ""
    if command and command != verdict.failure:
        found.append(f"To accept it:\n\n{block(command)}")
    return "\n\n".join(found)


def _unused(report: SessionReport) -> list[str]:
    unused = report.unused
    if not unused or not report.passed:
        return []
    shown = ", ".join(str(key) for _, key in unused[:3]) + (", ..." if len(unused) > 3 else "")
    return [f"{len(unused)} unused baseline{'' if len(unused) == 1 else 's'}: {shown}; `gpumem prune` removes them"]


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
