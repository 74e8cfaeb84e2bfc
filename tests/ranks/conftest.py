"""Jobs of several ranks on the CPU, started as users start them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.jobs import Job, run_job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def torchrun(warm_python) -> Callable[..., Job]:
    """Run pytest on some ranks in a folder; with ``dies`` each rank is a Python of its own. No time is taken unless ``timed``."""

    def run(
        folder: Path, ranks: int, *arguments: str, dies: bool = False, timed: bool = False, **variables: str
    ) -> Job:
        warm = warm_python()
        more = [] if timed else ["--gpumem-no-time"]
        return run_job(
            folder, ranks, *more, *arguments, python=warm, rank_python=sys.executable if dies else warm, **variables
        )

    return run
