"""Provenance of a baseline: date and commit."""

from __future__ import annotations

import datetime
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def today() -> str:
    """Return the date in UTC: ``"2026-11-02"``."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def this_second() -> str:
    """Return the time in UTC: ``"2026-11-02T16:20:05Z"``."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def commit_of(folder: Path) -> str | None:
    """Return the abbreviated hash of the commit checked out in ``folder``; ``None`` outside of a repository, or without git."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "--short=9", "HEAD"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
