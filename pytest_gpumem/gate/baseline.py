"""What a measurement is compared with: the baseline of a test in an environment, and the budget of a test."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from pytest_gpumem.metrics import METRICS, WHOLE
from pytest_gpumem.timing.comparison import Runs, run_of
from pytest_gpumem.values.operator_counts import MADE_OF_OPERATORS, NOWHERE, kept, total

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.measurement import Environment, Measurement, Workload
    from pytest_gpumem.units import Rate
    from pytest_gpumem.values.composition import Composition
    from pytest_gpumem.values.operator_counts import Tally


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Budget:
    """What a test may use at most, and how much it must get done. ``None`` is no limit.

    Bytes, ratios of growth and slowdown against its baseline, and work per second.
    """

    limits: Mapping[str, int] = field(default_factory=dict)
    """By metric, in bytes."""
    max_growth: float | None = None
    """How much `peak_allocated` may grow against the baseline (0.02 is 2 %); replaces the tolerance."""
    max_slowdown: float | None = None
    """How much longer a step may take than in the baseline (0.05 is 5 %); replaces the tolerance."""
    min_throughput: Rate | None = None
    device: str | None = None

    def or_else(self, fallback: Budget) -> Budget:
        """This budget, with what it leaves open taken from ``fallback``."""
        return Budget(
            {**fallback.limits, **self.limits},
            _first(self.max_growth, fallback.max_growth),
            _first(self.max_slowdown, fallback.max_slowdown),
            _first(self.min_throughput, fallback.min_throughput),
            _first(self.device, fallback.device),
        )


def _first(value: T | None, fallback: T | None) -> T | None:
    return fallback if value is None else value


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Which baseline: ``Key("tests/test_gpt.py", "TestTrain::test_step[fp32]", "train_step")``."""

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
    """The largest rows of what was live at the peak; ``None`` where that was not recorded."""
    runs: Runs | None = None
    """The step's times in the last runs that were accepted; ``None`` where there was none to go by."""
    reason: str | None = None
    """Why it was accepted, in one line; ``None`` where nobody said."""
    by_operator: Mapping[str, tuple[Tally, ...]] = field(default_factory=dict)
    """What its counts are made of, by metric; without those that an older version recorded."""

    def __post_init__(self) -> None:
        # A count of 0 is made of nothing, whoever recorded it.
        nothing: dict[str, tuple[Tally, ...]] = {name: () for name in MADE_OF_OPERATORS if self.metrics.get(name) == 0}
        object.__setattr__(self, "by_operator", {**self.by_operator, **nothing})

    @property
    def tells_lines(self) -> bool:
        """Whether any line is known of what its counts are made of."""
        return any(tally.place != NOWHERE for tallies in self.by_operator.values() for tally in tallies)

    def takes_the_same(self, other: Baseline) -> bool:
        """Whether both are of the same work with the same bytes and counts."""
        return self.workload == other.workload and _repeating(self.metrics) == _repeating(other.metrics)

    def says_the_same(self, other: Baseline) -> bool:
        """Whether replacing ``other`` by this one would change nothing that is compared: then the store is left alone.

        The same bytes with another driver or release of torch are no news; with other instructions, say, they are, since
        figures that depend on them are only doubted where they differ.
        """
        return (
            self.takes_the_same(other)
            and _decisive(self, self.metrics) == _decisive(other, self.metrics)
            # Lines move without any byte moving; a composition, or what counts are made of, is news only where there is none.
            and (self.composition is None or other.composition is not None)
            and self.by_operator.keys() <= other.by_operator.keys()
            and (other.tells_lines or not self.tells_lines)
        )


@dataclass(frozen=True, slots=True)
class NoBaseline:
    """There is no baseline for this environment; ``elsewhere`` are the devices for which there is one."""

    elsewhere: tuple[str, ...] = ()


def baseline_of(measurement: Measurement, recorded: str, commit: str | None, reason: str | None = None) -> Baseline:
    """The baseline that accepting a measurement makes. Times keep four digits, and five as one of the runs."""
    metrics = {
        name: int(value) if METRICS[name].unit in WHOLE else rounded(value)
        for name, value in measurement.metrics.items()
        # Nothing is written of what an entry that does not have it says as well.
        if value != METRICS[name].where_absent
    }
    explanation = measurement.explanation
    # One that was recorded in a run with another peak would not explain this one.
    explains = explanation is not None and explanation.peak.total == metrics["peak_allocated"]
    composition = replace(explanation.peak.kept(), notes=()) if explanation is not None and explains else None
    entry = Baseline(
        measurement.workload,
        measurement.environment,
        metrics,
        recorded,
        commit,
        composition,
        reason=reason,
        by_operator={
            name: kept(tallies)
            for name, tallies in measurement.by_operator.items()
            if name in metrics and total(tallies) == metrics[name]
        },
    )
    runs = _runs(measurement)
    return entry if runs is None else with_runs(runs, entry)


def _runs(measurement: Measurement) -> Runs | None:
    """This run as the first of those that are accepted, if it is a measure for later ones."""
    run = None if measurement.times is None else run_of(measurement.times)
    return None if run is None else Runs(tuple(map(_finer, run.seconds)), tuple(map(_finer, run.cycles)))


def with_runs(runs: Runs, entry: Baseline) -> Baseline:
    """``entry`` with ``runs``, of which it is the latest: its step time is their median, and its throughput that of it."""
    step_time = rounded(runs.median)
    times = {"step_time": step_time}
    if "throughput" in entry.metrics:
        times["throughput"] = rounded(entry.metrics["throughput"] * entry.metrics["step_time"] / step_time)
    return replace(entry, runs=runs, metrics={**entry.metrics, **times})


def rounded(time: float) -> float:
    """A time, or a throughput, to the four digits that are shown."""
    return float(f"{time:.4g}")


def _finer(value: float) -> float:
    """To five digits, since medians and ratios are made of it."""
    return float(f"{value:.5g}")


def _repeating(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are the same whenever the same is run."""
    return {name: n for name, n in metrics.items() if METRICS[name].repeats}


def _decisive(entry: Baseline, metrics: Mapping[str, float]) -> dict[str, str | int]:
    """The details of its environment that some of these metrics depends on."""
    decisive = {detail for name in metrics for detail in METRICS[name].details}
    return {name: value for name, value in entry.environment.details.items() if name in decisive}
