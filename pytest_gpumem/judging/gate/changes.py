"""The changes behind a verdict: rows of the peak, and operators behind larger counts. All functions are pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.facts.measurement import largest
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.operator_counts import reduced_tallies
from pytest_gpumem.judging.gate.baseline import Baseline
from pytest_gpumem.judging.gate.count_difference import changed_tallies
from pytest_gpumem.judging.gate.difference import difference_of_peaks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.facts.values.composition import Explanation
    from pytest_gpumem.judging.gate.baseline import NoBaseline
    from pytest_gpumem.judging.gate.verdict import Verdict


def with_changes(verdict: Verdict, baseline: Baseline | NoBaseline | None) -> Verdict:
    """Return the verdict with the changes in the peak's composition, and the changed operators for each larger count.

    Args:
        verdict: The verdict on a measurement. The measurement's explanation may have been recorded after the verdict.
        baseline: The stored entry, if the session compares with baselines.
    """
    if not isinstance(baseline, Baseline):
        return verdict
    measurement = verdict.measurement
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
    return replace(verdict, difference=difference, count_changes=count_changes)


def _phase_of_peak(metrics: Mapping[str, float]) -> str:
    """Return the phase with the step's peak, or an empty text if no phase or several phases have this peak."""
    highest = [
        name.removeprefix("peak_")
        for name, value in metrics.items()
        if name.startswith("peak_") and METRICS[name].tolerance is None and value == metrics["peak_allocated"]
    ]
    return highest[0] if len(highest) == 1 else ""


def _is_explained(explanation: Explanation, measurement: Measurement, baseline: Baseline) -> bool:
    """Return whether the explanation and the baseline's composition describe the same device.

    A baseline's composition describes the device with the largest peak.
    """
    return explanation.gpu in (None, largest(baseline.by_device) or measurement.largest_device)
