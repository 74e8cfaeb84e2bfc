"""``gpumem compare``: compares two reports, the store at two git revisions, or two devices in the store."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pytest_gpumem.judging.baselines.bucket import without_credentials
from pytest_gpumem.plugin.config.settings import DEFAULT_TOLERANCES, Settings
from pytest_gpumem.reporting.reports.comparison import (
    NOTHING_COMPARED,
    Side,
    compare_sides,
    side_of_report,
    side_of_store,
)
from pytest_gpumem.reporting.reports.comparison_formats import lines, markdown, to_json
from pytest_gpumem.tools.console import completion
from pytest_gpumem.tools.console.files import name_of, path_of
from pytest_gpumem.tools.console.project import committed, project_settings, read_baselines, store_backend
from pytest_gpumem.tools.console.store_options import store_option
from pytest_gpumem.tools.console.streams import InputError, format_option, read_report, screen, write_lines


@click.command()
@click.argument("old", shell_complete=completion.slugs_and_files)
@click.argument("new", required=False, shell_complete=completion.slugs_and_files)
@store_option
@format_option("json", "markdown")
def compare(*, old: str, new: str | None, store: str | None, form: str) -> None:
    """Compare two reports, two revisions of the store, or two devices.

    The command runs no test. It compares earlier figures: a JSON report (`pytest
    --gpumem-report=FILE.json`), the store at a git revision (`main`, `HEAD~3`), or the baselines from a device in the store
    (`emulated-h100-80gb`). If NEW is missing, OLD is compared with the store in the current checkout. The command prints a
    line for each metric that changed from OLD to NEW, and for each measurement that is only in OLD or only in NEW.

    Figures are compared as by the gate: OLD is the baseline, and the tolerances come from the project's settings. A test that
    failed only in NEW counts as worse, even if its figures are better.

    \b
    Examples:
      gpumem compare main HEAD
      gpumem compare v1.0
      gpumem compare last-week.json today.json --format markdown
      gpumem compare nvidia-h100-80gb-hbm3 emulated-h100-80gb

    Exit status: 0 if no test is worse, 1 if a test regressed or failed only in NEW, or after Ctrl-C, 2 if nothing could be
    compared, or for wrong usage or input that cannot be read.
    \f
    ## `OLD` and `NEW`

    - A name is a report if it ends with `.json`, or if a file has this name. `-` is a report on standard input. Any other
      name is a git revision. If git does not know the name, it is a device, named like its folder in the
      [store](store-format.md).
    - Credentials in a store's URL are not shown.

    ## Verdicts

    - Measurements are compared only if they come from the same device and the same workload.
    - **Tolerances** come from the settings. The marker's limits, budgets and the hook for tolerances are not applied.
    - **Emulated and real GPU:** if `OLD` has a test's figures from an emulated GPU, and `NEW` has figures from the real GPU of
      this kind, or the other way round, the figures are compared with the tolerances of
      [`--gpumem-against`](options.md#--gpumem-against).
    - **Step times** get a verdict only if `NEW` is a report, because a report contains the times of all rounds. Baselines
      contain only the medians. If the medians differ by more than the tolerance, they are printed without a verdict. Use
      `gpumem ab` to compare the speed of two revisions.
    - **`failed`** means: the test failed in the report `NEW` and not in `OLD`, by itself, in its tear-down, by its budget or a
      relation, or because it did not finish. A test is also `failed` if it has figures in `OLD`, and its file could not be
      collected in `NEW`. A regressed test is not listed again as `failed`.
    - Tests that are `gone` (only in `OLD`) or `unmeasured` (in `NEW` without figures, for example skipped) do not count as
      worse.

    ## JSON

    `--format json` prints an object. Figures are in bytes, seconds and counts. Infinity and NaN are strings, as in
    [session reports](reports.md).

    | key | value |
    |---|---|
    | `format` | 1 |
    | `exit_status` | the command's exit status |
    | `old`, `new` | the names of `OLD` and `NEW` |
    | `tests` | `file`, `test`, `name`, `slug`, `old_slug` (if it differs), `outcome`, `reason`, `metrics` |
    | `added` | measurements only in `NEW`, with `peak_allocated` |
    | `gone` | measurements only in `OLD`, with `peak_allocated`, `reason` and `failed` |
    | `failed` | `file`, `test` and `reason` of each test that failed only in `NEW` |
    | `causes`, `not_explained` | the causes of growth in several tests, as in a session report |

    Each entry in `metrics` has `metric`, `outcome`, `old`, `new`, `allowed` and `reason`.
    """
    if old == new == "-":
        raise click.UsageError("OLD and NEW cannot both be standard input")
    settings = project_settings(store)
    comparison = compare_sides(
        _side(old, settings), _side(new, settings), {**DEFAULT_TOLERANCES, **settings.tolerances}
    )
    if form == "json":
        click.echo(to_json(comparison), nl=False)
    elif form == "markdown":
        click.echo(markdown(comparison, settings.units), nl=False)
    else:
        write_lines(lines(comparison, settings.units, screen()))
    if comparison.exit_status == NOTHING_COMPARED:
        click.echo("Error: nothing could be compared", err=True)
    sys.exit(comparison.exit_status)


def _side(name: str | None, settings: Settings) -> Side:
    """Return the figures in a report, at a git revision of the store, or from a device in the store.

    Args:
        name: The argument OLD or NEW. ``None`` means the store in the current checkout.
        settings: The project's settings, which name the store.

    Raises:
        InputError: The name is not a report, a revision or a device, or the figures cannot be read.
    """
    if name is not None and (name == "-" or name.endswith(".json") or Path(name).is_file()):
        file = path_of(name)
        return side_of_report(name_of(file), read_report(file))
    current = store_backend(settings)
    if name is None:
        return side_of_store(without_credentials(settings.store), read_baselines(current))
    try:
        revision, at_revision = committed(name, current, "; a JSON report is a file that ends with .json")
    except InputError as no_revision:
        try:
            return side_of_store(name, read_baselines(current, name))
        except InputError:
            raise no_revision from None
    return side_of_store(revision, read_baselines(at_revision))
