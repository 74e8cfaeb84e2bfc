"""A measurement together with its budget, baseline and tolerances, by which pure functions judge the measurement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.facts.values.step_peaks import StepPeaks
from pytest_gpumem.judging.gate.baseline import Baseline, NoBaseline
from pytest_gpumem.judging.gate.verdict import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.facts.metrics import Metric, Tolerance
    from pytest_gpumem.judging.gate.baseline import Budget


class Obstacle(NamedTuple):
    """The reason why a measurement cannot be compared with a baseline, as a sentence, and the resulting outcome."""

    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """A measurement with its budget, its baseline and the tolerances.

    Example:
        The peak is 303.41 kB, and the baseline has 280.00 kB. ``value`` and ``baseline_value`` of ``peak_allocated`` are
        these two figures. If the baseline belongs to a batch of another shape, ``obstacle`` says so, with the outcome
        ``stale``.
    """

    measurement: Measurement
    budget: Budget
    baseline: Baseline | None
    """The entry in the store; ``None`` if there is none, or if the session compares with no baselines."""
    tolerances: Mapping[str, Tolerance]
    """The tolerances by metric. Other metrics are not judged against a baseline."""
    obstacle: Obstacle | None = None
    """``None`` if the measurement can be compared, or if the session compares with no baselines."""

    @classmethod
    def of(
        cls,
        measurement: Measurement,
        budget: Budget,
        baseline: Baseline | NoBaseline | None,
        tolerances: Mapping[str, Tolerance],
    ) -> Comparison:
        """Return the comparison with an entry in the store. The arguments are the same as for `judge`."""
        entry = baseline if isinstance(baseline, Baseline) else None
        return cls(measurement, budget, entry, tolerances, _obstacle(measurement, baseline))

    def value(self, metric: Metric) -> float:
        """Return the measured figure."""
        return self.measurement.metrics[metric.name]

    def limited(self, metric: Metric) -> float:
        """Return the figure that a budget limits: the highest in any step.

        For several processes' `peak_allocated`, it is the most bytes that they held at the same time, if these are known.
        """
        measurement = self.measurement
        if self.limits_simultaneous(metric):
            peaks = {device: values[metric.name] for device, values in measurement.by_device.items()}
            return max({**peaks, **measurement.simultaneous}.values())
        # A budget limits the whole program. So it also applies to the first steps, which are not compared with a baseline.
        return max((self.value(metric), *measurement.step_peaks.of(metric.name)))

    def limits_simultaneous(self, metric: Metric) -> bool:
        """Return whether a budget limits the bytes that several processes held at the same time."""
        return metric.name == "peak_allocated" and bool(self.measurement.simultaneous)

    def baseline_value(self, metric: Metric) -> float | None:
        """Return the baseline's figure; ``None`` if the baseline lacks the metric, or if there is no baseline."""
        if self.baseline is None:
            return None
        return self.baseline.metrics.get(metric.name, metric.value_if_absent)

    @property
    def gained_further(self) -> int:
        """The bytes that a process had gained before this measurement, minus its gain before the baseline's measurement."""
        baseline = None if self.baseline is None else self.baseline.gained_before
        return self.measurement.gained_before - (baseline or 0)

    @property
    def peaks(self) -> tuple[int, ...]:
        """The peak of each step, or a single peak if all are equal or unknown."""
        return self._peaks(self.measurement.step_peaks.repeated, self.measurement.metrics)

    @property
    def baseline_peaks(self) -> tuple[int, ...]:
        """The peak of each step in the baseline, or a single peak if all are equal or unknown; empty without a baseline."""
        return () if self.baseline is None else self._peaks(self.baseline.step_peaks, self.baseline.metrics)

    @staticmethod
    def _peaks(peaks: tuple[int, ...], metrics: Mapping[str, float]) -> tuple[int, ...]:
        return peaks if len({*peaks}) > 1 else (int(metrics["peak_allocated"]),)

    def on(self, device: str) -> Comparison:
        """Return the comparison of the bytes on a single GPU, such as ``cuda:1``."""
        measurement = self.measurement
        step_peaks = measurement.step_peaks_by_device.get(device, StepPeaks())
        on_device = replace(
            measurement,
            metrics={**measurement.metrics, **measurement.by_device[device]},
            step_peaks=step_peaks,
            by_device={},
            simultaneous={gpu: nbytes for gpu, nbytes in measurement.simultaneous.items() if gpu == device},
        )
        baseline = None if self.baseline is None else self.baseline.on(device, measurement.by_device)
        return replace(self, measurement=on_device, baseline=baseline)


def _obstacle(measurement: Measurement, baseline: Baseline | NoBaseline | None) -> Obstacle | None:
    """Return why a measurement cannot be compared with its baseline; ``None`` if nothing prevents the comparison."""
    if baseline is None:
        return None
    if isinstance(baseline, NoBaseline):
        device = measurement.environment.device
        if baseline.other_devices:
            return Obstacle(
                Outcome.FOREIGN, f"there are baselines for {', '.join(baseline.other_devices)}, but this is {device}"
            )
        return Obstacle(Outcome.NEW, f"there is no baseline for {device} yet")
    differences = measurement.workload.differences(baseline.workload)
    return Obstacle(Outcome.STALE, "; ".join(differences)) if differences else None
