"""``gpumem compare``: two reports, or the store at two revisions, and what changed from one to the other."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pytest_gpumem.baselines.url_backend import without_credentials
from pytest_gpumem.cli import completion
from pytest_gpumem.cli.files import name_of, path_of
from pytest_gpumem.cli.project import committed, project_settings, read_baselines, store_backend
from pytest_gpumem.cli.streams import InputError, format_option, read_report, renamed, screen, write_lines
from pytest_gpumem.config.settings import DEFAULT_TOLERANCES, Settings
from pytest_gpumem.reports.comparison import NOTHING_COMPARED, Side, compared, side_of_report, side_of_store
from pytest_gpumem.reports.comparison_formats import lines, markdown, to_json


@click.command()
@click.argument("old", shell_complete=completion.slugs_and_files)
@click.argument("new", required=False, shell_complete=completion.slugs_and_files)
@click.option(
    "--store",
    metavar="PATH|URL",
    shell_complete=completion.folders,
    help="Where the baselines lie, if not where the project's settings say.",
)
@format_option("json", "markdown")
@renamed("--json", "--format json", is_flag=True)
@renamed("--markdown", "--format markdown", is_flag=True)
def compare(*, old: str, new: str | None, store: str | None, form: str) -> None:
    """Compare figures that are there, OLD with NEW, metric by metric; nothing is run.

    Each is a JSON report of a session (pytest --gpumem-report=FILE.json), a git revision of the store (a branch, a tag,
    HEAD~3), or a device's folder in it (emulated-h100-80gb). Without NEW it is the store as it lies here. Figures are judged as
    the gate would, with OLD for its baselines and the tolerances of the project's settings. Step times are judged where NEW is
    a report: baselines keep medians, which are shown and not judged. Where one side has figures of an emulated GPU and the
    other of a real one, these are compared.

    \b
    Examples:
      gpumem compare main HEAD
      gpumem compare v1.0
      gpumem compare last-week.json today.json --format markdown
      gpumem compare nvidia-h100-80gb-hbm3 emulated-h100-80gb

    A test that failed in NEW only is worse, whatever its figures say: by itself, by its budget or a relation, or because it did
    not run to its end.

    Exit status: 0 when nothing is worse, 1 when something regressed, or failed in NEW only, 2 when nothing could be compared,
    or for wrong input.
    """
    if old == new == "-":
        raise click.UsageError("OLD and NEW cannot both be standard input")
    settings = project_settings(store)
    found = compared(_side(old, settings), _side(new, settings), {**DEFAULT_TOLERANCES, **settings.tolerances})
    if form == "json":
        click.echo(to_json(found), nl=False)
    elif form == "markdown":
        click.echo(markdown(found, settings.units), nl=False)
    else:
        write_lines(lines(found, settings.units, screen()))
    if found.exit_status == NOTHING_COMPARED:
        click.echo("Error: nothing could be compared", err=True)
    sys.exit(found.exit_status)


def _side(name: str | None, settings: Settings) -> Side:
    """Return the figures that ``name`` means. Raises `InputError`."""
    if name is not None and (name == "-" or name.endswith(".json") or Path(name).is_file()):
        file = path_of(name)
        return side_of_report(name_of(file), read_report(file))
    here = store_backend(settings)
    if name is None:
        return side_of_store(without_credentials(settings.store), read_baselines(here))
    try:
        revision, there = committed(name, here, "; a JSON report is a file that ends with .json")
    except InputError as no_revision:
        try:
            return side_of_store(name, read_baselines(here, name))
        except InputError:
            raise no_revision from None
    return side_of_store(revision, read_baselines(there))
