"""Output for GitHub Actions, without a token or an action: annotations on tests, and the step's summary.

A session that measured something writes it if ``GITHUB_ACTIONS`` is ``true``. ``--no-summary`` leaves it out.

- ``::error`` at a test's function: the test failed, with the whole text of the failure, or it did not finish.
- ``::error`` at a line of the project: the line in the first row of the explanation, if it is a file of the checkout, and in a
  pull request a file in its diff. No line has one if one of several rows may have grown, or if the first row is a package's.
- ``::error`` at the line of a cause: for tests that fail by causes alone, in place of their own annotations.
- ``::error`` without a file: other reasons for a red session, for example that nothing was gated.
- ``::warning``: a test that is ``uncertain``, or a budget without an effect.
- The step's summary: the report in Markdown, added to the file that ``GITHUB_STEP_SUMMARY`` names, as far as there is room.
  A file that cannot be written is reported and fails nothing.

Files are named from the repository's root (``GITHUB_WORKSPACE``). The diff is git's, from ``origin/$GITHUB_BASE_REF`` or the
merge's first parent. A clone of depth 1 has neither, so any file of the checkout may have an annotation; ``fetch-depth: 2``
is enough. GitHub shows ten annotations of a kind for a step: the most serious come first, and the tenth counts the others.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from pytest_gpumem.gate.verdict import Outcome
from pytest_gpumem.git import changed_files
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports.causes import causes_in, name_of
from pytest_gpumem.reports.escaping import visible
from pytest_gpumem.reports.markdown import FEWEST, MOST_OF_A_SUMMARY, markdown
from pytest_gpumem.reports.places import first_row
from pytest_gpumem.reports.told_causes import explained_by_causes
from pytest_gpumem.reports.values import difference
from pytest_gpumem.reports.view import rows_of
from pytest_gpumem.values.source_lines import file_and_line, package_of
from pytest_gpumem.variables import GITHUB_ACTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pytest_gpumem.gate.causes import Cause
    from pytest_gpumem.reports.causes import CausesOf
    from pytest_gpumem.reports.session_report import SessionReport
    from pytest_gpumem.reports.view import ReportRow
    from pytest_gpumem.units import UnitSystem

MOST_ANNOTATIONS = 10
"""The most annotations of a kind that GitHub shows of a step:
https://docs.github.com/en/actions/reference/limits and ``_maxCountPerIssueType`` of the runner."""
MOST_OF_A_MESSAGE = 4_096
"""Characters of a message; the runner cuts off the others (``_maxIssueMessageLength``)."""
MOST_OF_A_TITLE = 255
"""Characters of a title: https://docs.github.com/en/rest/checks/runs#create-a-check-run."""


def is_github(environment: Mapping[str, str]) -> bool:
    """Return whether this is a job of GitHub Actions."""
    return environment.get(GITHUB_ACTIONS) == "true"


def annotation_lines(
    report: SessionReport, folder: str = "", can_show: Callable[[str], bool] = lambda _file: False
) -> list[str]:
    """Return lines that the runner turns into annotations, errors before warnings, the most serious first.

    Errors are what makes the session red, warnings what is uncertain or has no effect. Tests that fail by the same causes have
    an annotation for each cause, at its line. Any other failed test has an annotation at its function. A pull request rarely
    changes that file, so the test has a second annotation at the line in the first row of its explanation.

    Args:
        report: The session.
        folder: The root directory as seen from the repository's root: ``"libs/model/"``.
        can_show: Returns whether GitHub can show an annotation on a file, which is given from the root directory.

    Returns:
        At most `MOST_ANNOTATIONS` of a kind. If there are more, the last counts the others.
    """
    failed = sorted((row for row in rows_of(report) if row.status.fails), key=_seriousness, reverse=True)
    found = causes_in(report)
    told = explained_by_causes(found.causes, (one.verdict for one in report.results)) if found.tell else {}
    causes = {cause: None for row in failed for cause in told.get(row.title, ())}
    at_first_line = partial(_at_first_line, units=report.terms.units, folder=folder, can_show=can_show)
    errors = [
        *(_line("error", "gpumem", problem) for problem in report.problems),
        *(
            line
            for one in found.causes.causes
            if one in causes
            for line in _of_a_cause(one, found, report, folder, at_first_line)
        ),
        *(
            line
            for row in failed
            if row.title not in told
            for line in (_of_a_test("error", row, row.why, folder), *at_first_line(row))
        ),
    ]
    warnings = [
        *(_line("warning", "gpumem", idle) for idle in report.warnings),
        *(
            _of_a_test("warning", row, why, folder)
            for row in rows_of(report)
            if not row.status.fails and (why := _why_uncertain(row))
        ),
    ]
    return [*_limited("error", errors), *_limited("warning", warnings)]


def notice_line(message: str) -> str:
    """Return a notice of the run that is about no file."""
    return _line("notice", "gpumem", message)


def _seriousness(row: ReportRow) -> tuple[bool, bool, int]:
    verdict = row.result.verdict if row.result is not None else None
    return (False, False, 0) if verdict is None else (True, not verdict.failed_by_itself, verdict.outcome.importance)


def _limited(kind: str, lines: list[str]) -> list[str]:
    if len(lines) <= MOST_ANNOTATIONS:
        return lines
    more = len(lines) - MOST_ANNOTATIONS + 1
    return [*lines[: MOST_ANNOTATIONS - 1], _line(kind, "gpumem", f"{more} more, for which GitHub has no room here")]


def _why_uncertain(row: ReportRow) -> str:
    return "\n".join(
        f"{one.metric} is uncertain: {one.reason or 'its interval reaches beyond what is allowed'}"
        for each in row.measured
        for one in each.verdict.metrics
        if one.outcome is Outcome.UNCERTAIN
    )


def _of_a_cause(
    cause: Cause,
    found: CausesOf,
    report: SessionReport,
    folder: str,
    at_first_line: Callable[[ReportRow], Iterable[str]],
) -> Iterator[str]:
    """Yield a cause's annotation at its line. If the project has no such line, annotate the first test's two places."""
    units = report.terms.units
    grown = f"{difference(cause.metric, cause.total, units)} {METRICS[cause.metric].title}"
    title = f"gpumem: {name_of(cause, units)}: {grown} in {len(cause.tests)} of {found.measured} tests"
    details = " ".join(
        filter(None, [cause.module, cause.operator, cause.what if cause.has_tensors else "", cause.reason])
    )
    message = "\n".join([*([details] if details else []), *cause.tests])
    file, number = file_and_line(cause.lines[0]) if cause.lines else ("", 0)
    if number and not package_of(cause.lines[0]):
        yield _line("error", title, message, {"file": f"{folder}{file}", "line": str(number)})
        return
    first = next(row for row in rows_of(report) if row.title == cause.tests[0])
    yield _line("error", title, message, _where(first, folder))
    yield from at_first_line(first)


def _at_first_line(row: ReportRow, units: UnitSystem, folder: str, can_show: Callable[[str], bool]) -> Iterator[str]:
    """Yield an annotation at the line in the explanation's first row, if GitHub can show the file."""
    first = first_row(row, units)
    if first is not None and first.place is not None and can_show(first.place[0]):
        file, line = first.place
        where = {"file": f"{folder}{file}", "line": str(line)}
        yield _of_a_test("error", row, f"{first.text}\n{row.title}: {row.headline}", folder, where)


def _of_a_test(kind: str, row: ReportRow, message: str, folder: str, where: Mapping[str, str] | None = None) -> str:
    title = f"gpumem: {row.test}"
    if len(visible(title)) > MOST_OF_A_TITLE and row.title not in message:
        message = f"{row.title}\n{message}"
    return _line(kind, title, message, where or _where(row, folder))


def _where(row: ReportRow, folder: str) -> dict[str, str]:
    location = row.result.verdict.location if row.result is not None else None
    where = {"file": row.file} if location is None else {"file": location.file, "line": str(location.line)}
    return where | {"file": f"{folder}{where['file']}"}


def _line(kind: str, title: str, message: str, where: Mapping[str, str] | None = None) -> str:
    """Return a command of the runner, escaped as its ``ActionCommand`` reads it."""
    properties = {**(where or {}), "title": _cut(visible(title), MOST_OF_A_TITLE)}
    written = ",".join(f"{name}={_property(visible(value))}" for name, value in properties.items())
    lines = [visible(one) for one in message.split("\n")]
    return f"::{kind} {written}::{_data(_cut(chr(10).join(lines), MOST_OF_A_MESSAGE))}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def folder_within(root: Path, workspace: str | None) -> str:
    """Return the root directory as seen from the repository's, with a slash; empty where they are the same, or apart."""
    if not workspace:
        return ""
    try:
        within = os.path.relpath(os.path.realpath(root), os.path.realpath(workspace))
    except ValueError:
        # Two drives of Windows.
        return ""
    within = within.replace(os.sep, "/")
    return "" if within in (".", "..") or within.startswith("../") else f"{within}/"


def shown_files(root: Path, environment: Mapping[str, str]) -> Callable[[str], bool]:
    """Return a predicate for files, relative to ``root``: can GitHub show an annotation on this file?

    A pull request shows annotations on files in its diff. If git cannot compute the diff, for example in a clone of depth 1,
    every file in the checkout is accepted.
    """
    base = environment.get("GITHUB_BASE_REF")
    diff = changed_files(root, base) if base else None

    def can_show(file: str) -> bool:
        path = root / file
        is_inside = path.is_file() and path.resolve().is_relative_to(root.resolve())
        return is_inside and (diff is None or file in diff)

    return can_show


def add_to_summary(file: str, report: SessionReport) -> None:
    """Append the report to a step's summary, as much as there is room for: several runs of a step share the file.

    Raises ``OSError``, also where the file is full.
    """
    path = Path(file)
    taken = path.stat().st_size if path.exists() else 0
    room = MOST_OF_A_SUMMARY - taken - 1
    if room < FEWEST:
        raise OSError(f"the summary has {taken:,} bytes already, and GitHub shows at most {MOST_OF_A_SUMMARY:,}")
    # What another program wrote last may lack its line end.
    text = ("\n" if taken else "") + markdown(report, most=room)
    with path.open("a", encoding="utf-8", newline="\n") as summary:
        summary.write(text)


def report_to_github(report: SessionReport, root: Path, environment: Mapping[str, str]) -> Sequence[str]:
    """Add to the step's summary, and return the lines to print at the very end, each at the start of a line.

    None where this is no job of GitHub Actions, or the session measured nothing.
    """
    if not is_github(environment) or not (report.results or report.not_run or report.problems):
        return []
    errors = []
    summary = environment.get("GITHUB_STEP_SUMMARY")
    if summary:
        try:
            add_to_summary(summary, report)
        except (OSError, ValueError) as error:
            errors.append(f"gpumem: the step's summary was not written: {visible(str(error))}")
    folder = folder_within(root, environment.get("GITHUB_WORKSPACE"))
    # `gpumem merge` may run in a job without a checkout, in which no file can be looked at.
    is_checkout = any((root / result.verdict.file).is_file() for result in report.results)
    can_show = shown_files(root, environment) if is_checkout else _is_within
    return [*errors, *annotation_lines(report, folder, can_show)]


def _is_within(file: str) -> bool:
    """Return whether a relative path does not lead out of the folder that it starts in."""
    return ".." not in PurePosixPath(file).parts
