"""Jobs of several ranks on the CPU, started as users start them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.jobs import Job, run_job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def torchrun(warm_python) -> Callable[..., Job]:
    """Run pytest on some ranks in a folder. No time is taken unless ``timed``."""

    def run(folder: Path, ranks: int, *arguments: str, timed: bool = False, **variables: str) -> Job:
        more = [] if timed else ["--gpumem-no-time"]
        return run_job(folder, ranks, *more, *arguments, python=warm_python(), **variables)

    return run
