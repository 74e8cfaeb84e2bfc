"""Peaks of stretches that lie within one another, over a device that keeps one peak at a time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.devices.contract import Peak
from pytest_gpumem.steps.readings import Windows, highest

unhurried = settings(deadline=None)


class Memory:
    """A device of which only the peak is asked."""

    def __init__(self):
        self.live = 0
        self._peak = 0

    def forget_libraries(self) -> None:
        pass

    def change(self, nbytes: int) -> None:
        self.live += nbytes
        self._peak = max(self._peak, self.live)

    def spike(self, nbytes: int) -> None:
        self.change(nbytes)
        self.change(-nbytes)

    def pop_peak(self) -> Peak:
        peak, self._peak = self._peak, self.live
        return Peak(peak, 2 * peak)


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def windows(memory) -> Windows:
    return Windows(memory)


def test_a_window_sees_the_highest_peak_while_it_is_open(memory, windows):
    memory.spike(100)
    window = windows.open()
    memory.spike(30)
    memory.spike(20)
    assert windows.close(window) == Peak(30, 60)


def test_a_window_in_which_nothing_happens_sees_what_is_live(memory, windows):
    memory.change(10)
    assert windows.close(windows.open()) == Peak(10, 20)


def test_a_window_sees_the_peak_of_a_window_within_it(memory, windows):
    outer = windows.open()
    memory.spike(10)
    inner = windows.open()
    memory.spike(30)
    assert windows.close(inner) == Peak(30, 60)
    memory.spike(20)
    assert windows.close(outer) == Peak(30, 60)


def test_a_window_does_not_see_what_was_before_a_window_within_it(memory, windows):
    outer = windows.open()
    memory.spike(50)
    inner = windows.open()
    memory.spike(30)
    assert windows.close(inner) == Peak(30, 60)
    assert windows.close(outer) == Peak(50, 100)


def test_windows_may_overlap(memory, windows):
    first = windows.open()
    memory.spike(10)
    second = windows.open()
    memory.spike(20)
    assert windows.close(first) == Peak(20, 40)
    memory.spike(30)
    assert windows.close(second) == Peak(30, 60)


def test_a_closed_window_is_told_nothing_more(memory, windows):
    window = windows.open()
    memory.spike(10)
    assert windows.close(window) == Peak(10, 20)
    memory.spike(50)
    windows.close(windows.open())
    assert window.peak == Peak(10, 20)


def test_a_border_hides_no_peak(memory, windows):
    window = windows.open()
    memory.spike(30)
    windows.border()
    memory.spike(20)
    assert windows.close(window) == Peak(30, 60)


def test_the_higher_of_two_peaks_is_so_field_by_field():
    assert highest(Peak(1, 20), Peak(2, 10)) == Peak(2, 20)


def test_without_reserved_bytes_there_are_none_in_the_higher_peak():
    assert highest(Peak(1), Peak(2, 10)) == Peak(2)
    assert highest(Peak(1), Peak(2)) == Peak(2)


@unhurried
@given(st.lists(st.sampled_from(["open", "close"]) | st.integers(-50, 50), max_size=30))
def test_every_window_sees_what_one_would_see_who_watched_all_the_time(actions):
    memory = Memory()
    windows = Windows(memory)
    watched: list[tuple[object, list[int]]] = []
    for action in actions:
        if action == "open":
            watched.append((windows.open(), [memory.live]))
        elif action == "close":
            if watched:
                window, seen = watched.pop()
                assert windows.close(window).allocated == max(seen)
        else:
            memory.change(max(action, -memory.live))
            for _, seen in watched:
                seen.append(memory.live)
    for window, seen in reversed(watched):
        assert windows.close(window).allocated == max(seen)
