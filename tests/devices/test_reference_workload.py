"""The fixed piece of work that a CPU's pace is told by, with a clock that is made up."""

from __future__ import annotations

import itertools

import pytest
import torch

from pytest_gpumem.measuring.devices.reference_workload import ReferenceWorkload, one_thread


@pytest.fixture(scope="module")
def reference_workload():
    return ReferenceWorkload()


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def clock(monkeypatch, *seconds):
    """From now on each part of the work takes the given seconds in turn."""
    borders = itertools.chain.from_iterable((100.0, 100.0 + each) for each in seconds)
    monkeypatch.setattr("time.perf_counter", lambda: next(borders))


def test_the_pace_is_runs_per_second_of_the_best_of_each_part(reference_workload, monkeypatch):
    clock(monkeypatch, *(0.3, 0.25, 0.5), *(0.125, 9.0, 0.2), *(0.25, 0.125, 0.125))
    assert reference_workload.pace() == pytest.approx(1 / (0.25 + 0.125 + 0.125))


@pytest.mark.usefixtures("two_threads")
def test_taking_the_pace_changes_neither_threads_nor_random_numbers(reference_workload):
    torch.manual_seed(5)
    reference_workload.pace()
    assert torch.get_num_threads() == 2
    assert torch.initial_seed() == 5
    first = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(1))


@pytest.mark.usefixtures("two_threads")
def test_the_work_is_done_on_one_thread(reference_workload, monkeypatch):
    seen = []
    multiply = torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda *args, **kwargs: seen.append(torch.get_num_threads()) or multiply(*args, **kwargs)
    )
    reference_workload.pace()
    with pytest.raises(KeyError), one_thread():
        raise KeyError
    assert torch.get_num_threads() == 2
    assert set(seen) == {1}


def test_it_can_be_made_in_one_mode_of_autograd_and_used_in_another():
    with torch.inference_mode():
        made_within = ReferenceWorkload()
    assert made_within.pace() > 0
    made_without = ReferenceWorkload()
    with torch.inference_mode():
        assert made_without.pace() > 0
