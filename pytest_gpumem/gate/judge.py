"""The judge: from a measurement, its budget and its baseline to a verdict. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.gate.baseline import Baseline, NoBaseline
from pytest_gpumem.gate.count_difference import changed_tallies
from pytest_gpumem.gate.difference import difference_of_peaks
from pytest_gpumem.gate.one_sided import not_measured, why_new
from pytest_gpumem.gate.speed import judge_step_time, judge_throughput
from pytest_gpumem.gate.verdict import (
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
from pytest_gpumem.measurement import Measurement, largest
from pytest_gpumem.metrics import METRICS, Kind, Metric, Tolerance
from pytest_gpumem.units import format_bytes, format_bytes_change
from pytest_gpumem.values.operator_counts import kept, varied_clause
from pytest_gpumem.values.step_peaks import StepPeaks, differ_by_chance, spread
from pytest_gpumem.values.unknown_reads import decided_a_branch

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pytest_gpumem.gate.baseline import Budget
    from pytest_gpumem.values.composition import Explanation


def tolerances_of_emulated(tolerances: Mapping[str, Tolerance]) -> dict[str, Tolerance]:
    """Return the tolerances of emulated figures against measured ones: at least those that the benchmark supports."""
    return {
        name: Tolerance(max(tolerance.relative, least.relative), max(tolerance.absolute, least.absolute))
        for name, tolerance in tolerances.items()
        if (least := METRICS[name].emulated) is not None
    }


MOST_BY_ENVIRONMENT = 0.40
"""The most that another environment may move a metric, as a ratio; more than that is the code's.

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
            METRICS[name], budget.limits.get(name), measurement, entry, outcome, tolerances.get(name)
        )
        for name in measurement.metrics
        if name != "throughput"
    )
    throughput = judge_throughput(measurement, budget.min_throughput)
    if throughput is not None:
        metrics += (throughput,)
    elsewhere = baseline.elsewhere if isinstance(baseline, NoBaseline) else ()
    origin = None if entry is None else origin_of(entry)
    notes = _idle_limits(budget, measurement)
    if entry is not None and why_not is None:
        notes += not_measured(measurement, entry, tolerances)
    notes += [] if entry is None else _release_notes(measurement, entry)
    mostly = 2 * measurement.workspaces > measurement.metrics.get("peak_allocated", math.inf)
    notes += [MOSTLY_WORKSPACES] if mostly else []
    noted = replace(measurement, notes=(*measurement.notes, *notes)) if notes else measurement
    return with_differences(Verdict(noted, metrics, origin, why_not, elsewhere), noted, baseline)


def origin_of(entry: Baseline) -> Origin:
    """Return what a verdict says of the baseline that it is by."""
    environment = entry.environment
    torch = str(environment.details.get("torch", UNKNOWN_RELEASE))
    return Origin(entry.recorded, environment.device, torch, entry.commit, entry.reason, environment.packages)


def _idle_limits(budget: Budget, measurement: Measurement) -> list[str]:
    """Return a note on each limit of a metric that the measurement does not have."""
    return [
        f"{METRICS[name].budget} = {format_bytes(limit)} has no effect: there is no {name} on {measurement.environment.device}"
        for name, limit in budget.limits.items()
        if name not in measurement.metrics
    ]


MOSTLY_WORKSPACES = (
    "more than half of the peak are workspaces of cuBLAS, as large in any step: a larger batch shows more of this one"
)


def _release_notes(measurement: Measurement, baseline: Baseline) -> list[str]:
    """Return a note on the part of the peak's change that is of another release of torch, whose workspaces differ."""
    now, then = measurement.environment.details.get("torch"), baseline.environment.details.get("torch")
    if baseline.workspaces is None or now == then or measurement.workspaces == baseline.workspaces:
        return []
    before = int(baseline.metrics["peak_allocated"]) - baseline.workspaces
    after = measurement.peak_allocated - measurement.workspaces
    beside = "is as it was"
    if after != before:
        beside = f"went from {format_bytes(before)} to {format_bytes(after)} ({format_bytes_change(after - before)})"
    # What runs once makes workspaces that are kept as it goes, some after its peak.
    beside = "" if measurement.workload.step in ("call", "load", "region") else f"; what is beside them {beside}"
    note = (
        f"workspaces of cuBLAS are {format_bytes(measurement.workspaces)} of the peak with torch {now}, and were "
        f"{format_bytes(baseline.workspaces)} with torch {then}: that part of its change is the release's own{beside}"
    )
    return [note]


def with_differences(verdict: Verdict, measurement: Measurement, baseline: Baseline | NoBaseline | None) -> Verdict:
    """Return the verdict with what changed in the composition of the peak, and the operators of which a count has more.

    Args:
        verdict: The verdict on the measurement.
        measurement: The one that was judged, which may have been explained since.
        baseline: What it was compared with.
    """
    if not isinstance(baseline, Baseline):
        return replace(verdict, measurement=measurement)
    changed, more, explained = None, {}, measurement.explanation
    if baseline.composition is not None and explained is not None and _is_explained(explained, measurement, baseline):
        then = replace(baseline.composition, phase=baseline.composition.phase or _phase_of_peak(baseline.metrics))
        changed = difference_of_peaks(
            then,
            explained.peak,
            baseline.other_phases,
            explained.other_phases,
            explained.callers,
            explained.function_at,
        )
    if verdict.reason is None:
        more = {
            name: kept(changed_tallies(baseline.by_operator[name], tallies))
            for name, tallies in measurement.by_operator.items()
            if name in baseline.by_operator and measurement.metrics[name] > baseline.metrics[name]
        }
    return replace(verdict, measurement=measurement, difference=changed, count_changes=more)


def _phase_of_peak(metrics: Mapping[str, float]) -> str:
    """Return the phase that has the peak of the step, by its metric; empty where that is none or several."""
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
    """Return the verdict on a metric: that of the largest device, or of one that is worse than that of its baseline.

    Arguments as for `_judge_metric`.
    """
    whole = _judge_metric(metric, limit, measurement, baseline, why_not, tolerance)
    by_device = {device: here[metric.name] for device, here in measurement.by_device.items() if metric.name in here}
    several = len(by_device) > 1 or (by_device and baseline is not None and baseline.by_device)
    if not several:
        return whole
    found = []
    for device in by_device:
        then = None if baseline is None else baseline.on(device, measurement.by_device)
        one = _judge_metric(metric, limit, _on(measurement, device), then, why_not, tolerance)
        absent = baseline is not None and then is not baseline and device not in baseline.by_device
        if absent and one.reason is None:
            one = replace(one, reason=f"the baseline has no bytes of {device}")
        found.append(replace(one, gpu=device))
    return max(
        (one for one in found if one.outcome in WORSE),
        key=lambda one: (WORSE.index(one.outcome), one.value - (one.budget or one.baseline or 0)),
        default=replace(
            whole, gpu=max(by_device, key=by_device.__getitem__) if measurement.metrics[metric.name] else None
        ),
    )


def _on(measurement: Measurement, device: str) -> Measurement:
    """Return what was measured with the bytes of one of its devices."""
    here = measurement.by_device[device]
    step_peaks = measurement.step_peaks_by_device.get(device, StepPeaks())
    return replace(measurement, metrics={**measurement.metrics, **here}, step_peaks=step_peaks)


def _is_explained(explanation: Explanation, measurement: Measurement, baseline: Baseline) -> bool:
    """Return whether it is of the device that the baseline's composition is of: the one with the largest peak."""
    return explanation.gpu in (None, largest(baseline.by_device) or measurement.largest_device)


def _judge_metric(
    metric: Metric,
    limit: int | None,
    measurement: Measurement,
    baseline: Baseline | None,
    why_not: Outcome | None,
    tolerance: Tolerance | None,
) -> MetricVerdict:
    """Return the verdict on a metric of one device.

    ``limit`` is the budget; ``why_not`` the outcome where no comparison was asked for, or where it is not one of the same work.
    """
    value = measurement.metrics[metric.name]
    earlier = None if baseline is None else baseline.metrics.get(metric.name, metric.where_absent)
    # A budget is for the whole program, also for the first steps, which no baseline is compared with.
    highest = max((value, *measurement.step_peaks.of(metric.name)))
    if limit is not None and highest > limit:
        return MetricVerdict(metric.name, Outcome.OVER_BUDGET, highest, earlier, budget=limit)
    if tolerance is not None and baseline is not None:
        compared = _compare(metric, limit, measurement, baseline, tolerance)
        grew = compared.outcome in (Outcome.REGRESSED, Outcome.UNCERTAIN) and earlier is not None and value > earlier
        if why_not is None or (metric.unit == "bytes" and grew):
            return compared
    if tolerance is not None and why_not is not None:
        # The baseline of another workload is shown beside the value, though neither is judged by the other.
        return MetricVerdict(metric.name, why_not, value, earlier, budget=limit)
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
    metric: Metric, limit: int | None, measurement: Measurement, baseline: Baseline, tolerance: Tolerance
) -> MetricVerdict:
    value, earlier = measurement.metrics[metric.name], baseline.metrics.get(metric.name, metric.where_absent)
    if earlier is None:
        return MetricVerdict(
            metric.name, Outcome.NEW, value, budget=limit, reason=why_new(metric, measurement, baseline)
        )
    # A small model's increase would drown in workspaces that every model needs.
    workspaces = max(measurement.workspaces, baseline.workspaces or 0) if metric.peak else 0
    if metric.name == "peak_reserved":
        tolerance = replace(tolerance, absolute=min(tolerance.absolute, _segments_by_chance(measurement, baseline)))
    allowed = tolerance.allowed(max(0, earlier - workspaces))
    worse = earlier - value if metric.larger_is_better else value - earlier
    # 0.7 % of 1000 bytes is 7 of them, also where the product of the two floats is a little less.
    beyond = abs(worse) > allowed and not math.isclose(abs(worse), allowed, rel_tol=1e-12)
    is_peak = metric.name == "peak_allocated"
    outcome, reason = Outcome.OK, None
    if beyond and (reason := _moved_by(metric.decided_by, metric, measurement, baseline)) is not None:
        outcome = Outcome.UNCERTAIN
    elif beyond and worse > 0:
        reason = _doubt(metric, earlier, allowed, measurement, baseline)
        outcome = Outcome.REGRESSED if reason is None else Outcome.UNCERTAIN
        if reason is None and is_peak:
            reason = _of_steps(measurement, baseline)
    elif beyond and not (is_peak and differ_by_chance(_peaks_in(baseline), _peaks_in(measurement), allowed)):
        # It may be the code or the machine: to accept it from here would make the baseline the machine's.
        outcome, reason = Outcome.IMPROVED, _moved_by(metric.depends_on, metric, measurement, baseline)
    return MetricVerdict(metric.name, outcome, value, earlier, allowed, limit, reason)


SMALL_SEGMENT, LARGE_SEGMENT = 2 * 2**20, 20 * 2**20
"""Bytes that torch's allocator takes from the GPU at once for small blocks, and for those up to 10 MiB."""


def _segments_by_chance(measurement: Measurement, baseline: Baseline) -> float:
    """Return by how many bytes the same step may reserve more or less than its baseline.

    Whether it finds room in segments that were there depends on what ran before, and on nothing else: with the same room it
    takes the same segments. A block that fits into little room may save a whole segment.
    """
    then, now = baseline.unused_before, measurement.unused_before
    if then is None:
        return math.inf
    return SMALL_SEGMENT + (0 if now == then else math.ceil(max(now, then) / LARGE_SEGMENT) * LARGE_SEGMENT)


def _doubt(metric: Metric, earlier: float, allowed: float, measurement: Measurement, baseline: Baseline) -> str | None:
    """Return why a change for the worse may have another cause than the code; ``None`` where there is no such reason."""
    # Counts have no such limit: a release of torch may change any number of them.
    beyond = metric.unit == "bytes" and measurement.metrics[metric.name] - earlier > MOST_BY_ENVIRONMENT * earlier
    moved = None if beyond else _moved_by(metric.depends_on, metric, measurement, baseline)
    if moved is not None:
        return moved
    if metric.made_of_operators:
        return _varied(metric, earlier, allowed, measurement)
    if not metric.peak or _keeps_more(measurement):
        return None
    if metric.name == "peak_allocated" and measurement.step_peaks.allocated:
        if not differ_by_chance(_peaks_in(measurement), _peaks_in(baseline), allowed):
            return None
        return (
            f"{_of_steps(measurement, baseline)}: by chance, unless a fixed seed makes each step the same in each run"
        )
    return None if measurement.settled or beyond else "the step's peak did not settle: " + "; ".join(measurement.notes)


def _varied(metric: Metric, earlier: float, allowed: float, measurement: Measurement) -> str | None:
    """Return that a count differs from step to step, where its smallest value is not beyond what is allowed."""
    lowest = measurement.lowest_counts.get(metric.name)
    if lowest is None or lowest - earlier > allowed:
        return None
    return varied_clause(metric.name, lowest, int(measurement.metrics[metric.name]))


def _keeps_more(measurement: Measurement) -> bool:
    """Return whether peaks move because each step keeps more: the same number of steps moves them as far."""
    growth = METRICS["growth"].tolerance
    return growth is not None and measurement.metrics.get("growth", 0) > growth.allowed(0)


def _peaks_in(side: Measurement | Baseline) -> tuple[int, ...]:
    """Return the peaks of the steps, where they are not known or all alike one of them."""
    peaks = side.step_peaks.repeated if isinstance(side, Measurement) else side.step_peaks
    return peaks if len({*peaks}) > 1 else (int(side.metrics["peak_allocated"]),)


def _of_steps(measurement: Measurement, baseline: Baseline) -> str | None:
    """Return how the peaks of steps differ, as a clause; ``None`` where they are alike."""
    now, then = (spread(peaks) if len(peaks) > 1 else None for peaks in (_peaks_in(measurement), _peaks_in(baseline)))
    if now is None and then is None:
        return None
    here = f"peaks differ from step to step: {now}" if now else "peaks of all steps are alike"
    return f"{here}; in the baseline {then or 'they are alike'}"


def _moved_by(details: tuple[str, ...], metric: Metric, measurement: Measurement, baseline: Baseline) -> str | None:
    """Return which of ``details`` of the environment differs from the baseline's, if one that both sides know does."""
    here, there = measurement.environment.details, baseline.environment.details
    for detail in details:
        if detail in here and detail in there and here[detail] != there[detail]:
            # One reason for every metric of its kind, so reports tell it once.
            figures = {"bytes": "bytes", "count": "counts"}.get(metric.unit, "times")
            return f"{detail} was {there[detail]}, now {here[detail]}, which moves {figures} by itself"
    return None


def failing_outcomes(
    verdict: TestVerdict, *, strict: bool, compares: bool, accepts: frozenset[Outcome]
) -> frozenset[Outcome]:
    """Return the outcomes for which the gate must fail a test: none if it has failed by itself.

    Args:
        verdict: The verdict on the test.
        strict: Whether everything has to be compared (``--gpumem-strict``).
        compares: Whether a regression is a failure (``--gpumem-baseline``); an update compares only to know what to write.
        accepts: The outcomes that this session writes into the store, and so are no failures.
    """
    if verdict.failed_by_itself:
        return frozenset()
    seen = {metric.outcome for one in verdict.verdicts for metric in one.metrics}
    if verdict.unmeasured:
        seen.add(Outcome.UNMEASURED)
    if verdict.missing:
        seen.add(Outcome.MISSING)
    if not verdict.verdicts:
        # Nothing is written for a test that measured nothing, and nothing removed.
        accepts -= {Outcome.MISSING}
    if strict:
        failing = seen - PASSING
        if not verdict.gated and not failing:
            failing = {Outcome.RECORDED}
        if any(decided_a_branch(one.measurement.notes) for one in verdict.verdicts):
            failing |= {Outcome.UNCERTAIN}
    else:
        failing = seen & (FAILING if compares else ALWAYS_FAILING)
    return frozenset(failing - accepts)


def failing_metrics(verdict: Verdict, failing: Collection[object], kind: Kind = "memory") -> list[str]:
    """Return the metrics of a kind for which a measurement fails."""
    return [one.metric for one in verdict.metrics if one.outcome in failing and METRICS[one.metric].kind == kind]
