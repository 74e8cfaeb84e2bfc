"""The benchmark of the time gate: what is drawn from recorded times, and that the gate itself judges it."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from time_gate import (
    QUARTER,
    RECORDED,
    RECORDING,
    TWICE,
    Kind,
    claimed_power,
    judge,
    judge_in_turns,
    show_alarms,
    show_power,
)
from time_judged import (
    PairedTrial,
    Trial,
    compared_in_turns,
    exact_interval,
    ours,
    runs_of,
    tolerance,
)
from time_noise import CROWDED, HEAVY, IDLE, MODERATE, WAIT, WORK, Slowdown, itself, load_of, longer, simulated, slower
from time_recorded import Reading, Recording, Run, Series
from time_replay import Timed
from time_simulated import SCENARIOS, SCENARIOS_IN_TURNS, Machine, Moment, frequency_step
from time_trials import QUIET, in_turns, planted, same_in_turns, same_step

from pytest_gpumem.measuring.measure.timed_steps import ROUNDS_TO_DECIDE

CORES = 2
STEP = 0.03


def steady(seconds: float = STEP, *, waited: float = 0.0, rounds: int = 70, seed: int = 0) -> Series:
    """Rounds that vary by half a percent; ``waited`` is the share that the thread had no core."""
    chance = random.Random(seed)
    taken = [seconds * chance.gauss(1, 0.005) for _ in range(rounds)]
    at = [sum(taken[:number]) for number in range(rounds + 1)]
    return Series(1, tuple(taken), tuple(Reading(one, 4000.0, one * waited, 0.0, 0.0) for one in at))


def recording() -> Recording:
    """Blocks ABBA of each planted slowdown, quiet; then runs twice as long, and crowded ones."""
    blocks = [(block, percent) for block, percent in enumerate([0, 5, 10, 20] * 3)]
    kinds = [
        (block, place, here, 0, 0.0) for block, percent in blocks for place, here in enumerate((0, percent, percent, 0))
    ]
    kinds += [(90, place, percent, wait, 0.0) for place, (percent, wait) in enumerate([(100, 0), (0, 100)] * 5)]
    kinds += [(99, place, 0, 0, 0.7) for place in range(5)]
    runs = [
        Run(
            "2 busy" if waited else QUIET,
            block,
            place,
            percent,
            7.0 * number,
            {"gpt": steady(STEP * (1 + (percent + wait) / 100), waited=waited, seed=number)},
            wait,
        )
        for number, (block, place, percent, wait, waited) in enumerate(kinds)
    ]
    return Recording({"device": "CPU"}, CORES, tuple(runs))


def ratio(now: Series, before: Series) -> float:
    return statistics.median(now.seconds) / statistics.median(before.seconds)


@pytest.mark.parametrize("path", sorted(RECORDING.parent.glob("time-samples*.json")), ids=lambda path: path.stem)
def test_the_gate_passes_recorded_steps_compared_with_themselves(path):
    assert set(judge(path, Kind(RECORDED), 0, 10)) <= {"passes", "uncertain"}


def test_the_gate_finds_what_was_planted_in_the_recorded_steps():
    assert judge(RECORDING, Kind("planted", 20, 10), 0, 10) == ["fails"] * 10
    assert judge_in_turns(RECORDING, Kind("planted", 20, 4), 0, 3) == ["fails"] * 3


def test_rounds_are_sampled_as_they_were_recorded_as_often_as_the_gate_asks():
    series = steady(rounds=300)
    timed = Timed(series, CORES)
    taken = len(timed.first.rounds)
    assert [one.seconds for one in timed.first.rounds] == list(series.seconds[:taken])
    assert timed.once_more is timed.once_more is not timed.again
    short = Timed(steady(rounds=30), CORES)
    assert [one.seconds for one in short.again.rounds] == list(steady(rounds=30).seconds[taken:])
    assert short.once_more is None
    assert len(Timed(steady(1.5), CORES).again.rounds) == ROUNDS_TO_DECIDE


def test_a_baseline_has_no_disturbed_runs_but_what_was_measured_again_in_their_place():
    disturbed, quiet = steady(2 * STEP, waited=0.5, rounds=17), steady(rounds=20)
    assert runs_of([steady(waited=0.5)], CORES) is None
    end = disturbed.readings[-1]
    later = [replace(one, at=end.at + one.at, waited=end.waited) for one in quiet.readings[1:]]
    runs = runs_of([Series(1, disturbed.seconds + quiet.seconds, (*disturbed.readings, *later))], CORES)
    assert runs is not None
    assert runs.seconds == pytest.approx([STEP], rel=0.01)


def test_a_slowdown_of_twice_the_tolerance_fails_and_a_waiting_thread_is_uncertain():
    baseline = tuple(steady(seed=number + 1) for number in range(10))
    assert ours(Trial(baseline, steady(), CORES)) == "passes"
    assert ours(Trial(baseline, steady(STEP * (1 + 2 * tolerance())), CORES)) == "fails"
    assert ours(Trial(baseline, steady(1.5 * STEP, waited=0.4), CORES)) == "uncertain"
    assert ours(Trial((steady(waited=0.4),), steady(), CORES)) == "uncertain"


@pytest.mark.parametrize(
    ("head", "pairs", "word"),
    # The same step is decided by the first look that counts, a slower one by two looks that agree, and some never.
    [(1.0, 4, "not slower"), (1.1, 5, "slower"), (1.021, 8, "uncertain")],
)
def test_in_turns_the_gate_looks_after_each_pair_and_ends_as_the_command_does(head, pairs, word):
    drawn = tuple((steady(seed=number), steady(head * STEP, seed=50 + number)) for number in range(8))
    report = compared_in_turns(PairedTrial(drawn, CORES), 0.02)
    (figure,) = report.speeds.values()
    assert (report.pairs, figure.word) == (pairs, word)


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    # Tables of the binomial distribution; 0 of n has the closed form 1 - 0.025 ** (1 / n).
    [(0, 10, 0.0, 0.3085), (10, 10, 0.6915, 1.0), (1, 10, 0.0025, 0.4450), (0, 1000, 0.0, 0.00368)],
)
def test_intervals_are_those_of_clopper_and_pearson(hits, trials, low, high):
    assert exact_interval(hits, trials) == pytest.approx((low, high), abs=1e-4)


def test_a_run_is_never_compared_with_itself_nor_a_slow_run_with_its_own_block():
    recorded = recording()
    assert all(one.now not in one.baseline for one in same_step(recorded, random.Random(0), 200))
    block_of = {id(run.series["gpt"]): run.block for run in recorded.runs}
    for one in planted(recorded, random.Random(0), 10, 3, 20):
        assert len(one.baseline) == 3
        assert ratio(one.now, one.baseline[-1]) == pytest.approx(1.10, rel=0.01)
        assert block_of[id(one.now)] not in {block_of[id(run)] for run in one.baseline}
    assert list(planted(recorded, random.Random(0), 10, 500, 20)) == []


def test_pairs_are_neighbours_in_mirrored_order_and_no_run_is_in_two_of_them():
    recorded = recording()
    (drawn,) = in_turns(recorded, random.Random(0), 20, 6, 1)
    assert [ratio(head, base) for base, head in drawn.pairs] == pytest.approx([1.20] * 6, rel=0.01)
    number_of = {id(run.series["gpt"]): number for number, run in enumerate(recorded.runs)}
    (drawn,) = same_in_turns(recorded, random.Random(0), QUIET, 8, 1)
    numbers = [[number_of[id(series)] for series in pair] for pair in drawn.pairs]
    assert [head - base for base, head in numbers] == [1, -1] * 4
    assert len({number for pair in numbers for number in pair}) == 16


@pytest.mark.parametrize(
    ("waited", "others", "load"),
    [(0.0, 0.2, IDLE), (0.2, 0.6, MODERATE), (0.0, 0.8, HEAVY), (0.4, 1.4, HEAVY), (0.7, 1.7, CROWDED)],
)
def test_a_series_says_itself_what_was_at_work(waited, others, load):
    series = steady(waited=waited)
    readings = tuple(replace(one, others=one.at * others) for one in series.readings)
    assert load_of(replace(series, readings=readings), CORES) == load


@pytest.mark.parametrize("form", [WORK, WAIT])
@pytest.mark.parametrize("is_planted", [True, False], ids=["planted", "reckoned"])
def test_a_slower_step_is_compared_with_runs_that_would_be_accepted(form, is_planted):
    drawn = list(slower(recording(), random.Random(0), Slowdown(form, 100, is_planted), IDLE, 20))
    assert len(drawn) == 20
    for one in drawn:
        assert [ratio(one.now, run) for run in one.baseline] == pytest.approx([2.0] * 5, rel=0.05)
        assert ours(one) == "fails"


def test_a_load_that_too_few_runs_had_has_no_row_and_one_that_some_had_has_theirs():
    assert list(itself(recording(), random.Random(0), HEAVY, 20)) == []
    for one in itself(recording(), random.Random(0), CROWDED, 20):
        assert load_of(one.now, CORES) == CROWDED
        assert one.now not in one.baseline


def test_a_reckoned_slowdown_makes_rounds_longer_beside_the_same_share_of_the_load():
    series = steady(waited=0.3)
    slow = longer(series, 0.5, STEP)
    assert slow.seconds == pytest.approx([1.5 * seconds + STEP for seconds in series.seconds])
    last = slow.readings[-1]
    assert (last.at, last.waited) == pytest.approx((sum(slow.seconds), 0.3 * sum(slow.seconds)))


def test_hidden_waits_claim_nothing_and_doubled_steps_claim_everything():
    work, wait = (Slowdown(form, 100, planted=True) for form in (WORK, WAIT))
    assert [claimed_power(one, HEAVY) for one in (work, wait, replace(wait, planted=False))] == [TWICE, None, TWICE]
    quarter = replace(work, percent=25)
    assert [claimed_power(quarter, load) for load in (MODERATE, HEAVY)] == [QUARTER, None]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_simulated_runs_repeat_with_their_seed(scenario):
    first, second, other = (SCENARIOS[scenario](random.Random(seed)) for seed in ("1", "1", "2"))
    assert first.now.seconds == second.now.seconds != other.now.seconds
    assert first.now.readings[-1].at >= 2


def test_a_lower_simulated_clock_lengthens_steps_and_a_wait_reads_as_a_wait():
    one = frequency_step(random.Random("7"))
    paces = [statistics.median(reading.pace for reading in run.readings) for run in (one.now, one.baseline[0])]
    assert ratio(one.now, one.baseline[0]) > 1.08
    assert ratio(one.now, one.baseline[0]) * paces[0] / paces[1] == pytest.approx(1, abs=0.05)
    run = Machine(random.Random(0), lambda _: Moment(2.0, waited=0.5)).run(STEP, 0.0)
    assert run.readings[-1].waited == pytest.approx(0.5 * run.readings[-1].at)
    assert statistics.median(run.seconds) == pytest.approx(2 * STEP, rel=0.05)


def test_beside_a_simulated_moderate_load_slowdowns_fail_and_nothing_else_does():
    twice = Slowdown(WORK, 100, planted=False)
    for slowdown, outcomes in ((twice, {"fails"}), (None, {"passes", "uncertain"})):
        assert {ours(one) for one in simulated(random.Random(3), slowdown, 10)} <= outcomes


def test_a_claim_that_too_few_runs_were_recorded_for_is_missed():
    class Nobody:
        def start(self, *_):
            return []

        def score(self, _):
            return None

    claims = [*show_alarms(Nobody(), 10), *show_power(Nobody(), 10)]
    assert len(claims) == 1 + len(SCENARIOS) + 2 + len(SCENARIOS_IN_TURNS) + 2
    assert all(claim.missed for claim in claims)
