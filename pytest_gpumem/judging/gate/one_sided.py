"""Notes on metrics that only the measurement or only its baseline has. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.facts.metrics import METRICS, WHOLE

if TYPE_CHECKING:
    from collections.abc import Container

    from pytest_gpumem.facts.measurement import Environment, Measurement
    from pytest_gpumem.facts.metrics import Metric
    from pytest_gpumem.judging.gate.baseline import Baseline


def may_be_added(metric: Metric, measured_in: Environment, recorded_in: Environment) -> bool:
    """Return whether a missing metric may be added to a baseline.

    Bytes and counts may be added if all environment details that affect the metric are equal.

    Args:
        metric: The metric.
        measured_in: The environment in which the new value was measured.
        recorded_in: The environment in which the baseline was recorded.
    """
    return metric.unit in WHOLE and all(
        measured_in.details.get(name) == recorded_in.details.get(name) for name in metric.details
    )


def why_new(metric: Metric, measurement: Measurement, baseline: Baseline) -> str:
    """Return a clause on a metric without a baseline value: why it is not compared, and which option adds it."""
    torch = baseline.environment.details.get("torch", "?")
    lacking = f"not compared: the baseline ({baseline.recorded}, torch {torch}) has no {metric.title}"
    if may_be_added(metric, measurement.environment, baseline.environment):
        return f"{lacking}; --gpumem-update=new adds it"
    return f"{lacking}; --gpumem-update=all replaces the baseline, because it was recorded in another environment"


def not_measured(measurement: Measurement, baseline: Baseline, comparable: Container[str]) -> list[str]:
    """Return a clause for each metric in bytes or counts that the baseline has, but that cannot be compared.

    Args:
        measurement: The measurement.
        baseline: The measurement's baseline.
        comparable: The metrics that may be compared. Some metrics cannot be compared between an emulated GPU and a real GPU.
    """
    notes = []
    for name in baseline.metrics:
        metric = METRICS[name]
        if metric.tolerance is None or metric.unit not in WHOLE:
            continue
        if name not in measurement.metrics:
            notes.append(f"not compared: {metric.title}, which the baseline has, could not be measured")
        elif name not in comparable:
            notes.append(f"not compared: {metric.title} of an emulated GPU, which cannot be compared with a real GPU's")
    return notes
