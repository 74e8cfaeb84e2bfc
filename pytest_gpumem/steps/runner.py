"""Measures a step that repeats: its memory once it has settled, its growth, its counts, and its time."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.devices.contract import highest
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.ranks.together import ALONE
from pytest_gpumem.steps.counting import NOTHING_COUNTED, Counted, count_step
from pytest_gpumem.timing.sampling import invalid_if, sample_step, time_step
from pytest_gpumem.torch_support.garbage_collector import collect_everything, cyclic_collector_off

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from pytest_gpumem.devices.contract import Device, Peak
    from pytest_gpumem.ranks.together import Alone
    from pytest_gpumem.timing.sampling import TimeBudget
    from pytest_gpumem.values.times import Sample, Times


@dataclass(frozen=True, slots=True)
class Figures:
    """Readings around a stretch of code. Live bytes and peaks count from the same zero.

    ``foreign`` bytes are live all the time and are not the stretch's own. ``live_before`` is read before it ran; ``live_run``
    right after it ran; ``live_after`` when garbage has been collected.
    """

    foreign: int
    live_before: int
    reserved_before: int | None
    peak: Peak
    live_run: int
    live_after: int
    phases: Mapping[str, Peak] = field(default_factory=dict)
    turnover: int = 0
    """Bytes that were allocated in all, whether freed or not."""
    held_change: int = 0
    """How much more the test's fixtures hold than before: kept on purpose, not retained."""
    workspaces: int = 0
    """Bytes that the backend's libraries still held for themselves when the stretch ended; the peak has them, too."""

    @property
    def own(self) -> int:
        """Bytes of the stretch's own when it began."""
        return self.live_before - self.foreign

    @property
    def peak_allocated(self) -> int:
        """Peak of the stretch's own bytes."""
        return self.peak.allocated - self.foreign

    def memory_metrics(self) -> dict[str, int]:
        """Return the memory metrics of the stretch, in bytes."""
        metrics = {"peak_allocated": self.peak_allocated}
        metrics |= {f"peak_{name}": peak.allocated - self.foreign for name, peak in self.phases.items()}
        if self.peak.reserved is not None and self.reserved_before is not None:
            # Room that was left in segments reserved before is not in the difference, but tensors were put there.
            reserved = self.peak.reserved - self.reserved_before + self.own
            metrics["peak_reserved"] = max(reserved, metrics["peak_allocated"])
        metrics["retained"] = max(0, self.live_after - self.live_before - self.held_change)
        metrics["cyclic_garbage"] = max(0, self.live_run - self.live_after)
        return metrics


SETTLING_STEPS = 6
"""Steps in which a cache, or a list that forgets its oldest entries, may fill before growth is read."""
WINDOW = 12
"""Steps over which growth is read: a multiple of 2 and 3, so that a step that keeps bytes every second or third time has
the same growth wherever the window begins. What is emptied at least once within them is no growth."""


def grows(live: Sequence[int]) -> bool:
    """Return whether live bytes grow over some steps: they never fall after their lowest and end higher.

    Or they go up and down, but both their lowest and their highest are higher in the later half than in the earlier one.
    """
    since_lowest = live[live.index(min(live)) :]
    if since_lowest[-1] > since_lowest[0] and list(since_lowest) == sorted(since_lowest):
        return True
    return _is_higher_later(live)


def growth_per_step(live: Sequence[int]) -> int:
    """Return the bytes that each step keeps, 0 where memory does not grow.

    It grows where both the lowest and the highest of ``live`` are higher in the later half than in the earlier one: what is
    emptied now and then may be at any point of its course.

    Args:
        live: The bytes that are live before the first step and after each one, garbage collected.
    """
    if len(live) < 2 or not _is_higher_later(live):
        return 0
    return max(0, round((live[-1] - live[0]) / (len(live) - 1)))


def _is_higher_later(live: Sequence[int]) -> bool:
    early, late = live[: len(live) // 2], live[len(live) // 2 :]
    return min(late) > min(early) and max(late) > max(early)


MOST_WARM_UPS = 6
SECONDS_BETWEEN_SAMPLES = 1.0
ROUNDS_TO_DECIDE = 3
"""A sample that a test may fail by has so many rounds, however long a step takes."""
MOST_UNSTABLE_WARM_UPS = 16
"""For steps that may compile anew, or overflow, before they repeat."""


class Phase(NamedTuple):
    """A named part of a step. Phases run in order; the peak is taken at each border. Those of one name are one phase."""

    name: str
    run: Callable[[], object]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of a step: the memory of one step in the state that it repeats in, its counts, and its times."""

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
        """Return the memory metrics of the step, in bytes."""
        return {**self.memory.memory_metrics(), "growth": self.growth}

    def notes(self) -> tuple[str, ...]:
        """Return notes on the figures, as clauses."""
        unsettled = () if self.settled else (self.unsettled_note(),)
        return (*unsettled, *(() if self.counted.trouble is None else (self.counted.trouble,)))

    def unsettled_note(self) -> str:
        """Return a clause that says how the warm-up steps' peaks moved."""
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
    together: Alone = ALONE,
) -> StepFigures:
    """Measure the step that ``phases`` make.

    Warms up until two consecutive steps give the same peaks (at least 2 steps, at most `MOST_WARM_UPS`), so that lazy
    optimizer state and autotuning are behind, then measures one more. ``foreign`` bytes are live that are not the step's own;
    ``own`` gives the storages that are its own at any moment. A step that changes ``state()`` (graphs that were compiled,
    the gradient scale) is not like the next one, and up to `MOST_UNSTABLE_WARM_UPS` are run until it stays. Without an
    ``time_budget`` no time is taken. Of a step that was ``compiled`` no operators are counted. On several ranks all
    run as many steps, as they decide ``together``.
    """
    run_step = functools.partial(run_one_step, phases, device, foreign, together=together)
    since = device.known()
    device.quiesce()
    with cyclic_collector_off():
        warm_ups = [run_step()]
        settled = False
        most = MOST_UNSTABLE_WARM_UPS if together.any(state is not None) else MOST_WARM_UPS
        while not settled and len(warm_ups) < most:
            before = state() if state is not None else None
            warm_ups.append(run_step())
            moved = state is not None and state() != before
            settled = together.all(have_same_peaks(warm_ups[-2], warm_ups[-1]) and not moved)
        memory = run_step()
        keeps = any(figures.live_after > figures.live_before for figures in (warm_ups[-1], memory))
        growth = _growth(run_step, device, together) if together.any(keeps) else 0
        times = None
        # Before any time is taken: how many steps that takes is chance, and what a step does may depend on its weights.
        with device.peak_ignored():
            counted = count_step(_whole(phases), device, compiled=compiled)
        if time_budget is not None:
            try:
                with device.unrecorded():
                    times = time_step(_whole(phases), phases, device, time_budget)
                # A recorded step replaces what the unrecorded ones left behind (gradients, say); the rest is gone.
                run_step()
            finally:
                # Also when a step raised: the test may go on, and measure another.
                device.reconcile(since, own())
    peaks = tuple(figures.peak_allocated for figures in warm_ups)
    return StepFigures(memory, settled, peaks, times, counted, growth)


def _growth(run_step: Callable[[Callable[[Device, int], int]], Figures], device: Device, together: Alone) -> int:
    """Run more steps to distinguish a leak from a cache that fills, and return the bytes that each of them keeps.

    Garbage among all objects is collected once, at the end: there can only have been less before, so that what does not grow
    with it does not grow without it. Only if there is some is it collected after each step.
    """
    growth = _growth_of([run_step(live_when_settled) for _ in range(SETTLING_STEPS + WINDOW)])
    live = device.live()
    if not together.any(growth > 0 and live_at_rest(device, 0) != live):
        return growth
    return _growth_of([run_step(live_at_rest) for _ in range(SETTLING_STEPS + WINDOW)])


def _growth_of(steps: Sequence[Figures]) -> int:
    window = steps[SETTLING_STEPS:]
    return growth_per_step([window[0].live_before, *(figures.live_after for figures in window)])


def sample_again(
    phases: Sequence[Phase],
    device: Device,
    own: Callable[[], Iterable[torch.UntypedStorage]],
    seconds: float,
) -> Sample:
    """Return another sample of a step that has been measured. A recorded step ends it, as in `measure_step`.

    Taken after a pause of `SECONDS_BETWEEN_SAMPLES`, so that one burst of another process is not in both.
    """
    time.sleep(SECONDS_BETWEEN_SAMPLES)
    # What the step holds may be replaced while nothing is recorded: of that only what it holds in the end is live.
    held = {storage.data_ptr() for storage in own()}
    since = frozenset(block for block in device.known() if block[0] not in held)
    device.quiesce()
    with cyclic_collector_off():
        try:
            with device.unrecorded(), device.exclusive() as refused:
                # Settling has emptied the caches, and of few rounds none may be one that fills them again.
                _whole(phases)()
                sample = sample_step(_whole(phases), device, seconds, ROUNDS_TO_DECIDE)
            run_one_step(phases, device, 0)
        finally:
            device.reconcile(since, own())
    return invalid_if(refused, sample, device)


def _whole(phases: Sequence[Phase]) -> Callable[[], None]:
    """Return the step that the phases make."""

    def step() -> None:
        for phase in phases:
            phase.run()

    return step


def live_when_settled(device: Device, _expected: int) -> int:
    """Return the bytes that are live when garbage among young objects has been collected."""
    device.quiesce()
    return device.live()


def live_at_rest(device: Device, expected: int) -> int:
    """Return the bytes that are live without garbage, which is collected among all objects unless they are as ``expected``."""
    live = live_when_settled(device, expected)
    if live != expected:
        collect_everything()
        live = device.live()
    return live


def released_workspaces(device: Device) -> int:
    """Release the workspaces of the backend's libraries, and return their bytes."""
    live = device.live()
    device.release_workspaces()
    return live - device.live()


def run_one_step(
    phases: Sequence[Phase],
    device: Device,
    foreign: int,
    rest: Callable[[Device, int], int] = live_at_rest,
    together: Alone = ALONE,
) -> Figures:
    together.rest()
    started = device.live()
    reserved = device.reserved()
    turnover = device.turnover()
    peaks: dict[str, Peak] = {}
    with device.window() as whole:
        for phase in phases:
            with device.window() as window:
                phase.run()
            peaks[phase.name] = highest(peaks.get(phase.name), window.highest)
    turnover = device.turnover() - turnover
    workspaces = released_workspaces(device)
    live_run = device.live()
    live_after = rest(device, started)
    named = peaks if len(peaks) > 1 else {}
    return Figures(
        foreign, started, reserved, whole.highest, live_run, live_after, named, turnover, workspaces=workspaces
    )


def have_same_peaks(first: Figures, second: Figures) -> bool:
    return _settling(first) == _settling(second)


def _settling(figures: Figures) -> dict[str, int]:
    """Return the metrics that are alike in two steps that repeat; a phase need not have a metric of its own."""
    metrics = figures.memory_metrics()
    return {name: metrics[name] for name in metrics if name not in METRICS or METRICS[name].settles}
