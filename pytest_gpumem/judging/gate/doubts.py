"""Decide the outcome for a change beyond its tolerance, and find reasons to doubt that the code caused the change.

All functions are pure.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import format_bytes
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.operator_counts import varied_clause
from pytest_gpumem.facts.values.step_peaks import spread
from pytest_gpumem.judging.gate.verdict import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.facts.metrics import Metric
    from pytest_gpumem.judging.gate.comparison import Comparison

MOST_BY_ENVIRONMENT = 0.40
"""The largest growth in bytes that another environment can explain, divided by the baseline's bytes. The code must have caused
any larger growth.

Kernels for another instruction set allocate different amounts. With AVX-512, the backward of a convolution took 27 % more than
with SSE4.1, and a bfloat16 product took 20 % more than with AVX2 (torch 2.13.0, x86_64)."""


SMALL_SEGMENT, LARGE_SEGMENT = 2 * 2**20, 20 * 2**20
"""Segment sizes in torch's GPU allocator: 2 MiB for blocks up to 1 MiB, and 20 MiB for blocks up to 10 MiB."""


def segments_by_chance(comparison: Comparison) -> float:
    """Return the bytes by which `peak_reserved` may differ from its baseline although the step is the same.

    The allocator first fills unused bytes in older segments, and then reserves new segments. If both runs begin with equally
    many unused bytes, the step reserves the same segments. If one run begins with more unused bytes, a block may fit into an
    older segment, and this run reserves one segment less.

    Example:
        If both runs begin without unused bytes, the result is 2 MiB, the size of a small segment. If this run begins with 30
        MiB of unused bytes, it may reserve two large segments less. The result is then 2 + 2 * 20 = 42 MiB.
    """
    baseline_unused = None if comparison.baseline is None else comparison.baseline.unused_before
    unused = comparison.measurement.unused_before
    if baseline_unused is None:
        return math.inf
    return SMALL_SEGMENT + (
        0 if unused == baseline_unused else math.ceil(max(unused, baseline_unused) / LARGE_SEGMENT) * LARGE_SEGMENT
    )


def bytes_of_other_tests(comparison: Comparison, metric: Metric) -> tuple[int, int]:
    """Return how far a process's figure may be above and below its baseline, because other tests used the process before.

    If the process had gained further bytes before this measurement, its peak may be higher by these bytes. This does not hold
    for bytes in both peaks, which the baseline's run allocated and retained itself. This run retains fewer bytes then, because
    another test has allocated them earlier.

    If the process held less before this measurement than before the baseline's measurement, its peak may be lower by these
    bytes.

    `retained` is lower if another test has allocated these bytes earlier, and higher if no other test has. Neither is a change.

    Example:
        An earlier test leaked 40 MB in a server. So the peak may be 40 MB higher. Another server loaded a model of 30 GB
        during the baseline's run. Now an earlier test has loaded the model. So `retained` may be 30 GB lower, and the peak
        may not be higher.

        The baseline was recorded after a test that leaked 40 MB. Now the test runs alone. So the peak may be 40 MB lower.
    """
    further = comparison.gained_further
    if metric.name == "retained":
        return max(0, -further), max(0, further)
    if metric.name != "peak_allocated":
        return 0, 0
    return max(0, further + min(0, _retained_further(comparison))), max(0, -further)


def _retained_further(comparison: Comparison) -> int:
    """Return the bytes that a process has retained in this measurement, minus those in the baseline's measurement."""
    baseline = {} if comparison.baseline is None else comparison.baseline.metrics
    retained, baseline_retained = (
        int(metrics.get("retained", 0)) for metrics in (comparison.measurement.metrics, baseline)
    )
    return retained - baseline_retained


def doubt_within_tolerance(comparison: Comparison, metric: Metric, worsening: float, allowed: float) -> str | None:
    """Return a reason to doubt a peak that is not above its tolerance, because the process held less before this measurement.

    Example:
        A baseline of 150 MB was recorded after a test that leaked 40 MB. Now the test runs alone, and its peak is 130 MB. The
        server held 40 MB less, and the peak is only 20 MB lower. So this test may need 20 MB more than before.

    The sum over all processes has no `retained`, which may show that this test has allocated these bytes itself this time. So
    this function doubts the processes, and not their sum.

    Args:
        comparison: The comparison.
        metric: The metric.
        worsening: The value minus the baseline's value.
        allowed: The allowed difference, in the metric's unit.
    """
    is_known = metric.name == "peak_allocated" and "retained" in comparison.measurement.metrics
    further = comparison.gained_further if is_known else 0
    if further >= 0 or worsening <= min(0, further + max(0, _retained_further(comparison))) + allowed:
        return None
    return (
        f"the process had gained {format_bytes(-further)} less before this measurement than in the baseline, and its peak is "
        "not lower by as much"
    )


def outcome_beyond_tolerance(
    comparison: Comparison, metric: Metric, baseline_value: float, allowed: float, *, is_worse: bool
) -> tuple[Outcome, str | None]:
    """Return the outcome for a change beyond ``allowed``, and a reason to doubt that the code caused it, if there is one."""
    changed_environment = _changed_environment(comparison, metric, metric.decided_by)
    if changed_environment is not None:
        return Outcome.UNCERTAIN, changed_environment
    is_peak = metric.name == "peak_allocated"
    if is_worse:
        reason = _doubt_by_other_tests(comparison, metric, baseline_value, allowed) or _doubt(
            comparison, metric, baseline_value, allowed
        )
        if reason is not None:
            return Outcome.UNCERTAIN, reason
        return Outcome.REGRESSED, _differing_peaks(comparison) if is_peak else None
    if is_peak and differ_by_chance(comparison.baseline_peaks, comparison.peaks, allowed):
        return Outcome.OK, None
    # If another environment may have caused the improvement, say so: an update would store a value for this environment only.
    return Outcome.IMPROVED, _changed_environment(comparison, metric, metric.depends_on)


def _doubt_by_other_tests(comparison: Comparison, metric: Metric, baseline_value: float, allowed: float) -> str | None:
    """Return a clause if all bytes that the process gained before the measurement together explain a higher peak.

    For example, the process keeps its last result until the next result replaces it. Run alone, the test retains a result. Run
    after another test, it retains no further bytes. The other test's result is still a part of the peak.
    """
    further = comparison.gained_further if metric.name == "peak_allocated" else 0
    if further <= 0:
        return None
    unexplained = further - bytes_of_other_tests(comparison, metric)[0]
    if comparison.value(metric) - baseline_value > allowed + unexplained:
        return None
    return (
        f"the process had gained {format_bytes(further)} more before this measurement than in the baseline, where this test "
        "itself may have allocated them"
    )


def _doubt(comparison: Comparison, metric: Metric, baseline_value: float, allowed: float) -> str | None:
    """Return a reason to doubt that the code made a metric worse; ``None`` if only the code explains the change.

    Args:
        comparison: The comparison.
        metric: The metric that became worse.
        baseline_value: The metric's value in the baseline.
        allowed: The allowed difference, in the metric's unit.
    """
    measurement = comparison.measurement
    # MOST_BY_ENVIRONMENT applies to bytes only, because another torch release may change counts by any factor.
    exceeds_environment = (
        metric.unit == "bytes" and comparison.value(metric) - baseline_value > MOST_BY_ENVIRONMENT * baseline_value
    )
    if not exceeds_environment:
        environment_change = _changed_environment(comparison, metric, metric.depends_on)
        if environment_change is not None:
            return environment_change
    if metric.is_counted_by_operator:
        return _varied(metric, baseline_value, allowed, measurement)
    if not metric.peak or _keeps_more(measurement):
        return None
    if metric.name == "peak_allocated" and measurement.step_peaks.allocated:
        if not differ_by_chance(comparison.peaks, comparison.baseline_peaks, allowed):
            return None
        return f"{_differing_peaks(comparison)}: this may be chance, unless a fixed seed makes each step equal in every run"
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
    """Return whether each step keeps further bytes. The peaks then rise equally in every run, so they do not vary by chance."""
    growth = METRICS["growth"].tolerance
    return growth is not None and measurement.metrics.get("growth", 0) > growth.allowed(0)


def _differing_peaks(comparison: Comparison) -> str | None:
    """Return a clause on how the peaks differ from step to step; ``None`` if they differ neither now nor in the baseline."""
    current, baseline_peaks = (
        spread(peaks) if len(peaks) > 1 else None for peaks in (comparison.peaks, comparison.baseline_peaks)
    )
    if current is None and baseline_peaks is None:
        return None
    clause = f"peaks differ from step to step: {current}" if current else "all steps have the same peak"
    return f"{clause}; in the baseline {baseline_peaks or 'all steps have the same peak'}"


def _changed_environment(comparison: Comparison, metric: Metric, details: tuple[str, ...]) -> str | None:
    """Return a clause on the first environment detail in ``details`` that differs from the baseline's.

    The result is ``None`` if all these details are equal. A detail is ignored if the baseline or this run did not record it.
    """
    stored = {} if comparison.baseline is None else comparison.baseline.environment.details
    current = comparison.measurement.environment.details
    for name in details:
        if name in current and name in stored and current[name] != stored[name]:
            # The clause does not name the metric. So all metrics of memory have the same clause, and reports print it once.
            figures = {"memory": "bytes", "work": "counts"}.get(metric.kind, "times")
            return f"{name} was {stored[name]}, now {current[name]}, which can change {figures} without a code change"
    return None


def differ_by_chance(higher: Sequence[int], lower: Sequence[int], allowed: float) -> bool:
    """Return whether chance may explain that one measurement's highest peak exceeds another's, because steps' peaks vary.

    In four cases, chance does not explain the difference:

    - The peaks in ``lower`` are all equal.
    - Each step in ``higher`` needs at least as much as the same step in ``lower``. With a fixed seed, a regression looks like
      this. With chance, some steps would need less.
    - Even the lowest peak in ``higher`` exceeds all peaks in ``lower``.
    - The maximum of ``higher`` exceeds the maximum of ``lower`` by more than the range of ``lower`` (maximum minus minimum).

    Example:
        ``differ_by_chance((10, 30, 20), (25, 10, 12), 1)`` is ``True``. The maximum grew from 25 to 30, but the peaks in
        ``lower`` range from 10 to 25, and the first step needs less than in ``lower``.

    Args:
        higher: Each step's peak in bytes. The maximum exceeds the maximum of ``lower`` by more than ``allowed``.
        lower: Each step's peak in the other measurement, in bytes.
        allowed: A difference of at most this many bytes counts as equal.
    """
    most = max(lower)
    if max(higher) - most > allowed + most - min(lower) or min(higher) - most > allowed:
        return False
    same_steps = list(zip(higher, lower, strict=False))
    return max(peak for peak, _ in same_steps) - most <= allowed or any(
        peak < lower_peak - allowed for peak, lower_peak in same_steps
    )
