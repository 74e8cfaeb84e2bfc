"""Processes that a test, its fixtures or its session start, on an emulated GPU.

`test_child_processes_in_full` has further tests.
"""

from __future__ import annotations

from tests.support.child_processes import (  # noqa: F401 -- pytest collects them here
    session,
    test_a_server_has_the_peak_that_it_computes_and_its_leak_and_growth_are_red,
)
from tests.support.process_table import (  # noqa: F401 -- likewise
    test_a_test_is_red_exactly_if_its_process_has_a_fault,
    test_the_first_diagonal_has_each_fault,
)
