"""Notes beside a verdict: limits without effect, metrics that were not compared, and workspaces in the peak. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import format_bytes, format_bytes_change, format_factor
from pytest_gpumem.facts.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.judging.gate.comparison import Comparison


MOSTLY_WORKSPACES = (
    "cuBLAS workspaces take more than half of the peak, and they have the same size in every step; use a larger batch to "
    "see more of this step's own memory"
)


def notes_on(comparison: Comparison) -> tuple[str, ...]:
    """Return the notes on a comparison, each as a sentence."""
    return (
        *_idle_limits(comparison),
        *_incomparable(comparison),
        *_changed_workspaces(comparison),
        *_workspaces(comparison),
        *_gained_before(comparison),
        *_simultaneous(comparison),
    )


def _idle_limits(comparison: Comparison) -> Iterator[str]:
    """Yield a note for each limit of the budget whose metric was not measured.

    A job's processes have no note on a ratio between the job's ranks.
    """
    measurement = comparison.measurement
    for name, limit in comparison.budget.limits.items():
        metric = METRICS[name]
        if name in measurement.metrics or (metric.unit == "ratio" and measurement.workload.step == "process"):
            continue
        if metric.unit == "ratio":
            lacking = f"only a launched job with at least two ranks has {name}"
            yield f"{metric.budget} = {format_factor(limit)} has no effect: {lacking}"
        else:
            device = measurement.environment.device
            yield f"{metric.budget} = {format_bytes(int(limit))} has no effect: there is no {name} on {device}"


def _incomparable(comparison: Comparison) -> Iterator[str]:
    """Yield a clause for each of the baseline's metrics, except times, that cannot be compared.

    A metric cannot be compared if it was not measured now. Some metrics also cannot be compared between an emulated GPU and a
    real GPU.
    """
    if comparison.baseline is None or comparison.obstacle is not None:
        return
    for name in comparison.baseline.metrics:
        metric = METRICS[name]
        if metric.tolerance is None or metric.is_timed:
            continue
        if name not in comparison.measurement.metrics:
            yield f"not compared: {metric.title}, which the baseline has, could not be measured"
        elif name not in comparison.tolerances:
            yield f"not compared: {metric.title} of an emulated GPU, which cannot be compared with a real GPU's"


def _workspaces(comparison: Comparison) -> Iterator[str]:
    """Yield `MOSTLY_WORKSPACES` if workspaces take more than half of the peak."""
    measurement = comparison.measurement
    if 2 * measurement.workspaces > measurement.metrics.get("peak_allocated", math.inf):
        yield MOSTLY_WORKSPACES


def _gained_before(comparison: Comparison) -> Iterator[str]:
    """Yield a note if a peak is too high, and the process had gained bytes before this test."""
    measurement, baseline, metric = comparison.measurement, comparison.baseline, METRICS["peak_allocated"]
    gained, peak = measurement.gained_before, measurement.metrics.get(metric.name, 0)
    baseline_peak, tolerance = comparison.baseline_value(metric), comparison.tolerances.get(metric.name)
    is_over_budget = peak > 0 and comparison.limited(metric) > comparison.budget.limits.get(metric.name, math.inf)
    has_grown = (
        comparison.gained_further > 0
        and baseline_peak is not None
        and tolerance is not None
        and peak - baseline_peak > tolerance.allowed(baseline_peak)
    )
    if not has_grown and not (gained > 0 and is_over_budget):
        return
    held = f"held {_more_or_less(gained)} when this measurement began than when the session first saw"
    note = f"the processes {held} them" if measurement.workload.step == "processes" else f"the process {held} it"
    before = None if baseline is None else baseline.gained_before
    yield note if before is None else f"{note}; in the baseline, {_more_or_less(before)}"


def _simultaneous(comparison: Comparison) -> Iterator[str]:
    """Yield the most bytes that several processes held at the same time, for each GPU.

    If they exceed the budget on a single GPU, the metric's row shows them.
    """
    limit, simultaneous = comparison.budget.limits.get("peak_allocated"), comparison.measurement.simultaneous
    for gpu, nbytes in simultaneous.items():
        if limit is not None and nbytes > limit and len(simultaneous) == 1:
            continue
        held = f"{gpu}: at the same time, the processes held at most {format_bytes(nbytes)}"
        yield held if limit is None else f"{held}. The budget limits these bytes"


def _more_or_less(nbytes: int) -> str:
    """Return a change in words: ``40.00 MB more``."""
    return f"{format_bytes(abs(nbytes))} {'less' if nbytes < 0 else 'more'}"


def _changed_workspaces(comparison: Comparison) -> Iterator[str]:
    """Yield a note if the torch release differs from the baseline's, and cuBLAS workspaces have another size."""
    measurement, baseline = comparison.measurement, comparison.baseline
    if baseline is None:
        return
    torch, baseline_torch = measurement.environment.details.get("torch"), baseline.environment.details.get("torch")
    if baseline.workspaces is None or torch == baseline_torch or measurement.workspaces == baseline.workspaces:
        return
    old_rest = int(baseline.metrics["peak_allocated"]) - baseline.workspaces
    rest = measurement.peak_allocated - measurement.workspaces
    change = "is unchanged"
    if rest != old_rest:
        change = f"went from {format_bytes(old_rest)} to {format_bytes(rest)} ({format_bytes_change(rest - old_rest)})"
    # A call, a load or a region runs only once, so cuBLAS may create its workspaces after the peak. Such workspaces are not a
    # part of the peak, so the rest of the peak is unknown.
    change = "" if measurement.workload.step in ("call", "load", "region") else f"; the rest of the peak {change}"
    yield (
        f"cuBLAS workspaces take {format_bytes(measurement.workspaces)} of the peak with torch {torch}, and "
        f"took {format_bytes(baseline.workspaces)} with torch {baseline_torch}; the torch release causes this part of the "
        f"change{change}"
    )
