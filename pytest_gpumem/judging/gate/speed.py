"""Verdicts on a step's speed: its time against the baseline, and its throughput against a budget. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.base.units import counted
from pytest_gpumem.facts.measurement import ITEMS
from pytest_gpumem.judging.gate.verdict import MetricVerdict, Outcome
from pytest_gpumem.judging.times.comparison import SpeedOutcome, compare
from pytest_gpumem.judging.times.intervals import LEVEL

if TYPE_CHECKING:
    from pytest_gpumem.base.units import ThroughputLimit
    from pytest_gpumem.facts.measurement import Environment, Measurement
    from pytest_gpumem.facts.values.option_words import UpdateMode
    from pytest_gpumem.facts.values.times import Times
    from pytest_gpumem.judging.gate.baseline import Baseline
    from pytest_gpumem.judging.gate.comparison import Comparison

MACHINE = "machine"
"""Times are compared only if this environment detail is equal in the measurement and the baseline."""

NO_TIME = "no baseline of time yet"

OUTCOMES: dict[SpeedOutcome, Outcome] = {
    "slower": Outcome.REGRESSED,
    "not slower": Outcome.OK,
    "faster": Outcome.IMPROVED,
    "uncertain": Outcome.UNCERTAIN,
}


def judge_step_time(comparison: Comparison) -> MetricVerdict:
    """Return the verdict on a step's time.

    If the baseline's time comes from another machine, the times are not compared, and the outcome is ``foreign`` if the test
    has a ``max_slowdown``, otherwise ``recorded``. If the baseline has no times, for example because other programs disturbed
    its runs, the outcome is ``new``.
    """
    measurement, tolerance = comparison.measurement, comparison.tolerances.get("step_time")
    baseline = comparison.baseline if comparison.obstacle is None else None
    times = measurement.times
    value = measurement.metrics["step_time"]
    if times is None or baseline is None or tolerance is None:
        return MetricVerdict("step_time", Outcome.RECORDED, value)
    has_limit = comparison.budget.max_slowdown is not None
    machine, baseline_machine = measurement.environment.details.get(MACHINE), baseline.environment.details.get(MACHINE)
    if baseline.runs is None:
        return MetricVerdict("step_time", Outcome.NEW, value, reason=_no_time(measurement.environment, baseline))
    if machine is None or machine != baseline_machine:
        baseline_machine, current = (name or "an unknown machine" for name in (baseline_machine, machine))
        reason = (
            f"time is not compared: the baseline's time comes from {baseline_machine}, and this machine is {current}"
        )
        return MetricVerdict("step_time", Outcome.FOREIGN if has_limit else Outcome.RECORDED, value, reason=reason)
    baseline_time = baseline.runs.median
    allowed = tolerance.allowed(baseline_time)
    speed = compare(times.samples, baseline.runs, allowed / baseline_time)
    return MetricVerdict(
        "step_time",
        OUTCOMES[speed.outcome],
        value,
        baseline_time,
        allowed=allowed,
        reason=speed.reason,
        interval=(speed.low, speed.high),
    )


def time_may_be_added(measured_in: Environment, recorded_in: Environment) -> bool:
    """Return whether a time may be added to a baseline without times: not if the baseline comes from another machine.

    Args:
        measured_in: The environment in which the time was measured.
        recorded_in: The environment in which the baseline was recorded.
    """
    machine = measured_in.details.get(MACHINE)
    return machine is not None and recorded_in.details.get(MACHINE) in (None, machine)


def _no_time(environment: Environment, baseline: Baseline) -> str:
    only_shown = (
        "the stored time is only shown, because its run was disturbed; " if "step_time" in baseline.metrics else ""
    )
    if time_may_be_added(environment, baseline.environment):
        return f"{NO_TIME}: {only_shown}{_update('new')} adds {'a valid time' if only_shown else 'it'}"
    machine = baseline.environment.details.get(MACHINE, "an unknown machine")
    return f"{NO_TIME}: {only_shown}{_update('all')} adds a time, because the baseline comes from another machine ({machine})"


def update_that_adds_time(metric: MetricVerdict) -> UpdateMode:
    """Return the update mode that stores this metric: ``"new"`` for a time that this mode can add, otherwise ``"all"``."""
    return "new" if metric.lacks_time and metric.reason and _update("new") in metric.reason else "all"


def _update(mode: UpdateMode) -> str:
    return f"--gpumem-update={mode}"


def not_compared_with(count: int, why: str) -> str:
    """Return a clause on times that do not become a baseline: ``"1 time will not be compared with: <why>"``."""
    return f"{counted(count, 'time')} will not be compared with: {why}"


def judge_throughput(measurement: Measurement, times: Times, minimum: ThroughputLimit | None) -> MetricVerdict | None:
    """Return the verdict on a timed step's throughput; ``None`` if the work in the step is unknown.

    The throughput is ``over_budget`` if the confidence interval of every sample is below ``minimum``, and interference from
    other programs cannot explain the difference.

    Example:
        The budget is 1,000 tokens/s. The median is 950 tokens/s, but one sample's interval reaches 1,020 tokens/s, so the
        outcome is ``uncertain``.
    """
    work = work_of(measurement, minimum)
    if work is None or times.median <= 0:
        return None
    unit, amount = work
    value = amount / times.median
    if minimum is None or minimum.of != unit:
        return MetricVerdict("throughput", Outcome.RECORDED, value, of=unit)
    outcome, reason = Outcome.OK, None
    if value < minimum.amount:
        outcome = Outcome.OVER_BUDGET
        highest = max(amount / sample.interval(LEVEL)[0] for sample in times.samples)
        disturbed = [sample for sample in times.samples if sample.invalid is not None]
        if any(amount / sample.at_least >= minimum.amount for sample in disturbed):
            outcome, reason = Outcome.UNCERTAIN, disturbed[0].invalid
        elif highest >= minimum.amount:
            outcome, reason = Outcome.UNCERTAIN, f"within the variation of the times: at most {highest:.4g} {unit}/s"
    return MetricVerdict("throughput", outcome, value, budget=minimum.amount, reason=reason, of=unit)


def work_of(measurement: Measurement, minimum: ThroughputLimit | None) -> tuple[str, float] | None:
    """Return the unit and the amount of work in a step, such as ``("tokens", 2048)``; ``None`` if the work is unknown.

    If there is a budget ``minimum``, the result has the budget's unit. A number that the test passed as ``items=`` counts in
    the budget's unit. For example, with a budget in tokens/s, ``items=2048`` means 2,048 tokens.
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
    """Return a sentence if ``max_slowdown`` has no effect, because no measurement was timed; otherwise ``None``."""
    if any(measurement.times is not None for measurement in measurements):
        return None
    return _nothing_timed(f"max_slowdown={f'{100 * limit:g} %'!r}")


def idle_throughput(minimum: ThroughputLimit, measurements: list[Measurement]) -> str | None:
    """Return a sentence if ``min_throughput`` has no effect, because no timed step counts items in its unit; else ``None``."""
    timed = [measurement for measurement in measurements if measurement.times is not None]
    if not timed:
        return _nothing_timed(f"min_throughput={str(minimum)!r}")
    if any((work := work_of(measurement, minimum)) is not None and work[0] == minimum.of for measurement in timed):
        return None
    units = sorted({name for measurement in timed for name in measurement.work})
    clause = (
        f"the work of its steps is only known in {' and '.join(units)}" if units else "the work of its steps is unknown"
    )
    return f"min_throughput={str(minimum)!r} has no effect: {clause}; pass items=, the number of {minimum.of} in a step"


def _nothing_timed(limit: str) -> str:
    return (
        f"{limit} has no effect: no step of this test was timed; measure one with "
        "gpumem.measure, train_step or infer_step"
    )
