"""Growth per step: a leak to the byte, and what is none."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.measuring.measure.counting import FURTHER_COUNTED_STEPS
from pytest_gpumem.measuring.measure.growth import SETTLING_STEPS, WINDOW, growth_per_step
from pytest_gpumem.measuring.measure.prepared import MOST_WARM_UPS
from pytest_gpumem.measuring.measure.reading import Phase
from tests.measuring import measured_steps

KB = 1000


@pytest.mark.parametrize(
    ("live", "growth"),
    [
        ([5, 5, 5, 5], 0),
        ([0, 0, 12, 12, 24, 24, 36], 6),
        ([30, 20, 10, 0], 0),
        ([0, 5, 0, 5, 0, 9, 5], 0),
        ([0, 10, 5, 15, 10, 20, 15], 2),
        ([7], 0),
    ],
)
def test_growth_is_what_each_step_keeps(live, growth):
    assert growth_per_step(live) == growth


@given(st.integers(0, 10**12), st.integers(1, 10**9), st.integers(1, 50))
def test_a_constant_leak_is_exact(began, leak, steps):
    assert growth_per_step([began + leak * step for step in range(steps + 1)]) == leak


@given(st.integers(2, WINDOW), st.integers(0, 100))
def test_what_is_emptied_within_the_window_is_no_growth_wherever_that_begins(every, began):
    assert growth_per_step([(began + step) % every for step in range(WINDOW + 1)]) == 0


@given(st.lists(st.integers(0, 10**12), max_size=30))
def test_growth_is_never_negative(live):
    assert growth_per_step(live) >= 0


def tensor(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def measured(device, run):
    return measured_steps([Phase("step", run)], device, other_bytes=[device.live()])


def keeping(every: int, kept, first: int = 0):
    """A step that keeps 12 kB every so many times."""
    calls: list[int] = []

    def run():
        block = tensor(12 * KB)
        calls.append(len(calls))
        if calls[-1] >= first and (calls[-1] - first) % every == 0:
            kept.append(block)

    return run, calls


@pytest.mark.parametrize(
    ("every", "first", "growth"), [(1, 0, 12 * KB), (2, 1, 6 * KB), (3, 0, 4 * KB), (3, 2, 4 * KB)]
)
def test_a_leak_is_found_wherever_it_begins(device, every, first, growth):
    run, _ = keeping(every, [], first)
    figures = measured(device, run)
    assert figures.growth == {"cpu": growth}
    assert figures.memory_metrics()["growth"] == growth


@pytest.mark.parametrize("entries", [1, MOST_WARM_UPS + 1 + SETTLING_STEPS])
def test_a_list_that_forgets_its_oldest_entries_is_no_leak(device, entries):
    run, _ = keeping(1, deque(maxlen=entries))
    assert measured(device, run).memory_metrics()["growth"] == 0


@pytest.mark.parametrize("every", [2, 7, WINDOW])
def test_a_list_that_is_emptied_now_and_then_is_no_leak(device, every):
    kept: list[torch.Tensor] = []

    def run():
        kept.append(tensor(12 * KB))
        if len(kept) == every:
            kept.clear()

    assert measured(device, run).memory_metrics()["growth"] == 0


def test_a_leak_beside_a_list_that_is_emptied_now_and_then_is_exact(device):
    kept: list[torch.Tensor] = []
    emptied: list[torch.Tensor] = []

    def run():
        kept.append(tensor(8 * KB))
        emptied.append(tensor(100 * KB))
        if len(emptied) == 3:
            emptied.clear()

    assert measured(device, run).memory_metrics()["growth"] == 8 * KB


def test_a_step_that_repeats_runs_no_more_often_for_it(device):
    run, calls = keeping(1, deque(maxlen=1))
    measured(device, run)
    once = len(calls)
    run, calls = keeping(1, [])
    measured(device, run)
    assert len(calls) - once == MOST_WARM_UPS - 3 + SETTLING_STEPS + WINDOW + FURTHER_COUNTED_STEPS


def test_peaks_that_rise_with_a_leak_are_said_to_grow(device):
    run, _ = keeping(1, [])
    figures = measured(device, run)
    assert not figures.is_settled
    assert figures.notes() == ("peaks grew from step to step: 24.00 kB in the first of 9, 120.00 kB in the last",)
