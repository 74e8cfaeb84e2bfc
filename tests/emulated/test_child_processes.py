"""Processes that a test, its fixtures or its session start, on an emulated GPU."""

from __future__ import annotations

from tests.support.child_processes import (  # noqa: F401 -- pytest collects them here
    session,
    test_a_process_whose_memory_is_not_known_fails_the_gate_with_the_reason,
    test_a_server_has_the_peak_that_it_computes_and_its_leak_and_growth_are_red,
    test_each_way_to_start_a_process_is_measured_and_a_grown_process_is_red,
    test_workers_that_change_places_are_green_and_a_grown_worker_is_the_only_red_one,
)
from tests.support.process_table import (  # noqa: F401 -- likewise
    test_a_test_is_red_exactly_if_its_process_has_a_fault,
    test_the_first_diagonal_has_each_fault,
)
