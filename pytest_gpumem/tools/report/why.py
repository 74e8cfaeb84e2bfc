"""``gpumem why``: prints all details about a test from the report of the last session."""

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
    "Default: the report of the last pytest session in this project.",
)
def why(*, test: str, file: Path | None) -> None:
    """Explain the verdict on one test, from the last report.

    The command runs no test. For TEST, it prints the same details as `pytest -vv`: the result, the failure message, all
    metrics of each measurement, the peaks of phases, and the composition of the peak if it was recorded. If TEST is
    parametrized by step configs, the command prints all configs, because each saving is relative to the first config.

    TEST is a test's id, for example `tests/test_gpt.py::test_train`, a part that no other measured test's id contains,
    or a pattern with `*` and `?`. If several tests match, the command lists them.

    \b
    Examples:
      gpumem why test_train_step
      gpumem why "tests/test_gpt.py::*[amp-bf16]"
      gpumem why test_train_step --report gpumem.json

    Exit status: 0 if the test was found, 1 after Ctrl-C, 2 for wrong usage, or if TEST matches no measured test or
    several measured tests, or there is no report.
    \f
    ## The kept report

    - pytest's [cache](https://docs.pytest.org/en/stable/how-to/cache.html) keeps the report of the last session in
      which a measured test ran, with or without a gate. The file is `d/gpumem/report.json` in the folder that the setting
      `cache_dir` names, by default `.pytest_cache`.
    - With pytest-xdist, the controller writes the report. Under torchrun, the first rank writes the report.
    - A session without a measured test does not change the report. `pytest --cache-clear` removes the report.
    - No report is kept with `-p no:cacheprovider`, or if the cache cannot be written. The session does not fail because of
      this.
    - If `cache_dir` was set on pytest's command line (`-o cache_dir=...`), this command does not find the report. Name the
      report with `--report`.

    ## What is printed

    - The output also includes notes, the reason if a metric was not compared, and the peak of each rank.
    - The composition of the peak is recorded if a test fails, and with `--gpumem-explain=always` for all tests.
    - In a merged report, a test can have results from several devices. All results are printed.
    - pytest's tracebacks and the captured output of a test are not in the report.
    """
    check_is_no_file(test)
    path = _kept(test) if file is None else file
    report = read_report(path)
    # A test without a measurement gets a key with an empty name, so the user can select this test as well.
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
    """Return the file with the report of the last session in this project. Raises `InputError` if there is no such file.

    Args:
        test: The argument TEST, for a command in the error message.
    """
    cache = files_around().cache
    alternative = f"`pytest --gpumem-report=FILE.json` writes one for `{command_name()} why {test} --report FILE.json`"
    if cache is None:
        raise InputError(
            f"no report is kept, because pytest's cache is switched off (-p no:cacheprovider): {alternative}"
        )
    path = cached_report_path(cache)
    if not path.is_file():
        raise InputError(
            f"no report is kept: there is no file {path}. `pytest --gpumem-baseline` and any other session with a measured "
            f"test keep a report there, unless pytest's cache is switched off or cannot be written; {alternative}"
        )
    return path
