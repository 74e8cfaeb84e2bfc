"""The option ``--jobs``: how many tests or programs a command runs at the same time, limited by this machine's memory."""

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
"""Assumed memory for a run, in bytes: 0.6 to 1 GB for torch and a model library, and over 1 GB for the model."""


def jobs_option(limit: str) -> Callable[[_Function], _Function]:
    """Return the option ``--jobs``.

    Args:
        limit: A sentence for the end of the help text, about a rule for simultaneous runs.
    """
    return click.option(
        "--jobs",
        type=WholeNumber(min=1),
        default=1,
        show_default=True,
        metavar="N",
        help=f"Make N runs at the same time, for example `4`. Each run needs 2 GB of free memory; with less memory, fewer runs "
        f"are made at the same time. {limit}",
    )


def available() -> int | None:
    """Return the free memory for new programs, in bytes; ``None`` if the system does not report the number.

    On Linux, the number includes file caches, because the kernel frees them when programs need memory.
    """
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
    """Return how many simultaneous runs fit into memory: at least 1, and at most ``requested``.

    If the result is lower than ``requested``, print a line about it. For example, with 9 GB of free memory, 8 requested runs
    become 4.

    Args:
        requested: The number after ``--jobs``.
        free: Returns the free memory in bytes, or ``None`` if the number is unknown.
    """
    memory = free()
    jobs = requested if memory is None else max(1, min(requested, memory // A_RUN))
    if jobs < requested:
        click.echo(
            f"free memory is enough for {counted(jobs, 'run')} at a time, so --jobs {requested} is reduced to {jobs}",
            err=True,
        )
    return jobs
