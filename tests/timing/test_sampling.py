"""Rounds of steps and their median, over a device whose seconds are made up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.timing.sampling import BUDGET_SECONDS, ROUNDS, SECONDS_A_ROUND, Times, time_step

unhurried = settings(deadline=None)


class Clock:
    """A device on which the steps of each round take the given seconds; the last ones hold for all that follow."""

    def __init__(self, *seconds_of_a_step: float):
        self._seconds = list(seconds_of_a_step)
        self.steps_run = 0
        self.rounds: list[int] = []

    def step(self) -> None:
        self.steps_run += 1

    def time(self, run) -> float:
        before = self.steps_run
        run()
        self.rounds.append(self.steps_run - before)
        each = self._seconds[min(len(self.rounds), len(self._seconds)) - 1]
        return each * self.rounds[-1]


def timed(clock: Clock) -> Times:
    return time_step(clock.step, clock)


def test_a_long_step_is_a_round_by_itself():
    clock = Clock(0.1)
    assert timed(clock) == Times((0.1,) * ROUNDS)
    assert clock.rounds == [1] * ROUNDS


def test_short_steps_fill_a_round_and_the_first_one_does_not_count():
    clock = Clock(0.004, 0.002)
    times = timed(clock)
    assert clock.rounds == [1] + [5] * ROUNDS
    assert times.rounds == pytest.approx((0.002,) * ROUNDS)


def test_a_step_that_just_fills_a_round_is_not_repeated_in_it():
    clock = Clock(SECONDS_A_ROUND)
    timed(clock)
    assert clock.rounds == [1] * ROUNDS


def test_a_step_a_little_too_short_is_run_twice_a_round():
    clock = Clock(0.99 * SECONDS_A_ROUND)
    timed(clock)
    assert clock.rounds == [1] + [2] * ROUNDS


def test_a_very_long_step_is_timed_once():
    clock = Clock(BUDGET_SECONDS)
    assert timed(clock) == Times((BUDGET_SECONDS,))
    assert clock.steps_run == 1


def test_no_round_is_begun_when_the_time_is_spent():
    clock = Clock(0.4 * BUDGET_SECONDS)
    timed(clock)
    assert clock.rounds == [1, 1, 1]


def test_at_least_one_round_is_taken_when_the_first_step_was_slow_to_start():
    # Compiled in the first step: it took the whole time, and says nothing of the ones that follow.
    clock = Clock(0.001, BUDGET_SECONDS)
    times = timed(clock)
    assert len(times.rounds) == 1
    assert times.median == pytest.approx(BUDGET_SECONDS)


def test_the_median_is_not_moved_by_one_slow_round():
    assert Times((0.010, 0.011, 0.500, 0.010, 0.012)).median == 0.011


def test_the_median_of_an_even_number_of_rounds_lies_between():
    assert Times((0.01, 0.03)).median == pytest.approx(0.02)


def test_the_seconds_of_a_round_are_shared_among_its_steps():
    clock = Clock(0.002, 0.001, 0.002, 0.003, 0.004, 0.005)
    assert timed(clock).rounds == pytest.approx((0.001, 0.002, 0.003, 0.004, 0.005))
    assert timed(Clock(0.002, 0.001, 0.002, 0.003, 0.004, 0.005)).median == pytest.approx(0.003)


def test_a_step_that_takes_no_time_on_the_clock_ends():
    times = timed(Clock(0.0))
    assert times.median == 0.0
    assert len(times.rounds) == ROUNDS


@unhurried
@given(st.lists(st.floats(1e-5, 3.0), min_size=1, max_size=8))
def test_rounds_are_bounded_in_number_and_time_whatever_the_clock_says(seconds):
    clock = Clock(*seconds)
    times = timed(clock)
    assert 1 <= len(times.rounds) <= ROUNDS
    assert set(clock.rounds[1:]) <= {max(1, math.ceil(SECONDS_A_ROUND / seconds[0]))}
    before_the_last = sum(
        count * seconds[min(number, len(seconds)) - 1] for number, count in enumerate(clock.rounds[:-1], start=1)
    )
    assert before_the_last < BUDGET_SECONDS or len(times.rounds) == 1
    assert min(times.rounds) <= times.median <= max(times.rounds)
