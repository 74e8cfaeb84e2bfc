"""Processes on an emulated GPU, which thorough runs start. The CPU's run by default: `tests/test_child_processes_on_cpu.py`."""

from __future__ import annotations

import pytest

from tests.support.child_processes import (  # noqa: F401 -- pytest collects them here
    session,
    test_a_process_whose_memory_is_not_known_fails_the_gate_with_the_reason,
    test_each_way_to_start_a_process_is_measured_and_a_grown_process_is_red,
    test_workers_that_change_places_are_green_and_a_grown_worker_is_the_only_red_one,
)

pytestmark = pytest.mark.thorough
