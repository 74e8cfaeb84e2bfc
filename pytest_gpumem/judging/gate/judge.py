"""Compare a measurement with its budget and its baseline, and return a verdict. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import format_bytes, format_bytes_change
from pytest_gpumem.facts.measurement import Measurement, largest
from pytest_gpumem.facts.metrics import METRICS, Kind, Metric, Tolerance
from pytest_gpumem.facts.values.operator_counts import reduced_tallies, varied_clause
from pytest_gpumem.facts.values.step_peaks import StepPeaks, differ_by_chance, spread
from pytest_gpumem.facts.values.unknown_reads import decided_a_branch
from pytest_gpumem.judging.gate.baseline import Baseline, NoBaseline
from pytest_gpumem.judging.gate.count_difference import changed_tallies
from pytest_gpumem.judging.gate.difference import difference_of_peaks
from pytest_gpumem.judging.gate.one_sided import not_measured, why_new
from pytest_gpumem.judging.gate.speed import judge_step_time, judge_throughput
from pytest_gpumem.judging.gate.verdict import (
    ALWAYS_FAILING,
    FAILING,
    PASSING,
    UNKNOWN_RELEASE,
    WORSE,
    MetricVerdict,
    Origin,
    Outcome,
    TestVerdict,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pytest_gpumem.facts.values.composition import Explanation
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


MOST_BY_ENVIRONMENT = 0.40
"""The upper bound for growth in bytes that another environment can explain, as a ratio of the baseline. The code must have
caused any larger growth.

Kernels for another instruction set allocate different amounts. With AVX-512, the backward of a convolution took 27 % more than
with SSE4.1, and a bfloat16 product took 20 % more than with AVX2 (torch 2.13.0, x86_64)."""


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
    why_not, outcome = _not_comparable(measurement, baseline)
    entry = baseline if isinstance(baseline, Baseline) else None
    metrics = tuple(
        judge_step_time(measurement, budget, entry if outcome is None else None, tolerances.get(name))
        if name == "step_time"
        else _judge_on_devices(
            METRICS[name], budget.limits.get(name), measurement, entry, outcome, tolerances.get(name)
        )
        for name in measurement.metrics
        if name != "throughput"
    )
    throughput = judge_throughput(measurement, budget.min_throughput)
    if throughput is not None:
        metrics += (throughput,)
    other_devices = baseline.other_devices if isinstance(baseline, NoBaseline) else ()
    origin = None if entry is None else origin_of(entry)
    notes = _idle_limits(budget, measurement)
    if entry is not None and why_not is None:
        notes += not_measured(measurement, entry, tolerances)
    notes += [] if entry is None else _release_notes(measurement, entry)
    is_mostly_workspaces = 2 * measurement.workspaces > measurement.metrics.get("peak_allocated", math.inf)
    notes += [MOSTLY_WORKSPACES] if is_mostly_workspaces else []
    annotated = replace(measurement, notes=(*measurement.notes, *notes)) if notes else measurement
    return with_differences(Verdict(annotated, metrics, origin, why_not, other_devices), annotated, baseline)


def origin_of(entry: Baseline) -> Origin:
    """Return the origin of a baseline for the verdict: its date, device, releases, commit and reason."""
    environment = entry.environment
    torch = str(environment.details.get("torch", UNKNOWN_RELEASE))
    return Origin(entry.recorded, environment.device, torch, entry.commit, entry.reason, environment.packages)


def _idle_limits(budget: Budget, measurement: Measurement) -> list[str]:
    """Return a note for each limit of the budget whose metric was not measured."""
    return [
        f"{METRICS[name].budget} = {format_bytes(limit)} has no effect: there is no {name} on {measurement.environment.device}"
        for name, limit in budget.limits.items()
        if name not in measurement.metrics
    ]


MOSTLY_WORKSPACES = (
    "cuBLAS workspaces take more than half of the peak, and they have the same size in every step; use a larger batch to "
    "see more of this step's own memory"
)


def _release_notes(measurement: Measurement, baseline: Baseline) -> list[str]:
    """Return a note if the torch release differs from the baseline's, and cuBLAS workspaces have another size."""
    torch, baseline_torch = measurement.environment.details.get("torch"), baseline.environment.details.get("torch")
    if baseline.workspaces is None or torch == baseline_torch or measurement.workspaces == baseline.workspaces:
        return []
    old_rest = int(baseline.metrics["peak_allocated"]) - baseline.workspaces
    rest = measurement.peak_allocated - measurement.workspaces
    change = "is unchanged"
    if rest != old_rest:
        change = f"went from {format_bytes(old_rest)} to {format_bytes(rest)} ({format_bytes_change(rest - old_rest)})"
    # A call, a loading or a region runs once and may create workspaces after its peak. So the remaining peak is unknown.
    change = "" if measurement.workload.step in ("call", "load", "region") else f"; the rest of the peak {change}"
    note = (
        f"cuBLAS workspaces take {format_bytes(measurement.workspaces)} of the peak with torch {torch}, and "
        f"took {format_bytes(baseline.workspaces)} with torch {baseline_torch}; the torch release causes this part of the "
        f"change{change}"
    )
    return [note]


def with_differences(verdict: Verdict, measurement: Measurement, baseline: Baseline | NoBaseline | None) -> Verdict:
    """Return the verdict with the changes in the peak's composition, and the changed operators for each larger count.

    Args:
        verdict: The verdict on the measurement.
        measurement: The judged measurement. Its explanation may have been recorded after the verdict.
        baseline: The stored entry, if the session compares with baselines.
    """
    if not isinstance(baseline, Baseline):
        return replace(verdict, measurement=measurement)
    difference, count_changes, explanation = None, {}, measurement.explanation
    if (
        baseline.composition is not None
        and explanation is not None
        and _is_explained(explanation, measurement, baseline)
    ):
        baseline_peak = replace(
            baseline.composition, phase=baseline.composition.phase or _phase_of_peak(baseline.metrics)
        )
        difference = difference_of_peaks(
            baseline_peak,
            explanation.peak,
            baseline.other_phases,
            explanation.other_phases,
            explanation.callers,
            explanation.function_at,
        )
    if verdict.reason is None:
        count_changes = {
            name: reduced_tallies(changed_tallies(baseline.by_operator[name], tallies))
            for name, tallies in measurement.by_operator.items()
            if name in baseline.by_operator and measurement.metrics[name] > baseline.metrics[name]
        }
    return replace(verdict, measurement=measurement, difference=difference, count_changes=count_changes)


def _phase_of_peak(metrics: Mapping[str, float]) -> str:
    """Return the phase with the step's peak, or an empty text if no phase or several phases have this peak."""
    highest = [
        name.removeprefix("peak_")
        for name, value in metrics.items()
        if name.startswith("peak_") and METRICS[name].tolerance is None and value == metrics["peak_allocated"]
    ]
    return highest[0] if len(highest) == 1 else ""


def _judge_on_devices(
    metric: Metric,
    limit: int | None,
    measurement: Measurement,
    baseline: Baseline | None,
    why_not: Outcome | None,
    tolerance: Tolerance | None,
) -> MetricVerdict:
    """Return the verdict on a metric over all devices.

    The metric is judged on each device. If it is worse on any device than the budget or the baseline allows, the verdict on the
    worst device is returned. Otherwise the verdict on the whole step is returned, and names the device with the most bytes.

    The arguments have the same meaning as in `_judge_metric`.
    """
    overall = _judge_metric(metric, limit, measurement, baseline, why_not, tolerance)
    by_device = {
        device: metrics[metric.name] for device, metrics in measurement.by_device.items() if metric.name in metrics
    }
    has_device_verdicts = len(by_device) > 1 or (by_device and baseline is not None and baseline.by_device)
    if not has_device_verdicts:
        return overall
    verdicts = []
    for device in by_device:
        device_baseline = None if baseline is None else baseline.on(device, measurement.by_device)
        verdict = _judge_metric(metric, limit, _on(measurement, device), device_baseline, why_not, tolerance)
        is_new_device = baseline is not None and device_baseline is not baseline and device not in baseline.by_device
        if is_new_device and verdict.reason is None:
            verdict = replace(verdict, reason=f"the baseline has no bytes on {device}")
        verdicts.append(replace(verdict, gpu=device))
    return max(
        (verdict for verdict in verdicts if verdict.outcome in WORSE),
        key=lambda verdict: (
            WORSE.index(verdict.outcome),
            verdict.value - (verdict.budget or verdict.baseline or 0),
        ),
        default=replace(
            overall, gpu=max(by_device, key=by_device.__getitem__) if measurement.metrics[metric.name] else None
        ),
    )


def _on(measurement: Measurement, device: str) -> Measurement:
    """Return the measurement with the bytes and step peaks on a single device."""
    device_metrics = measurement.by_device[device]
    step_peaks = measurement.step_peaks_by_device.get(device, StepPeaks())
    return replace(measurement, metrics={**measurement.metrics, **device_metrics}, step_peaks=step_peaks)


def _is_explained(explanation: Explanation, measurement: Measurement, baseline: Baseline) -> bool:
    """Return whether the explanation and the baseline's composition describe the same device.

    A baseline's composition describes the device with the largest peak.
    """
    return explanation.gpu in (None, largest(baseline.by_device) or measurement.largest_device)


def _judge_metric(
    metric: Metric,
    limit: int | None,
    measurement: Measurement,
    baseline: Baseline | None,
    why_not: Outcome | None,
    tolerance: Tolerance | None,
) -> MetricVerdict:
    """Return the verdict on a metric on a single device.

    Args:
        metric: The metric.
        limit: The metric's budget; ``None`` if the test has no such budget.
        measurement: The measurement.
        baseline: The measurement's baseline; ``None`` if there is none.
        why_not: The outcome to return if no comparison is possible, for example ``stale`` for another workload. ``None`` if the
            comparison is possible.
        tolerance: The tolerance of the metric; ``None`` if the metric is not judged against a baseline.
    """
    value = measurement.metrics[metric.name]
    baseline_value = None if baseline is None else baseline.metrics.get(metric.name, metric.value_if_absent)
    # A budget limits the whole program, including the first steps, which are not compared with a baseline.
    highest = max((value, *measurement.step_peaks.of(metric.name)))
    if limit is not None and highest > limit:
        return MetricVerdict(metric.name, Outcome.OVER_BUDGET, highest, baseline_value, budget=limit)
    if tolerance is not None and baseline is not None:
        comparison = _compare(metric, limit, measurement, baseline, tolerance)
        grew = (
            comparison.outcome in (Outcome.REGRESSED, Outcome.UNCERTAIN)
            and baseline_value is not None
            and value > baseline_value
        )
        if why_not is None or (metric.unit == "bytes" and grew):
            return comparison
    if tolerance is not None and why_not is not None:
        # No comparison is possible, for example because the workload differs. So the baseline's figure is only shown.
        return MetricVerdict(metric.name, why_not, value, baseline_value, budget=limit)
    outcome = Outcome.RECORDED if limit is None else Outcome.OK
    return MetricVerdict(metric.name, outcome, value, baseline_value, budget=limit)


def _not_comparable(
    measurement: Measurement, baseline: Baseline | NoBaseline | None
) -> tuple[str | None, Outcome | None]:
    """Return why a measurement cannot be compared with its baseline, and the resulting outcome.

    Returns:
        A sentence with the reason, and the outcome. Both are ``None`` if the measurement can be compared, or if the session
        does not compare with baselines.
    """
    if baseline is None:
        return None, None
    if isinstance(baseline, NoBaseline):
        device = measurement.environment.device
        if baseline.other_devices:
            return f"there are baselines for {', '.join(baseline.other_devices)}, but this is {device}", Outcome.FOREIGN
        return f"there is no baseline for {device} yet", Outcome.NEW
    differences = measurement.workload.differences(baseline.workload)
    if differences:
        return "; ".join(differences), Outcome.STALE
    return None, None


def _compare(
    metric: Metric, limit: int | None, measurement: Measurement, baseline: Baseline, tolerance: Tolerance
) -> MetricVerdict:
    value, baseline_value = measurement.metrics[metric.name], baseline.metrics.get(metric.name, metric.value_if_absent)
    if baseline_value is None:
        return MetricVerdict(
            metric.name, Outcome.NEW, value, budget=limit, reason=why_new(metric, measurement, baseline)
        )
    # A small model's workspaces can be larger than the model. So a ratio of a peak with workspaces would allow any increase.
    workspaces = max(measurement.workspaces, baseline.workspaces or 0) if metric.peak else 0
    if metric.name == "peak_reserved":
        tolerance = replace(tolerance, absolute=min(tolerance.absolute, _segments_by_chance(measurement, baseline)))
    allowed = tolerance.allowed(max(0, baseline_value - workspaces))
    worsening = baseline_value - value if metric.larger_is_better else value - baseline_value
    # Rounding must not decide: the tolerance 0.7 % of 1000 bytes is 7 bytes, but 0.007 * 1000 may be slightly less.
    is_beyond_tolerance = abs(worsening) > allowed and not math.isclose(abs(worsening), allowed, rel_tol=1e-12)
    is_peak = metric.name == "peak_allocated"
    outcome, reason = Outcome.OK, None
    if is_beyond_tolerance and (reason := _moved_by(metric.decided_by, metric, measurement, baseline)) is not None:
        outcome = Outcome.UNCERTAIN
    elif is_beyond_tolerance and worsening > 0:
        reason = _doubt(metric, baseline_value, allowed, measurement, baseline)
        outcome = Outcome.REGRESSED if reason is None else Outcome.UNCERTAIN
        if reason is None and is_peak:
            reason = _of_steps(measurement, baseline)
    elif is_beyond_tolerance and not (
        is_peak and differ_by_chance(_peaks_in(baseline), _peaks_in(measurement), allowed)
    ):
        # Add a reason if another environment may have caused the improvement. An update would store a value for this
        # environment only.
        outcome, reason = Outcome.IMPROVED, _moved_by(metric.depends_on, metric, measurement, baseline)
    return MetricVerdict(metric.name, outcome, value, baseline_value, allowed, limit, reason)


SMALL_SEGMENT, LARGE_SEGMENT = 2 * 2**20, 20 * 2**20
"""Segment sizes in torch's GPU allocator: 2 MiB for blocks up to 1 MiB, and 20 MiB for blocks up to 10 MiB."""


def _segments_by_chance(measurement: Measurement, baseline: Baseline) -> float:
    """Return the bytes by which `peak_reserved` may differ from its baseline although the step is the same.

    The allocator first fills unused bytes in older segments, and then reserves new segments. If both runs begin with equally
    many unused bytes, the step reserves the same segments. If one run begins with more unused bytes, a block may fit into an
    older segment, and this run reserves one segment less.

    Example:
        If both runs begin without unused bytes, the result is 2 MiB, the size of a small segment. If this run begins with 30
        MiB of unused bytes, it may reserve two large segments less. The result is then 2 + 2 * 20 = 42 MiB.
    """
    baseline_unused, unused = baseline.unused_before, measurement.unused_before
    if baseline_unused is None:
        return math.inf
    return SMALL_SEGMENT + (
        0 if unused == baseline_unused else math.ceil(max(unused, baseline_unused) / LARGE_SEGMENT) * LARGE_SEGMENT
    )


def _doubt(
    metric: Metric, baseline_value: float, allowed: float, measurement: Measurement, baseline: Baseline
) -> str | None:
    """Return why something else than the code may have made a metric worse; ``None`` if nothing else explains the change."""
    # MOST_BY_ENVIRONMENT applies to bytes only, because another torch release may change counts by any factor.
    exceeds_environment = (
        metric.unit == "bytes"
        and measurement.metrics[metric.name] - baseline_value > MOST_BY_ENVIRONMENT * baseline_value
    )
    environment_change = None if exceeds_environment else _moved_by(metric.depends_on, metric, measurement, baseline)
    if environment_change is not None:
        return environment_change
    if metric.is_counted_by_operator:
        return _varied(metric, baseline_value, allowed, measurement)
    if not metric.peak or _keeps_more(measurement):
        return None
    if metric.name == "peak_allocated" and measurement.step_peaks.allocated:
        if not differ_by_chance(_peaks_in(measurement), _peaks_in(baseline), allowed):
            return None
        return f"{_of_steps(measurement, baseline)}: this may be chance, unless a fixed seed makes each step equal in every run"
    return (
        None
        if measurement.settled or exceeds_environment
        else "the step's peak did not settle: " + "; ".join(measurement.notes)
    )


def _varied(metric: Metric, baseline_value: float, allowed: float, measurement: Measurement) -> str | None:
    """Return a clause if a count differs from step to step and its smallest value is within the tolerance; else ``None``."""
    lowest = measurement.lowest_counts.get(metric.name)
    if lowest is None or lowest - baseline_value > allowed:
        return None
    return varied_clause(metric.name, lowest, int(measurement.metrics[metric.name]))


def _keeps_more(measurement: Measurement) -> bool:
    """Return whether each step keeps further bytes. Its peak then rises from step to step, by the same bytes in every run."""
    growth = METRICS["growth"].tolerance
    return growth is not None and measurement.metrics.get("growth", 0) > growth.allowed(0)


def _peaks_in(side: Measurement | Baseline) -> tuple[int, ...]:
    """Return the peak of each step, or a single peak if all are equal or unknown."""
    peaks = side.step_peaks.repeated if isinstance(side, Measurement) else side.step_peaks
    return peaks if len({*peaks}) > 1 else (int(side.metrics["peak_allocated"]),)


def _of_steps(measurement: Measurement, baseline: Baseline) -> str | None:
    """Return a clause on how the peaks differ from step to step; ``None`` if they differ neither now nor in the baseline."""
    current, baseline_peaks = (
        spread(peaks) if len(peaks) > 1 else None for peaks in (_peaks_in(measurement), _peaks_in(baseline))
    )
    if current is None and baseline_peaks is None:
        return None
    clause = f"peaks differ from step to step: {current}" if current else "all steps have the same peak"
    return f"{clause}; in the baseline {baseline_peaks or 'all steps have the same peak'}"


def _moved_by(names: tuple[str, ...], metric: Metric, measurement: Measurement, baseline: Baseline) -> str | None:
    """Return a clause on the first environment detail in ``names`` that differs from the baseline's.

    The result is ``None`` if all these details are equal. A detail is ignored if only one environment records it.
    """
    current, stored = measurement.environment.details, baseline.environment.details
    for name in names:
        if name in current and name in stored and current[name] != stored[name]:
            # The text does not name the metric. So all metrics in bytes have the same text, and reports print it once.
            figures = {"bytes": "bytes", "count": "counts"}.get(metric.unit, "times")
            return f"{name} was {stored[name]}, now {current[name]}, which can change {figures} without a code change"
    return None


def failing_outcomes(
    verdict: TestVerdict, *, strict: bool, compares: bool, accepts: frozenset[Outcome]
) -> frozenset[Outcome]:
    """Return the outcomes because of which the gate fails a test. If the test has already failed by itself, there are none.

    Args:
        verdict: The verdict on the test.
        strict: Whether a test also fails if a figure was not compared (``--gpumem-strict``).
        compares: Whether a regression is a failure (``--gpumem-baseline``). Without this option, an update compares only to
            choose the figures to write.
        accepts: The outcomes whose figures this session writes into the store. They do not fail the test.
    """
    if verdict.failed_by_itself:
        return frozenset()
    outcomes = {metric.outcome for measured in verdict.verdicts for metric in measured.metrics}
    if verdict.unmeasured:
        outcomes.add(Outcome.UNMEASURED)
    if verdict.missing:
        outcomes.add(Outcome.MISSING)
    if not verdict.verdicts:
        # If a test measured nothing, an update does not remove its baselines. So `missing` still fails the test.
        accepts -= {Outcome.MISSING}
    if strict:
        failing = outcomes - PASSING
        if not verdict.gated and not failing:
            failing = {Outcome.RECORDED}
        if any(decided_a_branch(measured.measurement.notes) for measured in verdict.verdicts):
            failing |= {Outcome.UNCERTAIN}
    else:
        failing = outcomes & (FAILING if compares else ALWAYS_FAILING)
    return frozenset(failing - accepts)


def failing_metrics(verdict: Verdict, failing: Collection[object], kind: Kind = "memory") -> list[str]:
    """Return the metrics of a kind, such as ``"memory"``, whose outcome is in ``failing``."""
    return [
        metric.metric for metric in verdict.metrics if metric.outcome in failing and METRICS[metric.metric].kind == kind
    ]
