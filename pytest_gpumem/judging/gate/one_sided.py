"""Metrics that were measured, but are missing in the baseline. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpumem.facts.measurement import Environment
    from pytest_gpumem.facts.metrics import Metric
    from pytest_gpumem.judging.gate.baseline import Baseline


def may_be_added(metric: Metric, measured_in: Environment, recorded_in: Environment) -> bool:
    """Return whether a metric that a baseline lacks may be added to this baseline.

    Bytes, counts and ratios may be added if all environment details that affect the metric are equal. For times, see
    `time_may_be_added`.

    Args:
        metric: The metric.
        measured_in: The environment in which the new value was measured.
        recorded_in: The environment in which the baseline was recorded.
    """
    return not metric.is_timed and all(
        measured_in.details.get(name) == recorded_in.details.get(name) for name in metric.details
    )


def why_new(metric: Metric, measured_in: Environment, baseline: Baseline) -> str:
    """Return a clause on a metric without a baseline value: why it is not compared, and which option adds it."""
    torch = baseline.environment.details.get("torch", "?")
    lacking = f"not compared: the baseline ({baseline.recorded}, torch {torch}) has no {metric.title}"
    if may_be_added(metric, measured_in, baseline.environment):
        return f"{lacking}; --gpumem-update=new adds it"
    return f"{lacking}; --gpumem-update=all replaces the baseline, because it was recorded in another environment"
