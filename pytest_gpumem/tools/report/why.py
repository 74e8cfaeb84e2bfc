"""``gpumem why``: prints everything about one test from the last report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pytest_gpumem.base.command_name import command_name
from pytest_gpumem.base.units import counted
from pytest_gpumem.judging.gate.baseline import Key
from pytest_gpumem.plugin.session.cached_report import cached_report_path
from pytest_gpumem.reporting.reports.why import tests_of, why_lines
from pytest_gpumem.tools.console import completion
from pytest_gpumem.tools.console.files import FilePath, name_of
from pytest_gpumem.tools.console.one_test import check_is_no_file, keys_of_one_test, no_such_test
from pytest_gpumem.tools.console.project import files_around
from pytest_gpumem.tools.console.streams import InputError, read_report, screen, write_lines

if TYPE_CHECKING:
    from pathlib import Path


@click.command()
@click.argument("test", shell_complete=completion.tests)
@click.option(
    "--report",
    "file",
    metavar="FILE.json",
    type=FilePath(),
    help="Read this JSON report, for example the artifact of a CI job or a report from `gpumem merge`; `-` is standard input. "
    "Default: the report of the last session here.",
)
def why(*, test: str, file: Path | None) -> None:
    """Explain the verdict on one test, from the last report.

    The command runs nothing. It prints the same as `pytest -vv` for this test: the result, the failure message, all
    metrics of each measurement, the peaks of phases, and the composition of the peak if it was recorded. For a test in
    a matrix of configs, it prints all configs, because their savings are compared with the first config.

    TEST is a test's id, for example `tests/test_gpt.py::test_train`, a part of the id that no other measured test has,
    or a pattern with `*` and `?`. If several tests match, the command lists them.

    \b
    Examples:
      gpumem why test_train_step
      gpumem why "tests/test_gpt.py::*[amp-bf16]"
      gpumem why test_train_step --report gpumem.json

    Exit status: 0 if the test was found, 1 after Ctrl-C, 2 for wrong usage, or if no measured test or more than
    one matches TEST, or there is no report.
    \f
    ## The kept report

    - pytest's [cache](https://docs.pytest.org/en/stable/how-to/cache.html) keeps the report of the last session in
      which a measured test ran, with or without a gate. The file is `d/gpumem/report.json` in the `cache_dir` of
      pytest's settings.
    - With pytest-xdist the controller writes the report, and under torchrun the first rank does.
    - A session without a measured test leaves the report unchanged. `pytest --cache-clear` removes it.
    - No report is kept with `-p no:cacheprovider`, or if the cache cannot be written. Neither makes a session fail.
    - This command does not know a `cache_dir` from pytest's command line (`-o cache_dir=...`). Use `--report`.

    ## What is printed

    - The output includes the reasons why a metric was not compared, notes, and the peaks of ranks.
    - The composition of the peak is recorded for failures, and for all tests with `--gpumem-explain=always`.
    - In a merged report, a test can have a result on each device. All of them are printed.
    - pytest's own tracebacks and the captured output of a test are not in the report.
    """
    check_is_no_file(test)
    path = _kept(test) if file is None else file
    report = read_report(path)
    # A test without a measurement gets a key with an empty name.
    tests = tests_of(report)
    keys = [Key(*test_id, name) for test_id, names in tests.items() for name in names or ("",)]
    selected = keys_of_one_test(test, keys)
    if not selected:
        source = "the last session" if file is None else name_of(path)
        raise no_such_test(
            test, f"none of the {counted(len(tests), 'measured test')} in {source} matches {test!r}", keys
        )
    write_lines(why_lines(report, selected[0].file, selected[0].test, screen()))


def _kept(test: str) -> Path:
    """Return the file with the report of the last session here. Raises `InputError` if it does not exist."""
    cache = files_around().cache
    alternative = f"`pytest --gpumem-report=FILE.json` writes one for `{command_name()} why {test} --report FILE.json`"
    if cache is None:
        raise InputError(
            f"no report is kept, because pytest's cache is switched off (-p no:cacheprovider): {alternative}"
        )
    path = cached_report_path(cache)
    if not path.is_file():
        raise InputError(
            f"no report is kept: there is no file {path}. `pytest --gpumem-baseline` keeps one, as does any other run with a "
            f"measured test, unless pytest's cache is switched off or cannot be written; {alternative}"
        )
    return path
