"""``gpumem show``: the baselines of the store as a table."""

from __future__ import annotations

import click

from pytest_gpumem.baselines.selecting import matches
from pytest_gpumem.baselines.url_backend import without_credentials
from pytest_gpumem.cli import completion
from pytest_gpumem.cli.one_test import check_is_no_file, no_such_test
from pytest_gpumem.cli.project import project_settings, read_baselines, store_backend
from pytest_gpumem.cli.streams import format_option, screen, write_lines
from pytest_gpumem.command_name import command_name
from pytest_gpumem.reports.layout import laid_out
from pytest_gpumem.reports.stored import accounting, table, to_json


@click.command()
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1, shell_complete=completion.tests)
@click.option(
    "--store",
    metavar="PATH|URL",
    shell_complete=completion.folders,
    help="Where the baselines lie, if not where the project's settings say.",
)
@click.option(
    "--slug",
    metavar="SLUG",
    shell_complete=completion.slugs,
    help="Those of one device only, by the name of its folder in the store.",
)
@format_option("json")
@click.option("-v", "--verbose", is_flag=True, help="Also the peaks and times of phases, and counts of work.")
def show(*, patterns: tuple[str, ...], store: str | None, slug: str | None, form: str, verbose: bool) -> None:
    """Show the baselines that are in the store.

    A PATTERN is a test's id, a part of it (a file, a class, a word), or a pattern with * and ?. Without one all baselines are
    shown, of all devices. Behind the step time stands of how many runs it is the median.

    \b
    Examples:
      gpumem show
      gpumem show tests/test_gpt.py "*[amp-bf16]"
      gpumem show --slug nvidia-h100-80gb-hbm3 --format json

    Exit status: 0 when the baselines were shown, also when the store is empty, 2 when there is no such store, device or test,
    or a file of the store cannot be read.
    """
    settings = project_settings(store)
    where = without_credentials(settings.store)
    baselines = read_baselines(store_backend(settings), slug)
    for pattern in patterns:
        if not any(matches(one.key, pattern) for one in baselines):
            check_is_no_file(pattern)
            lists = f"`{command_name()} show` lists them all"
            raise no_such_test(pattern, f"no baseline is of {pattern}", [one.key for one in baselines], lists)
    kept = [one for one in baselines if not patterns or any(matches(one.key, pattern) for pattern in patterns)]
    if form == "json":
        click.echo(to_json(kept, where), nl=False)
        return
    found = table(kept, settings.units, everything=verbose)
    write_lines([*laid_out(found, screen()), ""] if found is not None else [])
    write_lines([f"gpumem: {accounting(kept, len(baselines), where)}"])
