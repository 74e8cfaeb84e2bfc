"""``gpumem cache``: the environments that `gpumem ab` and `gpumem bisect` have made, and the removal of what they keep."""

from __future__ import annotations

import time

import click

from pytest_gpumem import user_cache
from pytest_gpumem.cli.ab import environments
from pytest_gpumem.cli.streams import input_errors, screen, write_lines
from pytest_gpumem.reports.layout import Column, Span, Table, laid_out
from pytest_gpumem.requirements.environments import bytes_in
from pytest_gpumem.units import counted, format_bytes


@click.command()
@click.option(
    "--clear",
    is_flag=True,
    help="Remove all of them, the runs of interrupted bisections, and what was compiled for emulated GPUs.",
)
def cache(*, clear: bool) -> None:
    """List the environments that sets of requirements were installed into, or remove them.

    They are kept in the user's cache, each by what it holds, and used again by `gpumem ab` and `gpumem bisect`. The variable
    GPUMEM_CACHE names another folder for all that is kept.

    \b
    Examples:
      gpumem cache
      gpumem cache --clear

    Exit status: 0 when done, 2 when the cache cannot be read or cleared.
    """
    kept = environments()
    with input_errors(OSError):
        found, unfinished = kept.kept(), kept.unfinished()
        sizes = [bytes_in(one.folder) for one in found]
    columns = (Column("requirements", left=True), Column("holds", left=True, weight=2), Column("made"), Column("size"))
    rows = tuple(
        tuple(
            map(
                Span,
                (
                    one.name,
                    ", ".join(f"{name} {version}" for name, version in one.packages.items()),
                    time.strftime("%Y-%m-%d", time.localtime(one.made)),
                    format_bytes(nbytes),
                ),
            )
        )
        for one, nbytes in zip(found, sizes, strict=True)
    )
    if rows:
        write_lines([*laid_out(Table(columns, rows), screen()), ""])
    told = f"{counted(len(found), 'environment')}, {format_bytes(sum(sizes))}"
    if unfinished:
        told += f", and {len(unfinished)} not finished, {format_bytes(sum(map(bytes_in, unfinished)))}"
    if clear:
        with input_errors(OSError):
            user_cache.clear()
    click.echo(f"gpumem cache: {'removed ' if clear else ''}{told}, in {kept.folder}")
