"""``gpumem why``: everything about one test, from the last report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pytest_gpumem.cli import completion
from pytest_gpumem.cli.files import FilePath, name_of
from pytest_gpumem.cli.one_test import check_is_no_file, keys_of_one_test, no_such_test
from pytest_gpumem.cli.project import files_around
from pytest_gpumem.cli.streams import InputError, read_report, screen, write_lines
from pytest_gpumem.command_name import command_name
from pytest_gpumem.gate.baseline import Key
from pytest_gpumem.reports.why import tests_of, why_lines
from pytest_gpumem.session.kept_report import kept_in
from pytest_gpumem.units import counted

if TYPE_CHECKING:
    from pathlib import Path


@click.command()
@click.argument("test", shell_complete=completion.tests)
@click.option(
    "--report",
    "file",
    metavar="FILE.json",
    type=FilePath(),
    help="Read this JSON report (pytest --gpumem-report, gpumem merge --report), and not that of the last session.",
)
def why(*, test: str, file: Path | None) -> None:
    """Tell everything about one test, from the last report; nothing is run.

    TEST is a test's id, a part of it that no other measured test's has, or a pattern with * and ?. What pytest -vv shows of it
    is shown: why it failed, every figure, phases, and what its peak is made of where that was recorded. The report is that of
    the last session here that ran a measured test, which pytest's cache keeps.

    \b
    Examples:
      gpumem why test_train_step
      gpumem why "tests/test_gpt.py::*[amp-bf16]"
      gpumem why test_train_step --report whole.json

    Exit status: 0 when the test was told of, 2 when it was not: no such test, several, or no report that can be read.
    """
    check_is_no_file(test)
    path = _kept(test) if file is None else file
    report = read_report(path)
    # A test without a measurement has a key, too.
    tests = tests_of(report)
    keys = [Key(*one, name) for one, names in tests.items() for name in names or ("",)]
    found = keys_of_one_test(test, keys)
    if not found:
        where = "the last session" if file is None else name_of(path)
        raise no_such_test(test, f"none of the {counted(len(tests), 'measured test')} of {where} is {test!r}", keys)
    write_lines(why_lines(report, found[0].file, found[0].test, screen()))


def _kept(test: str) -> Path:
    """Return the file that keeps the report of the last session here. Raises `InputError` where there is none."""
    cache = files_around().cache
    else_written = f"`pytest --gpumem-report=FILE.json` writes one for `{command_name()} why {test} --report FILE.json`"
    if cache is None:
        raise InputError(f"no report is kept, as pytest's cache is switched off (-p no:cacheprovider): {else_written}")
    path = kept_in(cache)
    if not path.is_file():
        raise InputError(
            f"no report is kept: there is no file {path}. `pytest --gpumem-baseline` keeps one, as does any other run with a "
            f"measured test, unless pytest's cache is switched off or cannot be written; {else_written}"
        )
    return path
