"""Output for GitHub Actions: annotations on tests, and the step's summary. The output needs no token and no action.

A session with measurements writes this output if ``GITHUB_ACTIONS`` is ``true``. ``--no-summary`` omits it.

- ``::error`` at a test's function: the complete failure text, or a sentence that says that the test did not finish.
- ``::error`` at a line in the project: the line from the first row of the explanation. GitHub shows such an annotation only if
  the file is in the checkout and, for a pull request, also in its diff. No line is annotated if one of several rows may have
  grown, or if the first row belongs to a package.
- ``::error`` at the line of a cause: this annotation replaces the annotations on the tests that fail only because of causes.
- ``::error`` without a file: other reasons for a red session, such as ``nothing was gated``.
- ``::warning``: a test that is ``uncertain``, or a budget without an effect.
- The step's summary: the report in Markdown, appended to the file in ``GITHUB_STEP_SUMMARY`` and cut to GitHub's limit. If the
  file cannot be written, a message says so and nothing fails.

Paths are relative to the repository's root (``GITHUB_WORKSPACE``). A pull request's diff is computed from ``HEAD`` and
``origin/$GITHUB_BASE_REF``. If the clone lacks this branch, the diff is computed from the merge commit that GitHub checks out
and its first parent. A clone with ``fetch-depth: 2`` has this parent. A clone with ``fetch-depth: 1`` has neither, so any file
in the checkout may be annotated.

GitHub shows at most ten errors and ten warnings for a step. The most serious come first, and the tenth counts the others.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from pytest_gpumem.base.git import changed_files
from pytest_gpumem.base.variables import GITHUB_ACTIONS
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.source_lines import file_and_line, package_of
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.reporting.reports.causes import name_of
from pytest_gpumem.reporting.reports.escaping import visible
from pytest_gpumem.reporting.reports.markdown import LEAST_BYTES, SUMMARY_LIMIT, markdown
from pytest_gpumem.reporting.reports.places import first_row
from pytest_gpumem.reporting.reports.values import difference
from pytest_gpumem.reporting.reports.view import rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pytest_gpumem.base.units import UnitSystem
    from pytest_gpumem.judging.gate.causes import Cause
    from pytest_gpumem.reporting.reports.session_report import SessionReport
    from pytest_gpumem.reporting.reports.view import ReportRow

MOST_ANNOTATIONS = 10
"""GitHub's limit for the errors in a step, and also for the warnings:
https://docs.github.com/en/actions/reference/limits and ``_maxCountPerIssueType`` of the runner."""
MESSAGE_LIMIT = 4_096
"""The maximum length of a message in characters. The runner cuts longer messages (``_maxIssueMessageLength``)."""
TITLE_LIMIT = 255
"""The maximum length of a title in characters: https://docs.github.com/en/rest/checks/runs#create-a-check-run."""


def is_github(environment: Mapping[str, str]) -> bool:
    """Return whether the environment belongs to a job on GitHub Actions."""
    return environment.get(GITHUB_ACTIONS) == "true"


def annotation_lines(
    report: SessionReport, folder: str = "", can_show: Callable[[str], bool] = lambda _file: False
) -> list[str]:
    """Return lines that the runner turns into annotations, errors before warnings, the most serious first.

    Errors are the reasons for a red session. Warnings are uncertain tests and budgets without an effect. If several tests fail
    by the same causes, each cause has an annotation at its line. Any other failed test has an annotation at its function. This
    function is rarely in a pull request's diff, so the test has a second annotation at the first line in its explanation.

    Args:
        report: The session.
        folder: The path from the repository's root to pytest's root directory: ``"libs/model/"``.
        can_show: Returns whether GitHub can show an annotation on a file. The path is relative to the root directory.

    Returns:
        At most `MOST_ANNOTATIONS` lines of each kind. If there are more, the last line counts the others.
    """
    failed = sorted((row for row in rows_of(report) if row.status.fails), key=_seriousness, reverse=True)
    causes = report.causes
    explained = [row.title for row in failed if row.title in causes.explained]
    shown_causes = {cause for test in explained for cause in causes.of(test)}
    at_first_line = partial(_at_first_line, units=report.terms.units, folder=folder, can_show=can_show)
    errors = [
        *(_line("error", "gpumem", problem) for problem in report.problems),
        *(
            line
            for cause in causes.causes
            if cause in shown_causes
            for line in _of_a_cause(cause, report, folder, at_first_line)
        ),
        *(
            line
            for row in failed
            if row.title not in causes.explained
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
    """Return an annotation of the kind ``notice``, without a file."""
    return _line("notice", "gpumem", message)


def _seriousness(row: ReportRow) -> tuple[bool, bool, int]:
    verdict = row.result.verdict if row.result is not None else None
    return (False, False, 0) if verdict is None else (True, not verdict.failed_by_itself, verdict.outcome.importance)


def _limited(kind: str, lines: list[str]) -> list[str]:
    if len(lines) <= MOST_ANNOTATIONS:
        return lines
    more = len(lines) - MOST_ANNOTATIONS + 1
    return [*lines[: MOST_ANNOTATIONS - 1], _line(kind, "gpumem", f"and {more} more, which GitHub would not show")]


def _why_uncertain(row: ReportRow) -> str:
    return "\n".join(
        f"{metric.metric} is uncertain: {metric.reason or 'the confidence interval exceeds the allowed change'}"
        for measured in row.measured
        for metric in measured.verdict.metrics
        if metric.outcome is Outcome.UNCERTAIN
    )


def _of_a_cause(
    cause: Cause,
    report: SessionReport,
    folder: str,
    at_first_line: Callable[[ReportRow], Iterable[str]],
) -> Iterator[str]:
    """Yield an annotation for a cause, at its line of code.

    If the cause has no line in the project, yield the annotations of the cause's first test.
    """
    units = report.terms.units
    grown = f"{difference(cause.metric, cause.total, units)} {METRICS[cause.metric].title}"
    title = f"gpumem: {name_of(cause, units)}: {grown} in {len(cause.tests)} of {report.causes.measured} tests"
    details = " ".join(
        filter(None, [cause.module, cause.operator, cause.tensors if cause.has_tensors else "", cause.reason])
    )
    message = "\n".join([*([details] if details else []), *cause.tests])
    file, number = file_and_line(cause.lines[0]) if cause.lines else ("", 0)
    if number and not package_of(cause.lines[0]):
        yield _line("error", title, message, {"file": f"{folder}{file}", "line": str(number)})
        return
    first = next(row for row in rows_of(report) if row.title == cause.tests[0])
    yield _line("error", title, message, _position(first, folder))
    yield from at_first_line(first)


def _at_first_line(row: ReportRow, units: UnitSystem, folder: str, can_show: Callable[[str], bool]) -> Iterator[str]:
    """Yield an annotation at the line in the first row of the explanation, if GitHub can show the file."""
    first = first_row(row, units)
    if first is not None and first.place is not None and can_show(first.place[0]):
        file, line = first.place
        position = {"file": f"{folder}{file}", "line": str(line)}
        yield _of_a_test("error", row, f"{first.text}\n{row.title}: {row.headline}", folder, position)


def _of_a_test(kind: str, row: ReportRow, message: str, folder: str, position: Mapping[str, str] | None = None) -> str:
    title = f"gpumem: {row.test}"
    if len(visible(title)) > TITLE_LIMIT and row.title not in message:
        message = f"{row.title}\n{message}"
    return _line(kind, title, message, position or _position(row, folder))


def _position(row: ReportRow, folder: str) -> dict[str, str]:
    location = row.result.verdict.location if row.result is not None else None
    position = {"file": row.file} if location is None else {"file": location.file, "line": str(location.line)}
    return position | {"file": f"{folder}{position['file']}"}


def _line(kind: str, title: str, message: str, position: Mapping[str, str] | None = None) -> str:
    """Return an annotation as a command to GitHub's runner, escaped for the runner's ``ActionCommand`` parser."""
    properties = {**(position or {}), "title": _cut(visible(title), TITLE_LIMIT)}
    written = ",".join(f"{name}={_property(visible(value))}" for name, value in properties.items())
    lines = [visible(line) for line in message.split("\n")]
    return f"::{kind} {written}::{_data(_cut(chr(10).join(lines), MESSAGE_LIMIT))}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def folder_within(root: Path, workspace: str | None) -> str:
    """Return the path from the repository's root to pytest's root directory, such as ``"libs/model/"``.

    The path is empty if both are the same directory, or if the root directory is outside of the repository.
    """
    if not workspace:
        return ""
    try:
        within = os.path.relpath(os.path.realpath(root), os.path.realpath(workspace))
    except ValueError:
        # On Windows, the folders may be on different drives.
        return ""
    within = within.replace(os.sep, "/")
    return "" if within in (".", "..") or within.startswith("../") else f"{within}/"


def shown_files(root: Path, environment: Mapping[str, str]) -> Callable[[str], bool]:
    """Return a function that says whether GitHub can show an annotation on a file. File paths are relative to ``root``.

    A pull request shows annotations on files in its diff. If git cannot compute the diff, for example in a clone of depth 1,
    every file in the checkout is accepted.

    Args:
        root: The root directory.
        environment: The environment variables; ``GITHUB_BASE_REF`` is set for a pull request.
    """
    base = environment.get("GITHUB_BASE_REF")
    diff = changed_files(root, base) if base else None

    def can_show(file: str) -> bool:
        path = root / file
        is_inside = path.is_file() and path.resolve().is_relative_to(root.resolve())
        return is_inside and (diff is None or file in diff)

    return can_show


def add_to_summary(file: str, report: SessionReport) -> None:
    """Append the report to the file with the step's summary, shortened to GitHub's size limit.

    All pytest runs in a step share the file, so earlier reports count towards the limit.

    Raises:
        OSError: The file cannot be written, or has reached the size limit.
    """
    path = Path(file)
    taken = path.stat().st_size if path.exists() else 0
    room = SUMMARY_LIMIT - taken - 1
    if room < LEAST_BYTES:
        raise OSError(f"the summary has {taken:,} bytes already, and GitHub shows at most {SUMMARY_LIMIT:,}")
    # The last line in the file may lack a line end, because another program wrote the line.
    text = ("\n" if taken else "") + markdown(report, most=room)
    with path.open("a", encoding="utf-8", newline="\n") as summary:
        summary.write(text)


def report_to_github(report: SessionReport, root: Path, environment: Mapping[str, str]) -> Sequence[str]:
    """Add the report to the step's summary, and return the lines with the annotations.

    Args:
        report: The session.
        root: The root directory.
        environment: The job's environment variables.

    Returns:
        Lines to print at the end of pytest's output. There are none outside of GitHub Actions, or without measurements.
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
    # `gpumem merge` may run in a job without a checkout, so files cannot be inspected.
    is_checkout = any((root / result.verdict.file).is_file() for result in report.results)
    can_show = shown_files(root, environment) if is_checkout else _is_within
    return [*errors, *annotation_lines(report, folder, can_show)]


def _is_within(file: str) -> bool:
    """Return whether a relative path stays within its folder."""
    return ".." not in PurePosixPath(file).parts
