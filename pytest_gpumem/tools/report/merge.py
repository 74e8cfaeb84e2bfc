"""``gpumem merge``: merges the JSON reports of a test run that was split into shards."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.base.command_name import command_name
from pytest_gpumem.base.errors import MergeError
from pytest_gpumem.base.units import counted, word_form
from pytest_gpumem.judging.baselines.selecting import unused_line
from pytest_gpumem.reporting.reports.formats import ENDINGS, FORMATS, format_of, suffixes
from pytest_gpumem.reporting.reports.github import report_to_github
from pytest_gpumem.reporting.reports.layout import Span
from pytest_gpumem.reporting.reports.merging import (
    merge_reports,
    repeated_tests,
    run_twice,
    unaccounted_baselines,
    unselected_tests,
)
from pytest_gpumem.reporting.reports.terminal import failure_lines, terminal_text
from pytest_gpumem.tools.console import completion
from pytest_gpumem.tools.console.files import FilePath, check_one_stream, suffix_of, text_beside, write_file
from pytest_gpumem.tools.console.streams import (
    InputError,
    WholeNumber,
    files_of,
    input_errors,
    read_report,
    screen,
    write_lines,
)

if TYPE_CHECKING:
    from pytest_gpumem.reporting.reports.session_report import SessionReport

_MOST_NAMED = 3


def _files(_context: click.Context, _parameter: click.Parameter, value: tuple[Path, ...]) -> tuple[Path, ...]:
    check_one_stream(value)
    for path in value:
        if format_of(f"report{suffix_of(path)}") is None:
            raise click.BadParameter(f"{path} has to end with {ENDINGS}, which selects the format")
    return value


@click.command()
@click.argument("reports", metavar="REPORT.json...", nargs=-1, required=True, shell_complete=completion.files)
@click.option(
    "--report",
    "files",
    metavar="FILE",
    multiple=True,
    type=FilePath(),
    callback=_files,
    help=f"Write the merged report to this file, for example `whole.json`. The suffix selects the format: {suffixes(FORMATS)}; "
    "`-` writes JSON to standard output. May be repeated.",
)
@click.option(
    "--shards",
    metavar="N",
    type=WholeNumber(min=1),
    help="End with an error if the reports do not come from exactly N shards, for example `4`. So a lost report cannot go "
    "unnoticed. Default: any number of shards.",
)
@click.option(
    "-v",
    "--verbose",
    count=True,
    help="Show every test. `-vv` also shows the phases of each step and the composition of each peak.",
)
def merge(*, reports: tuple[str, ...], files: tuple[Path, ...], shards: int | None, verbose: int) -> None:
    """Merge the reports of shards into one report with one verdict.

    A shard runs some of the tests, for example in one of several CI jobs. The tests can be split by folders, by `-k` or
    by pytest-split. Each shard writes a REPORT.json with `pytest --gpumem-report=REPORT.json`. The order of the reports
    does not change the result. Merged reports can be merged again.

    The merged report passes if no test failed, every selected test ran in at least one shard, and no shard had an error.
    The command names each measured test that failed or did not finish.

    \b
    Examples:
      gpumem merge gpu-0.json gpu-1.json --report gpumem.html
      gpumem merge shards/*.json --shards 4 --report whole.json

    Exit status: 0 if the merged report passed, 1 if it did not pass, or after Ctrl-C, 2 for wrong usage, a file that is
    not a report, shards from different commits or with different options, or an error that --shards found.
    \f
    ## `--shards`

    With this option, each of these cases is an error:

    - The number of shards is not N.
    - Two shards ran the same tests in the same environment, and other tests ran in no shard. The reason is probably that a
      job ran twice, in place of another job.
    - A test has a baseline from a device of these shards, but no report mentions the test: no shard gated, failed, skipped
      or deselected the test, or removed its baseline. Baselines of scripts (`train.py::run`) are not checked.

    ## The verdict

    - A failed measured test is listed with the first line of its failure. Failed tests that are not measured are only
      counted, and the output of their shard has the details.
    - The merged report decides [whether nothing was gated](verdicts.md), and which baselines are unused. The reports of
      single shards do not decide this.
    - If a test ran in several shards on the same device, the worst result counts. A failure is worse than a success, and a
      measurement counts more than no measurement. Between two verdicts, the more serious verdict counts, and `improved`
      counts as better than `ok`. Between equal verdicts, the larger peak counts.
    - A test that ran on several devices has a result for each device.
    - A measured test that no shard selected is reported. This does not fail the run, because `-m "not slow"` may be
      intended. But if the shards ran with a gate and no shard ran a measured test, nothing was gated.
    - A budget is reported as having no effect only if every shard reports this.

    ## Shards must match

    - All reports must come from the same version of pytest-gpumem and the same commit.
    - All sessions must have run with the same `--gpumem-baseline`, `--gpumem-strict`, `--gpumem-update` and `units`. Devices
      may differ.

    ## Files and CI

    - The command expands a pattern such as `shards/*.json` if the shell did not expand it.
    - In GitHub Actions, the command writes annotations and the step summary, as a pytest session does. Run the command in the
      project's root directory, so the annotations point to the right files.
    """
    paths = files_of(reports)
    parts = [read_report(path) for path in paths]
    for number, part in enumerate(parts):
        earlier = parts.index(part)
        if earlier < number and part.results:
            raise InputError(f"{paths[number]} is the same report as {paths[earlier]}: give each shard once")
    with input_errors(MergeError):
        report = merge_reports(parts, [str(path) for path in paths])
    if shards is not None:
        _check_shards(shards, paths, parts, report)
    with text_beside(files):
        _print(report, parts, verbose)
        # Print these lines without sanitizing, because they are commands for the CI runner.
        write_lines((Span(screen().encodable(line)),) for line in report_to_github(report, Path.cwd(), os.environ))
    for path in files:
        form = format_of(f"report{suffix_of(path)}")
        assert form is not None, "the option's callback checked the suffix"
        try:
            write_file(path, form.render(report))
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: the report cannot be written: {error}") from None
    sys.exit(0 if report.passed else 1)


def _check_shards(shards: int, paths: list[Path], parts: list[SessionReport], report: SessionReport) -> None:
    """Check the number of shards, and whether a shard mentions each test with a baseline.

    Raises:
        InputError: The number of shards differs, a job probably ran twice, or no shard mentions a test with a baseline from a
            device of the shards.
    """
    if report.shards != shards:
        count = counted(report.shards, "shard")
        raise InputError(f"the reports come from {count}, expected {shards}: {', '.join(map(str, paths))}")
    idle, twice = unselected_tests(report), run_twice(parts)
    if idle and twice is not None:
        earlier, later = twice
        raise InputError(
            f"{paths[later]} ran the same tests as {paths[earlier]}, and {counted(len(idle), 'test')} ran in no "
            f"shard: {_named(idle)}; give each shard once, or leave out --shards if this is intended"
        )
    lost = sorted({(key.file, key.test) for _, key in unaccounted_baselines(parts)})
    if lost:
        are = word_form(len(lost), "is", "are")
        again = "" if twice is None else f"{paths[twice[1]]} ran the same tests as {paths[twice[0]]}, and "
        raise InputError(
            f"{again}{counted(len(lost), 'test')} with baselines on these devices {are} in no shard: "
            f"{_named(lost)}; add the shard that ran them, remove baselines of deleted tests with `{command_name()} prune`, "
            "or leave out --shards if this is intended"
        )


def _print(report: SessionReport, parts: list[SessionReport], verbose: int) -> None:
    repeated, idle = repeated_tests(parts), unselected_tests(report)
    lines = [*report.closing_lines, f"merged: {counted(report.shards, 'shard')}"]
    if repeated:
        lines.append(
            f"merged: {counted(len(repeated), 'test')} ran in several shards; the worst result counts: {_named(repeated)}"
        )
    if idle:
        lines.append(f"merged: {counted(len(idle), 'test')} collected, but selected in no shard: {_named(idle)}")
    if report.unused:
        lines.append(unused_line(report.unused))
    text = terminal_text(replace(report, closing_lines=tuple(lines)), screen(), verbose)
    write_lines(text.tables)
    write_lines(failure_lines(report, screen()))
    # Do not repeat these errors, because the lines of ``terminal_text`` contain them already.
    printed = {*report.errors, report.nothing_done}
    write_lines(f"gpumem: {problem}" for problem in report.problems if problem not in printed)
    write_lines(text.lines)


def _named(tests: list[tuple[str, str]]) -> str:
    named = [f"{file}::{test}" for file, test in tests[:_MOST_NAMED]]
    return ", ".join([*named, *(["..."] if len(tests) > _MOST_NAMED else [])])
