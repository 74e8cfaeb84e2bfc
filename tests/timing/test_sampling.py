"""Samples of steps and of their phases, over a device whose seconds, clock and conditions are made up."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.facts.values.interference import Conditions
from pytest_gpumem.facts.values.times import FEWEST_ROUNDS, Sample
from pytest_gpumem.measuring.ranks.consensus import ALONE, Consensus
from pytest_gpumem.measuring.timing import validity
from pytest_gpumem.measuring.timing.sampling import (
    PRECISION,
    ROUNDS_BEFORE_A_STOP,
    ROUNDS_OF_PHASES,
    SECONDS_A_ROUND,
    TimeBudget,
    sample_step,
    time_phases,
    time_step,
)
from tests.ranks.side_by_side import side_by_side

unhurried = settings(deadline=None)


class Clock:
    """A device on which the steps of each stretch that is timed take the given seconds; the last ones hold from then on.

    ``retries`` are those of the allocator in each stretch, ``paces`` the readings of the clock; ``others`` is how many cores
    other processes use all the time, and ``waited`` the share of it in which the thread has no core.
    """

    seconds_between_readings = 0.0
    consensus = ALONE

    def __init__(
        self, *seconds_of_a_step: float, retries=(), paces=(None,), others: float = 0.0, waited: float | None = None
    ):
        self._seconds = seconds_of_a_step
        self._retries = list(retries)
        self._retried = 0
        self._paces = list(paces)
        self._others = others
        self._waited = waited
        self.now = 0.0
        self.steps_run = 0
        self.rounds: list[int] = []
        self.paces_read_after: list[int] = []

    def of(self, consensus: Consensus) -> Clock:
        """The device of a rank that decides with others."""
        self.consensus = consensus
        return self

    def step(self) -> None:
        self.steps_run += 1

    def time(self, run) -> float:
        before = self.steps_run
        run()
        self.rounds.append(self.steps_run - before)
        each = self._seconds[min(len(self.rounds), len(self._seconds)) - 1]
        if len(self.rounds) <= len(self._retries):
            self._retried += self._retries[len(self.rounds) - 1]
        self.now += each * self.rounds[-1]
        return each * self.rounds[-1]

    def conditions(self) -> Conditions:
        waited = None if self._waited is None else self._waited * self.now
        return Conditions(
            self.now, retries=self._retried, waited=waited, other_cpu_seconds=self._others * self.now, cores=2
        )

    def pace(self) -> float | None:
        self.paces_read_after.append(len(self.rounds))
        return self._paces[min(len(self.paces_read_after), len(self._paces)) - 1]


def sampled(clock: Clock, seconds: float = 1.0, fewest: int = 1) -> Sample:
    return sample_step(clock.step, clock, seconds, fewest)


def seconds_of(sample: Sample) -> list[float]:
    return [one.seconds for one in sample.rounds]


# Rounds


def test_a_long_step_is_a_round_by_itself():
    clock = Clock(0.05)
    sample = sampled(clock)
    assert (seconds_of(sample), sample.steps) == ([0.05] * ROUNDS_BEFORE_A_STOP, 1)
    assert clock.rounds == [1] * ROUNDS_BEFORE_A_STOP


def test_short_steps_fill_a_round_and_the_first_one_does_not_count():
    clock = Clock(0.004, 0.002)
    sample = sampled(clock)
    assert clock.rounds == [1] + [5] * ROUNDS_BEFORE_A_STOP
    assert seconds_of(sample) == pytest.approx([0.002] * ROUNDS_BEFORE_A_STOP)
    assert sample.steps == 5


@pytest.mark.parametrize(("filled", "steps"), [(1, 1), (0.99, 2)])
def test_a_round_has_as_few_steps_as_fill_it(filled, steps):
    clock = Clock(filled * SECONDS_A_ROUND)
    sampled(clock)
    assert (clock.rounds[0], set(clock.rounds[1:])) == (1, {steps})


@pytest.mark.parametrize("cold", [0.015, 0.05, 0.9])
def test_a_slow_first_step_neither_counts_nor_decides_the_size_of_a_round(cold):
    clock = Clock(cold, 0.001)
    sample = sampled(clock, 10.0)
    first = math.ceil(SECONDS_A_ROUND / cold)
    assert clock.rounds == [1, first] + [20] * ROUNDS_BEFORE_A_STOP
    assert (set(seconds_of(sample)), sample.steps) == ({0.001}, 20)


def test_what_disturbed_a_first_round_that_was_too_short_disturbs_no_other():
    assert all(one.disturbed is None for one in sampled(Clock(0.05, 0.001, retries=[0, 1])).rounds)


def test_rounds_that_are_short_now_and_then_are_kept():
    clock = Clock(0.02, 0.02, 0.005, 0.02)
    assert seconds_of(sampled(clock)) == [0.02, 0.02, 0.005, *[0.02] * (ROUNDS_BEFORE_A_STOP - 3)]


# When it stops


def test_sampling_stops_when_the_median_is_known():
    close = 0.02 * (1 + PRECISION / 2)
    assert len(sampled(Clock(*[0.02, close] * 40), 100.0).rounds) == ROUNDS_BEFORE_A_STOP


def test_sampling_goes_on_while_the_median_is_not_known():
    far = 0.02 * (1 + 4 * PRECISION)
    clock = Clock(*[0.02, far] * 20, 0.02)
    assert len(sampled(clock, 100.0).rounds) > 40


def test_sampling_stops_when_the_time_is_spent():
    clock = Clock(*[0.1, 0.2] * 20)
    assert seconds_of(sampled(clock, 1.0)) == [0.1, 0.2] * 3 + [0.1]


@pytest.mark.parametrize(
    ("taken", "limit", "fewest", "rounds"),
    [
        ([3.0], 1.0, 1, [3.0]),
        ([3.0], 1.0, 3, [3.0] * 3),
        ([0.001], 0.0, 1, [0.001] * FEWEST_ROUNDS),
        ([0.001, 2.0], 1.0, 1, [2.0]),
    ],
    ids=["very long", "very long, a verdict hangs on it", "short, no time left", "turns out long"],
)
def test_without_time_for_more_there_are_as_few_rounds_as_say_something(taken, limit, fewest, rounds):
    assert seconds_of(sampled(Clock(*taken), limit, fewest)) == pytest.approx(rounds)


def test_a_very_long_step_is_run_once():
    clock = Clock(3.0)
    sampled(clock)
    assert clock.steps_run == 1


def test_a_step_that_takes_no_time_on_the_clock_ends_and_has_a_ratio_to_others():
    sample = sampled(Clock(0.0))
    assert len(sample.rounds) == ROUNDS_BEFORE_A_STOP
    assert sample.median > 0


# What disturbs


def test_a_disturbed_round_is_kept_with_its_reason_and_makes_room_for_another():
    clock = Clock(0.02, retries=[0, 1, 0, 0, 2])
    sample = sampled(clock)
    assert [one.disturbed for one in sample.rounds[:5]] == [
        *(None, "the allocator retried once", None, None, "the allocator retried twice")
    ]
    assert len(sample.rounds) == ROUNDS_BEFORE_A_STOP + 2
    assert sample.invalid is None


def test_a_disturbance_while_sizing_a_round_disturbs_no_round():
    assert all(one.disturbed is None for one in sampled(Clock(0.004, retries=[1])).rounds)


def test_a_sample_that_stays_disturbed_is_invalid_and_says_what_did_it():
    clock = Clock(0.02, retries=[1] * 1000)
    sample = sampled(clock, 0.5)
    assert sample.invalid == "the allocator retried once"
    assert sum(seconds_of(sample)) == pytest.approx(0.5, abs=0.03)


def test_enough_undisturbed_rounds_make_a_sample_valid_whatever_the_others_were():
    assert sampled(Clock(0.02, retries=[1] * (25 - FEWEST_ROUNDS)), 0.5).invalid is None
    assert sampled(Clock(0.02, retries=[1] * (26 - FEWEST_ROUNDS)), 0.5).invalid is not None


def test_of_a_few_long_rounds_none_may_be_disturbed():
    assert sampled(Clock(0.4), 1.0).invalid is None
    assert sampled(Clock(0.4, retries=[0, 0, 1]), 1.0).invalid == "the allocator retried once"


def test_a_busy_machine_invalidates_a_sample_although_no_round_shows_it():
    # They are counted in ticks, of which a round is too short to tell.
    sample = sampled(Clock(0.02, others=0.9))
    assert all(one.disturbed is None for one in sample.rounds)
    assert sample.invalid == "other processes used 0.90 of 2 cores meanwhile"


@pytest.mark.parametrize("waited", [0.0, 0.5])
def test_of_a_sample_under_load_it_is_known_what_load_can_explain(waited):
    clock = Clock(0.03, others=0.9, waited=waited)
    begun = clock.conditions()
    sample = sampled(clock)
    assert sample.invalid
    load = validity.slowdown(begun, clock.conditions())
    assert (sample.slowed.shared, sample.slowed.refilled) == pytest.approx((load.shared, load.refilled))
    assert sample.own == pytest.approx(0.03 * (1 - waited))


def test_of_a_valid_sample_nothing_has_to_be_explained():
    sample = sampled(Clock(0.03, waited=0.0))
    assert (sample.invalid, sample.slowed, sample.own) == (None, None, sample.median)


def test_of_a_round_that_an_event_may_have_filled_nothing_is_left():
    retried = sampled(Clock(0.03, retries=[1] * 100, waited=0.0))
    assert retried.invalid
    assert retried.own < 1e-3 * retried.median


# The clock that steps run by


def test_the_pace_of_a_round_is_that_between_its_two_ends():
    sample = sampled(Clock(0.4, paces=[10.0, 20.0, 40.0]), 1.0)
    assert [one.pace for one in sample.rounds] == [15.0, 30.0, 40.0]


def test_a_pace_reading_that_slows_the_next_step_is_rare_and_serves_later_rounds():
    clock = Clock(0.1, paces=[10.0, 20.0, 40.0, 80.0])
    clock.seconds_between_readings = 0.25
    sample = sampled(clock, 0.75)
    assert [one.pace for one in sample.rounds] == [15.0, 15.0, 15.0, 30.0, 30.0, 30.0, 60.0, 60.0]
    assert clock.paces_read_after == [1, 3, 6, 8]


def test_what_disturbed_rounds_that_were_read_together_disturbed_each_of_them():
    clock = Clock(0.1, retries=[0, 0, 0, 0, 1])
    clock.seconds_between_readings = 0.25
    sample = sampled(clock, 1.2)
    told = [one.disturbed is not None for one in sample.rounds]
    assert told[:9] == [False] * 3 + [True] * 3 + [False] * 3


def test_sampling_does_not_stop_for_rounds_that_turn_out_to_be_disturbed():
    clock = Clock(0.02, retries=[0] * 13 + [1], waited=0.0)
    clock.seconds_between_readings = 0.25
    sample = sampled(clock, 2.0)
    assert sum(one.disturbed is None for one in sample.rounds) >= ROUNDS_BEFORE_A_STOP
    assert sample.invalid is None


def test_the_pace_is_not_read_before_the_first_step():
    # The clock of a GPU at rest is another one.
    for seconds in (0.4, 0.004):
        clock = Clock(seconds, paces=[10.0])
        sampled(clock)
        assert clock.paces_read_after[0] == 1


def test_the_pace_is_read_before_the_slow_reading_of_conditions():
    class Reading(Clock):
        read = ""

        def time(self, run) -> float:
            self.read += "t"
            return super().time(run)

        def pace(self) -> float | None:
            self.read += "p"
            return super().pace()

        def conditions(self) -> Conditions:
            self.read += "c"
            return super().conditions()

    for seconds in (0.4, 0.004, 0.0):
        clock = Reading(seconds)
        sampled(clock)
        ends = clock.read[1:].split("t")[1:]
        assert all(end.startswith("p") and end.endswith("c") for end in ends), clock.read


def test_a_round_at_one_end_of_which_the_pace_was_not_told_has_none():
    sample = sampled(Clock(0.4, paces=[10.0, None, 20.0, 20.0]), 1.0)
    assert [one.pace for one in sample.rounds] == [None, None, 20.0]


@unhurried
@given(st.lists(st.floats(1e-5, 3.0), min_size=1, max_size=8), st.floats(0.0, 2.0))
def test_time_is_bounded_whatever_the_clock_says(seconds, limit):
    clock = Clock(*seconds)
    sample = sampled(clock, limit)
    assert clock.rounds[1:2] in ([], [max(1, math.ceil(SECONDS_A_ROUND / seconds[0]))])
    assert set(clock.rounds[2:]) <= {sample.steps}
    before_the_last = sum(
        count * seconds[min(number, len(seconds)) - 1] for number, count in enumerate(clock.rounds[:-1], start=1)
    )
    short = len(sample.rounds) > 1 and sample.rounds[-2].seconds * sample.steps < 2 * SECONDS_A_ROUND
    assert before_the_last < limit or len(sample.rounds) == 1 or (short and len(sample.rounds) <= FEWEST_ROUNDS)
    assert min(seconds_of(sample)) <= sample.median <= max(seconds_of(sample))


# Phases


class Laps:
    """A device on which running a phase takes as many seconds as it returns."""

    consensus = ALONE

    def __init__(self) -> None:
        self.rounds = 0

    def laps(self, runs) -> list[float]:
        self.rounds += 1
        return [run() for run in runs]


def phases_of(**seconds: float):
    return [(name, lambda each=each: each) for name, each in seconds.items()]


def test_each_phase_has_its_median_seconds_a_step():
    time_budget, device = TimeBudget(2.0), Laps()
    found = time_phases(phases_of(forward=0.001, backward=0.002), device, 7, time_budget)
    assert found == pytest.approx({"forward": 0.001, "backward": 0.002})
    assert device.rounds == ROUNDS_OF_PHASES
    assert 2 * time_budget.share == pytest.approx(2.0 - ROUNDS_OF_PHASES * 7 * 0.003)


def test_one_slow_round_does_not_move_the_time_of_a_phase():
    backward = iter([0.002, 5.0, 0.002])
    found = time_phases([("forward", lambda: 0.001), ("backward", lambda: next(backward))], Laps(), 1, TimeBudget(99))
    assert found["backward"] == 0.002


def test_phases_of_one_name_are_one():
    phases = [*phases_of(forward=1.0, backward=2.0), *phases_of(forward=3.0, backward=4.0)]
    assert time_phases(phases, Laps(), 1, TimeBudget(1000)) == {"forward": 4.0, "backward": 6.0}


def test_a_step_of_a_single_phase_is_not_run_again_for_it():
    device = Laps()
    assert time_phases(phases_of(step=1.0), device, 5, TimeBudget()) == {}
    assert device.rounds == 0


def test_the_phases_of_a_very_long_step_are_timed_once():
    device = Laps()
    assert time_phases(phases_of(forward=1.0, backward=2.0), device, 1, TimeBudget(2.0)) == {
        "forward": 1.0,
        "backward": 2.0,
    }
    assert device.rounds == 1


# The seconds of a test


def test_a_sample_may_take_half_of_what_is_left():
    time_budget = TimeBudget(2.0)
    assert time_budget.share == 1.0
    time_budget.spend(1.0)
    assert time_budget.share == 0.5
    time_budget.spend(7.0)
    assert time_budget.share == 0.0


def test_a_sample_that_a_verdict_hangs_on_is_as_long_as_a_first_one_whatever_is_left():
    time_budget = TimeBudget(3.0)
    time_budget.spend(3.0)
    assert time_budget.second_sample == 1.5


def test_second_looks_of_a_test_share_as_many_seconds_as_first_samples():
    time_budget = TimeBudget(2.0)
    time_budget.spend(2.0)
    assert time_budget.may_sample_again
    time_budget.spend_on_second_sample(1.5)
    assert time_budget.may_sample_again
    time_budget.spend_on_second_sample(0.5)
    assert not time_budget.may_sample_again
    assert time_budget.second_sample == 1.0


# Several ranks


def sampled_beside(clocks: list[Clock], seconds: float = 1.0) -> list[Sample]:
    return side_by_side(
        len(clocks),
        lambda consensus: sample_step((clock := clocks[consensus.rank.number].of(consensus)).step, clock, seconds),
    )


@settings(deadline=None, max_examples=25)
@given(
    times=st.lists(st.lists(st.floats(1e-4, 0.3), min_size=1, max_size=30), min_size=2, max_size=3),
    seconds=st.floats(0.01, 2.0),
    retries=st.lists(st.integers(0, 1), max_size=20),
    between=st.sampled_from([0.0, 0.1]),
)
def test_all_ranks_run_as_many_steps_in_as_many_rounds(times, seconds, retries, between):
    clocks = [Clock(*one, retries=retries if number else ()) for number, one in enumerate(times)]
    for clock in clocks:
        clock.seconds_between_readings = between
    samples = sampled_beside(clocks, seconds)
    assert len({tuple(clock.rounds) for clock in clocks}) == 1
    assert len({(len(one.rounds), one.steps, one.invalid, one.slowed) for one in samples}) == 1


def test_ranks_go_on_until_the_median_is_known_on_each():
    steady, moving = Clock(0.05), Clock(*([0.05, 0.06] * 4), *([0.05] * 100))
    assert len(sampled(Clock(0.05)).rounds) == ROUNDS_BEFORE_A_STOP
    first, second = sampled_beside([steady, moving], 100.0)
    assert len(first.rounds) == len(second.rounds) > ROUNDS_BEFORE_A_STOP


def test_ranks_that_have_different_times_left_take_the_longer_one():
    left = [0.2, 2.0]
    clocks = [Clock(0.05, 0.06, 0.05, 0.06), Clock(*([0.05, 0.06] * 50))]

    def run(consensus):
        number = consensus.rank.number
        return sample_step(clocks[number].step, clocks[number].of(consensus), left[number])

    first, second = side_by_side(2, run)
    assert len(first.rounds) == len(second.rounds)
    assert second.spent > 1.5


def test_what_disturbed_one_rank_disturbed_all():
    quiet, busy = Clock(0.05, paces=[10.0]), Clock(0.05, paces=[9.0], others=0.9, waited=0.3)
    first, second = sampled_beside([quiet, busy])
    assert first.invalid is not None
    assert first.invalid.startswith("on rank 1 of 2: the thread waited 30 % of the time for a core")
    assert first == second
    assert [one.taken for one in first.rounds] == pytest.approx([1 / 0.7] * len(first.rounds))
    # The slower clock: of a step that waits for the other rank.
    assert {one.pace for one in first.rounds} == {9.0}


def test_a_rank_that_was_not_alone_on_its_device_makes_the_times_of_all_invalid():
    clocks = [Clock(0.05), Clock(0.05)]

    def run(consensus):
        clock = clocks[consensus.rank.number].of(consensus)

        @contextmanager
        def exclusive():
            yield "another measured test kept the GPU busy for 60 s" if consensus.rank.number else None

        clock.exclusive = exclusive
        return time_step(clock.step, [("step", clock.step)], clock, TimeBudget(1.0))

    for times in side_by_side(2, run):
        assert times.samples[0].invalid == "on rank 1 of 2: another measured test kept the GPU busy for 60 s"


def test_phases_of_all_ranks_are_timed_as_often():
    phases = phases_of(forward=1.0, backward=2.0)
    slow = [(name, (lambda run=run: 10 * run())) for name, run in phases]

    def run(consensus):
        device = Laps()
        device.consensus = consensus
        time_phases(slow if consensus.rank.number else phases, device, 1, TimeBudget(20.0))
        return device.rounds

    assert side_by_side(2, run) == [1, 1]
