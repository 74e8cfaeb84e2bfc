"""Jobs of several ranks on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.processes import Job, run_job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., Job]:
    """Run pytest on some ranks in a folder. No time is taken unless ``timed``."""

    def run(folder: Path, ranks: int, *arguments: str, timed: bool = False, **more: Any) -> Job:
        untimed = [] if timed else ["--no-gpumem-time"]
        return run_job(folder, ranks, *untimed, *arguments, **more)

    return run
