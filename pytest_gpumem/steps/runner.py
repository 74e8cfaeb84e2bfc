"""Measures a step that repeats: its memory once it has settled, its growth, its counts, and its time."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.devices.contract import highest
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.ranks.together import ALONE
from pytest_gpumem.steps.counting import NOTHING_COUNTED, Counted, count_step
from pytest_gpumem.timing.sampling import invalid_if, sample_step, time_step, to_themselves
from pytest_gpumem.torch_support.garbage_collector import collect_everything, cyclic_collector_off

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch

    from pytest_gpumem.devices.contract import BlockIds, Device, Peak
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
    elsewhere: Mapping[str, Figures] = field(default_factory=dict)
    """The figures of the device's `others` that the process uses, by their names."""

    @property
    def own(self) -> int:
        """Bytes of the stretch's own when it began."""
        return self.live_before - self.foreign

    def by_device(self, here: str) -> dict[str, Figures]:
        """Return the figures on each device by its name; ``here`` is that of this one."""
        return {here: self, **self.elsewhere}

    @property
    def own_peak(self) -> int:
        """Peak of the stretch's own bytes on this device."""
        return self.peak.allocated - self.foreign

    @property
    def peak_allocated(self) -> int:
        """Peak of the stretch's own bytes, on the device where it is the largest."""
        return max(one.own_peak for one in self.by_device("").values())

    @property
    def most_workspaces(self) -> int:
        """Bytes of `workspaces` on the device that has most of them."""
        return max(one.workspaces for one in self.by_device("").values())

    def memory_metrics(self) -> dict[str, int]:
        """Return the memory metrics of the stretch on this device, in bytes."""
        metrics = {"peak_allocated": self.own_peak}
        metrics |= {f"peak_{name}": peak.allocated - self.foreign for name, peak in self.phases.items()}
        if self.peak.reserved is not None and self.reserved_before is not None:
            # Room that was left in segments reserved before is not in the difference, but tensors were put there.
            reserved = self.peak.reserved - self.reserved_before + self.own
            metrics["peak_reserved"] = max(reserved, metrics["peak_allocated"])
        metrics["retained"] = max(0, self.live_after - self.live_before - self.held_change)
        metrics["cyclic_garbage"] = max(0, self.live_run - self.live_after)
        return metrics


def largest_of(metrics: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the largest value of each metric among those of several devices."""
    largest: dict[str, int] = {}
    for one in metrics:
        largest |= {name: max(value, largest.get(name, value)) for name, value in one.items()}
    return largest


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
    growth_elsewhere: Mapping[str, int] = field(default_factory=dict)
    """The same on the device's `others`, by their names."""
    warm_up_peaks_elsewhere: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def lowest_peaks(self, here: str) -> dict[str, int]:
        """Return the smallest peak of the later half of the steps on each device, in bytes; empty where they settled.

        The earlier ones may lack the optimizer's state. ``here`` is the name of the first device.
        """
        if self.settled:
            return {}
        peaks = {here: self.warm_up_peaks, **self.warm_up_peaks_elsewhere}
        return {
            name: min((*(before := peaks.get(name, ()))[len(before) // 2 :], figures.own_peak))
            for name, figures in self.memory.by_device(here).items()
        }

    def memory_metrics(self) -> dict[str, int]:
        """Return the memory metrics of the step, in bytes: of each the largest among devices."""
        return largest_of(self.metrics_by_device("").values())

    def metrics_by_device(self, here: str) -> dict[str, dict[str, int]]:
        """Return the memory metrics of the step on each device, in bytes; ``here`` is the name of the first."""
        growth = {here: self.growth, **self.growth_elsewhere}
        return {
            name: {**one.memory_metrics(), "growth": growth.get(name, 0)}
            for name, one in self.memory.by_device(here).items()
        }

    def notes(self) -> tuple[str, ...]:
        """Return notes on the figures, as clauses."""
        unsettled = () if self.settled else (self.unsettled_note(),)
        return (*unsettled, *(() if self.counted.trouble is None else (self.counted.trouble,)))

    def unsettled_note(self) -> str:
        """Return a clause that says how the warm-up steps' peaks moved."""
        steps = len(self.warm_up_peaks)
        everywhere = {"": self.warm_up_peaks, **self.warm_up_peaks_elsewhere}
        moved = next((name for name, peaks in everywhere.items() if peaks[0] != peaks[-1]), None)
        if moved is None:
            return f"none of {steps} warm-up steps was like the one before: recompiled, or overflowed"
        first, last = everywhere[moved][0], everywhere[moved][-1]
        on = f" on {moved}" if moved else ""
        if {"": self.growth, **self.growth_elsewhere}.get(moved) and last > first:
            return f"peaks{on} grew from step to step: {first} bytes in the first of {steps}, {last} in the last"
        return f"peaks{on} of {steps} warm-up steps moved from {first} to {last} bytes"


def measure_step(
    phases: Sequence[Phase],
    device: Device,
    *,
    own: Callable[[], Iterable[torch.UntypedStorage]],
    foreign: Sequence[int],
    time_budget: TimeBudget | None,
    state: Callable[[], object] | None = None,
    compiled: bool = False,
    together: Alone = ALONE,
) -> StepFigures:
    """Measure the step that ``phases`` make.

    Warms up until two consecutive steps give the same peaks (at least 2 steps, at most `MOST_WARM_UPS`), so that lazy
    optimizer state and autotuning are behind, then measures one more. ``foreign`` bytes are live that are not the step's own,
    on each of `Device.everywhere`;
    ``own`` gives the storages that are its own at any moment. A step that changes ``state()`` (graphs that were compiled,
    the gradient scale) is not like the next one, and up to `MOST_UNSTABLE_WARM_UPS` are run until it stays. Without an
    ``time_budget`` no time is taken. Of a step that was ``compiled`` no operators are counted. On several ranks all
    run as many steps, as they decide ``together``.
    """
    run_step = functools.partial(run_one_step, phases, device, foreign, together=together)
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
        keeps = any(_keeps(figures) for figures in (warm_ups[-1], memory))
        growth = _growth(run_step, device, together) if together.any(keeps) else {}
        times = None
        earlier = device.known()
        # Before any time is taken: how many steps that takes is chance, and what a step does may depend on its weights.
        with device.peak_ignored():
            counted = count_step(_whole(phases), device, compiled=compiled)
        if time_budget is not None:
            with unrecorded_steps(device, earlier, own, run_step):
                times = time_step(_whole(phases), phases, device, time_budget, together)
    peaks = tuple(figures.own_peak for figures in warm_ups)
    kept = growth.pop(device.name, 0)
    return StepFigures(memory, settled, peaks, times, counted, kept, growth, peaks_elsewhere(warm_ups))


@contextmanager
def unrecorded_steps(
    device: Device, earlier: BlockIds, own: Callable[[], Iterable[torch.UntypedStorage]], run_step: Callable[[], object]
) -> Iterator[None]:
    """Run steps within without recording them, then one that is recorded, and correct what the device takes to be live.

    While nothing is recorded, a step may replace what it holds. What can be reached of that is known at the end. Of the rest,
    such as buckets of `DistributedDataParallel` and what graphs have saved, what outlived a recorded step stays, and what each
    step makes anew is taken from the last one. Also when a step raises, since the test may go on and measure another.

    Args:
        device: Where the steps run.
        earlier: What the device knew before the last recorded step.
        own: Returns the storages that can be reached from the step.
        run_step: Runs a recorded step.
    """
    reached = {storage.data_ptr() for storage in own()}
    before = device.known()
    lasting = frozenset(block for block in earlier & before if block[0] not in reached)
    try:
        with device.unrecorded():
            yield
        run_step()
    finally:
        device.reconcile(lasting | (device.known() - before), own())


def _keeps(figures: Figures) -> bool:
    return any(one.live_after > one.live_before for one in figures.by_device("").values())


def _growth(run_step: Callable[[Rest], Figures], device: Device, together: Alone) -> dict[str, int]:
    """Run more steps to distinguish a leak from a cache that fills, and return the bytes that each keeps, by device.

    Garbage among all objects is collected once, at the end: there can only have been less before, so that what does not grow
    with it does not grow without it. Only if there is some is it collected after each step.
    """
    growth = _growth_by_device([run_step(live_when_settled) for _ in range(SETTLING_STEPS + WINDOW)], device)
    live = live_everywhere(device)
    if not together.any(any(growth.values()) and live_at_rest(device, [0] * len(live)) != live):
        return growth
    return _growth_by_device([run_step(live_at_rest) for _ in range(SETTLING_STEPS + WINDOW)], device)


def _growth_by_device(steps: Sequence[Figures], device: Device) -> dict[str, int]:
    window = steps[SETTLING_STEPS:]
    return {device.name: growth_of(window)} | growth_elsewhere(window)


def steps_elsewhere(steps: Sequence[Figures]) -> dict[str, list[Figures]]:
    """Return the figures of some steps in a row on the device's `others`, by their names, from the first that used it."""
    names = steps[-1].elsewhere
    return {name: [step.elsewhere[name] for step in steps if name in step.elsewhere] for name in names}


def growth_elsewhere(window: Sequence[Figures]) -> dict[str, int]:
    """Return the bytes that each of some steps in a row keeps on the device's `others`, by their names."""
    return {name: growth_of(steps) for name, steps in steps_elsewhere(window).items()}


def peaks_elsewhere(steps: Sequence[Figures]) -> dict[str, tuple[int, ...]]:
    """Return the peaks of some steps in a row on the device's `others`, in bytes, by their names."""
    return {name: tuple(one.own_peak for one in there) for name, there in steps_elsewhere(steps).items()}


def growth_of(window: Sequence[Figures]) -> int:
    """Return the bytes that each of some steps in a row keeps on their device."""
    return growth_per_step([window[0].live_before, *(step.live_after for step in window)])


def sample_again(
    phases: Sequence[Phase],
    device: Device,
    own: Callable[[], Iterable[torch.UntypedStorage]],
    seconds: float,
    together: Alone = ALONE,
) -> Sample:
    """Return another sample of a step that has been measured. A recorded step ends it, as in `measure_step`.

    Taken after a pause of `SECONDS_BETWEEN_SAMPLES`, so that one burst of another process is not in both.
    """
    time.sleep(SECONDS_BETWEEN_SAMPLES)
    run_step = functools.partial(run_one_step, phases, device, [0] * len(device.everywhere), together=together)
    device.quiesce()
    with cyclic_collector_off():
        earlier = device.known()
        run_step()
        with unrecorded_steps(device, earlier, own, run_step), to_themselves(device, together) as refused:
            # Settling has emptied the caches, and of few rounds none may be one that fills them again.
            _whole(phases)()
            sample = sample_step(_whole(phases), device, seconds, ROUNDS_TO_DECIDE, together)
    return invalid_if(refused, sample, device)


def _whole(phases: Sequence[Phase]) -> Callable[[], None]:
    """Return the step that the phases make."""

    def step() -> None:
        for phase in phases:
            phase.run()

    return step


def live_everywhere(device: Device) -> list[int]:
    """Return the bytes that are live on each of `Device.everywhere`."""
    return [one.live() for one in device.everywhere]


Rest = Callable[["Device", "Sequence[int]"], "list[int]"]
"""Returns the bytes that are live on each of `Device.everywhere` at rest; they are expected to be so many."""


def live_when_settled(device: Device, _expected: Sequence[int]) -> list[int]:
    """Return the bytes that are live when garbage among young objects has been collected."""
    device.quiesce()
    return live_everywhere(device)


def live_at_rest(device: Device, expected: Sequence[int]) -> list[int]:
    """Return the bytes that are live without garbage, which is collected among all objects unless they are as ``expected``."""
    live = live_when_settled(device, expected)
    if live != list(expected):
        collect_everything()
        live = live_everywhere(device)
    return live


class Reading:
    """Readings of one stretch of code on each of `Device.everywhere`, from just before it to its end.

    Args:
        device: Where it runs, garbage collected.
        foreign: The bytes that are not its own, on each device.
        live_before: The bytes that are live before it, on each device; read here by default.
    """

    def __init__(self, device: Device, foreign: Sequence[int], live_before: Sequence[int] | None = None) -> None:
        self._device = device
        self._foreign = foreign
        self.live_before = live_everywhere(device) if live_before is None else list(live_before)
        self._reserved = [one.reserved() for one in device.everywhere]
        self._turnover = [one.turnover() for one in device.everywhere]

    def ended(self) -> None:
        """Read what it allocated, and release the workspaces of the backend's libraries."""
        self._turnover = [
            one.turnover() - before for one, before in zip(self._device.everywhere, self._turnover, strict=True)
        ]
        live = live_everywhere(self._device)
        self._device.release_workspaces()
        self._live_run = live_everywhere(self._device)
        self._workspaces = [before - after for before, after in zip(live, self._live_run, strict=True)]

    def figures(
        self,
        peaks: Sequence[Peak],
        live_after: Sequence[int],
        phases: Mapping[str, Sequence[Peak]],
        held_change: Sequence[int] | None = None,
    ) -> Figures:
        """Return the figures of the stretch.

        Args:
            peaks: On each device.
            live_after: The bytes that are live at rest, on each device.
            phases: The peaks of each phase, on each device.
            held_change: How much more the test's fixtures hold than before, on each device.
        """
        devices = self._device.everywhere
        read = [
            Figures(
                self._foreign[n],
                self.live_before[n],
                self._reserved[n],
                peaks[n],
                self._live_run[n],
                live_after[n],
                {name: of_phase[n] for name, of_phase in phases.items()},
                self._turnover[n],
                0 if held_change is None else held_change[n],
                self._workspaces[n],
            )
            for n in range(len(devices))
        ]
        elsewhere = {one.name: figures for one, figures in zip(devices, read, strict=True) if one.is_used}
        del elsewhere[devices[0].name]
        return replace(read[0], elsewhere=elsewhere) if elsewhere else read[0]


def run_one_step(
    phases: Sequence[Phase],
    device: Device,
    foreign: Sequence[int],
    rest: Rest = live_at_rest,
    together: Alone = ALONE,
) -> Figures:
    together.rest()
    reading = Reading(device, foreign)
    peaks: dict[str, list[Peak]] = {}
    with device.window() as whole:
        for phase in phases:
            with device.window() as window:
                phase.run()
            before = peaks.get(phase.name, [None] * len(device.everywhere))
            peaks[phase.name] = [highest(*pair) for pair in zip(before, window.everywhere, strict=True)]
    reading.ended()
    return reading.figures(whole.everywhere, rest(device, reading.live_before), peaks if len(peaks) > 1 else {})


def have_same_peaks(first: Figures, second: Figures) -> bool:
    return _settling(first) == _settling(second)


def _settling(figures: Figures) -> list[dict[str, int]]:
    """Return the metrics that are alike in two steps that repeat; a phase need not have a metric of its own."""
    everywhere = [one.memory_metrics() for one in figures.by_device("").values()]
    return [{name: here[name] for name in here if name not in METRICS or METRICS[name].settles} for here in everywhere]
