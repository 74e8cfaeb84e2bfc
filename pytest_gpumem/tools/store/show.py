"""``gpumem show``: prints the baselines in the store as a table."""

from __future__ import annotations

import click

from pytest_gpumem.base.command_name import command_name
from pytest_gpumem.judging.baselines.bucket import without_credentials
from pytest_gpumem.judging.baselines.selecting import matches
from pytest_gpumem.reporting.reports.layout import laid_out
from pytest_gpumem.reporting.reports.stored import accounting, table, to_json
from pytest_gpumem.tools.console import completion
from pytest_gpumem.tools.console.one_test import check_is_no_file, no_such_test
from pytest_gpumem.tools.console.project import project_settings, read_baselines, store_backend
from pytest_gpumem.tools.console.store_options import slug_option, store_option
from pytest_gpumem.tools.console.streams import format_option, screen, write_lines


@click.command()
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1, shell_complete=completion.tests)
@store_option
@slug_option
@format_option("json")
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Also show counts, and the peak and time of each phase (forward, backward, optimizer).",
)
def show(*, patterns: tuple[str, ...], store: str | None, slug: str | None, form: str, verbose: bool) -> None:
    """Show the baselines in the store, a row for each.

    A step time is the median of several runs, and the row shows their number: `12.00 ms (3 runs)`. The gate does not compare
    step times marked `not compared`.

    PATTERN selects tests: an id, a part of an id (a file, a class, a word), or a pattern with `*` and `?`. If PATTERN is
    missing, all baselines are shown. If PATTERN matches no baseline, the command ends with an error.

    \b
    Examples:
      gpumem show
      gpumem show tests/test_gpt.py "*[amp-bf16]"
      gpumem show --slug nvidia-h100-80gb-hbm3 --format json

    Exit status: 0 if the baselines were printed, even if the store is empty, 1 after Ctrl-C, 2 for wrong usage,
    or if the store or the device does not exist, PATTERN matches no baseline, or a file in the store cannot be read.
    \f
    ## JSON

    `--format json` prints an object with `format` (1), `store` and `baselines`. A URL in `store` has no credentials.
    Each baseline has these keys:

    | key | value |
    |---|---|
    | `file`, `test`, `name` | the test and its measurement; `file::test` is the test's id |
    | `slug`, `device` | the name of the device's folder in the store, and the device's own name |
    | `environment` | versions and settings that can change a metric, by name |
    | `workload` | the measured work: `step`, `config`, `parameters` and `batch` |
    | `metrics` | the value of each [metric](metrics.md) by name, in bytes, counts and seconds |
    | `runs` | the step times of the last runs, as `seconds` and `cycles`; or `null` |
    | `recorded`, `commit`, `reason` | the day, the commit and the reason of the baseline's last change |
    | `composition` | the rows of the peak's composition, as strings; or `null` |
    """
    settings = project_settings(store)
    location = without_credentials(settings.store)
    baselines = read_baselines(store_backend(settings), slug)
    for pattern in patterns:
        if not any(matches(baseline.key, pattern) for baseline in baselines):
            check_is_no_file(pattern)
            hint = f"`{command_name()} show` lists all baselines"
            raise no_such_test(
                pattern, f"no baseline matches {pattern}", [baseline.key for baseline in baselines], hint
            )
    selected = [
        baseline
        for baseline in baselines
        if not patterns or any(matches(baseline.key, pattern) for pattern in patterns)
    ]
    if form == "json":
        click.echo(to_json(selected, location), nl=False)
        return
    rows = table(selected, settings.units, everything=verbose)
    write_lines([*laid_out(rows, screen()), ""] if rows is not None else [])
    write_lines([f"gpumem: {accounting(selected, len(baselines), location)}"])
