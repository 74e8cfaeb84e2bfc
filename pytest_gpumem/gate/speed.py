"""Verdicts on a step's speed: its time against the baseline, its throughput against a budget. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.gate.verdict import MetricVerdict, Outcome
from pytest_gpumem.measurement import ITEMS
from pytest_gpumem.timing.comparison import SpeedOutcome, compare
from pytest_gpumem.timing.intervals import LEVEL
from pytest_gpumem.units import counted

if TYPE_CHECKING:
    from pytest_gpumem.gate.baseline import Baseline, Budget
    from pytest_gpumem.measurement import Environment, Measurement
    from pytest_gpumem.metrics import Tolerance
    from pytest_gpumem.units import ThroughputLimit
    from pytest_gpumem.values.option_words import UpdateMode

MACHINE = "machine"
"""The detail of an environment that must be equal for times to be compared."""

NO_TIME = "no baseline of time yet"

OUTCOMES: dict[SpeedOutcome, Outcome] = {
    "slower": Outcome.REGRESSED,
    "not slower": Outcome.OK,
    "faster": Outcome.IMPROVED,
    "uncertain": Outcome.UNCERTAIN,
}


def judge_step_time(
    measurement: Measurement, budget: Budget, baseline: Baseline | None, tolerance: Tolerance | None
) -> MetricVerdict:
    """Return the verdict on a step's time; ``baseline`` is ``None`` unless it is of the same device and workload.

    A baseline that was taken on another machine is not compared, which is ``foreign`` if the test has a ``max_slowdown``. One
    without times was recorded while too much else was running, or without timing: the time alone is ``new``.
    """
    times = measurement.times
    value = measurement.metrics["step_time"]
    if times is None or baseline is None or tolerance is None:
        return MetricVerdict("step_time", Outcome.RECORDED, value)
    asked = budget.max_slowdown is not None
    here, there = measurement.environment.details.get(MACHINE), baseline.environment.details.get(MACHINE)
    if baseline.runs is None:
        return MetricVerdict("step_time", Outcome.NEW, value, reason=_no_time(measurement.environment, baseline))
    if here is None or here != there:
        there, this = (machine or "an unknown machine" for machine in (there, here))
        reason = f"time is not compared: the baseline's was taken on {there}, this is {this}"
        return MetricVerdict("step_time", Outcome.FOREIGN if asked else Outcome.RECORDED, value, reason=reason)
    earlier = baseline.runs.median
    allowed = tolerance.allowed(earlier)
    comparison = compare(times.samples, baseline.runs, allowed / earlier)
    return MetricVerdict(
        "step_time",
        OUTCOMES[comparison.outcome],
        value,
        earlier,
        allowed=allowed,
        reason=comparison.reason,
        interval=(comparison.low, comparison.high),
    )


def time_may_be_added(here: Environment, there: Environment) -> bool:
    """Return whether a time taken ``here`` may stand in a baseline without times that was recorded ``there``."""
    machine = here.details.get(MACHINE)
    return machine is not None and there.details.get(MACHINE) in (None, machine)


def _no_time(here: Environment, baseline: Baseline) -> str:
    only_shown = (
        "the stored time is only shown, because its run was disturbed; " if "step_time" in baseline.metrics else ""
    )
    if time_may_be_added(here, baseline.environment):
        return f"{NO_TIME}: {only_shown}{_update('new')} adds {'one' if only_shown else 'it'}"
    machine = baseline.environment.details.get(MACHINE, "an unknown machine")
    return f"{NO_TIME}: {only_shown}{_update('all')} records one, as the baseline is of another machine ({machine})"


def update_that_adds_time(metric: MetricVerdict) -> UpdateMode:
    """Return the mode that the reason of a time without a comparable baseline names; ``"all"`` for any other reason."""
    return "new" if metric.lacks_time and metric.reason and _update("new") in metric.reason else "all"


def _update(mode: UpdateMode) -> str:
    return f"--gpumem-update={mode}"


def not_compared_with(count: int, why: str) -> str:
    """Return a clause on the times of a run that are no baseline: ``"1 time will not be compared with: WHY"``."""
    return f"{counted(count, 'time')} will not be compared with: {why}"


def judge_throughput(measurement: Measurement, minimum: ThroughputLimit | None) -> MetricVerdict | None:
    """Return the verdict on the throughput; ``None`` where it was not measured.

    It is over budget where each sample's interval lies below ``minimum`` and no interference could account for that.
    """
    times, work = measurement.times, work_of(measurement, minimum)
    if times is None or work is None or times.median <= 0:
        return None
    of, amount = work
    value = amount / times.median
    if minimum is None or minimum.of != of:
        return MetricVerdict("throughput", Outcome.RECORDED, value, of=of)
    outcome, reason = Outcome.OK, None
    if value < minimum.amount:
        outcome = Outcome.OVER_BUDGET
        best = max(amount / sample.interval(LEVEL)[0] for sample in times.samples)
        disturbed = [one for one in times.samples if one.invalid is not None]
        if any(amount / one.at_least >= minimum.amount for one in disturbed):
            outcome, reason = Outcome.UNCERTAIN, disturbed[0].invalid
        elif best >= minimum.amount:
            outcome, reason = Outcome.UNCERTAIN, f"within what times vary by: at most {best:.4g} {of}/s"
    return MetricVerdict("throughput", outcome, value, budget=minimum.amount, reason=reason, of=of)


def work_of(measurement: Measurement, minimum: ThroughputLimit | None) -> tuple[str, float] | None:
    """Return the unit of a step's work and its amount; ``None`` where it is not known.

    The unit is the budget's if there is one: a number that was given as ``items=`` counts whatever the budget names.
    """
    work = measurement.work
    if minimum is not None:
        if minimum.of == "steps":
            return minimum.of, 1.0
        if ITEMS in work:
            return minimum.of, work[ITEMS]
        if minimum.of in work:
            return minimum.of, work[minimum.of]
    return next(iter(work.items()), None)


def idle_slowdown(limit: float, measurements: list[Measurement]) -> str | None:
    """Return why ``max_slowdown`` has no effect on ``measurements``, as a sentence; ``None`` if it has."""
    if any(one.times is not None for one in measurements):
        return None
    return _nothing_timed(f"max_slowdown={f'{100 * limit:g} %'!r}")


def idle_throughput(minimum: ThroughputLimit, measurements: list[Measurement]) -> str | None:
    """Return why ``min_throughput`` has no effect on ``measurements``, as a sentence; ``None`` if it has."""
    timed = [one for one in measurements if one.times is not None]
    if not timed:
        return _nothing_timed(f"min_throughput={str(minimum)!r}")
    if any((work := work_of(one, minimum)) is not None and work[0] == minimum.of for one in timed):
        return None
    known = sorted({name for one in timed for name in one.work})
    has = f"only {' and '.join(known)} are known" if known else "nothing is known"
    return (
        f"min_throughput={str(minimum)!r} has no effect: {has} of what its steps work on; "
        f"say items=, the number of {minimum.of} of a step"
    )


def _nothing_timed(limit: str) -> str:
    return (
        f"{limit} has no effect: no step of this test was timed; measure one with "
        "gpumem.measure, train_step or infer_step"
    )
