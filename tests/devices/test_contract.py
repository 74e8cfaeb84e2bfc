"""Peaks of stretches that lie within one another, over a device that keeps one peak at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.base.errors import MeasuringError
from pytest_gpumem.measuring.devices.contract import Device, Peak, Window, highest

if TYPE_CHECKING:
    from pytest_gpumem.facts.measurement import Environment

unhurried = settings(deadline=None)


class Memory(Device):
    """A device of which only the peak is asked."""

    name = "memory"
    torch_device = None

    def __init__(self):
        self._live = 0
        self._peak = 0

    def environment(self) -> Environment:
        raise NotImplementedError

    def live(self) -> int:
        return self._live

    def peak(self) -> Peak:
        return Peak(self._peak, 2 * self._peak)

    def reset_peak(self) -> None:
        self._peak = self._live

    def change(self, nbytes: int) -> None:
        self._live += nbytes
        self._peak = max(self._peak, self._live)

    def spike(self, nbytes: int) -> None:
        self.change(nbytes)
        self.change(-nbytes)


@pytest.fixture
def memory() -> Memory:
    return Memory()


def test_windows_may_overlap(memory):
    first = memory.open_window()
    memory.spike(10)
    second = memory.open_window()
    memory.spike(20)
    assert memory.close_window(first) == Peak(20, 40)
    memory.spike(30)
    assert memory.close_window(second) == Peak(30, 60)


def test_a_closed_window_is_told_nothing_more(memory):
    window = memory.open_window()
    memory.spike(10)
    assert memory.close_window(window) == Peak(10, 20)
    memory.spike(50)
    memory.close_window(memory.open_window())
    assert window.highest == Peak(10, 20)


def test_a_window_in_parts_knows_the_peak_of_each_and_the_highest_of_all(memory):
    outer = memory.open_window()
    parted = memory.open_window()
    memory.spike(10)
    memory.split(parted)
    memory.change(5)
    memory.split(parted)
    memory.spike(30)
    memory.pop_peak()
    memory.spike(20)
    assert memory.close_window(parted) == memory.close_window(outer) == Peak(35, 70)
    assert (parted.parts, outer.parts) == ((Peak(10, 20), Peak(5, 10), Peak(35, 70)), (Peak(35, 70),))


def test_popping_the_peak_hides_it_from_no_window(memory):
    window = memory.open_window()
    memory.spike(30)
    memory.pop_peak()
    memory.spike(20)
    assert memory.close_window(window) == Peak(30, 60)


def test_no_window_sees_the_peak_of_an_ignored_stretch(memory):
    window = memory.open_window()
    memory.spike(30)
    with memory.peak_ignored():
        memory.spike(50)
    memory.spike(20)
    assert memory.close_window(window) == Peak(30, 60)


@pytest.mark.parametrize("stretch", ["window", "peak_ignored"])
def test_an_error_within_is_raised_where_the_peak_cannot_be_read(memory, stretch, monkeypatch):
    outer = memory.open_window()
    memory.spike(30)

    def unreadable() -> Peak:
        raise MeasuringError("the recording was cut short")

    def interrupted() -> None:
        with getattr(memory, stretch)():
            memory.spike(50)
            monkeypatch.setattr(memory, "peak", unreadable)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(MeasuringError), getattr(memory, stretch)():
        pass
    monkeypatch.undo()
    memory.spike(20)
    seen = 50 if stretch == "window" else 30
    assert memory.close_window(outer) == Peak(seen, 2 * seen)
    memory.spike(70)
    assert outer.highest == Peak(seen, 2 * seen)


def test_the_higher_of_two_peaks_is_taken_field_by_field_and_gaps_stay_gaps():
    assert highest(Peak(1, 20), Peak(2, 10)) == Peak(2, 20)
    assert highest(Peak(1), Peak(2, 10)) == Peak(2)
    assert highest(Peak(1), Peak(2)) == Peak(2)


@unhurried
@given(st.lists(st.sampled_from(["open", "close", "split"]) | st.integers(-50, 50), max_size=30))
def test_every_window_sees_what_one_would_see_who_watched_all_the_time(actions):
    memory = Memory()
    watched: list[tuple[Window, list[list[int]]]] = []

    def close() -> None:
        window, seen = watched.pop()
        assert memory.close_window(window).allocated == max(map(max, seen))
        assert [part.allocated for part in window.parts] == [max(part) for part in seen]

    for action in actions:
        if action == "open":
            watched.append((memory.open_window(), [[memory.live()]]))
        elif action == "split":
            if watched:
                window, seen = watched[0]
                memory.split(window)
                seen.append([memory.live()])
        elif action == "close":
            if watched:
                close()
        else:
            memory.change(max(action, -memory.live()))
            for _, seen in watched:
                seen[-1].append(memory.live())
    while watched:
        close()
