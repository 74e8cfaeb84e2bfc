"""What the gate says of a step's speed: when it is compared, what a budget of throughput holds, and what has no effect."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpumem.base.units import ThroughputLimit, parse_rate
from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.metrics import Tolerance
from pytest_gpumem.facts.values.interference import Slowdown
from pytest_gpumem.facts.values.times import Round, Sample, Times
from pytest_gpumem.judging.gate.baseline import Baseline, Budget
from pytest_gpumem.judging.gate.comparison import Comparison
from pytest_gpumem.judging.gate.judge import judge
from pytest_gpumem.judging.gate.speed import (
    idle_slowdown,
    idle_throughput,
    judge_step_time,
    judge_throughput,
    update_that_adds_time,
)
from pytest_gpumem.judging.gate.verdict import MetricVerdict, Outcome
from pytest_gpumem.judging.times.comparison import Runs

TRAIN = Workload("train_step", "fp32", 1000, "int64[4, 256]")
HERE, THERE = "Xeon, 8 cores", "EPYC, 64 cores"
TOLERANCE = Tolerance(0.05)
ASKED = Budget(max_slowdown=0.05)
THROTTLED = "the GPU was throttled"
DEFAULT = {"samples": 4, "tokens": 1024}


def on(machine: str | None) -> Environment:
    return Environment("cpu-x86_64", "CPU (x86_64)", {} if machine is None else {"machine": machine})


def sample_of(*seconds: float, **more) -> Sample:
    return Sample(tuple(map(Round, seconds)), **more)


def measured(*samples: float | Sample, machine: str | None = HERE, work=DEFAULT) -> Measurement:
    """A measurement whose samples were these; a number stands for a steady one."""
    rounds = tuple(one if isinstance(one, Sample) else sample_of(*[one] * 12) for one in samples)
    times = Times(rounds) if rounds else None
    metrics = {"peak_allocated": 1} | ({} if times is None else {"step_time": times.median})
    return Measurement("train_step", TRAIN, on(machine), metrics, times=times, work=work)


def stored(*seconds: float, machine: str | None = HERE) -> Baseline:
    runs = Runs(seconds) if seconds else None
    return Baseline(TRAIN, on(machine), {"peak_allocated": 1}, "2026-11-02", runs=runs)


def time_verdict(measurement, budget, baseline, tolerance) -> MetricVerdict:
    return judge_step_time(Comparison.of(measurement, budget, baseline, {"step_time": tolerance}))


# Against the baseline


@pytest.mark.parametrize(
    ("now", "outcome"),
    [
        ([0.5], Outcome.IMPROVED),
        ([1.0], Outcome.OK),
        ([1.055], Outcome.UNCERTAIN),
        ([1.2], Outcome.REGRESSED),
        ([1.2, 1.2], Outcome.REGRESSED),
        ([1.2, 1.0], Outcome.OK),
    ],
)
def test_a_step_time_is_judged_by_all_samples_against_all_runs(now, outcome):
    verdict = time_verdict(measured(*now), Budget(), stored(*[1.0] * 10), TOLERANCE)
    assert verdict.outcome is outcome
    assert (verdict.value, verdict.baseline, verdict.allowed) == (min(now), 1.0, 0.05)
    assert verdict.interval[0] < min(now) < verdict.interval[1]
    assert verdict.gated


def test_the_value_is_of_the_sample_that_decides_and_not_of_a_slower_valid_one():
    confirmed_by_none = measured(1.2, sample_of(*[1.0] * 12, invalid=THROTTLED, slowed=Slowdown(1e6)))
    verdict = time_verdict(confirmed_by_none, Budget(), stored(*[1.0] * 10), TOLERANCE)
    assert (verdict.outcome, verdict.value) == (Outcome.OK, 1.0)
    assert verdict.interval[0] < verdict.value < verdict.interval[1]


def test_of_a_relative_and_an_absolute_tolerance_the_larger_one_holds():
    for tolerance, allowed in ((Tolerance(0.0, absolute=0.4), 0.4), (Tolerance(0.3, absolute=0.1), 0.6)):
        verdict = time_verdict(measured(2.3), Budget(), stored(*[2.0] * 10), tolerance)
        assert (verdict.outcome, verdict.allowed) == (Outcome.OK, allowed)
    verdict = time_verdict(measured(2.3), Budget(), stored(*[2.0] * 10), Tolerance(0.0, absolute=0.1))
    assert (verdict.outcome, verdict.allowed) == (Outcome.REGRESSED, 0.1)


def test_what_is_uncertain_has_its_reason():
    sample = sample_of(*[1.2] * 12, invalid=THROTTLED, slowed=Slowdown(1e6))
    verdict = time_verdict(measured(sample), Budget(), stored(*[1.0] * 10), TOLERANCE)
    assert (verdict.outcome, verdict.reason) == (Outcome.UNCERTAIN, THROTTLED)


def test_a_step_time_that_nobody_compares_is_recorded():
    assert time_verdict(measured(1.0), ASKED, None, TOLERANCE) == MetricVerdict("step_time", Outcome.RECORDED, 1.0)


@pytest.mark.parametrize(
    ("here", "there", "machines"),
    [
        (HERE, THERE, f"{THERE}, and this machine is {HERE}"),
        (HERE, None, f"an unknown machine, and this machine is {HERE}"),
        (None, None, "an unknown machine, and this machine is an unknown machine"),
    ],
)
def test_times_of_another_machine_are_not_compared_and_the_verdict_says_so(here, there, machines):
    reason = f"time is not compared: the baseline's time comes from {machines}"
    verdict = time_verdict(measured(9.0, machine=here), Budget(), stored(1.0, machine=there), TOLERANCE)
    assert verdict == MetricVerdict("step_time", Outcome.RECORDED, 9.0, reason=reason)
    assert not verdict.gated


def test_who_asked_for_a_limit_is_told_that_another_machine_cannot_hold_it():
    verdict = time_verdict(measured(9.0), ASKED, stored(1.0, machine=THERE), TOLERANCE)
    assert (verdict.outcome, verdict.gated) == (Outcome.FOREIGN, False)
    assert THERE in verdict.reason


@pytest.mark.parametrize("budget", [Budget(), ASKED], ids=["by default", "asked for"])
def test_a_baseline_without_times_is_nothing_to_compare_with_and_the_verdict_says_so(budget):
    verdict = time_verdict(measured(1.0), budget, stored(), TOLERANCE)
    reason = "no baseline of time yet: --gpumem-update=new adds it"
    assert verdict == MetricVerdict("step_time", Outcome.NEW, 1.0, reason=reason)
    assert not verdict.gated


@pytest.mark.parametrize(("machine", "mode"), [(HERE, "new"), (THERE, "all")])
def test_a_stored_time_that_is_not_compared_with_is_told_and_one_update_named(machine, mode):
    only_shown = replace(stored(machine=machine), metrics={"step_time": 2.0})
    verdict = time_verdict(measured(1.0), ASKED, only_shown, TOLERANCE)
    assert verdict.reason is not None
    assert verdict.reason.startswith(
        "no baseline of time yet: the stored time is only shown, because its run was disturbed; "
    )
    assert f"--gpumem-update={mode} " in verdict.reason
    assert update_that_adds_time(verdict) == mode


# Against a budget of throughput


def throughput(minimum: str | None, *samples, work=DEFAULT) -> MetricVerdict | None:
    measurement = measured(*samples, work=work)
    assert measurement.times is not None
    return judge_throughput(measurement, measurement.times, None if minimum is None else parse_rate(minimum))


def test_throughput_without_a_budget_is_of_the_first_thing_that_the_step_works_on():
    assert throughput(None, 0.5) == MetricVerdict("throughput", Outcome.RECORDED, 8.0, of="samples")
    assert throughput(None, 0.5, work={"items": 3, **DEFAULT}).of == "items"


@pytest.mark.parametrize("work", [{}, DEFAULT])
def test_throughput_that_was_not_measured_has_no_verdict(work):
    untimed = judge(measured(work=work), Budget(min_throughput=parse_rate("1 samples/s")), None, {})
    assert untimed.of("throughput") is None
    assert throughput(None, 0.5, work={}) is None


@pytest.mark.parametrize(
    ("minimum", "value", "work"),
    [
        ("8 samples/s", 8.0, DEFAULT),
        ("2048 tokens/s", 2048.0, DEFAULT),
        ("2 steps/s", 2.0, {}),
        ("2 steps/s", 2.0, {"items": 7}),
        ("20 items/s", 20.0, {"items": 10}),
        # A number that was given counts whatever the budget calls it.
        ("20 tokens/s", 20.0, {"items": 10, **DEFAULT}),
    ],
)
def test_a_budget_is_held_in_its_own_unit_and_may_be_met_exactly(minimum, value, work):
    rate = parse_rate(minimum)
    verdict = throughput(minimum, 0.5, work=work)
    assert verdict == MetricVerdict("throughput", Outcome.OK, value, budget=rate.amount, of=rate.of)
    assert verdict.gated
    assert throughput(minimum, 0.51, work=work).outcome is Outcome.OVER_BUDGET


def test_a_budget_of_what_the_step_is_not_known_to_work_on_holds_nothing():
    verdict = throughput("1e9 tokens/s", 0.5, work={"samples": 4})
    assert (verdict.outcome, verdict.budget, verdict.of) == (Outcome.RECORDED, None, "samples")


def test_a_sample_that_meets_the_budget_is_believed_before_one_that_does_not():
    assert throughput("2 steps/s", 1.0, 0.5).outcome is Outcome.OK
    assert throughput("2 steps/s", 1.0, 0.9).outcome is Outcome.OVER_BUDGET


def test_a_throughput_that_misses_its_budget_within_what_times_vary_by_is_uncertain():
    verdict = throughput("2 steps/s", sample_of(*[0.4] * 4, *[0.6] * 8))
    assert (verdict.outcome, verdict.reason) == (
        Outcome.UNCERTAIN,
        "within the variation of the times: at most 2.5 steps/s",
    )


def test_a_throughput_that_misses_its_budget_in_a_disturbed_sample_is_uncertain():
    disturbed = sample_of(*[1.0] * 12, invalid=THROTTLED, slowed=Slowdown(1e6))
    for samples in ([disturbed], [disturbed, 0.9], [0.9, disturbed]):
        verdict = throughput("2 steps/s", *samples)
        assert (verdict.outcome, verdict.reason) == (Outcome.UNCERTAIN, THROTTLED)


@pytest.mark.parametrize(("taken", "outcome"), [(1.0, Outcome.OVER_BUDGET), (6.0, Outcome.UNCERTAIN)])
def test_a_throughput_that_is_missed_by_more_than_load_accounts_for_is_over_budget(taken, outcome):
    rounds = tuple(Round(0.5, taken=taken) for _ in range(12))
    busy = Sample(rounds, invalid="other processes used 0.90 of 2 cores meanwhile", slowed=Slowdown(1.2))
    assert throughput("40 samples/s", busy).outcome is outcome


def test_a_disturbed_sample_that_meets_the_budget_meets_it():
    assert (
        throughput("2 steps/s", sample_of(*[0.4] * 12, invalid=THROTTLED, slowed=Slowdown(1e6))).outcome is Outcome.OK
    )


# Budgets that hold nothing


def test_a_budget_is_used_if_any_of_the_tests_measurements_has_its_metric():
    assert (
        idle_throughput(ThroughputLimit(5, "tokens"), [measured(), measured(1.0, work={"samples": 1}), measured(1.0)])
        is None
    )
    assert idle_throughput(ThroughputLimit(5, "steps"), [measured(1.0, work={})]) is None
    assert idle_throughput(ThroughputLimit(5, "tokens"), [measured(1.0, work={"items": 3})]) is None


@pytest.mark.parametrize("measurements", [[], [measured()]], ids=["nothing measured", "nothing timed"])
def test_a_budget_and_a_limit_on_slowdowns_of_a_test_that_times_no_step_hold_nothing(measurements):
    why = "no step of this test was timed; measure one with gpumem.measure, train_step or infer_step"
    assert (
        idle_throughput(ThroughputLimit(5, "steps"), measurements) == f"min_throughput='5 steps/s' has no effect: {why}"
    )
    assert idle_slowdown(0.05, measurements) == f"max_slowdown='5 %' has no effect: {why}"
    assert idle_slowdown(0.05, [*measurements, measured(1.0)]) is None


@pytest.mark.parametrize(
    ("minimum", "work", "has"),
    [
        (ThroughputLimit(5, "tokens"), {}, "the work of its steps is unknown"),
        (ThroughputLimit(5, "tokens"), {"samples": 4}, "the work of its steps is only known in samples"),
        (ThroughputLimit(5, "items"), DEFAULT, "the work of its steps is only known in samples and tokens"),
    ],
)
def test_a_budget_in_a_unit_that_no_step_is_known_to_work_on_holds_nothing(minimum, work, has):
    assert idle_throughput(minimum, [measured(1.0, work=work)]) == (
        f"min_throughput='{minimum}' has no effect: {has}; pass items=, the number of {minimum.of} in a step"
    )
