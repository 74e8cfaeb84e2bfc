"""The benchmark of the time gate: its planting, its recordings, its simulations, and how it scores rules, ours and the peers'."""

from __future__ import annotations

import json
import random
import re
import statistics
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import time_faithful
import time_file
import time_gate
import time_noise
import time_peers
import time_samples
from click.testing import CliRunner
from time_cost import cost_of
from time_file import Reading, Recording, Run, Series, run_from_plain
from time_load import LOADS, neighbours
from time_replay import Replay, Timed
from time_rules import (
    PairedTrial,
    Trial,
    compared_in_turns,
    exact_interval,
    judged,
    ours,
    ours_in_turns,
    runs_of,
    score,
    tolerance,
    tolerance_in_turns,
)
from time_simulated import (
    SCENARIOS,
    SCENARIOS_IN_TURNS,
    Machine,
    Moment,
    frequency_step,
    unseen_frequency_step,
)
from time_steps import SLOWDOWNS, SUB_STEPS, planted
from time_trials import ANY_LOAD, QUIET, in_turns, same_in_turns, same_step
from time_trials import planted as planted_trials

from pytest_gpumem.cli.ab import ab
from pytest_gpumem.steps.runner import ROUNDS_TO_DECIDE, SECONDS_BETWEEN_SAMPLES
from pytest_gpumem.values.interference import Conditions

if TYPE_CHECKING:
    from collections.abc import Callable

peers = pytest.mark.skipif(time_peers.missing() is not None, reason=time_peers.missing() or "")

CORES = 2
STEP = 0.03


def steady(
    seconds: float = STEP, *, waited: float = 0.0, rounds: int = 70, seed: int = 0, pace: float = 4000.0
) -> Series:
    """Rounds that vary by half a percent; ``waited`` is the share that the thread had no core."""
    chance = random.Random(seed)
    taken = [seconds * chance.gauss(1, 0.005) for _ in range(rounds)]
    at = [sum(taken[:number]) for number in range(rounds + 1)]
    return Series(1, tuple(taken), tuple(Reading(one, pace, one * waited, 0.0, 0.0) for one in at))


def trial(now: Series, baseline: int = 10) -> Trial:
    return Trial(tuple(steady(seed=number + 1) for number in range(baseline)), now, now, CORES)


def recording(blocks: int = 3) -> Recording:
    """Blocks ABBA of each planted slowdown, quiet, and two runs beside another load."""
    runs = []
    for number in range(blocks):
        for place_of_percent, percent in enumerate((0, *SLOWDOWNS)):
            block = number * 10 + place_of_percent
            for place, here in enumerate((0, percent, percent, 0)):
                series = {"gpt": steady(STEP * (1 + here / 100), seed=block * 10 + place)}
                runs.append(Run("quiet", block, place, here, 100.0 * len(runs), series))
    runs += [Run("2 busy", 999, place, 0, 0.0, {"gpt": steady(2 * STEP, waited=0.5, seed=place)}) for place in range(3)]
    return Recording({"device": "CPU"}, CORES, tuple(runs))


@pytest.mark.parametrize("percent", [0, *SLOWDOWNS])
def test_a_planted_step_does_exactly_so_much_more(percent: int) -> None:
    done = []
    planted(lambda: done.append(1), percent)()
    assert len(done) * 100 == SUB_STEPS * (100 + percent)


def test_the_plan_of_quiet_runs_is_abba_for_every_slowdown() -> None:
    plan = time_samples.quiet_plan()
    first = [next(plan) for _ in range(4 * 5)]
    blocks = [[(one.percent, one.place) for one in first if one.block == block] for block in range(5)]
    assert blocks == [[(0, 0), (percent, 1), (percent, 2), (0, 3)] for percent in (0, *SLOWDOWNS)]
    assert len({one.key for one in first}) == len(first)


def test_every_load_is_in_the_plan_and_has_neighbours_that_end_with_it() -> None:
    plan = time_samples.loads_plan()
    # The moderate one is in the plan of noise.
    assert {next(plan).load for _ in range(2 * len(LOADS))} == set(LOADS) - {"moderate"}
    with neighbours("quiet"):
        pass


def test_the_plan_of_noise_has_each_slowdown_in_both_forms_beside_each_load() -> None:
    plan = time_samples.noise_plan()
    runs = [next(plan) for _ in range(time_samples.RUNS_A_TURN["noise"])]
    for load in time_samples.NOISE:
        planted_here = Counter((one.percent, one.wait) for one in runs if one.load == load)
        assert planted_here == {(0, 0): 2, (25, 0): 1, (100, 0): 1, (0, 25): 1, (0, 100): 1}
    assert len({one.key for one in runs}) == len(runs)


def test_a_planted_wait_comes_on_top_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    class Time:
        thread_time = staticmethod(lambda: clock[0])

        @staticmethod
        def perf_counter() -> float:
            clock[0] += 1e-3
            return clock[0]

    def sub_step() -> None:
        clock[0] += 1.0

    monkeypatch.setattr("time_steps.time", Time)
    step = planted(sub_step, wait=50)
    began = clock[0]
    step()
    assert clock[0] - began == pytest.approx(1.5 * SUB_STEPS, rel=1e-3)


class Clock:
    """A device on which a step takes 8 ms, and reading costs nothing."""

    seconds_between_readings = 0.0

    def __init__(self) -> None:
        self.now = 50.0
        self.taken: list[int] = []

    def conditions(self) -> Conditions:
        return Conditions(self.now, waited=self.now / 100, stolen=0.0, others=self.now / 10, cores=CORES)

    def pace(self) -> float:
        return 4000.0

    def time(self, run: Callable[[], object]) -> float:
        before = self.now
        run()
        self.taken.append(round((self.now - before) / 0.008))
        return self.now - before


def test_a_series_is_recorded_in_rounds_of_twenty_milliseconds_with_a_reading_around_each() -> None:
    clock = Clock()

    def step() -> None:
        clock.now += 0.008

    series = time_samples.series_of(step, clock, 0.1)
    assert clock.taken == [1, 3, 3, 3, 3]
    assert series.steps == 3
    assert series.seconds == pytest.approx([0.008] * 5)
    assert len(series.readings) == 6


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = recording()
    path = tmp_path / "times.json"
    written.write(path)
    read = time_file.read(path)
    assert [run.key for run in read.runs] == [run.key for run in written.runs]
    assert (read.machine, read.cores) == (written.machine, CORES)
    was, now = written.runs[-1].series["gpt"], read.runs[-1].series["gpt"]
    assert now.seconds == pytest.approx(was.seconds, rel=1e-3)
    last, kept = was.readings[-1], now.readings[-1]
    assert (kept.at, kept.waited, kept.pace) == pytest.approx((last.at, last.waited, last.pace), rel=1e-3)
    assert run_from_plain(json.loads(json.dumps(read.runs[0].to_plain()))).to_plain() == read.runs[0].to_plain()


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 7, "machine": {}, "cores": 2, "runs": []}'])
def test_another_file_is_no_recording_and_says_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"times\.json .*move it away"):
        time_file.read(path)


def test_times_of_another_machine_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    recording().write(path)
    with pytest.raises(ValueError, match="recorded elsewhere"):
        time_samples.begin(path, {"device": "another"})
    assert len(time_samples.begin(path, {"device": "CPU"}).runs) == len(recording().runs)


def test_what_is_replayed_is_sampled_as_it_was_recorded() -> None:
    series = steady()
    timed = Timed(series, CORES)
    taken = len(timed.first.rounds)
    assert [one.seconds for one in timed.first.rounds] == list(series.seconds[:taken])
    assert [one.seconds for one in timed.again.rounds] == list(series.seconds[taken : taken + len(timed.again.rounds)])
    rounds = series.seconds[: taken + len(timed.again.rounds)]
    assert timed.seconds == pytest.approx(sum(rounds) + SECONDS_BETWEEN_SAMPLES)


def test_a_series_that_is_too_short_gives_a_shorter_sample() -> None:
    timed = Timed(steady(0.3, rounds=7), CORES)
    assert (len(timed.first.rounds), len(timed.again.rounds)) == (4, 3)


def test_a_third_sample_is_taken_where_the_series_is_long_enough() -> None:
    assert Timed(steady(rounds=30), CORES).once_more is None
    timed = Timed(steady(rounds=300), CORES)
    assert timed.once_more is not None
    assert timed.once_more is timed.once_more is not timed.again


def test_a_re_measurement_has_as_many_rounds_as_the_gate_decides_by() -> None:
    timed = Timed(steady(1.5), CORES)
    assert (len(timed.first.rounds), len(timed.again.rounds)) == (1, ROUNDS_TO_DECIDE)


def test_a_step_shorter_than_a_round_is_replayed_in_rounds_of_several() -> None:
    series = steady(0.008)
    series = Series(3, series.seconds, series.readings)
    sample = Replay(series, CORES).sample(1.0)
    assert sample.steps == 3
    assert [one.seconds for one in sample.rounds] == pytest.approx(series.seconds[1 : 1 + len(sample.rounds)])


def test_a_run_that_is_to_be_accepted_is_measured_again_where_it_was_disturbed() -> None:
    disturbed, quiet = steady(2 * STEP, waited=0.5, rounds=17), steady(rounds=20)
    end = disturbed.readings[-1]
    later = [replace(one, at=end.at + one.at, waited=end.waited) for one in quiet.readings[1:]]
    series = Series(1, disturbed.seconds + quiet.seconds, (*disturbed.readings, *later))
    assert Timed(series, CORES).first.invalid is not None
    runs = runs_of([series], CORES)
    assert runs is not None
    assert runs.seconds == pytest.approx([STEP], rel=0.01)


def test_the_store_has_no_runs_that_were_disturbed() -> None:
    quiet, disturbed = steady(), steady(waited=0.5)
    assert runs_of([disturbed], CORES) is None
    runs = runs_of([disturbed, quiet], CORES)
    assert runs is not None
    assert len(runs.seconds) == 1


def test_ours_passes_the_same_step_and_fails_one_that_is_twice_the_tolerance_longer() -> None:
    assert ours(trial(steady())) == "passes"
    assert ours(trial(steady(STEP * (1 + 2 * tolerance())))) == "fails"


def test_ours_measures_again_only_what_it_doubts() -> None:
    samples = [judged(trial(steady(ratio * STEP)))[1] for ratio in (1.0, 1.2, 0.8)]
    assert [len(taken) for taken in samples] == [1, 2, 2]


def test_ours_is_uncertain_where_the_thread_waited_or_there_is_no_baseline() -> None:
    assert ours(trial(steady(1.5 * STEP, waited=0.4))) == "uncertain"
    assert ours(Trial((steady(waited=0.4),), steady(), steady(), CORES)) == "uncertain"


def test_ours_in_turns_fails_a_longer_head_and_passes_an_equal_one() -> None:
    def pairs(head: float) -> PairedTrial:
        return PairedTrial(tuple((steady(seed=number), steady(head, seed=50 + number)) for number in range(6)), CORES)

    assert ours_in_turns(pairs(1.10 * STEP), 0.02) == "fails"
    assert ours_in_turns(pairs(STEP), 0.02) == "passes"


def test_what_is_tolerated_in_turns_is_what_the_command_tolerates() -> None:
    (said,) = re.findall(
        r"--max-slowdown .*?default:\s+([\d.]+) %", CliRunner().invoke(ab, ["--help"]).output, re.DOTALL
    )
    assert tolerance_in_turns() == pytest.approx(float(said) / 100)


@pytest.mark.parametrize(
    ("head", "pairs", "word"),
    # The same step is decided by the first look that counts, a slower one by two looks that agree, and some never.
    [(1.0, 4, "not slower"), (1.1, 5, "slower"), (1.021, 8, "uncertain")],
)
def test_ours_in_turns_looks_after_each_pair_and_ends_as_the_command_does(head: float, pairs: int, word: str) -> None:
    drawn = tuple((steady(seed=number), steady(head * STEP, seed=50 + number)) for number in range(8))
    report = compared_in_turns(PairedTrial(drawn, CORES), 0.02)
    (figure,) = report.speeds.values()
    assert (report.pairs, figure.word) == (pairs, word)


@pytest.mark.parametrize(("always", "fails", "uncertain"), [("fails", 20, 0), ("passes", 0, 0), ("uncertain", 0, 20)])
def test_a_rule_that_always_says_the_same_is_scored_so(always: str, fails: int, uncertain: int) -> None:
    found = score(lambda _: always, same_step(recording(), random.Random(0), 20))
    assert (found.fails, found.uncertain, found.trials) == (fails, uncertain, 20)
    assert found.share == fails / 20


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    # Tables of the binomial distribution; 0 of n has the closed form 1 - 0.025 ** (1 / n).
    [
        (0, 10, 0.0, 0.3085),
        (10, 10, 0.6915, 1.0),
        (1, 10, 0.0025, 0.4450),
        (5, 10, 0.1871, 0.8129),
        (0, 1000, 0.0, 0.00368),
    ],
)
def test_intervals_are_those_of_clopper_and_pearson(hits: int, trials: int, low: float, high: float) -> None:
    assert exact_interval(hits, trials) == pytest.approx((low, high), abs=1e-4)


def test_a_step_is_compared_with_itself_beside_any_load_and_never_with_the_same_run() -> None:
    drawn = list(same_step(recording(), random.Random(0), 200))
    assert len(drawn) == 200
    assert all(one.now not in one.baseline and one.next not in (*one.baseline, one.now) for one in drawn)
    loads = Counter((one.baseline[0].seconds[0] > 1.5 * STEP, one.now.seconds[0] > 1.5 * STEP) for one in drawn)
    assert set(loads) == {(False, False), (False, True), (True, False)} or len(loads) == 4
    assert {len(one.baseline) for one in drawn} >= {1, 10}


def test_planted_trials_have_the_slowdown_and_as_many_runs_as_asked_for() -> None:
    for one in planted_trials(recording(), random.Random(0), 10, 3, 20):
        assert len(one.baseline) == 3
        ratio = statistics.median(one.now.seconds) / statistics.median(one.baseline[-1].seconds)
        assert ratio == pytest.approx(1.10, rel=0.01)
    assert list(planted_trials(recording(1), random.Random(0), 10, 500, 20)) == []


def test_no_baseline_run_is_a_neighbour_of_the_run_that_is_judged() -> None:
    recorded = recording()
    block_of = {id(run.series["gpt"]): run.block for run in recorded.runs}
    for one in planted_trials(recorded, random.Random(0), 5, 10, 40):
        assert block_of[id(one.now)] not in {block_of[id(run)] for run in one.baseline}
        assert one.next not in one.baseline


# By what was at work


@pytest.mark.parametrize(
    ("waited", "others", "load"),
    [
        (0.0, 0.2, time_noise.IDLE),
        (0.0, 0.5, time_noise.MODERATE),
        (0.2, 0.6, time_noise.MODERATE),
        (0.0, 0.7, time_noise.MODERATE),
        (0.0, 0.8, time_noise.HEAVY),
        (0.4, 1.4, time_noise.HEAVY),
        (0.7, 1.7, time_noise.CROWDED),
    ],
)
def test_a_series_says_itself_what_was_at_work(waited: float, others: float, load: str) -> None:
    series = steady(waited=waited)
    readings = tuple(replace(one, others=one.at * others) for one in series.readings)
    assert time_noise.load_of(replace(series, readings=readings), CORES) == load


@pytest.mark.parametrize(("work", "wait"), [(1.0, 0.0), (0.0, STEP)])
def test_a_slowdown_that_is_reckoned_makes_rounds_longer_beside_the_same_load(work: float, wait: float) -> None:
    series = steady(waited=0.3)
    slow = time_noise.longer(series, work, wait)
    for before, after in zip(series.seconds, slow.seconds, strict=True):
        assert after == pytest.approx(before * (1 + work) + wait)
    last = slow.readings[-1]
    assert last.at == pytest.approx(sum(slow.seconds))
    assert last.waited == pytest.approx(0.3 * last.at)
    assert [one.pace for one in slow.readings] == [one.pace for one in series.readings]


def noisy_recording() -> Recording:
    """Quiet runs, with and without slowdowns, and crowded ones."""
    kinds = [(0, 0)] * 8 + [(100, 0), (0, 100)] * 5
    runs = [
        Run(
            "quiet",
            number,
            0,
            percent,
            float(number),
            {"gpt": steady(STEP * (1 + (percent + wait) / 100), seed=number)},
            wait,
        )
        for number, (percent, wait) in enumerate(kinds)
    ]
    runs += [Run("quiet", 99, n, 0, 99.0, {"gpt": steady(4 * STEP, waited=0.7, seed=n)}) for n in range(5)]
    return Recording({"device": "CPU"}, CORES, tuple(runs))


def test_a_step_is_compared_with_itself_beside_the_load_that_was_asked_for() -> None:
    recorded = noisy_recording()
    for load, median in ((time_noise.IDLE, STEP), (time_noise.CROWDED, 4 * STEP)):
        drawn = list(time_noise.itself(recorded, random.Random(0), load, 20))
        assert len(drawn) == 20
        for one in drawn:
            assert one.now not in one.baseline
            assert statistics.median(one.now.seconds) == pytest.approx(median, rel=0.02)
    assert list(time_noise.itself(recorded, random.Random(0), time_noise.HEAVY, 20)) == []


@pytest.mark.parametrize("form", [time_noise.WORK, time_noise.WAIT])
@pytest.mark.parametrize("is_planted", [True, False], ids=["planted", "reckoned"])
def test_a_slower_step_is_compared_with_runs_that_would_be_accepted(form: str, is_planted: bool) -> None:
    slowdown = time_noise.Slowdown(form, 100, is_planted)
    drawn = list(time_noise.slower(noisy_recording(), random.Random(0), slowdown, time_noise.IDLE, 20))
    assert len(drawn) == 20
    for one in drawn:
        assert len(one.baseline) == time_noise.BASELINE_RUNS
        assert statistics.median(one.now.seconds) == pytest.approx(2 * STEP, rel=0.05)
        assert all(statistics.median(run.seconds) == pytest.approx(STEP, rel=0.02) for run in one.baseline)
        assert ours(one) == "fails"


def test_a_wait_that_is_reckoned_makes_the_step_so_much_longer_beside_its_load() -> None:
    slowdown = time_noise.Slowdown(time_noise.WAIT, 100, planted=False)
    for one in time_noise.slower(noisy_recording(), random.Random(0), slowdown, time_noise.CROWDED, 20):
        assert statistics.median(one.now.seconds) == pytest.approx(8 * STEP, rel=0.02)


def test_beside_a_simulated_moderate_load_slowdowns_fail_and_nothing_else_does() -> None:
    twice, none = time_noise.Slowdown(time_noise.WORK, 100, planted=False), None
    for slowdown, outcome in ((twice, {"fails"}), (none, {"passes", "uncertain"})):
        found = {ours(one) for one in time_noise.simulated(random.Random(3), slowdown, 10)}
        assert found <= outcome


def test_nothing_is_claimed_of_waits_that_hide_in_waiting_and_everything_is_of_steps_twice_as_long() -> None:
    work, wait = (time_noise.Slowdown(form, 100, planted=True) for form in (time_noise.WORK, time_noise.WAIT))
    assert time_gate._claimed(work, time_noise.HEAVY) == time_gate.TWICE
    assert time_gate._claimed(wait, time_noise.HEAVY) is None
    assert time_gate._claimed(wait, time_noise.MODERATE) == time_gate.TWICE
    assert time_gate._claimed(replace(wait, planted=False), time_noise.HEAVY) == time_gate.TWICE
    quarter = replace(work, percent=25)
    assert time_gate._claimed(quarter, time_noise.MODERATE) == time_gate.QUARTER
    assert time_gate._claimed(quarter, time_noise.HEAVY) is None


def test_a_claim_that_too_few_runs_were_recorded_for_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    class Nobody:
        def start(self, *_: object) -> list[object]:
            return []

        def scores(self, _: object) -> list[object]:
            return []

    claims = [*time_gate.show_alarms(Nobody(), 10), *time_gate.show_power(Nobody(), 10)]
    assert sum(claim.text.startswith("A/B, ") for claim in claims) == 5
    assert all(claim.missed for claim in claims)
    assert "too few runs are recorded" in capsys.readouterr().out


def test_pairs_are_neighbours_of_one_block_with_the_base_first() -> None:
    (drawn,) = in_turns(recording(), random.Random(0), 20, 6, 1)
    assert len(drawn.pairs) == 6
    for base, head in drawn.pairs:
        assert statistics.median(head.seconds) / statistics.median(base.seconds) == pytest.approx(1.20, rel=0.01)


def test_a_step_is_compared_with_itself_in_turns_by_neighbours_of_one_code_and_no_run_is_in_two_pairs() -> None:
    recorded = replace(recording(), runs=tuple(replace(run, began=7.0 * n) for n, run in enumerate(recording().runs)))
    run_of = {id(run.series["gpt"]): (number, run) for number, run in enumerate(recorded.runs)}
    for drawn in same_in_turns(recorded, random.Random(0), QUIET, 8, 20):
        numbers = [[run_of[id(series)][0] for series in pair] for pair in drawn.pairs]
        # Every other pair is mirrored, as in the command.
        assert [head - base for base, head in numbers] == [1, -1] * 4
        assert len({number for pair in numbers for number in pair}) == 16
        runs = [[recorded.runs[number] for number in pair] for pair in numbers]
        assert all(base.percent == head.percent and base.load == head.load == QUIET for base, head in runs)


def test_beside_any_load_neighbours_are_those_that_ran_one_after_the_other() -> None:
    runs = [replace(run, began=7.0 * number) for number, run in enumerate(recording(2).runs)]
    (drawn,) = same_in_turns(Recording({}, CORES, tuple(runs)), random.Random(0), ANY_LOAD, 15, 1)
    assert max(series.seconds[0] for pair in drawn.pairs for series in pair) > 1.5 * STEP
    apart = [replace(run, began=100.0 * number) for number, run in enumerate(runs)]
    assert list(same_in_turns(Recording({}, CORES, tuple(apart)), random.Random(0), ANY_LOAD, 1, 1)) == []


@pytest.mark.parametrize("scenario", SCENARIOS_IN_TURNS)
def test_simulated_runs_in_turns_repeat_and_pairs_have_two_runs_of_one_step(scenario: str) -> None:
    first, second = (SCENARIOS_IN_TURNS[scenario](random.Random("1"), 3) for _ in range(2))
    assert [[one.seconds for one in pair] for pair in first.pairs] == [[one.seconds for one in p] for p in second.pairs]
    assert len({id(one) for pair in first.pairs for one in pair}) == 6
    assert len({one.steps for pair in first.pairs for one in pair}) == 1


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_simulated_trials_repeat_and_have_runs_of_two_seconds(scenario: str) -> None:
    first, second = (SCENARIOS[scenario](random.Random("1")) for _ in range(2))
    assert first.now.seconds == second.now.seconds
    assert first.now.seconds != SCENARIOS[scenario](random.Random("2")).now.seconds
    assert first.now.readings[-1].at >= 2
    assert len(first.now.readings) == len(first.now.seconds) + 1


def test_a_simulated_clock_that_is_lower_makes_steps_longer_by_as_much() -> None:
    def trials(make: Callable[[random.Random], Trial]) -> tuple[float, float]:
        one = make(random.Random("7"))
        seconds = statistics.median(one.now.seconds) / statistics.median(one.baseline[0].seconds)
        paces = [statistics.median(reading.pace for reading in run.readings) for run in (one.now, one.baseline[0])]
        return seconds, paces[0] / paces[1]

    seconds, pace = trials(frequency_step)
    assert seconds > 1.08
    assert seconds * pace == pytest.approx(1, abs=0.05)
    seconds, pace = trials(unseen_frequency_step)
    assert seconds > 1.08
    assert pace == pytest.approx(1, abs=0.01)


def test_a_simulated_wait_is_read_as_one() -> None:
    machine = Machine(random.Random(0), lambda _: Moment(2.0, waited=0.5))
    run = machine.run(0.03, 0.0)
    assert run.readings[-1].waited == pytest.approx(0.5 * run.readings[-1].at)
    assert statistics.median(run.seconds) == pytest.approx(0.06, rel=0.05)


def test_a_cost_is_the_time_of_its_rounds_and_of_a_re_measurement_only_where_there_is_one() -> None:
    quiet, doubted = cost_of(trial(steady())), cost_of(trial(steady(1.2 * STEP)))
    _, samples = judged(trial(steady(1.2 * STEP)))
    assert quiet.ours == pytest.approx(12 * STEP, rel=0.02)
    rounds = sum(one.spent for one in samples)
    assert doubted.ours == pytest.approx(rounds + SECONDS_BETWEEN_SAMPLES, rel=0.02)
    assert quiet.theirs == pytest.approx(1.0, abs=2 * STEP)


def test_samples_and_plain_loops_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_faithful, "SECONDS", 0.0)
    clock, order = Clock(), []

    def step() -> None:
        clock.now += 0.05
        order.append("sample")

    def loop(_: Callable[[], object]) -> float:
        order.append("loop")
        return 0.04

    ours_taken, theirs_taken = time_faithful.times_in_turns(step, clock, loop, turns=3)
    assert order == ["sample", "loop", "loop", "sample", "sample", "loop"]
    assert (ours_taken, theirs_taken) == (pytest.approx([0.05] * 3), [0.04] * 3)


@peers
def test_the_rule_of_pytest_benchmark_fails_a_mean_that_is_more_than_five_percent_longer() -> None:
    rule = time_peers.pytest_benchmark_rule()
    assert [rule(trial(steady(STEP * ratio))) for ratio in (1.0, 1.04, 1.06)] == ["passes", "passes", "fails"]


@peers
def test_the_rule_of_asv_needs_the_factor_and_a_significant_difference() -> None:
    rule = time_peers.asv_rule()
    assert [rule(trial(steady(STEP * ratio))) for ratio in (1.0, 1.08, 1.15)] == ["passes", "passes", "fails"]
    chance = random.Random(1)
    wild = Series(1, tuple(STEP * chance.uniform(0.5, 2.0) for _ in range(70)), steady().readings)
    calm = Series(1, tuple(STEP * chance.uniform(0.4, 1.9) for _ in range(70)), steady().readings)
    assert rule(Trial((calm, calm), wild, wild, CORES)) == "passes"


def test_the_command_says_which_peers_are_missing_and_how_to_install_them(tmp_path: Path) -> None:
    for name in ("pytest_benchmark", "asv"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')")
    benchmark = Path(time_samples.__file__).with_name("time_gate.py")
    code = f"import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['time_gate.py']; sys.path.append({str(benchmark.parent)!r}); runpy.run_path({str(benchmark)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pytest-benchmark (not here) and asv (not here); pip install pytest-benchmark asv" in done.stderr
