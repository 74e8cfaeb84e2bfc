"""Select the steps in a row that count, and the highest of them: those that come before steps repeat build state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpumem.measure.counting import NOTHING_COUNTED, Counted
from pytest_gpumem.measure.reading import largest_of, notes_on_missing, on_each
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.units import format_bytes
from pytest_gpumem.values.step_peaks import StepPeaks, spread

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpumem.measure.reading import ByDevice, Figures
    from pytest_gpumem.values.times import Times


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """Memory of the steps that were looked at, on one device."""

    seen: tuple[Figures, ...]
    """The figures of the steps that used it, in order."""
    left_out: int = 0
    """The number of first ones, which build state."""
    growth: int = 0
    """Bytes that every further step keeps."""

    @property
    def _counting(self) -> tuple[Figures, ...]:
        return self.seen[self.left_out :]

    @property
    def memory(self) -> Figures:
        """The memory of the step with the highest peak, after those that build state; of equal ones the last."""
        return max(reversed(self._counting), key=lambda one: one.own_peak)

    @property
    def keeping(self) -> Figures:
        """The memory of the latest step with this peak that kept bytes; `memory` if there is none."""
        peak = self.memory.own_peak
        return next((one for one in reversed(self._counting) if one.own_peak == peak and one.keeps), self.memory)

    @property
    def always_keeps(self) -> bool:
        """True if each step kept bytes."""
        return all(step.keeps for step in self._counting)

    @property
    def step_peaks(self) -> StepPeaks:
        """The peaks of the steps."""
        return _step_peaks([[one] for one in self.seen], self.left_out)

    def metrics(self) -> dict[str, int]:
        """Return the memory metrics of the step on the device, in bytes."""
        # Of steps that differ the least is retained, as the next batch may be larger than this one.
        retained = [one.retained for one in self._counting]
        left = {"retained": max(min(retained), self.growth)} if len({*retained}) > 1 else {}
        return {**self.memory.memory_metrics(), **left, "growth": self.growth}


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of a step: the memory of the steps that were looked at, its counts, and its times."""

    seen: tuple[ByDevice, ...]
    """All steps that were looked at, in order."""
    left_out: int
    """The number of first ones, which build state."""
    settled: bool
    growth: Mapping[str, int] = field(default_factory=dict)
    """Bytes that every further step keeps, by device."""
    times: Times | None = None
    counted: Counted = NOTHING_COUNTED

    @property
    def devices(self) -> dict[str, DeviceFigures]:
        """The memory of the step on each device, by its name."""
        return {
            name: DeviceFigures(steps, max(0, self.left_out - len(self.seen) + len(steps)), self.growth.get(name, 0))
            for name, steps in on_each(self.seen).items()
        }

    @property
    def memory(self) -> Figures:
        """The memory of the step on the first device."""
        return next(iter(self.devices.values())).memory

    @property
    def step_peaks(self) -> StepPeaks:
        """The peaks of the steps: of each that on the device where it is the largest."""
        return _step_peaks([[*one.values()] for one in self.seen], self.left_out)

    @property
    def allocate_alike(self) -> bool:
        """True if all steps after those that build state allocated as many bytes."""
        return all(_turnovers(one) == _turnovers(self.seen[-1]) for one in self.seen[self.left_out :])

    def memory_metrics(self) -> dict[str, int]:
        """Return the memory metrics of the step, in bytes: of each the largest among devices."""
        return largest_of(one.metrics() for one in self.devices.values())

    def notes(self) -> tuple[str, ...]:
        """Return notes on the figures, as clauses."""
        own = filter(None, (self._differing_note(), self._left_out_note()))
        missing = notes_on_missing(one.memory for one in self.devices.values())
        return (*own, *missing, *self.counted.notes())

    def _differing_note(self) -> str | None:
        """Return a clause that says how the steps' peaks differ, if they do."""
        repeated = {name: one.step_peaks.repeated for name, one in self.devices.items()}
        moved = next((name for name, peaks in repeated.items() if len({*peaks}) > 1), None)
        if moved is None:
            alike = f"none of {len(self.seen)} steps was like the one before: recompiled, or overflowed"
            return None if self.settled else alike
        peaks, on = repeated[moved], "" if moved == next(iter(repeated)) else f" on {moved}"
        first, last = map(format_bytes, (peaks[0], peaks[-1]))
        if self.growth.get(moved) and peaks[-1] > peaks[0]:
            return f"peaks{on} grew from step to step: {first} in the first of {len(peaks)}, {last} in the last"
        return f"peaks{on} differ from step to step: {spread(peaks)}"

    def _left_out_note(self) -> str | None:
        """Return a clause that names a step which builds state and has a higher peak than those that come after it."""
        first = [_highest_peak(one.values()) for one in self.seen[: self.left_out]]
        counting = _highest_peak(one.memory for one in self.devices.values())
        tolerance = METRICS["peak_allocated"].tolerance
        if not first or tolerance is None or max(first) - counting <= tolerance.allowed(max(first)):
            return None
        needed = f"step {first.index(max(first)) + 1} of {len(self.seen)} needed {format_bytes(max(first))}"
        return f"{needed}: one that comes before steps repeat counts for budgets, and not for the baseline"


def _highest_peak(figures: Iterable[Figures]) -> int:
    return max(one.own_peak for one in figures)


def _step_peaks(steps: Sequence[Sequence[Figures]], left_out: int) -> StepPeaks:
    """Return the peaks of steps, each given by its figures on some devices, of which the largest counts."""
    reserved = [[peak for one in step if (peak := one.peak_reserved) is not None] for step in steps]
    return StepPeaks(
        tuple(max(one.own_peak for one in step) for step in steps),
        tuple(map(max, reserved)) if all(reserved) else (),
        left_out,
    )


def figures_of_steps(seen: Sequence[ByDevice], settled_at: int | None) -> StepFigures:
    """Return the memory of some steps in a row.

    Args:
        seen: Their figures, in order.
        settled_at: The number of the first of two steps in a row that were alike, from 0. Those before it build state, if all
            after it have the same peak; else the first step does.
    """
    # Two that are alike by chance, among others that differ, tell nothing of those before them.
    settled = (
        settled_at is not None
        and len({tuple(one.own_peak for one in step.values()) for step in seen[settled_at:]}) == 1
    )
    left_out = settled_at if settled and settled_at is not None else 1
    return StepFigures(tuple(seen), left_out, settled)


def have_same_peaks(first: ByDevice, second: ByDevice) -> bool:
    """Return whether two steps have the same values of all metrics that settle."""
    return _settling(first) == _settling(second)


def _settling(figures: ByDevice) -> list[dict[str, int]]:
    """Return the metrics that are alike in two steps that repeat; a phase need not have a metric of its own."""
    metrics = [one.memory_metrics() for one in figures.values()]
    return [{name: here[name] for name in here if name not in METRICS or METRICS[name].settles} for here in metrics]


def do_the_same(first: ByDevice, second: ByDevice) -> bool:
    """Return whether two steps had the same peaks and allocated as many bytes in all, so that one is as good to count."""
    return have_same_peaks(first, second) and _turnovers(first) == _turnovers(second)


def _turnovers(figures: ByDevice) -> list[int]:
    return [one.turnover for one in figures.values()]
