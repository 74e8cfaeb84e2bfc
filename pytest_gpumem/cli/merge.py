"""``gpumem merge``: the JSON reports of a split run become one report with one verdict."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.cli.streams import InputError
from pytest_gpumem.reports.formats import ENDINGS, FORMATS, format_of, suffixes

if TYPE_CHECKING:
    from pytest_gpumem.reports.session_report import SessionReport

_MOST_NAMED = 3


def _files(_context: click.Context, _parameter: click.Parameter, value: tuple[Path, ...]) -> tuple[Path, ...]:
    for path in value:
        form = format_of(path)
        if form is None:
            raise click.BadParameter(f"{path} has to end with {ENDINGS}, which says the format")
        why_not = form.lacking()
        if why_not is not None:
            raise click.BadParameter(why_not)
    return value


@click.command()
@click.argument("reports", metavar="REPORT.json...", nargs=-1, required=True)
@click.option(
    "--report",
    "files",
    metavar="FILE",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_files,
    help=f"Write the whole there, in the format of the suffix: {suffixes(FORMATS)}. May be repeated.",
)
@click.option(
    "--shards",
    metavar="N",
    type=click.IntRange(min=1),
    help="Insist on so many shards: one whose report got lost is told, and not left out.",
)
@click.option("-v", "--verbose", count=True, help="Show every test; twice: also phases and compositions.")
def merge(*, reports: tuple[str, ...], files: tuple[Path, ...], shards: int | None, verbose: int) -> None:
    """Make one report and one verdict of the shards of a run.

    Each REPORT is what pytest --gpumem-report=FILE.json wrote of its part of the tests: on another machine, by folders, by -k,
    or by pytest-split. Merged reports can be merged again. The order is of no account.

    The whole passed when no test failed, measured or not, each that was selected ran in some shard, and nothing went wrong in
    any of them. Each measured test that failed or did not run to its end is named. Whether anything was gated, and which
    baselines are unused, is judged on the whole only. Of a test that ran in several shards on the same device the worst result
    counts.

    \b
    Examples:
      gpumem merge gpu-0.json gpu-1.json --report gpumem.html
      gpumem merge shards/*.json --shards 4 --report whole.json --report summary.md

    Exit status: 0 when the whole passed, 1 when it did not, 2 for wrong input: a file that is no report, shards of different
    commits or options, fewer or more than --shards, or, with --shards, the same shard twice while tests are in none of them.
    """
    from pytest_gpumem.cli.streams import files_of, read_report, tell
    from pytest_gpumem.reports.github import told_to_github
    from pytest_gpumem.reports.merging import MergeError, merged

    paths = files_of(reports)
    parts = [read_report(path) for path in paths]
    _refuse_copies(paths, parts)
    try:
        whole = merged(parts, [str(path) for path in paths])
    except MergeError as error:
        raise InputError(str(error)) from None
    if shards is not None and whole.shards != shards:
        given = "1 shard" if whole.shards == 1 else f"{whole.shards} shards"
        raise InputError(f"there are reports of {given}, expected {shards}: {', '.join(map(str, paths))}")
    if shards is not None:
        _refuse_what_ran_twice(paths, parts, whole)
    _tell(whole, parts, verbose)
    for path in files:
        _write(path, whole)
    tell(told_to_github(whole, Path.cwd(), os.environ))
    sys.exit(0 if whole.passed else 1)


def _refuse_copies(paths: list[Path], parts: list[SessionReport]) -> None:
    for number, part in enumerate(parts):
        earlier = parts.index(part)
        if earlier < number and part.results:
            raise InputError(f"{paths[number]} is the same report as {paths[earlier]}: give each shard once")


def _refuse_what_ran_twice(paths: list[Path], parts: list[SessionReport], whole: SessionReport) -> None:
    """A job that was repeated stands for one that got lost, and the number of reports is right."""
    from pytest_gpumem.reports.merging import in_no_shard, run_twice

    idle, twice = in_no_shard(whole), run_twice(parts)
    if idle and twice is not None:
        earlier, later = twice
        raise InputError(
            f"{paths[later]} ran the same tests as {paths[earlier]}, and {_tests(idle)} ran in none of the shards: "
            f"{_named(idle)}; give each shard once, or, if this is meant, leave out --shards"
        )


def _write(path: Path, whole: SessionReport) -> None:
    from pytest_gpumem.reports.files import write_report

    try:
        write_report(path, whole)
    except OSError as error:
        raise InputError(f"{path}: the report cannot be written: {error}") from None


def _tell(whole: SessionReport, parts: list[SessionReport], verbose: int) -> None:
    from pytest_gpumem.cli.streams import screen, tell
    from pytest_gpumem.reports.terminal import failure_lines, terminal_text

    said = terminal_text(replace(whole, said=(*whole.said, *_lines(whole, parts))), screen(), verbose)
    tell(said.tables)
    tell(failure_lines(whole, screen()))
    # pytest tells these by itself, at the end of a session.
    there = {*whole.errors, whole.nothing_gated}
    tell(f"gpumem: {problem}" for problem in whole.problems if problem not in there)
    tell(said.lines)


def _lines(whole: SessionReport, parts: list[SessionReport]) -> list[str]:
    """What only the whole can tell, beside its verdict."""
    from pytest_gpumem.baselines.selecting import unused_line
    from pytest_gpumem.reports.merging import in_no_shard, several

    again, idle, unused = several(parts), in_no_shard(whole), whole.unused
    return [
        "merged: " + ("1 shard" if whole.shards == 1 else f"{whole.shards} shards"),
        *(
            [f"merged: {_tests(again)} ran in several of them, the worst result counts: {_named(again)}"]
            if again
            else []
        ),
        *([f"merged: {_tests(idle)} collected and selected in none of them: {_named(idle)}"] if idle else []),
        *([unused_line(unused)] if unused else []),
    ]


def _tests(tests: list[tuple[str, str]]) -> str:
    return "1 test" if len(tests) == 1 else f"{len(tests)} tests"


def _named(tests: list[tuple[str, str]]) -> str:
    named = [f"{file}::{test}" for file, test in tests[:_MOST_NAMED]]
    return ", ".join([*named, *(["..."] if len(tests) > _MOST_NAMED else [])])
