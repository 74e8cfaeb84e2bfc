"""``gpumem merge``: the JSON reports of a split run become one report with one verdict."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.baselines.selecting import unused_line
from pytest_gpumem.cli import completion
from pytest_gpumem.cli.files import FilePath, check_one_stream, suffix_of, text_beside, write_file
from pytest_gpumem.cli.streams import InputError, WholeNumber, files_of, input_errors, read_report, screen, write_lines
from pytest_gpumem.command_name import command_name
from pytest_gpumem.reports.errors import MergeError
from pytest_gpumem.reports.formats import ENDINGS, FORMATS, format_of, suffixes
from pytest_gpumem.reports.github import report_to_github
from pytest_gpumem.reports.layout import Span
from pytest_gpumem.reports.merging import in_no_report, in_no_shard, merged, run_twice, several
from pytest_gpumem.reports.terminal import failure_lines, terminal_text
from pytest_gpumem.units import agreeing, counted

if TYPE_CHECKING:
    from pytest_gpumem.reports.session_report import SessionReport

_MOST_NAMED = 3


def _files(_context: click.Context, _parameter: click.Parameter, value: tuple[Path, ...]) -> tuple[Path, ...]:
    check_one_stream(value)
    for path in value:
        form = format_of(f"report{suffix_of(path)}")
        if form is None:
            raise click.BadParameter(f"{path} has to end with {ENDINGS}, which says the format")
        why_not = form.lacking()
        if why_not is not None:
            raise click.BadParameter(why_not)
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
    help=f"Write the whole there, in the format of the suffix: {suffixes(FORMATS)}; - writes JSON to standard output. May be "
    "repeated.",
)
@click.option(
    "--shards",
    metavar="N",
    type=WholeNumber(min=1),
    help="Insist on so many shards: one whose report got lost is told, and not left out.",
)
@click.option("-v", "--verbose", count=True, help="Show every test; twice: also phases and compositions.")
def merge(*, reports: tuple[str, ...], files: tuple[Path, ...], shards: int | None, verbose: int) -> None:
    """Make one report and one verdict of the shards of a run.

    Each REPORT is what pytest --gpumem-report=FILE.json wrote of its part of the tests: on another machine, by folders, by -k,
    or by pytest-split. Merged reports can be merged again, in any order.

    The whole passed when no test failed, measured or not, each that was selected ran in some shard, and nothing went wrong in
    any of them. Each measured test that failed or did not run to its end is named. Whether anything was gated, and which
    baselines are unused, is judged on the whole only. Of a test that ran in several shards on the same device the worst result
    counts.

    \b
    Examples:
      gpumem merge gpu-0.json gpu-1.json --report gpumem.html
      gpumem merge shards/*.json --shards 4 --report whole.json --report summary.md

    Exit status: 0 when the whole passed, 1 when it did not, 2 for wrong input: a file that is no report, shards of different
    commits or options, fewer or more than --shards, or, with --shards, tests that have baselines and are in none of them.
    """
    paths = files_of(reports)
    parts = [read_report(path) for path in paths]
    for number, part in enumerate(parts):
        earlier = parts.index(part)
        if earlier < number and part.results:
            raise InputError(f"{paths[number]} is the same report as {paths[earlier]}: give each shard once")
    with input_errors(MergeError):
        whole = merged(parts, [str(path) for path in paths])
    if shards is not None:
        _check_shards(shards, paths, parts, whole)
    with text_beside(files):
        _print(whole, parts, verbose)
        # Commands of the runner, which sanitizing would undo.
        write_lines((Span(screen().encodable(line)),) for line in report_to_github(whole, Path.cwd(), os.environ))
    for path in files:
        form = format_of(f"report{suffix_of(path)}")
        assert form is not None, "options are checked"
        try:
            write_file(path, form.render(whole))
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: the report cannot be written: {error}") from None
    sys.exit(0 if whole.passed else 1)


def _check_shards(shards: int, paths: list[Path], parts: list[SessionReport], whole: SessionReport) -> None:
    """Raise `InputError` unless there are so many shards, and they account for every baseline on their devices."""
    if whole.shards != shards:
        given = counted(whole.shards, "shard")
        raise InputError(f"there are reports of {given}, expected {shards}: {', '.join(map(str, paths))}")
    idle, twice = in_no_shard(whole), run_twice(parts)
    if idle and twice is not None:
        earlier, later = twice
        raise InputError(
            f"{paths[later]} ran the same tests as {paths[earlier]}, and {counted(len(idle), 'test')} ran in none of the "
            f"shards: {_named(idle)}; give each shard once, or, if this is meant, leave out --shards"
        )
    lost = sorted({(key.file, key.test) for _, key in in_no_report(parts)})
    if lost:
        are = agreeing(len(lost), "is", "are")
        again = "" if twice is None else f"{paths[twice[1]]} ran the same tests as {paths[twice[0]]}, and "
        raise InputError(
            f"{again}{counted(len(lost), 'test')} with baselines on these devices {are} in none of the shards: "
            f"{_named(lost)}; add the shard that ran them, remove what is gone with `{command_name()} prune`, or, if "
            "this is meant, leave out --shards"
        )


def _print(whole: SessionReport, parts: list[SessionReport], verbose: int) -> None:
    again, idle = several(parts), in_no_shard(whole)
    lines = [*whole.said, f"merged: {counted(whole.shards, 'shard')}"]
    if again:
        lines.append(
            f"merged: {counted(len(again), 'test')} ran in several of them, the worst result counts: {_named(again)}"
        )
    if idle:
        lines.append(f"merged: {counted(len(idle), 'test')} collected and selected in none of them: {_named(idle)}")
    if whole.unused:
        lines.append(unused_line(whole.unused))
    text = terminal_text(replace(whole, said=tuple(lines)), screen(), verbose)
    write_lines(text.tables)
    write_lines(failure_lines(whole, screen()))
    # terminal_text has the others, which pytest does not say by itself at the end of a session.
    there = {*whole.errors, whole.nothing_done}
    write_lines(f"gpumem: {problem}" for problem in whole.problems if problem not in there)
    write_lines(text.lines)


def _named(tests: list[tuple[str, str]]) -> str:
    named = [f"{file}::{test}" for file, test in tests[:_MOST_NAMED]]
    return ", ".join([*named, *(["..."] if len(tests) > _MOST_NAMED else [])])
