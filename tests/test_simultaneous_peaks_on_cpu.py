"""The bytes that several processes hold at the same time, on the CPU.

By default, `tests/emulated` runs the same tests on an emulated GPU, and `tests/emulated_process/test_shared_bytes.py` looks at the
bytes that a process publishes on the CPU.
"""

from __future__ import annotations

import pytest

from tests.support.cpu_sessions import CpuSessions
from tests.support.simultaneous_peaks import (  # noqa: F401 -- pytest collects them here
    session,
    test_a_budget_limits_the_bytes_held_at_the_same_time_and_not_the_sum,
    test_bytes_held_at_the_same_time_are_exact_and_in_no_baseline,
    test_idle_and_killed_servers_do_not_count,
    test_the_own_process_counts_with_the_bytes_that_it_holds,
)

pytestmark = pytest.mark.thorough


@pytest.fixture
def processes(tmp_path):
    return CpuSessions(tmp_path)
