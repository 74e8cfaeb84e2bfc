"""The options ``--store`` and ``--slug``, which several commands share."""

from __future__ import annotations

import click

from pytest_gpumem.tools.console import completion

store_option = click.option(
    "--store",
    metavar="PATH|URL",
    shell_complete=completion.folders,
    help="Use the baselines in this folder or at this URL, for example `../gpumem-baselines`. Default: the store in the "
    "project's settings, or in `addopts` of pytest's settings.",
)
slug_option = click.option(
    "--slug",
    metavar="SLUG",
    shell_complete=completion.slugs,
    help="Use only the baselines from one device. SLUG is the name of the device's folder in the store, for example "
    "`nvidia-h100-80gb-hbm3`. Default: all devices.",
)
