"""Runs a step until it repeats, then measures it: memory first, then counts, then time."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.devices.contract import highest
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.steps.counting import NOTHING_COUNTED, Counted, count_step
from pytest_gpumem.steps.readings import SETTLING_STEPS, WINDOW, Figures, growth_per_step
from pytest_gpumem.timing import bounds
from pytest_gpumem.timing.sampling import sample_step, time_phases
from pytest_gpumem.torch_support.garbage_collector import collect_everything, cyclic_collector_off
from pytest_gpumem.values.interference import Slowed
from pytest_gpumem.values.times import Sample, Times

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from pytest_gpumem.devices.contract import Device, Peak
    from pytest_gpumem.timing.sampling import TimeBudget

MOST_WARM_UPS = 6
SECONDS_BETWEEN_SAMPLES = 1.0
ROUNDS_TO_DECIDE = 3
"""A sample that a test may fail by has so many rounds, however long a step takes."""
MOST_RESTLESS_WARM_UPS = 16
"""For steps that may compile anew, or overflow, before they repeat."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A named part of a step. Phases run in order; the peak is taken at each border. Those of one name are one phase."""

    name: str
    run: Callable[[], object]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What measuring a step gave: the memory of one step in the state that it repeats in, what it does, and its times."""

    memory: Figures
    settled: bool
    warm_up_peaks: tuple[int, ...]
    times: Times | None
    counted: Counted = NOTHING_COUNTED
    growth: int = 0
    """Bytes that every further step keeps."""

    @property
    def lowest_peak(self) -> int | None:
        """The smallest peak of the later half of the steps, in bytes, where they did not settle.

        The earlier ones may lack the optimizer's state.
        """
        if self.settled:
            return None
        later = self.warm_up_peaks[len(self.warm_up_peaks) // 2 :]
        return min(*later, self.memory.peak_allocated)

    def memory_metrics(self) -> dict[str, int]:
        """The memory metrics of the step, in bytes."""
        return {**self.memory.memory_metrics(), "growth": self.growth}

    def notes(self) -> tuple[str, ...]:
        """What a reader has to know of the figures: a clause for each thing."""
        unsettled = () if self.settled else (self.unsettled_note(),)
        return (*unsettled, *(() if self.counted.trouble is None else (self.counted.trouble,)))

    def unsettled_note(self) -> str:
        """A clause that says how the warm-up steps' peaks moved."""
        first, last = self.warm_up_peaks[0], self.warm_up_peaks[-1]
        steps = len(self.warm_up_peaks)
        if self.growth and last > first:
            return f"peaks grew from step to step: {first} bytes in the first of {steps}, {last} in the last"
        if first == last:
            return f"none of {steps} warm-up steps was like the one before: recompiled, or overflowed"
        return f"peaks of {steps} warm-up steps moved from {first} to {last} bytes"


def measure_step(
    phases: Sequence[Phase],
    device: Device,
    *,
    own: Callable[[], Iterable[torch.UntypedStorage]],
    foreign: int,
    time_budget: TimeBudget | None,
    state: Callable[[], object] | None = None,
    compiled: bool = False,
) -> StepFigures:
    """Measure the step that ``phases`` make.

    Warms up until two consecutive steps give the same peaks (at least 2 steps, at most `MOST_WARM_UPS`), so that lazy
    optimizer state and autotuning are behind, then measures one more. ``foreign`` bytes are live that are not the step's own;
    ``own`` gives the storages that are its own at any moment. A step that changes ``state()`` (graphs that were compiled,
    the gradient scale) is not like the next one, and up to `MOST_RESTLESS_WARM_UPS` are run until it stays. Without an
    ``time_budget`` no time is taken. Of a step that was ``compiled`` no operators are counted.
    """
    one_step = functools.partial(_one_step, phases, device, foreign)
    since = device.known()
    device.quiesce()
    with cyclic_collector_off():
        seen = [one_step()]
        settled = False
        most = MOST_WARM_UPS if state is None else MOST_RESTLESS_WARM_UPS
        while not settled and len(seen) < most:
            before = state() if state is not None else None
            seen.append(one_step())
            moved = state is not None and state() != before
            settled = _same_peaks(seen[-2], seen[-1]) and not moved
        memory = one_step()
        keeps = any(figures.live_after > figures.live_before for figures in (seen[-1], memory))
        growth = _growth(one_step, device) if keeps else 0
        times = None
        # Before any time is taken: how many steps that takes is chance, and what a step does may depend on its weights.
        with device.peak_ignored():
            counted = count_step(_whole(phases), device, compiled=compiled)
        if time_budget is not None:
            try:
                with device.unrecorded():
                    times = _times(phases, device, time_budget)
                # A step that is seen replaces what the unseen ones left behind (gradients, say); what it did not is gone.
                one_step()
            finally:
                # Also when a step raised: the test may go on, and measure another.
                device.reconcile(since, own())
    peaks = tuple(figures.peak_allocated for figures in seen)
    return StepFigures(memory, settled, peaks, times, counted, growth)


def _growth(one_step: Callable[[Callable[[Device, int], int]], Figures], device: Device) -> int:
    """Run more steps, which tell a leak from a cache that fills, and return the bytes that each of them keeps.

    Garbage among all objects is looked for once, at the end: it can only have become more until then, so that what does not
    grow with it does not grow without it. Only where there is some is it taken away after each step.
    """
    growth = _growth_of([one_step(_live_when_settled) for _ in range(SETTLING_STEPS + WINDOW)])
    if not growth:
        return 0
    live = device.live()
    if live_at_rest(device, 0) == live:
        return growth
    return _growth_of([one_step(live_at_rest) for _ in range(SETTLING_STEPS + WINDOW)])


def _growth_of(steps: Sequence[Figures]) -> int:
    window = steps[SETTLING_STEPS:]
    return growth_per_step([window[0].live_before, *(figures.live_after for figures in window)])


def sample_again(
    phases: Sequence[Phase],
    device: Device,
    own: Callable[[], Iterable[torch.UntypedStorage]],
    seconds: float,
) -> Sample:
    """Another sample of a step that has been measured; a step that is seen ends it, as in `measure_step`.

    Taken after a pause of `SECONDS_BETWEEN_SAMPLES`, so that one burst of somebody else's work is not in both.
    """
    time.sleep(SECONDS_BETWEEN_SAMPLES)
    # What it holds may be replaced where nobody sees it: that is believed only as far as it is held in the end.
    held = {storage.data_ptr() for storage in own()}
    since = frozenset(block for block in device.known() if block[0] not in held)
    device.quiesce()
    with cyclic_collector_off():
        try:
            with device.unrecorded(), device.exclusive() as crowded:
                # Settling has emptied the caches, and of few rounds none may be one that fills them again.
                _whole(phases)()
                sample = sample_step(_whole(phases), device, seconds, ROUNDS_TO_DECIDE)
            _one_step(phases, device, 0)
        finally:
            device.reconcile(since, own())
    return _unless(crowded, sample, device)


def _times(phases: Sequence[Phase], device: Device, time_budget: TimeBudget) -> Times:
    """The first sample of a step's time and the times of its phases, both taken alone."""
    with device.exclusive() as crowded:
        sample = sample_step(_whole(phases), device, time_budget.share)
        time_budget.spend(sample.spent)
        laps = time_phases([(phase.name, phase.run) for phase in phases], device, sample.steps, time_budget)
    return Times((_unless(crowded, sample, device),), laps)


def _unless(crowded: str | None, sample: Sample, device: Device) -> Sample:
    if crowded is None:
        return sample
    slowed = sample.slowed or Slowed()
    shared = max(slowed.shared, bounds.crowded(device.conditions()))
    return replace(sample, invalid=crowded, slowed=replace(slowed, shared=shared))


def _whole(phases: Sequence[Phase]) -> Callable[[], None]:
    """The step that the phases make."""

    def step() -> None:
        for phase in phases:
            phase.run()

    return step


def _live_when_settled(device: Device, _expected: int) -> int:
    """Bytes that are live when garbage among young objects has been collected."""
    device.quiesce()
    return device.live()


def live_at_rest(device: Device, expected: int) -> int:
    """Bytes that are live when garbage has been collected: among all objects where they are not as many as ``expected``."""
    live = _live_when_settled(device, expected)
    if live != expected:
        collect_everything()
        live = device.live()
    return live


def released_workspaces(device: Device) -> int:
    """Have the backend's libraries drop their workspaces, and return how many bytes these were."""
    live = device.live()
    device.release_workspaces()
    return live - device.live()


def _one_step(
    phases: Sequence[Phase],
    device: Device,
    foreign: int,
    rest: Callable[[Device, int], int] = live_at_rest,
) -> Figures:
    started = device.live()
    reserved = device.reserved()
    turnover = device.turnover()
    whole = device.open_window()
    peaks: dict[str, Peak] = {}
    try:
        for phase in phases:
            window = device.open_window()
            try:
                phase.run()
            finally:
                peak = device.close_window(window)
                peaks[phase.name] = highest(peaks.get(phase.name, peak), peak)
    finally:
        peak = device.close_window(whole)
    turnover = device.turnover() - turnover
    workspaces = released_workspaces(device)
    live_run = device.live()
    live_after = rest(device, started)
    named = peaks if len(peaks) > 1 else {}
    return Figures(foreign, started, reserved, peak, live_run, live_after, named, turnover, workspaces=workspaces)


def _same_peaks(first: Figures, second: Figures) -> bool:
    return _settling(first) == _settling(second)


def _settling(figures: Figures) -> dict[str, int]:
    """What is alike in two steps that repeat; a phase need not have a metric of its own."""
    metrics = figures.memory_metrics()
    return {name: metrics[name] for name in metrics if name not in METRICS or METRICS[name].settles}
