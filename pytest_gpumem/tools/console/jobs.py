"""The option ``--jobs``: the number of simultaneous runs, limited by this machine's memory."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pytest_gpumem.base.units import counted
from pytest_gpumem.tools.console.streams import WholeNumber

if TYPE_CHECKING:
    from collections.abc import Callable

_Function = TypeVar("_Function", bound="Callable[..., Any]")
A_RUN = 2 * 2**30
"""Bytes assumed for each run. torch and a model library need 0.6 to 1 GB, and the model needs the rest."""


def jobs_option(limit: str) -> Callable[[_Function], _Function]:
    """Return the option ``--jobs``. ``limit`` is a sentence for the help text about another limit on the number."""
    return click.option(
        "--jobs",
        type=WholeNumber(min=1),
        default=1,
        show_default=True,
        metavar="N",
        help=f"Make this many runs at a time, for example `4`, if there are 2 GB of free memory for each. {limit}",
    )


def available() -> int | None:
    """Return the bytes of free memory, including file caches; ``None`` if the system does not report them."""
    with suppress(OSError):
        match = re.search(
            r"^MemAvailable:\s*(\d+) kB$", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE
        )
        if match:
            return int(match.group(1)) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def most_jobs(requested: int, free: Callable[[], int | None] = available) -> int:
    """Return how many simultaneous runs fit into memory, from 1 to ``requested``. If the number is lower, print it.

    For example, with 9 GB of free memory, 8 requested runs become 4.
    """
    memory = free()
    jobs = requested if memory is None else max(1, min(requested, memory // A_RUN))
    if jobs < requested:
        click.echo(f"there is memory for {counted(jobs, 'run')} at a time", err=True)
    return jobs
