"""Budgets for the bytes that several processes hold at the same time, on an emulated GPU. By default the CPU has these tests."""

from __future__ import annotations

import pytest

from tests.support.simultaneous_peaks import (  # noqa: F401 -- pytest collects them here
    session,
    test_a_budget_limits_the_bytes_held_at_the_same_time_and_not_the_sum,
)

pytestmark = pytest.mark.thorough
