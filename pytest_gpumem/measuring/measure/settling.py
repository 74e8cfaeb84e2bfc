"""Choose among several runs of a step: leave out the warm-up, and find the run with the highest peak.

The first runs are a warm-up, because they build state, for example an optimizer's moments. The warm-up ends when two
consecutive runs have the same peaks. These two runs are the first equal pair, and metrics count from its first run.

Example:
    Seven runs of a training step with AdamW (``Linear(256, 1024)``, relu, ``Linear(1024, 256)``, batch 64) on a CPU. AdamW
    creates its 4.20 MB state at the end of run 1, so forward and backward have lower peaks in run 1::

        run               1       2       3 to 7
        peak              10.58   10.58   10.58 MB
        forward           2.69    6.90    6.90 MB
        backward          4.53    8.74    8.74 MB
        optimizer         10.58   10.58   10.58 MB

    Runs 1 and 2 have the same peak, but not the same peak in forward. Runs 2 and 3 are the first equal pair, so `PreparedStep`
    makes only 4 more runs after run 3. `figures_of_steps` is called with ``settled_at=1``, and ``left_out`` is 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import format_bytes
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.step_peaks import StepPeaks, spread
from pytest_gpumem.measuring.measure.counting import NO_COUNTS, CountResult
from pytest_gpumem.measuring.measure.reading import by_device, largest_of, notes_on_missing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpumem.facts.values.times import Times
    from pytest_gpumem.measuring.measure.reading import ByDevice, Figures


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """Memory figures for all measured runs on a single device."""

    runs: tuple[Figures, ...]
    """Figures for each run on the device, in order."""
    left_out: int = 0
    """The number of warm-up runs at the beginning, which build state."""
    growth: int = 0
    """The bytes kept by every further run."""

    @property
    def _counting(self) -> tuple[Figures, ...]:
        return self.runs[self.left_out :]

    @property
    def memory(self) -> Figures:
        """The run with the highest peak after the warm-up. If several runs have this peak, the last run counts."""
        return max(reversed(self._counting), key=lambda run: run.own_peak)

    @property
    def latest_keeping_run(self) -> Figures:
        """The last run that has the highest peak and also kept bytes; `memory` if no run has both."""
        peak = self.memory.own_peak
        return next((run for run in reversed(self._counting) if run.own_peak == peak and run.keeps_bytes), self.memory)

    @property
    def always_keeps(self) -> bool:
        """True if each run after the warm-up kept bytes."""
        return all(run.keeps_bytes for run in self._counting)

    @property
    def step_peaks(self) -> StepPeaks:
        """Each run's peak."""
        return _step_peaks([[run] for run in self.runs], self.left_out)

    def metrics(self) -> dict[str, int]:
        """Return the step's memory metrics on this device, in bytes."""
        # If runs retain different amounts, use the smallest amount, because a larger one may only come from a larger batch.
        retained = [run.retained for run in self._counting]
        least_retained = {"retained": max(min(retained), self.growth)} if len({*retained}) > 1 else {}
        return {**self.memory.memory_metrics(), **least_retained, "growth": self.growth}


@dataclass(frozen=True, slots=True)
class StepFigures:
    """A step's figures: memory in all measured runs, counts, and times."""

    runs: tuple[ByDevice, ...]
    """Figures for each measured run, in order."""
    left_out: int
    """The number of warm-up runs at the beginning, which build state."""
    is_settled: bool
    """True if there is an equal pair, and all runs after it have the same peak as the pair."""
    growth: Mapping[str, int] = field(default_factory=dict)
    """The bytes kept by every further run, by device name."""
    times: Times | None = None
    counted: CountResult = NO_COUNTS

    @property
    def devices(self) -> dict[str, DeviceFigures]:
        """The memory figures on each device, by device name."""
        return {
            name: DeviceFigures(steps, max(0, self.left_out - len(self.runs) + len(steps)), self.growth.get(name, 0))
            for name, steps in by_device(self.runs).items()
        }

    @property
    def memory(self) -> Figures:
        """The run with the highest peak on the first device."""
        return next(iter(self.devices.values())).memory

    @property
    def step_peaks(self) -> StepPeaks:
        """Each run's peak, on the device with the largest peak in this run."""
        return _step_peaks([[*run.values()] for run in self.runs], self.left_out)

    @property
    def allocates_equally(self) -> bool:
        """True if all runs after the warm-up allocated equally many bytes in total."""
        return all(_turnovers(run) == _turnovers(self.runs[-1]) for run in self.runs[self.left_out :])

    def memory_metrics(self) -> dict[str, int]:
        """Return the step's memory metrics in bytes. Each metric comes from the device with the largest value."""
        return largest_of(figures.metrics() for figures in self.devices.values())

    def notes(self) -> tuple[str, ...]:
        """Return notes on the figures, as clauses."""
        own = filter(None, (self._differing_note(), self._left_out_note()))
        missing = notes_on_missing(figures.memory for figures in self.devices.values())
        return (*own, *missing, *self.counted.notes())

    def _differing_note(self) -> str | None:
        """Return a clause if peaks differ from run to run, or if no two consecutive runs were equal, and otherwise ``None``."""
        repeated = {name: figures.step_peaks.repeated for name, figures in self.devices.items()}
        moved = next((name for name, peaks in repeated.items() if len({*peaks}) > 1), None)
        if moved is None:
            unsettled = (
                f"no 2 consecutive steps of {len(self.runs)} were equal: steps compiled again or gradients overflowed"
            )
            return None if self.is_settled else unsettled
        peaks, device_clause = repeated[moved], "" if moved == next(iter(repeated)) else f" on {moved}"
        first, last = map(format_bytes, (peaks[0], peaks[-1]))
        if self.growth.get(moved) and peaks[-1] > peaks[0]:
            return (
                f"peaks{device_clause} grew from step to step: {first} in the first of {len(peaks)}, {last} in the last"
            )
        return f"peaks{device_clause} differ from step to step: {spread(peaks)}"

    def _left_out_note(self) -> str | None:
        """Return a clause if a warm-up run has a higher peak than all runs after the warm-up."""
        first = [_highest_peak(run.values()) for run in self.runs[: self.left_out]]
        counting = _highest_peak(figures.memory for figures in self.devices.values())
        tolerance = METRICS["peak_allocated"].tolerance
        if not first or tolerance is None or max(first) - counting <= tolerance.allowed(max(first)):
            return None
        needed = f"step {first.index(max(first)) + 1} of {len(self.runs)} needed {format_bytes(max(first))}"
        return f"{needed}: warm-up steps count for budgets, but not for the baseline"


def _highest_peak(figures: Iterable[Figures]) -> int:
    return max(device_figures.own_peak for device_figures in figures)


def _step_peaks(steps: Sequence[Sequence[Figures]], left_out: int) -> StepPeaks:
    """Return the peak of each step: the largest peak on any device."""
    reserved = [[peak for figures in step if (peak := figures.peak_reserved) is not None] for step in steps]
    return StepPeaks(
        tuple(max(figures.own_peak for figures in step) for step in steps),
        tuple(map(max, reserved)) if all(reserved) else (),
        left_out,
    )


def figures_of_steps(seen: Sequence[ByDevice], settled_at: int | None) -> StepFigures:
    """Return the memory figures for consecutive runs.

    Args:
        seen: Figures for each run, in order.
        settled_at: The index of the first equal pair's first run, counted from 0; ``None`` if there is no equal pair. If all
            runs from this index have the same peak, the earlier runs are the warm-up. Otherwise only run 0 is the warm-up.
    """
    # If peaks differ after the pair, its runs were equal by chance, so the pair says nothing about the warm-up.
    settled = (
        settled_at is not None
        and len({tuple(figures.own_peak for figures in run.values()) for run in seen[settled_at:]}) == 1
    )
    left_out = settled_at if settled and settled_at is not None else 1
    return StepFigures(tuple(seen), left_out, settled)


def have_same_peaks(first: ByDevice, second: ByDevice) -> bool:
    """Return whether two runs are equal in all metrics that must settle, such as `peak_allocated` and `peak_forward`."""
    return _settling(first) == _settling(second)


def _settling(figures: ByDevice) -> list[dict[str, int]]:
    """Return the metrics that must be equal in two runs of a settled step, on each device.

    They include the peak of every phase, even if `METRICS` does not name the phase.
    """
    metrics_by_device = [device_figures.memory_metrics() for device_figures in figures.values()]
    return [
        {name: metrics[name] for name in metrics if name not in METRICS or METRICS[name].settles}
        for metrics in metrics_by_device
    ]


def do_equal_work(first: ByDevice, second: ByDevice) -> bool:
    """Return whether two runs have equal peaks and allocated equally many bytes in total."""
    return have_same_peaks(first, second) and _turnovers(first) == _turnovers(second)


def _turnovers(figures: ByDevice) -> list[int]:
    return [device_figures.turnover for device_figures in figures.values()]
