"""Limit of the runs at a time by the memory of this machine."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

A_RUN = 2 * 2**30
"""Bytes that are taken for a run: torch and a model library are 0.6 to 1 GB resident, the rest is the model's."""


def available() -> int | None:
    """Return the bytes of memory that can be used, with what caches of files give back; ``None`` if the system does not say."""
    with suppress(OSError):
        found = re.search(
            r"^MemAvailable:\s*(\d+) kB$", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE
        )
        if found:
            return int(found.group(1)) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def most_jobs(wanted: int, free: Callable[[], int | None] = available) -> int:
    """Return how many of the ``wanted`` runs at a time there is memory for: at least one."""
    memory = free()
    return wanted if memory is None else max(1, min(wanted, memory // A_RUN))
