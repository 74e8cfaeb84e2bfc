"""Launched jobs on an emulated GPU, which thorough runs start. The CPU's run by default: `tests/test_launch_on_cpu.py`."""

from __future__ import annotations

import pytest

from tests.support.launched_jobs import (  # noqa: F401 -- pytest collects them here
    session,
    test_a_job_whose_figures_would_be_too_low_fails_with_the_reason,
    test_each_process_has_the_peak_that_it_prints_and_a_grown_process_is_red,
)

pytestmark = pytest.mark.thorough
