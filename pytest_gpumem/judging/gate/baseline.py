"""Baselines and budgets, with which a measurement is compared."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import rounded
from pytest_gpumem.facts.measurement import largest
from pytest_gpumem.facts.metrics import METRICS, WHOLE
from pytest_gpumem.facts.values.composition import without_callers
from pytest_gpumem.facts.values.module_calls import outermost
from pytest_gpumem.facts.values.operator_counts import (
    MADE_OF_OPERATORS,
    NOWHERE,
    reduced_tallies,
    tallies_without_callers,
    total,
)
from pytest_gpumem.facts.values.step_peaks import StepPeaks
from pytest_gpumem.judging.times.comparison import Runs, run_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.base.units import ThroughputLimit
    from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
    from pytest_gpumem.facts.values.composition import Composition
    from pytest_gpumem.facts.values.operator_counts import Tally


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits for a test: bytes, ratios, throughput, peak growth and slowdown. ``None`` means no limit."""

    limits: Mapping[str, float] = field(default_factory=dict)
    """Limits by metric, in the metric's unit: bytes, or a ratio."""
    tolerance: float | None = None
    """The allowed `peak_allocated` growth over the baseline, instead of the metric's tolerance (0.02 is 2 %)."""
    max_slowdown: float | None = None
    """The allowed slowdown against the baseline, instead of the metric's tolerance (0.05 is 5 %)."""
    min_throughput: ThroughputLimit | None = None
    device: str | None = None

    def or_else(self, fallback: Budget) -> Budget:
        """Return this budget. Each limit that it lacks comes from ``fallback``."""
        own = {limit.name: value for limit in fields(self) if (value := getattr(self, limit.name)) is not None}
        return replace(fallback, **{**own, "limits": {**fallback.limits, **self.limits}})


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """The key of a baseline: test file, test and name of the measurement.

    Example: ``Key("tests/test_gpt.py", "TestTrain::test_step[fp32]", "train_step")``.
    """

    file: str
    test: str
    name: str

    def __str__(self) -> str:
        return f"{self.file}::{self.test} ({self.name})"


@dataclass(frozen=True, slots=True)
class Baseline:
    """An accepted measurement. ``recorded`` is a date (``2026-11-02``), and ``commit`` is an abbreviated hash."""

    workload: Workload
    environment: Environment
    metrics: Mapping[str, float]
    recorded: str
    commit: str | None = None
    composition: Composition | None = None
    """The peak's composition, reduced to its largest rows; ``None`` if no composition was recorded. If the steps have
    different peaks, the rows may not come from the step with the highest peak."""
    runs: Runs | None = None
    """The step's times in the last accepted runs; ``None`` if no run had valid times."""
    reason: str | None = None
    """The reason for accepting the measurement, in one line; ``None`` without a reason."""
    by_operator: Mapping[str, tuple[Tally, ...]] = field(default_factory=dict)
    """The operator calls in each count, by operator and line. The key is the count's metric, such as ``"syncs"``. Baselines
    from older versions do not list calls."""
    by_device: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The judged metrics in bytes on each GPU, if the step used several GPUs. The mapping is empty for a step on a single
    device, and in baselines from older versions."""
    other_phases: Mapping[str, Composition] = field(default_factory=dict)
    """For each other phase, the composition at the phase's own peak, because in a later measurement the step's peak may be in
    this phase. `Explanation.kept` selects the stored phases and rows."""
    workspaces: int | None = None
    """The bytes of cuBLAS workspaces in the peak (`Measurement.workspaces`); ``None`` on devices without `peak_reserved` (the
    CPU), and in baselines from older versions."""
    unused_before: int | None = None
    """The allocator's unused bytes when the step began (`Measurement.unused_before`); ``None`` whenever ``workspaces`` is
    ``None``."""
    gained_before: int | None = None
    """The bytes that a process had gained before the measurement began (`Measurement.gained_before`); ``None`` for 0."""
    step_peaks: tuple[int, ...] = ()
    """Each step's peak in order, in bytes, if the peaks differ. ``peak_allocated`` is the highest peak."""
    step_peaks_by_device: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Each step's peak on each GPU, if the step used several GPUs."""
    named_device: str | None = None
    """The device that the test's marker named; ``None`` if the test was measured on the session's device."""

    def __post_init__(self) -> None:
        # If a count is missing in ``by_operator``, its operators are unknown. The store also leaves out a count of 0, although
        # it certainly has no operators. So add an empty tuple for a count of 0.
        no_operators: dict[str, tuple[Tally, ...]] = {
            name: () for name in MADE_OF_OPERATORS if self.metrics.get(name) == 0
        }
        object.__setattr__(self, "by_operator", {**self.by_operator, **no_operators})

    @property
    def has_lines(self) -> bool:
        """True if the line of at least one operator call is known."""
        return any(tally.place != NOWHERE for tallies in self.by_operator.values() for tally in tallies)

    def has_same_figures(self, other: Baseline) -> bool:
        """Return whether this baseline and ``other`` have the same workload, bytes, counts and ratios."""
        return self.workload == other.workload and _repeating(self) == _repeating(other)

    def on(self, device: str, current: Mapping[str, Mapping[str, int]]) -> Baseline:
        """Return this baseline with the bytes of a single GPU.

        If the baseline lists its bytes by GPU, an unlisted GPU had 0 bytes. If the baseline lists no GPU, all its bytes are
        assigned to the GPU with the largest current peak, and every other GPU gets 0 bytes.

        Args:
            device: The GPU, such as ``cuda:1``.
            current: The metrics of the current measurement, by GPU.

        Example:
            The baseline has 4 GB on ``cuda:0`` only. Now ``cuda:0`` and ``cuda:1`` have 2 GB each. On ``cuda:1`` the baseline
            has 0 bytes, so the 2 GB there are growth.
        """
        if self.by_device:
            device_metrics = self.by_device.get(device, {})
        elif device == largest(current):
            return self
        else:
            device_metrics = {}
        names = {name for metrics in (self.by_device or current).values() for name in metrics}
        metrics = {
            name: device_metrics.get(name, 0) if name in names else value for name, value in self.metrics.items()
        }
        return replace(self, metrics=metrics, step_peaks=self.step_peaks_by_device.get(device, ()))

    def is_equivalent(self, other: Baseline) -> bool:
        """Return whether replacing ``other`` by this baseline would change nothing that a gate compares.

        An update does not write an equivalent baseline. A different environment detail matters only if one of the metrics
        depends on it. For example, counts depend on the torch release, and ``peak_allocated`` does not.
        """
        return (
            self.has_same_figures(other)
            and _decisive(self, self.metrics) == _decisive(other, self.metrics)
            # A composition and operators also change if only lines of code move. So they matter only if `other` has none.
            and (self.composition is None or other.composition is not None)
            and self.by_operator.keys() <= other.by_operator.keys()
            and (other.has_lines or not self.has_lines)
            and bool(other.step_peaks or not self.step_peaks)
            # A tolerance is a ratio of the peak without workspaces. Baselines from older versions lack the workspaces, so
            # adding them changes the tolerance.
            and (other.workspaces is not None or self.workspaces is None)
            and (other.unused_before is not None or self.unused_before is None)
            and self.gained_before == other.gained_before
            # Sessions on other devices find the test's baselines by the named device, so it must be up to date.
            and self.named_device == other.named_device
        )


@dataclass(frozen=True, slots=True)
class NoBaseline:
    """The result of a search in the store if a measurement has no baseline on the current device.

    ``other_devices`` names the devices on which the measurement has a baseline.
    """

    other_devices: tuple[str, ...] = ()


def baseline_of(
    measurement: Measurement,
    recorded: str,
    commit: str | None,
    reason: str | None = None,
    named_device: str | None = None,
) -> Baseline:
    """Return the baseline for an accepted measurement.

    Times, the throughput and ratios are rounded to four significant digits, and the times in ``runs`` to five.

    Args:
        measurement: The accepted measurement.
        recorded: The date: ``2026-11-02``.
        commit: The abbreviated commit hash; ``None`` without a git repository.
        reason: The reason for accepting the measurement.
        named_device: The device that the test's marker names.
    """
    metrics = {
        name: int(value) if METRICS[name].unit in WHOLE else rounded(value)
        for name, value in measurement.metrics.items()
        # A stored entry without the metric is read as `value_if_absent`, so this value need not be stored.
        if value != METRICS[name].value_if_absent
    }
    devices = measurement.by_device if len(measurement.by_device) > 1 else {}
    by_device = {
        device: {
            name: value
            for name, value in device_metrics.items()
            if METRICS[name].tolerance is not None and value != METRICS[name].value_if_absent
        }
        for device, device_metrics in devices.items()
    }
    explanation = measurement.explanation
    # The explanation comes from another run. It explains this measurement only if a measured step had the explained peak.
    recordable = {metrics.get("peak_allocated"), *measurement.step_peaks.repeated}
    kept_explanation = explanation.kept() if explanation is not None and explanation.peak.total in recordable else None
    entry = Baseline(
        measurement.workload,
        measurement.environment,
        metrics,
        recorded,
        commit,
        None if kept_explanation is None else _composition_to_keep(without_callers(kept_explanation.peak)),
        reason=reason,
        by_operator={
            name: reduced_tallies(tallies_without_callers(tallies))
            for name, tallies in measurement.by_operator.items()
            if name in metrics and total(tallies) == metrics[name]
        },
        by_device=by_device,
        other_phases={}
        if kept_explanation is None
        else {phase: without_callers(composition) for phase, composition in kept_explanation.other_phases.items()},
        workspaces=measurement.workspaces if "peak_reserved" in metrics else None,
        unused_before=measurement.unused_before if "peak_reserved" in metrics else None,
        gained_before=measurement.gained_before or None,
        step_peaks=_differing(measurement.step_peaks),
        step_peaks_by_device={
            device: peaks
            for device in devices
            if (peaks := _differing(measurement.step_peaks_by_device.get(device, StepPeaks())))
        },
        named_device=named_device,
    )
    run = None if measurement.times is None else run_of(measurement.times)
    if run is None:
        return entry
    # Keep five digits instead of four, because medians and ratios are computed from these times.
    seconds, cycles = (tuple(float(f"{value:.5g}") for value in values) for values in (run.seconds, run.cycles))
    return with_runs(Runs(seconds, cycles), entry)


def _composition_to_keep(peak: Composition) -> Composition:
    """Return the composition without notes, and with only the `outermost` modules in ``no_grad`` and ``no_backward``."""
    return replace(peak, notes=(), no_grad=outermost(peak.no_grad), no_backward=outermost(peak.no_backward))


def _differing(peaks: StepPeaks) -> tuple[int, ...]:
    return peaks.repeated if peaks.differ else ()


def with_runs(runs: Runs, entry: Baseline) -> Baseline:
    """Return ``entry`` with the times in ``runs``. The step time becomes their median, and the throughput follows from it.

    Args:
        runs: The times from the accepted runs.
        entry: The baseline from the latest run.
    """
    step_time = rounded(runs.median)
    times = {"step_time": step_time}
    if "throughput" in entry.metrics:
        times["throughput"] = rounded(entry.metrics["throughput"] * entry.metrics["step_time"] / step_time)
    return replace(entry, runs=runs, metrics={**entry.metrics, **times})


def _repeating(entry: Baseline) -> dict[str, dict[str, float]]:
    """Return the metrics that have equal values in every run of the same code, by GPU. The key ``""`` is the whole step."""
    tables: dict[str, Mapping[str, float]] = {"": entry.metrics, **entry.by_device}
    return {
        gpu: {name: value for name, value in metrics.items() if METRICS[name].repeats}
        for gpu, metrics in tables.items()
    }


def _decisive(entry: Baseline, metrics: Mapping[str, float]) -> dict[str, str | int]:
    """Return the environment details on which at least one of these metrics depends."""
    decisive = {detail for name in metrics for detail in METRICS[name].details}
    return {name: value for name, value in entry.environment.details.items() if name in decisive}
