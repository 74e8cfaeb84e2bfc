"""Processes that still run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def is_alive(pid: int) -> bool:
    """Return whether a process runs: one that waits for being reaped has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_ended(pids: Iterable[int], seconds: float = 60) -> None:
    """Wait until processes have ended: what a signal was sent to has not yet."""
    until = time.monotonic() + seconds
    left = list(pids)
    while left and time.monotonic() < until:
        left = [pid for pid in left if is_alive(pid)]
        time.sleep(0.02)
    assert not left, f"processes that still run: {left}"
