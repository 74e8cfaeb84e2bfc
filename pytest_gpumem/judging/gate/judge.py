"""Compare a measurement with its budget and its baseline, and return a verdict. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.facts.metrics import METRICS, Metric, Tolerance
from pytest_gpumem.judging.gate.baseline import Baseline, NoBaseline
from pytest_gpumem.judging.gate.comparison import Comparison
from pytest_gpumem.judging.gate.doubts import (
    bytes_of_other_tests,
    doubt_within_tolerance,
    outcome_beyond_tolerance,
    segments_by_chance,
)
from pytest_gpumem.judging.gate.notes import notes_on
from pytest_gpumem.judging.gate.one_sided import why_new
from pytest_gpumem.judging.gate.speed import judge_step_time, judge_throughput
from pytest_gpumem.judging.gate.verdict import UNKNOWN_RELEASE, WORSE, MetricVerdict, Origin, Outcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.judging.gate.baseline import Budget


def emulated_tolerances(tolerances: Mapping[str, Tolerance]) -> dict[str, Tolerance]:
    """Return the tolerances for comparing an emulated GPU's figures with a real GPU's figures.

    Each tolerance is at least the metric's error on emulated GPUs (`Metric.emulated`). Metrics without such an error cannot be
    compared, and are left out.
    """
    return {
        name: Tolerance(max(tolerance.relative, supported.relative), max(tolerance.absolute, supported.absolute))
        for name, tolerance in tolerances.items()
        if (supported := METRICS[name].emulated) is not None
    }


def judge(
    measurement: Measurement,
    budget: Budget,
    baseline: Baseline | NoBaseline | None,
    tolerances: Mapping[str, Tolerance],
) -> Verdict:
    """Return the verdict on a measurement.

    Args:
        measurement: The measurement.
        budget: The limits for the measured test.
        baseline: The entry in the store, `NoBaseline` if the store has no entry, or ``None`` if the session does not compare
            with baselines.
        tolerances: The tolerance for each metric. A metric without a tolerance is not compared with the baseline.

    Example:
        The baseline has a peak of 86.10 MB, and ``peak_allocated`` has a tolerance of 0.5 %. So the peak may grow by 430.50
        kB.
        A peak of 86.50 MB is ``ok``, and a peak of 86.60 MB is ``regressed``. If the marker also has ``max_memory="86 MB"``,
        both peaks are ``over_budget``, because a budget has no tolerance.
    """
    comparison = Comparison.of(measurement, budget, baseline, tolerances)
    metrics = [
        judge_step_time(comparison) if name == "step_time" else _judge_on_devices(comparison, METRICS[name])
        for name in measurement.metrics
        if name != "throughput"
    ]
    times = measurement.times
    throughput = None if times is None else judge_throughput(measurement, times, budget.min_throughput)
    notes = notes_on(comparison)
    return Verdict(
        replace(measurement, notes=(*measurement.notes, *notes)) if notes else measurement,
        tuple(metrics) if throughput is None else (*metrics, throughput),
        None if comparison.baseline is None else origin_of(comparison.baseline),
        None if comparison.obstacle is None else comparison.obstacle.reason,
        baseline.other_devices if isinstance(baseline, NoBaseline) else (),
    )


def _judge_on_devices(comparison: Comparison, metric: Metric) -> MetricVerdict:
    """Return the verdict on a metric over all devices.

    The metric is judged on each device. If any device is worse than the budget or the baseline allows, the worst device's
    verdict is returned. If no device is worse, the whole step's verdict is returned, and names the device with the most bytes.
    """
    overall = _judge_metric(comparison, metric)
    measurement, baseline = comparison.measurement, comparison.baseline
    by_device = {
        device: metrics[metric.name] for device, metrics in measurement.by_device.items() if metric.name in metrics
    }
    has_device_verdicts = len(by_device) > 1 or (by_device and baseline is not None and baseline.by_device)
    if not has_device_verdicts:
        return overall
    verdicts = []
    for device in by_device:
        on_device = comparison.on(device)
        verdict = _judge_metric(on_device, metric)
        is_new_device = baseline is not None and on_device.baseline is not baseline and device not in baseline.by_device
        if is_new_device and verdict.reason is None:
            verdict = replace(verdict, reason=f"the baseline has no bytes on {device}")
        verdicts.append(replace(verdict, gpu=device))
    return max(
        (verdict for verdict in verdicts if verdict.outcome in WORSE),
        key=lambda verdict: (
            WORSE.index(verdict.outcome),
            verdict.value - (verdict.budget or verdict.baseline or 0),
        ),
        default=replace(overall, gpu=max(by_device, key=by_device.__getitem__) if comparison.value(metric) else None),
    )


def _judge_metric(comparison: Comparison, metric: Metric) -> MetricVerdict:
    """Return the verdict on a metric on a single device."""
    value, baseline_value = comparison.value(metric), comparison.baseline_value(metric)
    limit, obstacle = comparison.budget.limits.get(metric.name), comparison.obstacle
    highest = comparison.limited(metric)
    if limit is not None and highest > limit:
        return MetricVerdict(
            metric.name,
            Outcome.OVER_BUDGET,
            highest,
            baseline_value,
            budget=limit,
            at_same_time=comparison.limits_simultaneous(metric),
        )
    tolerance = comparison.tolerances.get(metric.name)
    if tolerance is not None and comparison.baseline is not None:
        verdict = _compare(comparison, metric, comparison.baseline, tolerance)
        grew = (
            verdict.outcome in (Outcome.REGRESSED, Outcome.UNCERTAIN)
            and baseline_value is not None
            and value > baseline_value
        )
        if obstacle is None or (metric.unit == "bytes" and grew):
            return verdict
    if tolerance is not None and obstacle is not None:
        # No comparison is possible, for example because the workload differs. So the verdict only shows the baseline's figure.
        return MetricVerdict(metric.name, obstacle.outcome, value, baseline_value, budget=limit)
    outcome = Outcome.RECORDED if limit is None else Outcome.OK
    return MetricVerdict(metric.name, outcome, value, baseline_value, budget=limit)


def _compare(comparison: Comparison, metric: Metric, baseline: Baseline, tolerance: Tolerance) -> MetricVerdict:
    """Return the verdict on a metric against its baseline, which may lack the metric."""
    value, baseline_value = comparison.value(metric), comparison.baseline_value(metric)
    limit = comparison.budget.limits.get(metric.name)
    if baseline_value is None:
        why = why_new(metric, comparison.measurement.environment, baseline)
        return MetricVerdict(metric.name, Outcome.NEW, value, budget=limit, reason=why)
    # A small model's workspaces can be larger than the model. A tolerance such as 0.5 % of the peak would then allow a large
    # growth of the model itself. So the tolerance is a ratio of the peak without workspaces.
    workspaces = max(comparison.measurement.workspaces, baseline.workspaces or 0) if metric.peak else 0
    if metric.name == "peak_reserved":
        tolerance = replace(tolerance, absolute=min(tolerance.absolute, segments_by_chance(comparison)))
    worsening = baseline_value - value if metric.larger_is_better else value - baseline_value
    within = tolerance.allowed(max(0, baseline_value - workspaces))
    growth, decrease = bytes_of_other_tests(comparison, metric) if comparison.gained_further else (0, 0)
    allowed = within + growth
    allowed_change = allowed if worsening > 0 else within + decrease
    # Rounding must not decide: the tolerance 0.7 % of 1000 bytes is 7 bytes, but 0.007 * 1000 may be slightly less.
    is_beyond_tolerance = abs(worsening) > allowed_change and not math.isclose(
        abs(worsening), allowed_change, rel_tol=1e-12
    )
    if is_beyond_tolerance:
        is_worse = worsening > 0
        outcome, reason = outcome_beyond_tolerance(
            comparison, metric, baseline_value, allowed_change, is_worse=is_worse
        )
    else:
        is_doubtful = comparison.gained_further < 0
        reason = doubt_within_tolerance(comparison, metric, worsening, within) if is_doubtful else None
        outcome = Outcome.OK if reason is None else Outcome.UNCERTAIN
    return MetricVerdict(metric.name, outcome, value, baseline_value, allowed, limit, reason)


def origin_of(entry: Baseline) -> Origin:
    """Return a baseline's date, device, releases, commit and reason, which a verdict shows as the baseline's origin."""
    environment = entry.environment
    torch = str(environment.details.get("torch", UNKNOWN_RELEASE))
    return Origin(entry.recorded, environment.device, torch, entry.commit, entry.reason, environment.packages)
