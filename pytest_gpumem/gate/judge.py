"""The judge: from a measurement, its budget and its baseline to a verdict. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.gate.baseline import Baseline, NoBaseline
from pytest_gpumem.gate.count_difference import changed_tallies
from pytest_gpumem.gate.difference import difference
from pytest_gpumem.gate.speed import judge_step_time, judge_throughput
from pytest_gpumem.gate.verdict import FAILING, MetricVerdict, Origin, Outcome, TestVerdict, Verdict
from pytest_gpumem.measurement import largest
from pytest_gpumem.metrics import METRICS, Metric, Tolerance
from pytest_gpumem.units import format_bytes
from pytest_gpumem.values.operator_counts import kept

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.gate.baseline import Budget
    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.values.composition import Explanation


def tolerances_of_emulated(tolerances: Mapping[str, Tolerance]) -> dict[str, Tolerance]:
    """Return the tolerances of emulated figures against measured ones: at least those that the benchmark supports."""
    return {
        name: Tolerance(max(tolerance.relative, least.relative), max(tolerance.absolute, least.absolute))
        for name, tolerance in tolerances.items()
        if (least := METRICS[name].emulated) is not None
    }


MOST_BY_ENVIRONMENT = 0.40
"""How much another environment may move a metric by itself, as a ratio; more than that is the code's.

Kernels for another instruction set allocate differently: convolution backward took 27 % more with AVX-512 than with SSE4.1,
a bfloat16 product 20 % more than with AVX2 (torch 2.13.0, x86_64).
"""


def judge(
    measurement: Measurement,
    budget: Budget,
    baseline: Baseline | NoBaseline | None,
    tolerances: Mapping[str, Tolerance],
) -> Verdict:
    """Return the verdict on a measurement.

    Args:
        measurement: The measurement.
        budget: The limits of its test.
        baseline: Its entry in the store, or that there is none; ``None`` where no comparison was asked for.
        tolerances: The tolerance of every metric that is judged against a baseline.
    """
    why_not, outcome = _not_comparable(measurement, baseline)
    entry = baseline if isinstance(baseline, Baseline) else None
    metrics = tuple(
        judge_step_time(measurement, budget, entry if outcome is None else None, tolerances.get(name))
        if name == "step_time"
        else _judge_on_devices(
            METRICS[name], value, budget.limits.get(name), measurement, entry, outcome, tolerances.get(name)
        )
        for name, value in measurement.metrics.items()
        if name != "throughput"
    )
    throughput = judge_throughput(measurement, budget.min_throughput)
    if throughput is not None:
        metrics += (throughput,)
    elsewhere = baseline.elsewhere if isinstance(baseline, NoBaseline) else ()
    origin = None
    if entry is not None:
        torch = str(entry.environment.details.get("torch", "?"))
        origin = Origin(entry.recorded, entry.environment.device, torch, entry.commit, entry.reason)
    idle = _idle_limits(budget, measurement)
    noted = replace(measurement, notes=(*measurement.notes, *idle)) if idle else measurement
    return with_differences(Verdict(noted, metrics, origin, why_not, elsewhere), noted, baseline)


def _idle_limits(budget: Budget, measurement: Measurement) -> list[str]:
    """Return a note on each limit of a metric that the measurement does not have."""
    return [
        f"{METRICS[name].budget} = {format_bytes(limit)} has no effect: there is no {name} on {measurement.environment.device}"
        for name, limit in budget.limits.items()
        if name not in measurement.metrics
    ]


def with_differences(verdict: Verdict, measurement: Measurement, baseline: Baseline | NoBaseline | None) -> Verdict:
    """Return the verdict with what changed in the composition of the peak, and the operators of which a count has more.

    Args:
        verdict: The verdict on the measurement.
        measurement: The one that was judged, which may have been explained since.
        baseline: What it was compared with.
    """
    growth, more = None, {}
    if isinstance(baseline, Baseline):
        explained = measurement.explanation
        if (
            baseline.composition is not None
            and explained is not None
            and _is_explained(explained, measurement, baseline)
        ):
            growth = difference(baseline.composition, explained.peak)
        if verdict.reason is None:
            more = {
                name: kept(changed_tallies(baseline.by_operator[name], tallies))
                for name, tallies in measurement.by_operator.items()
                if name in baseline.by_operator and measurement.metrics[name] > baseline.metrics[name]
            }
    return replace(verdict, measurement=measurement, growth=growth, count_changes=more)


_WORSE = (Outcome.UNCERTAIN, Outcome.REGRESSED, Outcome.OVER_BUDGET)


def _judge_on_devices(
    metric: Metric,
    value: float,
    limit: int | None,
    measurement: Measurement,
    baseline: Baseline | None,
    why_not: Outcome | None,
    tolerance: Tolerance | None,
) -> MetricVerdict:
    """Return the verdict on a metric: that of the largest device, or of one that is worse than that of its baseline.

    Arguments as for `_judge_metric`.
    """
    whole = _judge_metric(metric, value, limit, measurement, baseline, why_not, tolerance)
    by_device = {device: here[metric.name] for device, here in measurement.by_device.items() if metric.name in here}
    several = len(by_device) > 1 or (by_device and baseline is not None and baseline.by_device)
    if not several:
        return whole
    found = []
    for device, here in by_device.items():
        then = None if baseline is None else baseline.on(device, measurement.by_device)
        one = _judge_metric(metric, here, limit, _on(measurement, device), then, why_not, tolerance)
        absent = baseline is not None and then is not baseline and device not in baseline.by_device
        if absent and one.reason is None:
            one = replace(one, reason=f"the baseline has no bytes of {device}")
        found.append(replace(one, gpu=device))
    return max(
        (one for one in found if one.outcome in _WORSE),
        key=lambda one: (_WORSE.index(one.outcome), one.value - (one.budget or one.baseline or 0)),
        default=replace(whole, gpu=max(by_device, key=by_device.__getitem__) if value else None),
    )


def _on(measurement: Measurement, device: str) -> Measurement:
    """Return what was measured with the bytes of one of its devices."""
    here = measurement.by_device[device]
    lowest = measurement.lowest_by_device.get(device)
    return replace(measurement, metrics={**measurement.metrics, **here}, lowest_peak=lowest)


def _is_explained(explanation: Explanation, measurement: Measurement, baseline: Baseline) -> bool:
    """Return whether it is of the device that the baseline's composition is of: the one with the largest peak."""
    return explanation.gpu in (None, largest(baseline.by_device) or measurement.largest_device)


def _judge_metric(
    metric: Metric,
    value: float,
    limit: int | None,
    measurement: Measurement,
    baseline: Baseline | None,
    why_not: Outcome | None,
    tolerance: Tolerance | None,
) -> MetricVerdict:
    """``why_not`` is the outcome where no comparison was asked for, or where it is not one of the same work."""
    earlier = None if baseline is None else baseline.metrics.get(metric.name, metric.where_absent)
    if limit is not None and value > limit:
        return MetricVerdict(metric.name, Outcome.OVER_BUDGET, value, earlier, budget=limit)
    if tolerance is not None and baseline is not None:
        compared = _compare(metric, value, limit, measurement, baseline, tolerance)
        grew = compared.outcome in (Outcome.REGRESSED, Outcome.UNCERTAIN) and earlier is not None and value > earlier
        if why_not is None or (metric.unit == "bytes" and grew):
            return compared
    if tolerance is not None and why_not is not None:
        return MetricVerdict(metric.name, why_not, value, budget=limit)
    outcome = Outcome.RECORDED if limit is None else Outcome.OK
    return MetricVerdict(metric.name, outcome, value, earlier, budget=limit)


def _not_comparable(
    measurement: Measurement, baseline: Baseline | NoBaseline | None
) -> tuple[str | None, Outcome | None]:
    """Return why a measurement cannot be compared, as a sentence, and the outcome of that; ``None`` twice when it can."""
    if baseline is None:
        return None, None
    if isinstance(baseline, NoBaseline):
        here = measurement.environment.device
        if baseline.elsewhere:
            return f"there are baselines for {', '.join(baseline.elsewhere)}, this is {here}", Outcome.FOREIGN
        return f"there is no baseline for {here} yet", Outcome.NEW
    differences = measurement.workload.differences(baseline.workload)
    if differences:
        return "; ".join(differences), Outcome.STALE
    return None, None


def _compare(
    metric: Metric, value: float, limit: int | None, measurement: Measurement, baseline: Baseline, tolerance: Tolerance
) -> MetricVerdict:
    earlier = baseline.metrics.get(metric.name, metric.where_absent)
    if earlier is None:
        return MetricVerdict(metric.name, Outcome.NEW, value, budget=limit, reason="the baseline has no such metric")
    # A small model's growth would drown in workspaces that every model needs.
    workspaces = measurement.workspaces if metric.peak else 0
    allowed = tolerance.allowed(max(0, earlier - workspaces))
    worse = earlier - value if metric.larger_is_better else value - earlier
    reason = None
    # 0.7 % of 1000 bytes is 7 of them, also where the product of the two floats is a little less.
    if math.isclose(abs(worse), allowed, rel_tol=1e-12):
        outcome = Outcome.OK
    elif abs(worse) > allowed and (reason := _moved_by(metric.decided_by, metric, measurement, baseline)) is not None:
        outcome = Outcome.UNCERTAIN
    elif worse > allowed:
        outcome = Outcome.REGRESSED
        reason = _doubt(metric, earlier, allowed, measurement, baseline)
        if reason is not None:
            outcome = Outcome.UNCERTAIN
    elif worse < -allowed:
        outcome = Outcome.IMPROVED
    else:
        outcome = Outcome.OK
    return MetricVerdict(metric.name, outcome, value, earlier, allowed, limit, reason)


def _doubt(metric: Metric, earlier: float, allowed: float, measurement: Measurement, baseline: Baseline) -> str | None:
    """Return why a change for the worse may have another cause than the code; ``None`` where there is no such reason."""
    # Counts have no such limit: a release of torch may change any number of them.
    if metric.unit == "bytes" and measurement.metrics[metric.name] - earlier > MOST_BY_ENVIRONMENT * earlier:
        return None
    moved = _moved_by(metric.depends_on, metric, measurement, baseline)
    if moved is not None:
        return moved
    # Where each step keeps more, the peaks move because of that, and the same number of steps moves them as far.
    growth = METRICS["growth"].tolerance
    if measurement.settled or (growth is not None and measurement.metrics.get("growth", 0) > growth.allowed(0)):
        return None
    if metric.name == "peak_allocated" and measurement.lowest_peak is not None:
        # The steps differ, and even the smallest of them needs more.
        if measurement.lowest_peak - earlier > allowed:
            return None
    elif not (metric.peak or metric.unit == "count"):
        return None
    return "the step's peak did not settle: " + "; ".join(measurement.notes)


def _moved_by(details: tuple[str, ...], metric: Metric, measurement: Measurement, baseline: Baseline) -> str | None:
    """Return which of ``details`` of the environment differs from the baseline's, if one that both sides know does."""
    here, there = measurement.environment.details, baseline.environment.details
    for detail in details:
        if detail in here and detail in there and here[detail] != there[detail]:
            return f"{detail} was {there[detail]}, now {here[detail]}, which moves {metric.title} by itself"
    return None


def failing_outcomes(
    verdict: TestVerdict, *, strict: bool, compares: bool, accepts: frozenset[Outcome]
) -> frozenset[Outcome]:
    """Return the outcomes for which a test must fail.

    Args:
        verdict: The verdict on the test.
        strict: Whether everything has to be compared (``--gpumem-strict``).
        compares: Whether a regression is a failure (``--gpumem-baseline``); an update compares only to know what to write.
        accepts: The outcomes that this session writes into the store, and so are no failures.
    """
    seen = {metric.outcome for one in verdict.verdicts for metric in one.metrics}
    if verdict.unmeasured:
        seen.add(Outcome.UNMEASURED)
    if verdict.missing:
        seen.add(Outcome.MISSING)
    if not verdict.verdicts:
        # Nothing is written for a test that measured nothing, and nothing removed.
        accepts -= {Outcome.MISSING}
    if strict:
        failing = seen - {Outcome.OK, Outcome.IMPROVED, Outcome.RECORDED}
        if not verdict.gated and not failing:
            failing = {Outcome.RECORDED}
    else:
        failing = seen & (FAILING if compares else {Outcome.OVER_BUDGET})
    return frozenset(failing - accepts)
