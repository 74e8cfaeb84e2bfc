"""Which of several steps in a row count, and the highest of them: those that come before steps repeat build state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pytest_gpumem.measure.counting import NOTHING_COUNTED, Counted
from pytest_gpumem.measure.reading import largest_of, steps_elsewhere
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.units import format_bytes
from pytest_gpumem.values.step_peaks import StepPeaks, spread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpumem.measure.reading import Figures
    from pytest_gpumem.values.times import Times


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of a step: the memory of the steps that were looked at, its counts, and its times."""

    memory: Figures
    """Of the step with the highest peak, on each device, after those that build state; of equal ones the last."""
    settled: bool
    seen: tuple[Figures, ...] = ()
    """All steps that were looked at, in order."""
    left_out: int = 0
    """How many of the first ones build state."""
    times: Times | None = None
    counted: Counted = NOTHING_COUNTED
    growth: int = 0
    """Bytes that every further step keeps."""
    growth_elsewhere: Mapping[str, int] = field(default_factory=dict)
    """The same on the device's `others`, by their names."""

    @property
    def step_peaks(self) -> StepPeaks:
        """The peaks of the steps: of each that on the device where it is the largest."""
        return _step_peaks([[*one.by_device("").values()] for one in self.seen], self.left_out)

    def step_peaks_by_device(self, here: str) -> dict[str, StepPeaks]:
        """Return the peaks of the steps on each device; ``here`` is the name of the first."""
        return {
            name: _step_peaks([[one] for one in steps], max(0, self.left_out - len(self.seen) + len(steps)))
            for name, steps in {here: self.seen, **steps_elsewhere(self.seen)}.items()
        }

    def memory_on(self, other: str | None, *, keeps: bool) -> Figures:
        """Return `memory` on the device's ``other`` of that name, by default on the device itself.

        If it ``keeps`` bytes, that is the latest step of those with this peak that did keep some, if there is one.
        """
        counting = self.seen[self.left_out :]
        memory, steps = self.memory, counting
        if other is not None:
            memory, steps = self.memory.elsewhere[other], tuple(steps_elsewhere(counting)[other])
        keeping = (
            one for one in reversed(steps) if one.own_peak == memory.own_peak and one.live_after > one.live_before
        )
        return next(keeping, memory) if keeps else memory

    @property
    def allocate_alike(self) -> bool:
        """Whether all steps after those that build state allocated as many bytes."""
        return all(_turnovers(one) == _turnovers(self.seen[-1]) for one in self.seen[self.left_out :])

    def memory_metrics(self) -> dict[str, int]:
        """Return the memory metrics of the step, in bytes: of each the largest among devices."""
        return largest_of(self.metrics_by_device("").values())

    def metrics_by_device(self, here: str) -> dict[str, dict[str, int]]:
        """Return the memory metrics of the step on each device, in bytes; ``here`` is the name of the first."""
        growth = {here: self.growth, **self.growth_elsewhere}
        counting = self.seen[self.left_out :]
        steps = {here: counting, **(steps_elsewhere(counting) if counting else {})}
        return {
            name: {**one.memory_metrics(), **_left_by(steps[name], growth.get(name, 0)), "growth": growth.get(name, 0)}
            for name, one in self.memory.by_device(here).items()
        }

    def notes(self) -> tuple[str, ...]:
        """Return notes on the figures, as clauses."""
        return (*filter(None, (self._differing_note(), self._left_out_note())), *self.counted.notes())

    def _differing_note(self) -> str | None:
        """Return a clause that says how the steps' peaks differ, if they do."""
        everywhere = {name: peaks.repeated for name, peaks in self.step_peaks_by_device("").items()}
        moved = next((name for name, peaks in everywhere.items() if len({*peaks}) > 1), None)
        if moved is None:
            alike = f"none of {len(self.seen)} steps was like the one before: recompiled, or overflowed"
            return None if self.settled else alike
        peaks, on = everywhere[moved], f" on {moved}" if moved else ""
        first, last = map(format_bytes, (peaks[0], peaks[-1]))
        if {"": self.growth, **self.growth_elsewhere}.get(moved) and peaks[-1] > peaks[0]:
            return f"peaks{on} grew from step to step: {first} in the first of {len(peaks)}, {last} in the last"
        return f"peaks{on} differ from step to step: {spread(peaks)}"

    def _left_out_note(self) -> str | None:
        """Return a clause that names a step which builds state and has a higher peak than those that come after it."""
        first = [one.peak_allocated for one in self.seen[: self.left_out]]
        tolerance = METRICS["peak_allocated"].tolerance
        if not first or tolerance is None or max(first) - self.memory.peak_allocated <= tolerance.allowed(max(first)):
            return None
        needed = f"step {first.index(max(first)) + 1} of {len(self.seen)} needed {format_bytes(max(first))}"
        return f"{needed}: one that comes before steps repeat counts for budgets, and not for the baseline"


def _left_by(steps: Sequence[Figures], growth: int) -> dict[str, int]:
    """Return what each of some steps retains; of steps that differ the least, as the next batch may be larger than this one."""
    retained = [one.retained for one in steps]
    return {"retained": max(min(retained), growth)} if len({*retained}) > 1 else {}


def _step_peaks(steps: Sequence[Sequence[Figures]], left_out: int) -> StepPeaks:
    """Return the peaks of steps, each given by its figures on some devices, of which the largest counts."""
    reserved = [[peak for one in step if (peak := one.peak_reserved) is not None] for step in steps]
    return StepPeaks(
        tuple(max(one.own_peak for one in step) for step in steps),
        tuple(map(max, reserved)) if all(reserved) else (),
        left_out,
    )


def figures_of_steps(seen: Sequence[Figures], settled_at: int | None) -> StepFigures:
    """Return the memory of some steps in a row.

    Args:
        seen: Their figures, in order.
        settled_at: The place of the first of two steps in a row that were alike. Those before it build state, if all after it
            have the same peak; else the first step does.
    """
    # Two that are alike by chance, among others that differ, tell nothing of those before them.
    settled = settled_at is not None and len({_own_peaks(one) for one in seen[settled_at:]}) == 1
    left_out = settled_at if settled and settled_at is not None else 1
    counting = seen[left_out:]
    elsewhere = {name: _highest(steps) for name, steps in steps_elsewhere(counting).items()}
    return StepFigures(replace(_highest(counting), elsewhere=elsewhere), settled, tuple(seen), left_out)


def _own_peaks(figures: Figures) -> tuple[int, ...]:
    return tuple(one.own_peak for one in figures.by_device("").values())


def _highest(steps: Sequence[Figures]) -> Figures:
    return max(reversed(steps), key=lambda one: one.own_peak)


def have_same_peaks(first: Figures, second: Figures) -> bool:
    return _settling(first) == _settling(second)


def _settling(figures: Figures) -> list[dict[str, int]]:
    """Return the metrics that are alike in two steps that repeat; a phase need not have a metric of its own."""
    everywhere = [one.memory_metrics() for one in figures.by_device("").values()]
    return [{name: here[name] for name in here if name not in METRICS or METRICS[name].settles} for here in everywhere]


def do_the_same(first: Figures, second: Figures) -> bool:
    """Return whether two steps had the same peaks and allocated as many bytes in all, so that one is as good to count."""
    return have_same_peaks(first, second) and _turnovers(first) == _turnovers(second)


def _turnovers(figures: Figures) -> list[int]:
    return [one.turnover for one in figures.by_device("").values()]
