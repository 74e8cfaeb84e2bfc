"""The baseline of a test in an environment, and the budget of a test, with which a measurement is compared."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from pytest_gpumem.measurement import largest
from pytest_gpumem.metrics import METRICS, WHOLE
from pytest_gpumem.timing.comparison import Runs, run_of
from pytest_gpumem.values.composition import without_callers
from pytest_gpumem.values.operator_counts import MADE_OF_OPERATORS, NOWHERE, kept, tallies_without_callers, total
from pytest_gpumem.values.step_peaks import StepPeaks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.measurement import Environment, Measurement, Workload
    from pytest_gpumem.units import ThroughputLimit
    from pytest_gpumem.values.composition import Composition
    from pytest_gpumem.values.operator_counts import Tally


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of a test: bytes, throughput, and the peak's increase and slowdown over its baseline; ``None`` is no limit."""

    limits: Mapping[str, int] = field(default_factory=dict)
    """Limits in bytes, by metric."""
    tolerance: float | None = None
    """The increase of `peak_allocated` over the baseline that is allowed (0.02 is 2 %); replaces the tolerance."""
    max_slowdown: float | None = None
    """The slowdown of a step against the baseline that is allowed (0.05 is 5 %); replaces the tolerance."""
    min_throughput: ThroughputLimit | None = None
    device: str | None = None

    def or_else(self, fallback: Budget) -> Budget:
        """Return this budget with missing limits taken from ``fallback``."""
        own = {one.name: value for one in fields(self) if (value := getattr(self, one.name)) is not None}
        return replace(fallback, **{**own, "limits": {**fallback.limits, **self.limits}})


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """The key of a baseline: ``Key("tests/test_gpt.py", "TestTrain::test_step[fp32]", "train_step")``."""

    file: str
    test: str
    name: str

    def __str__(self) -> str:
        return f"{self.file}::{self.test} ({self.name})"


@dataclass(frozen=True, slots=True)
class Baseline:
    """A measurement that was accepted. ``recorded`` is a date (``2026-11-02``), ``commit`` an abbreviated hash."""

    workload: Workload
    environment: Environment
    metrics: Mapping[str, float]
    recorded: str
    commit: str | None = None
    composition: Composition | None = None
    """The largest rows of what was live at the peak; ``None`` where that was not recorded. Of steps that differ it may be that
    of another step than the one with the highest peak."""
    runs: Runs | None = None
    """The step's times in the last accepted runs; ``None`` where none was valid."""
    reason: str | None = None
    """The reason why it was accepted, in one line; ``None`` where no reason was given."""
    by_operator: Mapping[str, tuple[Tally, ...]] = field(default_factory=dict)
    """The operators of its counts, by metric; baselines of older versions have none."""
    by_device: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The judged metrics in bytes of each GPU, where it used several; baselines of older versions have none."""
    other_phases: Mapping[str, Composition] = field(default_factory=dict)
    """Compositions of the other phases to which the step's peak may move, as `Explanation.kept` leaves them."""
    workspaces: int | None = None
    """`Measurement.workspaces` in bytes; ``None`` where nothing was reserved, and in baselines of older versions."""
    unused_before: int | None = None
    """`Measurement.unused_before` in bytes; ``None`` as `workspaces`."""
    step_peaks: tuple[int, ...] = ()
    """The peaks of the steps in order, in bytes, where they differ; ``peak_allocated`` is the highest of them."""
    step_peaks_by_device: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The same of each GPU, where it used several."""
    named_device: str | None = None
    """The device that the test's marker named; ``None`` where it was measured on that of the session."""

    def __post_init__(self) -> None:
        # A count of 0 is made of nothing, whoever recorded it.
        nothing: dict[str, tuple[Tally, ...]] = {name: () for name in MADE_OF_OPERATORS if self.metrics.get(name) == 0}
        object.__setattr__(self, "by_operator", {**self.by_operator, **nothing})

    @property
    def tells_lines(self) -> bool:
        """True if the line of any of its operators is known."""
        return any(tally.place != NOWHERE for tallies in self.by_operator.values() for tally in tallies)

    def takes_the_same(self, other: Baseline) -> bool:
        """Return whether both are of the same workload with the same bytes and counts."""
        return self.workload == other.workload and _repeating(self) == _repeating(other)

    def on(self, device: str, among: Mapping[str, Mapping[str, int]]) -> Baseline:
        """Return this baseline with the bytes of one GPU ``among`` those of a measurement.

        One that has no such bytes held none then. A baseline that is not of several GPUs is that of the largest now.
        """
        if self.by_device:
            here = self.by_device.get(device, {})
        elif device == largest(among):
            return self
        else:
            here = {}
        names = {name for one in (self.by_device or among).values() for name in one}
        metrics = {name: here.get(name, 0) if name in names else value for name, value in self.metrics.items()}
        return replace(self, metrics=metrics, step_peaks=self.step_peaks_by_device.get(device, ()))

    def says_the_same(self, other: Baseline) -> bool:
        """Return whether replacing ``other`` by this one would change nothing that is compared, so that nothing is written.

        Another driver or release of torch with the same bytes changes nothing; other details of the environment may, since a
        figure that depends on them is uncertain only where they differ.
        """
        return (
            self.takes_the_same(other)
            and _decisive(self, self.metrics) == _decisive(other, self.metrics)
            # Lines move without a change of bytes: compositions and operators of counts matter only where the other has none.
            and (self.composition is None or other.composition is not None)
            and self.by_operator.keys() <= other.by_operator.keys()
            and (other.tells_lines or not self.tells_lines)
            and bool(other.step_peaks or not self.step_peaks)
            # Tolerances are of what exceeds them; entries of older versions lack them.
            and (other.workspaces is not None or self.workspaces is None)
            and (other.unused_before is not None or self.unused_before is None)
            # Sessions on other devices look for the test by it.
            and self.named_device == other.named_device
        )


@dataclass(frozen=True, slots=True)
class NoBaseline:
    """There is no baseline for this environment; ``elsewhere`` are the devices for which there is one."""

    elsewhere: tuple[str, ...] = ()


def baseline_of(
    measurement: Measurement,
    recorded: str,
    commit: str | None,
    reason: str | None = None,
    named_device: str | None = None,
) -> Baseline:
    """Return the baseline of an accepted measurement. Times keep four digits, and five as one of the runs."""
    metrics = {
        name: int(value) if METRICS[name].unit in WHOLE else rounded(value)
        for name, value in measurement.metrics.items()
        # An entry that lacks the metric means this value.
        if value != METRICS[name].where_absent
    }
    several = measurement.by_device if len(measurement.by_device) > 1 else {}
    by_device = {
        device: {
            name: value
            for name, value in here.items()
            if METRICS[name].tolerance is not None and value != METRICS[name].where_absent
        }
        for device, here in several.items()
    }
    explanation = measurement.explanation
    # One that was recorded in a run with another peak would not explain this one, unless it is that of another of its steps.
    recordable = {metrics.get("peak_allocated"), *measurement.step_peaks.repeated}
    explained = explanation.kept() if explanation is not None and explanation.peak.total in recordable else None
    entry = Baseline(
        measurement.workload,
        measurement.environment,
        metrics,
        recorded,
        commit,
        None if explained is None else replace(without_callers(explained.peak), notes=()),
        reason=reason,
        by_operator={
            name: kept(tallies_without_callers(tallies))
            for name, tallies in measurement.by_operator.items()
            if name in metrics and total(tallies) == metrics[name]
        },
        by_device=by_device,
        other_phases={}
        if explained is None
        else {phase: without_callers(one) for phase, one in explained.other_phases.items()},
        workspaces=measurement.workspaces if "peak_reserved" in metrics else None,
        unused_before=measurement.unused_before if "peak_reserved" in metrics else None,
        step_peaks=_differing(measurement.step_peaks),
        step_peaks_by_device={
            device: peaks
            for device in several
            if (peaks := _differing(measurement.step_peaks_by_device.get(device, StepPeaks())))
        },
        named_device=named_device,
    )
    run = None if measurement.times is None else run_of(measurement.times)
    if run is None:
        return entry
    # Five digits, since medians and ratios are made of them.
    seconds, cycles = (tuple(float(f"{value:.5g}") for value in values) for values in (run.seconds, run.cycles))
    return with_runs(Runs(seconds, cycles), entry)


def _differing(peaks: StepPeaks) -> tuple[int, ...]:
    return peaks.repeated if peaks.differ else ()


def with_runs(runs: Runs, entry: Baseline) -> Baseline:
    """Return ``entry``, the latest of ``runs``, with them: its step time is their median, its throughput is of that."""
    step_time = rounded(runs.median)
    times = {"step_time": step_time}
    if "throughput" in entry.metrics:
        times["throughput"] = rounded(entry.metrics["throughput"] * entry.metrics["step_time"] / step_time)
    return replace(entry, runs=runs, metrics={**entry.metrics, **times})


def rounded(time: float) -> float:
    """Return a time or a throughput with the four digits that are shown."""
    return float(f"{time:.4g}")


def _repeating(entry: Baseline) -> dict[str, dict[str, float]]:
    """Return the metrics that are the same in every run, by GPU; those of the whole by an empty name."""
    tables: dict[str, Mapping[str, float]] = {"": entry.metrics, **entry.by_device}
    return {gpu: {name: n for name, n in here.items() if METRICS[name].repeats} for gpu, here in tables.items()}


def _decisive(entry: Baseline, metrics: Mapping[str, float]) -> dict[str, str | int]:
    """Return the details of its environment that any of these metrics depends on."""
    decisive = {detail for name in metrics for detail in METRICS[name].details}
    return {name: value for name, value in entry.environment.details.items() if name in decisive}
