"""``gpumem cache``: lists the virtual environments that `gpumem ab` and `gpumem bisect` cached, or removes the cache."""

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
    help="Remove all cached environments, the stored runs of interrupted bisections, and the compiled libraries for emulated "
    "GPUs.",
)
def cache(*, clear: bool) -> None:
    """List the cached environments of ab and bisect, or remove them.

    `gpumem ab` and `gpumem bisect` install requirements such as `transformers==4.38.2` into virtual environments, and use these
    environments again. For each environment, a line shows the requirements, the installed packages, the day of the installation
    and the size. An environment is not finished while another command installs it, or after an interrupted installation. Such
    environments are not listed, but only counted in the last line.

    \b
    Examples:
      gpumem cache
      gpumem cache --clear

    Exit status: 0 if the environments were listed or removed, 1 after Ctrl-C, 2 if the cache cannot be read or removed, or for
    wrong usage.
    \f
    ## `--clear`

    The command removes only its own files, and keeps other files in the folder.

    ## The folder

    - The environment variable `GPUMEM_CACHE` names the cache folder. By default, it is `$XDG_CACHE_HOME/pytest-gpumem`, usually
      `~/.cache/pytest-gpumem` on Linux.
    - The commands load libraries and run programs from this folder, so they make it accessible only to you.
    - The commands refuse a folder if it belongs to another user, is a symbolic link, or contains files while other users can
      write to it. For example, root with the home folder of another user gets
      `the cache /home/ada/.cache/pytest-gpumem is not used: the folder belongs to another user; set GPUMEM_CACHE to a new
      folder, or remove this one if it is yours`.
    - The commands also refuse a folder if other users can replace it, because they can write to its parent folder. A parent
      folder with the sticky bit, such as `/tmp`, is safe.
    - In GitHub Actions, the [action](../ci.md) uses a cache in the job's temporary folder, so no earlier job can have changed
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
