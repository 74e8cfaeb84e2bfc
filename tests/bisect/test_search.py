"""Binary search in a row of which some cannot be judged."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.bisect.memory import A_RUN, available, most_jobs
from pytest_gpumem.bisect.search import bounds, next_ones


def searched(count, first_bad, skipped=frozenset(), jobs=1):
    """Search a row, and return its bounds, the number of rounds of runs, and all that is known."""
    known = {0: "good", count - 1: "bad"}
    rounds = 0
    while wanted := next_ones(count, known, jobs):
        assert len(wanted) <= jobs
        rounds += 1
        for at in wanted:
            assert at not in known, "nothing is run twice"
            known[at] = "skipped" if at in skipped else "bad" if at >= first_bad else "good"
    return bounds(count, known), rounds, known


@given(st.integers(2, 300).flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count - 1))))
def test_the_first_bad_one_is_found_in_as_many_runs_as_halving_takes(row):
    count, first_bad = row
    found, rounds, _ = searched(count, first_bad)
    assert (found.good, found.bad) == (first_bad - 1, first_bad)
    assert rounds <= math.ceil(math.log2(count - 1)) if count > 2 else rounds == 0


def test_of_64_commits_eight_are_run_with_both_ends():
    assert max(searched(64, first_bad)[1] for first_bad in range(1, 64)) + 2 == 8


@given(st.integers(1, 62), st.sets(st.integers(1, 62), max_size=20))
def test_what_is_skipped_does_not_hide_the_first_bad_one_but_where_it_lies_beside(first_bad, skipped):
    found, _, known = searched(64, first_bad, skipped)
    assert found.good < first_bad <= found.bad
    assert all(known[at] == "skipped" for at in range(found.good + 1, found.bad))


def test_a_row_with_nothing_between_needs_no_run():
    assert next_ones(2, {0: "good", 1: "bad"}) == ()


@given(st.integers(1, 62), st.integers(2, 8))
def test_several_at_a_time_divide_what_is_left(first_bad, jobs):
    found, rounds, _ = searched(64, first_bad, jobs=jobs)
    assert (found.good, found.bad) == (first_bad - 1, first_bad)
    assert rounds <= math.ceil(math.log(63, jobs + 1)) + 1


def test_no_more_runs_at_a_time_than_there_is_memory_for():
    assert most_jobs(8, lambda: 5 * A_RUN) == 5
    assert most_jobs(2, lambda: 5 * A_RUN) == 2
    assert most_jobs(8, lambda: A_RUN // 2) == 1
    assert most_jobs(8, lambda: None) == 8


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="reads Linux's /proc/meminfo")
def test_memory_that_caches_of_files_hold_can_be_used(monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda _name: 1)
    assert available() > 10**6
