"""The bytes that several processes hold at the same time, on an emulated GPU."""

from __future__ import annotations

import pytest

from tests.support.simultaneous_peaks import (  # noqa: F401 -- pytest collects them here
    OWN_TEST,
    TEST,
    session,
    test_bytes_held_at_the_same_time_are_exact_and_in_no_baseline,
    test_idle_and_killed_servers_do_not_count,
    test_the_own_process_counts_with_the_bytes_that_it_holds,
)


@pytest.mark.thorough
def test_a_budget_limits_the_sum_if_an_allocator_does_not_report_its_allocations(session):  # noqa: F811 -- the fixture
    done = session(TEST, "-k", "job and turns", LIMIT="15 MB", PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    assert "peak 18.87 MB, budget 15.00 MB" in done.stdout, done.stdout
    assert "the sum of 2 processes' peaks, an upper bound" in done.stdout, done.stdout
    assert "the processes held" not in done.stdout, done.stdout


@pytest.mark.thorough
def test_a_budget_limits_the_sum_if_the_own_allocator_does_not_report(session):  # noqa: F811 -- the fixture
    test = OWN_TEST.replace("def test_call(server, model, how)", "def test_call(server, how)")
    test = test.replace("gpumem\n@BOTH", 'gpumem(max_memory="15 MB")\n@BOTH').replace(
        "    server = parts", '    del parts.os.environ["PYTORCH_CUDA_ALLOC_CONF"]\n    server = parts'
    )
    done = session(test, "-k", "call and turns", PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    assert "over budget: peak " in done.stdout, done.stdout
    assert "the sum of 2 processes' peaks, an upper bound" in done.stdout, done.stdout
    assert "the processes held" not in done.stdout, done.stdout
