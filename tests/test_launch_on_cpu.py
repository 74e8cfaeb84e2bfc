"""Launched jobs on the CPU."""

from __future__ import annotations

import pytest

from tests.support.cpu_sessions import CpuSessions
from tests.support.launched_jobs import (  # noqa: F401 -- pytest collects them here
    session,
    test_a_job_whose_figures_would_be_too_low_fails_with_the_reason,
    test_each_process_has_the_peak_that_it_prints_and_a_grown_process_is_red,
)


@pytest.fixture
def processes(tmp_path):
    return CpuSessions(tmp_path)
