"""Number of runs at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_gpumem.tools.console.jobs import A_RUN, available, most_jobs


def test_no_more_runs_at_a_time_than_there_is_memory_for():
    assert most_jobs(8, lambda: 5 * A_RUN) == 5
    assert most_jobs(2, lambda: 5 * A_RUN) == 2
    assert most_jobs(8, lambda: A_RUN // 2) == 1
    assert most_jobs(8, lambda: None) == 8


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="reads Linux's /proc/meminfo")
def test_memory_that_caches_of_files_hold_can_be_used(monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda _name: 1)
    assert available() > 10**6
