"""``gpumem cache``: lists the cached environments of `gpumem ab` and `gpumem bisect`, or removes the cache."""

from __future__ import annotations

import time

import click

from pytest_gpumem.base import user_cache
from pytest_gpumem.base.requirements.environments import bytes_in
from pytest_gpumem.base.units import counted, format_bytes
from pytest_gpumem.reporting.reports.layout import Column, Span, Table, laid_out
from pytest_gpumem.tools.ab.command import environments
from pytest_gpumem.tools.console.streams import input_errors, screen, write_lines


@click.command()
@click.option(
    "--clear",
    is_flag=True,
    help="Remove all cached environments, the runs of interrupted bisections, and the compiled libraries of emulated GPUs.",
)
def cache(*, clear: bool) -> None:
    """List the cached environments of ab and bisect, or remove them.

    `gpumem ab` and `gpumem bisect` install requirements such as `transformers==4.38.2` into virtual environments, and use
    them again. A line shows the requirements, the installed packages, the day and the size. Unfinished environments are
    only counted: another command is installing them, or an installation was interrupted and will be repeated.

    \b
    Examples:
      gpumem cache
      gpumem cache --clear

    Exit status: 0 if the environments were listed or removed, 1 after Ctrl-C, 2 if the cache cannot be read or removed, or for
    wrong usage.
    \f
    ## `--clear`

    Other files in the folder are kept.

    ## The folder

    - The cache is the folder in `GPUMEM_CACHE`. By default it is `$XDG_CACHE_HOME/pytest-gpumem`, on Linux usually
      `~/.cache/pytest-gpumem`.
    - Only the user can enter the folder, because libraries and programs in it are loaded and run.
    - A folder is refused if it belongs to another user, if it contains files and others could write to it, or if it is a link.
      For example, root with the home folder of another user gets
      `the cache /home/ada/.cache/pytest-gpumem is not used: the folder belongs to another user; set GPUMEM_CACHE to a new
      folder, or remove this one if it is yours`.
    - A folder is also refused if others could replace it, because they can write to the folder around it. A folder with the
      sticky bit, such as `/tmp`, is fine.
    - In GitHub Actions, the [action](../ci.md) uses a folder in the job's temporary folder, so no earlier job can have changed
      the cache.
    """
    cached = environments()
    with input_errors(OSError):
        finished, unfinished = cached.finished(), cached.unfinished()
        sizes = [bytes_in(environment.folder) for environment in finished]
    columns = (Column("requirements", left=True), Column("holds", left=True, weight=2), Column("made"), Column("size"))
    rows = tuple(
        tuple(
            map(
                Span,
                (
                    environment.name,
                    ", ".join(f"{name} {version}" for name, version in environment.packages.items()),
                    time.strftime("%Y-%m-%d", time.localtime(environment.created)),
                    format_bytes(nbytes),
                ),
            )
        )
        for environment, nbytes in zip(finished, sizes, strict=True)
    )
    if rows:
        write_lines([*laid_out(Table(columns, rows), screen()), ""])
    summary = f"{counted(len(finished), 'environment')}, {format_bytes(sum(sizes))}"
    if unfinished:
        summary += f", and {len(unfinished)} not finished, {format_bytes(sum(map(bytes_in, unfinished)))}"
    if clear:
        with input_errors(OSError):
            user_cache.clear()
    click.echo(f"gpumem cache: {'removed ' if clear else ''}{summary}, in {cached.folder}")
