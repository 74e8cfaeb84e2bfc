"""Rounds, samples and times: medians and their intervals, which rounds count, and the way through plain values."""

from __future__ import annotations

import json
import pickle
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.facts.values.interference import UNREAD_PACE, Slowdown
from pytest_gpumem.facts.values.plain import from_plain, to_plain
from pytest_gpumem.facts.values.times import (
    FEWEST_ROUNDS,
    Round,
    Sample,
    Times,
    interval_of_median,
)

unhurried = settings(deadline=None)
SECONDS = st.floats(1e-7, 100.0)
CLAUSES = st.none() | st.sampled_from(["the thread waited", "it was throttled"])
FACTORS = st.floats(1.0, 5.0)
ROUNDS = st.builds(Round, SECONDS, st.none() | st.floats(1.0, 3e9), CLAUSES, FACTORS)
SAMPLES = st.builds(
    lambda rounds, steps, invalid, slowed: Sample(
        tuple(rounds), steps, invalid, None if invalid is None else Slowdown(*slowed)
    ),
    st.lists(ROUNDS, min_size=1, max_size=8),
    st.integers(1, 1000),
    CLAUSES,
    st.tuples(FACTORS, FACTORS),
)


def sample_of(*seconds: float, **more) -> Sample:
    return Sample(tuple(map(Round, seconds)), **more)


def disturbed(*seconds: float, by: str = "a neighbour") -> tuple[Round, ...]:
    return tuple(Round(one, disturbed=by) for one in seconds)


# Median and interval


def test_the_median_is_not_moved_by_one_slow_round():
    assert sample_of(0.010, 0.011, 0.500, 0.010, 0.012).median == 0.011


def test_the_median_of_an_even_number_of_rounds_lies_between():
    assert sample_of(0.01, 0.03).median == pytest.approx(0.02)


# Ranks as in the usual tables for medians, counted from 1.
@pytest.mark.parametrize(
    ("count", "level", "ranks"),
    [
        (6, 0.95, (1, 6)),
        (8, 0.95, (1, 8)),
        (9, 0.95, (2, 8)),
        (20, 0.95, (6, 15)),
        (100, 0.95, (40, 61)),
        (8, 0.99, (1, 8)),
        (50, 0.99, (16, 35)),
    ],
)
def test_the_interval_of_a_median_has_the_ranks_of_the_binomial_tables(count, level, ranks):
    values = list(range(1, count + 1))
    random.Random(count).shuffle(values)
    assert interval_of_median(values, level) == ranks


@pytest.mark.parametrize("count", [1, FEWEST_ROUNDS - 1])
def test_with_too_few_values_the_interval_is_from_the_smallest_to_the_largest(count):
    assert interval_of_median(range(count), 0.95) == (0, count - 1)


@unhurried
@given(st.lists(SECONDS, min_size=1, max_size=40), st.floats(0.5, 0.999))
def test_the_interval_holds_the_median_and_grows_with_its_level(values, level):
    low, high = interval_of_median(values, level)
    assert low <= statistics.median(values) <= high
    wider = interval_of_median(values, 0.5 + level / 2)
    assert wider[0] <= low
    assert high <= wider[1]


def test_a_sample_has_the_interval_of_its_rounds_that_count():
    sample = Sample((*map(Round, range(1, 13)), *disturbed(100, 200)))
    assert sample.interval() == (3, 10)
    assert sample.interval(0.99) == (2, 11)


# Disturbed rounds


def test_a_disturbed_round_is_kept_and_does_not_count_where_enough_others_do():
    sample = Sample((*map(Round, [1.0] * FEWEST_ROUNDS), *disturbed(9.0, 9.0)))
    assert sample.seconds == (1.0,) * FEWEST_ROUNDS
    assert len(sample.rounds) == FEWEST_ROUNDS + 2
    assert sample.percentile(100) == 9.0


def test_with_too_few_undisturbed_rounds_all_of_them_count():
    sample = Sample((*map(Round, [1.0] * (FEWEST_ROUNDS - 1)), *disturbed(9.0)))
    assert sample.seconds == (*(1.0,) * (FEWEST_ROUNDS - 1), 9.0)


def test_what_disturbed_most_rounds_is_told():
    rounds = (Round(1.0), *disturbed(2.0, by="once"), *disturbed(2.0, 2.0, by="twice"))
    assert Sample(rounds).most_disturbed_by == "twice"
    assert sample_of(1.0).most_disturbed_by is None


# Cycles


def test_cycles_are_seconds_times_the_pace_of_the_clock():
    assert Round(0.5, 2e9).cycles == 1e9
    assert Sample((Round(1.0, 4.0), Round(2.0, 3.0), Round(3.0, 4.0))).cycles == 6.0


def test_a_round_whose_clock_was_not_read_leaves_a_sample_without_cycles():
    assert Round(0.5).cycles is None
    assert Sample((Round(1.0, 4.0), Round(1.0))).cycles is None


def test_a_disturbed_round_whose_clock_was_not_read_takes_no_cycles_from_the_others():
    assert Sample((*(Round(1.0, 4.0) for _ in range(FEWEST_ROUNDS)), *disturbed(9.0))).cycles == 4.0


# Percentiles


@pytest.mark.parametrize(("percent", "seconds"), [(0, 1), (10, 1), (10.1, 2), (95, 10), (100, 10)])
def test_a_percentile_is_the_round_of_the_nearest_rank(percent, seconds):
    assert sample_of(*range(10, 0, -1)).percentile(percent) == seconds


def test_the_time_that_a_sample_took_is_that_of_all_steps_of_all_rounds():
    assert Sample((*map(Round, (0.1, 0.2)), *disturbed(0.3)), steps=4).spent == pytest.approx(2.4)


# What was disturbed


@pytest.mark.parametrize("more", [{"invalid": "a neighbour"}, {"slowed": Slowdown(1.2)}])
def test_an_invalid_sample_has_to_say_how_much_that_explains(more):
    with pytest.raises(ValueError, match="give both or neither"):
        sample_of(1.0, **more)


def test_the_own_time_of_a_step_is_without_what_was_taken_or_explained():
    rounds = tuple(Round(seconds, taken=taken) for seconds, taken in ((3.0, 1.5), (4.0, 2.0), (2.0, 1.0)))
    sample = Sample(rounds, 1, "a neighbour", Slowdown(1.2))
    assert (sample.median, sample.own) == (3.0, 2.0)
    assert sample.at_least == pytest.approx(2.0 / 1.2**UNREAD_PACE)
    assert sample_of(1.0, 2.0, 3.0).at_least == 2.0


# Times


@pytest.mark.parametrize("invalid", [None, "it was throttled"])
def test_of_several_samples_the_fastest_one_is_gone_by_as_it_decides_the_verdict(invalid):
    slow, fast = sample_of(2.0), sample_of(1.0, invalid=invalid, slowed=invalid and Slowdown(1.2))
    assert Times((slow, fast)).best is fast
    assert Times((fast, slow)).median == 1.0


def test_times_have_the_rounds_and_percentiles_of_the_sample_to_go_by():
    times = Times((sample_of(5.0), sample_of(1.0, 3.0, 2.0)))
    assert times.rounds == (1.0, 3.0, 2.0)
    assert times.percentile(100) == 3.0


def test_the_phases_of_times_cannot_be_changed():
    phases = {"forward": 1.0}
    times = Times((sample_of(1.0),), phases)
    phases["forward"] = 2.0
    assert times.phases == {"forward": 1.0}
    with pytest.raises(TypeError):
        times.phases["forward"] = 2.0


# Plain values


@unhurried
@given(st.lists(SAMPLES, min_size=1, max_size=2).map(tuple), st.dictionaries(st.sampled_from("ab"), SECONDS))
def test_times_come_back_from_json_and_from_another_process_as_they_were(samples, phases):
    times = Times(samples, phases)
    assert from_plain(Times, json.loads(json.dumps(to_plain(times)))) == times
    assert pickle.loads(pickle.dumps(times)) == times
