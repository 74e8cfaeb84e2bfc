"""Whether a step has become slower: what a verdict needs, what leaves it uncertain, and how often its interval is wrong."""

from __future__ import annotations

import math
import random
import statistics
from unittest.mock import patch

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pytest_gpumem.facts.values.interference import PACE, UNREAD_PACE, Slowdown
from pytest_gpumem.facts.values.times import MOST_SLOWDOWN_OF_RUN, MOST_TIME_FACTOR_OF_RUN, Round, Sample, Times
from pytest_gpumem.judging.times import intervals
from pytest_gpumem.judging.times.comparison import (
    FEWEST_PAIRS,
    MOST_RUNS,
    SLOWER_MACHINE,
    Comparison,
    Runs,
    compare,
    compare_pairs,
    is_undecided,
    run_of,
    typical_seconds,
)
from pytest_gpumem.judging.times.intervals import LEVEL, PRIOR_SPREAD, UNKNOWN_SPREAD, spread_of_runs

few_examples = settings(deadline=None, max_examples=40)
TOLERANCE = 0.05
THROTTLED = "the GPU was throttled"
BUSY = "other processes used 0.90 of 2 cores meanwhile"
SPREADS = st.sampled_from([0.0, 0.002, 0.02, 0.1])


@pytest.fixture(autouse=True, scope="module")
def fewer_resamples():
    # Enough for the ends of an interval, and a fifth of the time.
    with patch.object(intervals, "RESAMPLES", 200):
        yield


def sample_of(
    *seconds: float,
    pace: float | None = None,
    invalid: str | None = None,
    slowed: float | None = None,
    taken: float = 1.0,
    refilled: float = 1.0,
) -> Sample:
    """What disturbed an invalid sample can explain everything unless ``slowed`` says how much."""
    factors = None if invalid is None else Slowdown(slowed or 1e6, refilled)
    return Sample(tuple(Round(one, pace, None, taken) for one in seconds), 1, invalid, factors)


def noisy(seconds: float, spread: float = 0.002, rounds: int = 12, pace: float | None = None, **more) -> Sample:
    """Rounds at the quantiles of a lognormal distribution around ``seconds``."""
    normal = statistics.NormalDist(0, spread) if spread else None
    scores = [normal.inv_cdf((number + 0.5) / rounds) if normal else 0.0 for number in range(rounds)]
    return sample_of(*(seconds * math.exp(score) for score in scores), pace=pace, **more)


def stable(seconds: float = 1.0, runs: int = MOST_RUNS, cycles: float | None = None) -> Runs:
    return Runs((seconds,) * runs, () if cycles is None else (cycles,) * runs)


FACTORS = st.floats(0.7, 1.6)
SOME = st.builds(
    lambda factor, spread, rounds, pace, invalid: noisy(factor, spread, rounds, pace, invalid=invalid),
    FACTORS,
    SPREADS,
    st.integers(1, 14),
    st.sampled_from([None, 0.8, 0.9, 0.97, 1.0, 1.2]),
    st.none() | st.none() | st.just(THROTTLED),
)
BASELINES = st.builds(
    lambda seconds, cycles: Runs(tuple(seconds), tuple(seconds) if cycles else ()),
    st.lists(st.floats(0.95, 1.05), min_size=1, max_size=MOST_RUNS),
    st.booleans(),
)
TOLERANCES = st.sampled_from([0.0, 0.05, 0.3])


# Four outcomes


@pytest.mark.parametrize(
    ("factor", "outcome"),
    [
        (0.92, "faster"),
        (1.0, "not slower"),
        (1.06, "uncertain"),
        (1.10, "slower"),
    ],
)
def test_a_quiet_machine_tells_ten_percent(factor, outcome):
    found = compare([noisy(factor), noisy(factor)], stable(), TOLERANCE)
    assert found.outcome == outcome
    assert found.ratio == pytest.approx(factor, rel=1e-3)
    assert found.low < factor < found.high


@pytest.mark.parametrize(
    ("runs", "factor", "outcome"),
    [(1, 1.15, "uncertain"), (1, 1.4, "slower"), (2, 1.2, "slower"), (4, 1.12, "slower")],
)
def test_the_more_runs_were_accepted_the_smaller_the_slowdowns_that_they_tell(runs, factor, outcome):
    assert compare([noisy(factor)], stable(runs=runs), TOLERANCE).outcome == outcome


@pytest.mark.parametrize(("tolerance", "outcome"), [(0.15, "slower"), (0.30, "not slower")])
def test_the_tolerance_is_what_a_step_may_be_slower(tolerance, outcome):
    assert compare([noisy(1.25)], stable(), tolerance).outcome == outcome


# What slower needs


@few_examples
@given(st.lists(SOME, min_size=1, max_size=2), BASELINES, TOLERANCES)
def test_slower_is_what_every_sample_shows_in_seconds_and_in_cycles_and_undisturbed(samples, baseline, tolerance):
    # Just at the limit, rounding decides.
    assume(all(abs((one.rounds[0].pace or 1.0) - (1 - SLOWER_MACHINE)) > 1e-9 for one in samples))
    found = compare(samples, baseline, tolerance)
    alone = [compare([one], baseline, tolerance) for one in samples]
    shown = []
    for one, sample in zip(alone, samples, strict=True):
        intervals = [one.seconds] if one.cycles is None else [one.seconds, one.cycles]
        pace = 1.0 if one.cycles is None else sample.rounds[0].pace
        # A clock that runs slower than it did explains a power of what it lost.
        explained = 1.0 if pace >= 1 - SLOWER_MACHINE else pace**-PACE
        shown.append(
            all(interval.ratio > 1 + tolerance for interval in intervals)
            and (one.cycles is None or one.seconds.ratio * min(pace, 1.0) ** PACE > 1 + tolerance)
            and any(
                interval.low > (1 + tolerance) * left
                for interval, left in zip(intervals, (explained, explained * pace), strict=False)
            )
            and intervals[-1].low > explained * pace
            and sample.invalid is None
        )
    assert (found.outcome == "slower") == all(shown)


@few_examples
@given(SOME, SOME, BASELINES, TOLERANCES)
def test_a_sample_that_is_not_slower_is_believed_before_or_after_one_that_is(one, other, baseline, tolerance):
    assume(compare([other], baseline, tolerance).outcome in ("not slower", "faster"))
    after, before = (compare(samples, baseline, tolerance) for samples in ([one, other], [other, one]))
    assert after.outcome in ("not slower", "faster")
    assert (after.outcome, after.ratio) == (before.outcome, before.ratio)


@pytest.mark.parametrize("other", [1.0, 1.06, 2.0], ids=["not slower", "uncertain", "slower"])
def test_faster_is_what_every_sample_shows(other):
    assert compare([noisy(0.8), noisy(0.8)], stable(), TOLERANCE).outcome == "faster"
    for samples in ([noisy(0.8), noisy(other)], [noisy(other), noisy(0.8)]):
        assert compare(samples, stable(), TOLERANCE).outcome == "not slower"


@few_examples
@given(SOME, BASELINES, TOLERANCES)
def test_an_invalid_sample_says_neither_slower_nor_faster(sample, baseline, tolerance):
    invalid = Sample(sample.rounds, 1, THROTTLED, Slowdown(1e6))
    found = compare([invalid], baseline, tolerance)
    assert found.outcome in ("uncertain", "not slower")
    assert (found.reason == THROTTLED) == (found.outcome == "uncertain")


@pytest.mark.parametrize(
    ("factor", "slowed", "outcome"),
    [(1.5, 1.2, "slower"), (1.25, 1.2, "uncertain"), (2.0, 1.95, "uncertain")],
)
def test_what_a_disturbance_can_explain_is_taken_off_and_the_rest_is_judged(factor, slowed, outcome):
    busy = noisy(factor, pace=1.0, invalid=BUSY, slowed=slowed)
    said = compare([busy, busy], stable(cycles=1.0), TOLERANCE)
    assert (said.outcome, said.ratio) == (outcome, pytest.approx(factor, rel=1e-3))
    assert said.reason == (f"{BUSY}, which cannot explain the slowdown" if outcome == "slower" else BUSY)
    assert compare([busy, noisy(1.0, pace=1.0)], stable(cycles=1.0), TOLERANCE).outcome == "not slower"


@pytest.mark.parametrize(("taken", "outcome"), [(2.0, "slower"), (2.6, "uncertain")])
def test_the_time_that_a_disturbance_took_is_taken_off_besides(taken, outcome):
    busy = noisy(3.2, pace=1.0, invalid=BUSY, slowed=1.2, taken=taken)
    assert compare([busy], stable(cycles=1.0), TOLERANCE).outcome == outcome


def test_what_is_left_has_to_be_slower_with_its_whole_interval():
    busy = noisy(1.4, pace=1.0, invalid=BUSY, slowed=1.2)
    assert compare([busy], stable(cycles=1.0), TOLERANCE).outcome == "slower"
    assert compare([busy], Runs((0.85, 1.15) * 5, (0.85, 1.15) * 5), TOLERANCE).outcome == "uncertain"
    assert compare([busy], stable(runs=1, cycles=1.0), TOLERANCE).outcome == "uncertain"


@few_examples
@given(SOME, BASELINES, TOLERANCES, st.floats(1.0, 3.0), st.floats(1.0, 3.0))
def test_the_more_a_disturbance_can_explain_the_less_is_slower(sample, baseline, tolerance, slowed, more):
    few, many = (
        compare([Sample(sample.rounds, 1, BUSY, Slowdown(factor))], baseline, tolerance)
        for factor in (slowed, slowed * more)
    )
    assert few.outcome == "slower" or many.outcome != "slower"
    as_it_is = compare([Sample(sample.rounds)], baseline, tolerance)
    assert as_it_is.outcome == "slower" or few.outcome != "slower"


@pytest.mark.parametrize(
    ("pace", "factor", "outcome"), [(0.87, 1.5, "slower"), (0.87, 1.3, "uncertain"), (0.125, 8.0, "uncertain")]
)
def test_a_slower_clock_explains_what_it_lost_twice_and_no_more(pace, factor, outcome):
    found = compare([noisy(factor, pace=pace)], stable(cycles=1.0), TOLERANCE)
    assert found.outcome == outcome
    assert found.reason.startswith(f"the machine runs {100 * (1 - pace):.0f} % slower than in the baseline")


def test_of_load_and_a_slower_clock_the_one_that_explains_more_counts():
    # Both show the same neighbour, once from the outside and once in the pace.
    for factor, outcome in ((1.6, "slower"), (1.34, "uncertain")):
        busy = noisy(factor, pace=0.87, invalid=BUSY, slowed=1.3)
        assert compare([busy], stable(cycles=1.0), TOLERANCE).outcome == outcome


def test_cold_caches_explain_something_on_top_of_what_the_pace_lost():
    for factor, outcome in ((2.1, "slower"), (1.7, "uncertain")):
        busy = noisy(factor, pace=0.87, invalid=BUSY, slowed=1.2, refilled=1.4)
        assert compare([busy], stable(cycles=1.0), TOLERANCE).outcome == outcome


def test_where_no_pace_can_be_compared_what_slowed_a_sample_counts_more():
    enough, too_little = (1.1 * (1 + TOLERANCE) * 1.2**UNREAD_PACE, 0.95 * 1.2**UNREAD_PACE)
    for factor, outcome in ((enough, "slower"), (too_little, "uncertain")):
        assert compare([noisy(factor, invalid=BUSY, slowed=1.2)], stable(), TOLERANCE).outcome == outcome


# A third sample


CANNOT_TELL = noisy(1.3, pace=1.0, invalid=BUSY, slowed=1.5)
SLOWER, AS_FAST = noisy(1.3, pace=1.0), noisy(1.0, pace=1.0)


def test_two_samples_that_show_a_slowdown_are_enough_beside_one_that_cannot_tell():
    runs = stable(cycles=1.0)
    assert compare([SLOWER, CANNOT_TELL], runs, TOLERANCE).outcome == "uncertain"
    for samples in ([SLOWER, CANNOT_TELL, SLOWER], [CANNOT_TELL, SLOWER, SLOWER]):
        assert compare(samples, runs, TOLERANCE).outcome == "slower"
    assert compare([SLOWER, SLOWER, AS_FAST], runs, TOLERANCE).outcome == "not slower"


@pytest.mark.parametrize(
    ("samples", "undecided"),
    [
        ([SLOWER, CANNOT_TELL], True),
        ([CANNOT_TELL, SLOWER], True),
        ([SLOWER, SLOWER], False),
        ([CANNOT_TELL, CANNOT_TELL], False),
        ([SLOWER, AS_FAST], False),
        ([SLOWER, CANNOT_TELL, SLOWER], False),
    ],
)
def test_a_slowdown_neither_confirmed_nor_contradicted_is_undecided(samples, undecided):
    assert is_undecided(samples, stable(cycles=1.0), TOLERANCE) == undecided


def test_a_disturbed_sample_can_show_that_nothing_is_slower():
    assert compare([noisy(1.0, invalid=THROTTLED)], stable(), TOLERANCE).outcome == "not slower"


@few_examples
@given(SOME, BASELINES, TOLERANCES)
def test_what_is_uncertain_has_a_reason_and_what_is_slower_all_the_same(sample, baseline, tolerance):
    found = compare([sample], baseline, tolerance)
    if found.outcome == "slower":
        assert found.reason is None or found.reason.endswith(", which cannot explain the slowdown")
    else:
        assert (found.reason is not None) == (found.outcome == "uncertain")


# The clock


def test_a_step_that_took_longer_by_a_slower_clock_is_uncertain():
    found = compare([noisy(1.06, pace=0.975)], stable(cycles=1.0), TOLERANCE)
    assert found.outcome == "uncertain"
    assert (
        found.reason
        == f"a slower clock may explain the slowdown: {found.seconds} in seconds is {found.cycles} in cycles"
    )
    assert str(found.cycles).startswith("+3.")


@pytest.mark.parametrize("slowdown", [1.1, 1.0], ids=["slower by itself, too", "not slower by itself"])
def test_a_slowdown_that_a_much_slower_machine_may_explain_is_uncertain(slowdown):
    found = compare([noisy(slowdown / 0.8, pace=0.8)], stable(cycles=1.0), TOLERANCE)
    assert (found.outcome, found.reason) == ("uncertain", "the machine runs 20 % slower than in the baseline")


def test_a_machine_that_was_as_slow_in_one_of_the_baseline_s_runs_explains_nothing():
    runs = Runs((1.0, 1.0, 1.25, 1.0, 1.0), (1.0,) * 5)
    found = compare([noisy(1.25 * 1.15, pace=0.8)], runs, TOLERANCE)
    assert (found.outcome, found.reason) == ("slower", None)
    assert compare([noisy(1.25 * 1.15, pace=0.8)], stable(cycles=1.0), TOLERANCE).outcome == "uncertain"


def test_seconds_alone_show_no_slowdown_where_cycles_may_be_the_same():
    # Two runs of which the seconds agree by chance, on a machine whose speed moves.
    runs = Runs((1.0, 1.01), (0.9, 1.11))
    found = compare([noisy(1.2, pace=1.0)], runs, TOLERANCE)
    assert found.seconds.low > 1 + TOLERANCE
    assert found.cycles.low < 1 < 1 + TOLERANCE < found.cycles.ratio
    assert found.outcome == "uncertain"


def test_the_more_precise_sample_shows_a_slowdown_and_the_other_must_agree():
    drifting = Runs((0.9, 1.1, 1.0, 0.95, 1.05, 1.0), (1.0,) * 6)
    found = compare([noisy(1.10, pace=1.0)], drifting, TOLERANCE)
    assert found.outcome == "slower"
    assert found.seconds.low < 1 + TOLERANCE < found.cycles.low
    assert compare([noisy(1.03, pace=1.08)], drifting, TOLERANCE).outcome == "not slower"


def test_a_power_of_what_the_clock_lost_is_taken_off():
    # Somebody copies through memory: the step takes 9.8 % longer, and the fixed work that is the clock 2.9 %.
    found = compare([noisy(1.098, pace=0.972)], stable(cycles=1.0), TOLERANCE)
    assert found.cycles.low > 1 + TOLERANCE
    assert found.outcome == "uncertain"
    assert found.reason.startswith("a slower clock may explain the slowdown")
    assert compare([noisy(1.12, pace=0.975)], stable(cycles=1.0), TOLERANCE).outcome == "slower"


@pytest.mark.parametrize("factor", [1.0, 0.8], ids=["more cycles in the same time", "as many cycles in less time"])
def test_what_a_faster_clock_did_is_neither_slower_nor_faster(factor):
    assert compare([noisy(factor, pace=1.25)], stable(cycles=1.0), TOLERANCE).outcome == "not slower"


@pytest.mark.parametrize(
    ("pace", "cycles"), [(None, 1.0), (0.8, None)], ids=["not read now", "not read in the baseline"]
)
def test_where_the_clock_was_not_read_both_times_seconds_decide(pace, cycles):
    found = compare([noisy(1.25, pace=pace)], stable(cycles=cycles), TOLERANCE)
    assert (found.outcome, found.cycles) == ("slower", None)


# Noise


def test_a_slowdown_within_what_rounds_vary_by_is_uncertain():
    found = compare([noisy(1.10, spread=0.2)], stable(), TOLERANCE)
    assert found.outcome == "uncertain"
    assert found.reason == f"within the variation of the times, estimated from 10 runs: {found.seconds}"


def test_a_slowdown_within_what_accepted_runs_vary_by_is_uncertain():
    baseline = Runs((0.9, 1.1, 1.0, 0.95, 1.05, 1.0))
    assert compare([noisy(1.10)], stable(), TOLERANCE).outcome == "slower"
    assert compare([noisy(1.10)], baseline, TOLERANCE).reason.startswith(
        "within the variation of the times, estimated from 6 runs: +10.0 % ("
    )


def test_uncertain_if_a_large_slowdown_is_possible_although_nothing_looks_slower():
    found = compare([noisy(1.0, spread=0.6)], stable(), TOLERANCE)
    assert found.outcome == "uncertain"
    assert found.reason == f"the times vary too much to tell: {found.seconds}"


def test_a_large_tolerance_asks_for_no_more_than_twice_itself_to_be_excluded():
    sample = noisy(1.0, spread=0.4)
    assert compare([sample], stable(), 0.05).outcome == "uncertain"
    assert compare([sample], stable(), 0.50).outcome == "not slower"


@pytest.mark.parametrize("spread", [0.0, 0.01])
def test_more_accepted_runs_narrow_the_interval(spread):
    def width(runs: int) -> float:
        found = compare([noisy(1.0)], Runs((1 - spread, 1 + spread) * (runs // 2)), TOLERANCE)
        return found.high / found.low

    assert width(10) < width(4)


def test_of_a_few_runs_the_spread_is_drawn_towards_what_is_usual():
    assert spread_of_runs([1.0]) == UNKNOWN_SPREAD > spread_of_runs([1.0] * 2) > spread_of_runs([1.0] * 4)
    assert 0 < spread_of_runs([1.0] * 10) < PRIOR_SPREAD
    assert PRIOR_SPREAD < spread_of_runs([0.9, 1.1]) < statistics.stdev(map(math.log, (0.9, 1.1)))


# Ratios


@few_examples
@given(SOME, BASELINES, st.floats(0.01, 100.0))
def test_a_sample_that_is_longer_by_a_factor_has_a_ratio_that_is_larger_by_it(sample, baseline, factor):
    scaled = Sample(tuple(Round(one.seconds * factor, one.pace) for one in sample.rounds))
    before, after = (compare([one], baseline, TOLERANCE) for one in (sample, scaled))
    for name in ("ratio", "low", "high"):
        assert getattr(after, name) == pytest.approx(getattr(before, name) * factor)


@few_examples
@given(SOME, BASELINES)
def test_the_unit_of_time_does_not_matter(sample, baseline):
    in_hours = Sample(
        tuple(Round(one.seconds / 3600, one.pace) for one in sample.rounds), 1, sample.invalid, sample.slowed
    )
    there = Runs(*(tuple(value / 3600 for value in values) for values in (baseline.seconds, baseline.cycles)))
    before, after = compare([sample], baseline, TOLERANCE), compare([in_hours], there, TOLERANCE)
    assert after.ratio == pytest.approx(before.ratio)
    assert after.low == pytest.approx(before.low)


def test_the_same_samples_give_the_same_verdict_and_leave_random_numbers_alone():
    state = random.getstate()
    first, second = (compare([noisy(1.05, 0.05)], Runs((1.0, 1.02)), TOLERANCE) for _ in range(2))
    assert first == second
    assert random.getstate() == state


# Runs


def test_runs_are_added_at_the_end_and_the_first_are_forgotten():
    runs = Runs((1.0,), (2.0,))
    for number in range(MOST_RUNS):
        runs = runs.extended_by(Runs((float(number),), (float(number),)))
    assert runs.seconds == runs.cycles == tuple(map(float, range(MOST_RUNS)))


def test_a_run_without_cycles_is_not_taken_among_those_that_have_them():
    known = Runs((1.0, 1.0), (2.0, 2.0))
    assert known.extended_by(Runs((1.0,))) == known


def test_the_first_run_with_cycles_begins_anew():
    latest = Runs((1.0,), (2.0,))
    assert Runs((1.0, 1.0)).extended_by(latest) == latest


def test_a_run_to_compare_with_is_without_the_time_that_was_taken_from_it():
    waited = noisy(1.1, spread=0, pace=2.0, invalid=BUSY, slowed=MOST_SLOWDOWN_OF_RUN, taken=MOST_TIME_FACTOR_OF_RUN)
    assert run_of(Times((waited,))) == Runs(
        (pytest.approx(1.1 / MOST_TIME_FACTOR_OF_RUN),), (pytest.approx(2.2 / MOST_TIME_FACTOR_OF_RUN),)
    )
    assert run_of(Times((noisy(1.1, spread=0),))) == Runs((1.1,))


@pytest.mark.parametrize(
    ("slowed", "taken"), [(1.01 * MOST_SLOWDOWN_OF_RUN, 1.0), (1.0, 1.01 * MOST_TIME_FACTOR_OF_RUN)]
)
def test_a_run_that_was_disturbed_further_is_nothing_to_compare_with(slowed, taken):
    disturbed = noisy(0.9, invalid=BUSY, slowed=slowed, taken=taken)
    assert run_of(Times((disturbed,))) is None
    # A slower sample that the gate would not believe is none either.
    assert run_of(Times((disturbed, noisy(1.0, spread=0)))) is None


def test_runs_with_cycles_of_some_are_refused():
    with pytest.raises(ValueError, match="there are seconds for 2 runs, but cycles for 1"):
        Runs((1.0, 2.0), (3.0,))


# How often the interval is wrong


def assert_missed_as_often_as_it_says(found: list[Comparison]) -> None:
    """At most twice as many intervals as they say do not hold the ratio, which is 1."""
    assert sum(not one.low <= 1 <= one.high for one in found) <= 2 * (1 - LEVEL) * len(found)
    assert not any(one.outcome == "slower" for one in found)


def simulated(chance: random.Random, runs: int, between: float, within: float) -> tuple[Sample, Runs]:
    """One comparison of the same code: runs whose medians vary by ``between``, of rounds that vary by ``within``."""

    def run() -> list[float]:
        middle = chance.gauss(0, between)
        return [math.exp(chance.gauss(middle, within)) for _ in range(16)]

    return sample_of(*run()), Runs(tuple(statistics.median(run()) for _ in range(runs)))


@pytest.mark.parametrize(
    ("runs", "between", "within"),
    [
        # As runs usually vary.
        (1, 0.01, 0.01),
        (10, 0.01, 0.01),
        (10, 0.01, 0.05),
        # A machine on which runs vary more is known by its runs.
        (10, 0.03, 0.01),
    ],
)
def test_the_interval_holds_the_ratio_as_often_as_it_says(runs, between, within):
    chance = random.Random(7)
    drawn = [simulated(chance, runs, between, within) for _ in range(200)]
    assert_missed_as_often_as_it_says([compare([now], then, TOLERANCE) for now, then in drawn])


# Pairs


def pairs_of(*ratios: float, drift: float = 0.0, spread: float = 0.002, pace: float | None = None):
    """Pairs (base, head) on a machine that gets slower from pair to pair by ``drift``."""
    return [
        (noisy((1 + drift) ** number, spread, pace=pace), noisy(ratio * (1 + drift) ** number, spread, pace=pace))
        for number, ratio in enumerate(ratios)
    ]


def test_what_drifts_from_pair_to_pair_drops_out():
    still, drifting = (compare_pairs(pairs_of(1.0, 1.01, 0.99, 1.0, drift=drift), TOLERANCE) for drift in (0.0, 0.3))
    for name in ("ratio", "low", "high"):
        assert getattr(drifting, name) == pytest.approx(getattr(still, name))
    assert drifting.outcome == "not slower"


def test_pairs_tell_a_slowdown_under_drift():
    assert compare_pairs(pairs_of(*[1.08, 1.07, 1.09, 1.08, 1.07, 1.09], drift=0.1), TOLERANCE).outcome == "slower"


@pytest.mark.parametrize("number", [1, FEWEST_PAIRS - 1])
def test_a_few_pairs_are_not_enough_for_slower_or_faster(number):
    found = compare_pairs(pairs_of(*[2.0] * number), TOLERANCE)
    assert (found.outcome, found.reason) == ("uncertain", f"only {number} of {FEWEST_PAIRS} pairs of runs")
    assert compare_pairs(pairs_of(*[0.5] * number), TOLERANCE).outcome == "not slower"


def test_one_slow_run_among_the_pairs_is_not_slower():
    assert compare_pairs(pairs_of(1.0, 1.0, 1.0, 2.0), TOLERANCE).outcome == "uncertain"


@pytest.mark.parametrize(
    ("ratios", "tolerance", "outcome"),
    [
        pytest.param((0.95, 1.06, 0.96, 1.03), 0.015, "uncertain", id="far beyond the tolerance"),
        pytest.param((0.95, 1.06, 0.96, 1.03), 0.10, "not slower", id="within a tolerance that is as large"),
        pytest.param((0.999, 1.001, 0.999, 1.001), 0.015, "not slower", id="within the tolerance"),
        pytest.param((0.99, 1.01, 0.99, 1.01, 0.99, 1.01), 0.015, "not slower", id="a little beyond the tolerance"),
        pytest.param((0.90, 1.01, 0.91, 0.98), 0.015, "uncertain", id="though it looks faster"),
        pytest.param((0.5, 0.51, 0.5, 0.49), 0.015, "faster", id="faster with its whole interval"),
    ],
)
def test_pairs_that_leave_a_slowdown_far_beyond_the_tolerance_possible_are_uncertain(ratios, tolerance, outcome):
    found = compare_pairs(pairs_of(*ratios), tolerance)
    assert (found.outcome, found.high > 1 + 2 * tolerance) == (outcome, outcome == "uncertain")


def test_a_run_that_is_judged_by_earlier_runs_may_leave_more_open_than_pairs():
    found = compare([noisy(1.0, spread=0.05)], stable(runs=1), 0.015)
    assert found.high > 1 + 2 * 0.015
    assert found.outcome == "not slower"


@given(ratios=st.lists(st.floats(0.8, 1.25), min_size=1, max_size=8), drift=st.floats(-0.1, 0.3))
def test_the_seconds_of_both_sides_have_the_ratio_that_is_judged(ratios, drift):
    pairs = pairs_of(*ratios, drift=drift)
    base, head = typical_seconds(pairs)
    assert head / base == pytest.approx(compare_pairs(pairs, TOLERANCE).ratio)


def test_the_seconds_of_both_sides_are_those_of_the_pairs_that_are_compared():
    disturbed = (noisy(1.0), noisy(9.0, invalid=THROTTLED))
    calm = [(noisy(1.0), noisy(1.25)) for _ in range(FEWEST_PAIRS)]
    assert typical_seconds([disturbed, *calm]) == typical_seconds(calm)


def test_the_same_ratios_of_more_pairs_narrow_the_interval():
    few, many = (compare_pairs(pairs_of(*[0.99, 1.01] * count), TOLERANCE) for count in (2, 6))
    assert many.high / many.low < few.high / few.low


def test_disturbed_pairs_do_not_count_and_too_few_pairs_show_no_slowdown():
    pairs = [(noisy(1.0), noisy(1.25)) for _ in range(4)]
    disturbed = (noisy(1.0), noisy(9.0, invalid=THROTTLED))
    found = compare_pairs([disturbed, *pairs, disturbed], TOLERANCE)
    assert (found.outcome, found.ratio) == ("slower", pytest.approx(1.25, rel=0.01))
    found = compare_pairs([disturbed, *pairs[1:]], TOLERANCE)
    assert (found.outcome, found.reason) == ("uncertain", THROTTLED)
    assert compare_pairs([disturbed] * 5, TOLERANCE).outcome == "uncertain"


@pytest.mark.parametrize(("factor", "outcome"), [(1.5, "slower"), (1.2, "uncertain")])
def test_pairs_whose_disturbances_cannot_explain_it_are_slower(factor, outcome):
    pairs = [(noisy(1.0, pace=1.0), noisy(factor, pace=1.0, invalid=BUSY, slowed=1.2))] * FEWEST_PAIRS
    found = compare_pairs(pairs, TOLERANCE)
    assert found.outcome == outcome
    assert found.reason == (f"{BUSY}, which cannot explain the slowdown" if outcome == "slower" else BUSY)
    assert compare_pairs(pairs[1:], TOLERANCE).outcome == "uncertain"
    calm = (noisy(1.0, pace=1.0), noisy(1.0, pace=1.0))
    assert compare_pairs([*pairs, calm, calm], TOLERANCE).outcome in ("not slower", "uncertain")


def test_pairs_are_judged_in_cycles_where_the_clock_was_read_in_all_of_them():
    slower = [(noisy(1.0, pace=1.0), noisy(1.06, pace=0.985)) for _ in range(5)]
    assert compare_pairs(slower, TOLERANCE).reason.startswith("a slower clock may explain the slowdown")
    unread = [(noisy(1.0), noisy(1.06, pace=0.985)), *slower[1:]]
    assert (compare_pairs(unread, TOLERANCE).outcome, compare_pairs(unread, TOLERANCE).cycles) == ("slower", None)


def test_where_the_slower_moments_of_the_machine_fell_to_one_side_nothing_is_slower():
    by_chance = [(noisy(1.0, pace=1.0), noisy(1.2, pace=0.9)) for _ in range(5)]
    found = compare_pairs(by_chance, TOLERANCE)
    assert (found.outcome, found.reason) == ("uncertain", "the machine ran 10 % slower in the runs of the head")
    for factor, pace in ((1.5, 0.9), (1.25, 1.0)):
        more = [(noisy(1.0, pace=1.0), noisy(factor, pace=pace)) for _ in range(5)]
        assert compare_pairs(more, TOLERANCE).outcome == "slower"


@pytest.mark.parametrize("number", [4, 10])
def test_the_interval_of_pairs_holds_the_ratio_as_often_as_it_says(number):
    chance = random.Random(3)

    def run(machine: float) -> Sample:
        middle = machine + chance.gauss(0, 0.02)
        return sample_of(*(math.exp(chance.gauss(middle, 0.01)) for _ in range(8)))

    def pair() -> tuple[Sample, Sample]:
        machine = chance.gauss(0, 0.3)
        return run(machine), run(machine)

    found = [compare_pairs([pair() for _ in range(number)], TOLERANCE) for _ in range(120)]
    assert_missed_as_often_as_it_says(found)
