"""Options for commands with baselines: the store, and a device in the store."""

from __future__ import annotations

import click

from pytest_gpumem.tools.console import completion

store_option = click.option(
    "--store",
    metavar="PATH|URL",
    shell_complete=completion.folders,
    help="Use the store in this folder, relative to the current folder, or at this URL, for example `../gpumem-baselines`. "
    "Default: the store in the project's settings, which are read as in pytest, with `addopts`.",
)
slug_option = click.option(
    "--slug",
    metavar="SLUG",
    shell_complete=completion.slugs,
    help="Use the baselines from one device only. SLUG is the name of the device's folder in the store, for example "
    "`nvidia-h100-80gb-hbm3`. Default: all devices.",
)
