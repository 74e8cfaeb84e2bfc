"""Metrics that only one of a measurement and its baseline has: why each is not compared, and what adds it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.metrics import METRICS, WHOLE

if TYPE_CHECKING:
    from collections.abc import Container

    from pytest_gpumem.gate.baseline import Baseline
    from pytest_gpumem.measurement import Environment, Measurement
    from pytest_gpumem.metrics import Metric


def may_be_added(metric: Metric, here: Environment, there: Environment) -> bool:
    """Return whether a value measured ``here`` may stand beside those of a baseline that was recorded ``there``."""
    return metric.unit in WHOLE and all(here.details.get(name) == there.details.get(name) for name in metric.details)


def why_new(metric: Metric, measurement: Measurement, baseline: Baseline) -> str:
    """Return why a metric that the baseline lacks is not compared, as a clause."""
    torch = baseline.environment.details.get("torch", "?")
    lacking = f"not compared: the baseline ({baseline.recorded}, torch {torch}) has no {metric.title}"
    if may_be_added(metric, measurement.environment, baseline.environment):
        return f"{lacking}; --gpumem-update=new adds it"
    return f"{lacking}; --gpumem-update=all replaces it, as it was recorded in another environment"


def not_measured(measurement: Measurement, baseline: Baseline, judged: Container[str]) -> list[str]:
    """Return a clause for each metric of the baseline in bytes or counts that is not compared with anything.

    Args:
        measurement: What was measured.
        baseline: What it is compared with.
        judged: The metrics that may be compared: not all of those of an emulated GPU with a real one's.
    """
    found = []
    for name in baseline.metrics:
        metric = METRICS[name]
        if metric.tolerance is None or metric.unit not in WHOLE:
            continue
        if name not in measurement.metrics:
            found.append(f"not compared: {metric.title}, which the baseline has, could not be measured")
        elif name not in judged:
            found.append(f"not compared: {metric.title} of an emulated GPU, which mean nothing for a real one's")
    return found
