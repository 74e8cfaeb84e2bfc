"""Measures a step that repeats: its memory once it has settled, its growth, its counts, and its time."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.devices.contract import highest
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.ranks.together import ALONE
from pytest_gpumem.steps.counting import NOTHING_COUNTED, Counted, count_step
from pytest_gpumem.timing.sampling import invalid_if, sample_step, time_step, to_themselves
from pytest_gpumem.torch_support.garbage_collector import collect_everything, cyclic_collector_off
from pytest_gpumem.units import format_bytes
from pytest_gpumem.values.step_peaks import StepPeaks, spread

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
    right after it ran; ``live_after`` when garbage has been collected. They are without workspaces, which peaks have.
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
    """Bytes of the peak that the backend's libraries took for themselves, between operations or in one of them."""
    workspaces_before: int = 0
    """Bytes that they held when it began: what the program's earlier steps have left there."""
    unused_before: int = 0
    """Bytes that were reserved and not used when it began, in segments that hold something."""
    elsewhere: Mapping[str, Figures] = field(default_factory=dict)
    """The figures of the device's `others` that the process uses, by their names."""

    @property
    def own(self) -> int:
        """Bytes of the stretch's own when it began, with workspaces."""
        return self.live_before + self.workspaces_before - self.foreign

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

    @property
    def most_unused_before(self) -> int:
        """Bytes of `unused_before` on the device that has most of them."""
        return max(one.unused_before for one in self.by_device("").values())

    @property
    def peak_reserved(self) -> int | None:
        """Bytes that were reserved for the stretch at most; ``None`` where the device does not reserve."""
        if self.peak.reserved is None or self.reserved_before is None:
            return None
        # Room that was left in segments reserved before is not in the difference, but tensors were put there.
        return max(self.peak.reserved - self.reserved_before + self.own, self.own_peak)

    @property
    def retained(self) -> int:
        """Bytes that outlived the stretch and that its test's fixtures do not hold."""
        return max(0, self.live_after - self.live_before - self.held_change)

    def memory_metrics(self) -> dict[str, int]:
        """Return the memory metrics of the stretch on this device, in bytes."""
        metrics = {"peak_allocated": self.own_peak}
        metrics |= {f"peak_{name}": peak.allocated - self.foreign for name, peak in self.phases.items()}
        if self.peak_reserved is not None:
            metrics["peak_reserved"] = self.peak_reserved
        metrics["retained"] = self.retained
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
FURTHER_STEPS = 4
"""How many steps are looked at after two in a row that are alike, or that do not come."""
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

    Runs it until two consecutive steps give the same peaks (at least 2 steps, at most `MOST_WARM_UPS`), so that lazy
    optimizer state and autotuning are behind, then `FURTHER_STEPS` more: what happens every second to sixth time is seen.
    ``foreign`` bytes are live that are not the step's own, on each of `Device.everywhere`;
    ``own`` gives the storages that are its own at any moment. A step that changes ``state()`` (graphs that were compiled,
    the gradient scale) is not like the next one, and up to `MOST_UNSTABLE_WARM_UPS` are run until it stays. Without an
    ``time_budget`` no time is taken. Of a step that was ``compiled`` no operators are counted. On several ranks all
    run as many steps, as they decide ``together``.
    """
    run_step = functools.partial(run_one_step, phases, device, foreign, together=together)
    device.quiesce()
    with cyclic_collector_off():
        seen = [run_step()]
        settled_at = None
        most = MOST_UNSTABLE_WARM_UPS if together.any(state is not None) else MOST_WARM_UPS
        while settled_at is None and len(seen) < most:
            before = state() if state is not None else None
            seen.append(run_step())
            moved = state is not None and state() != before
            if together.all(have_same_peaks(*seen[-2:]) and not moved):
                settled_at = len(seen) - 2
        latest = seen[-1]
        further = [latest, *(run_step() for _ in range(FURTHER_STEPS))]
        seen += further[1:]
        growth = _growth(run_step, device, together) if together.any(any(map(_keeps, further))) else {}
        times = None
        earlier = device.known()
        # Before any time is taken: how many steps that takes is chance, and what a step does may depend on its weights.
        with device.peak_ignored():
            alike = together.all(settled_at is not None and all(_do_the_same(*pair) for pair in pairwise(further)))
            counted = count_step(_whole(phases), device, compiled=compiled, alike=alike)
        if time_budget is not None:
            with unrecorded_steps(device, earlier, own, run_step):
                times = time_step(_whole(phases), phases, device, time_budget, together)
    kept = growth.pop(device.name, 0)
    figures = figures_of_steps(seen, settled_at)
    return replace(figures, times=times, counted=counted, growth=kept, growth_elsewhere=growth)


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


def _do_the_same(first: Figures, second: Figures) -> bool:
    """Return whether two steps had the same peaks and allocated as many bytes in all, so that one is as good to count."""
    return have_same_peaks(first, second) and _turnovers(first) == _turnovers(second)


def _turnovers(figures: Figures) -> list[int]:
    return [one.turnover for one in figures.by_device("").values()]


def _keeps(figures: Figures) -> bool:
    return any(one.live_after > one.live_before for one in figures.by_device("").values())


def _growth(run_step: Callable[[Rest], Figures], device: Device, together: Alone) -> dict[str, int]:
    """Run more steps to distinguish a leak from a cache that fills, and return the bytes that each keeps, by device.

    Garbage among all objects is collected once, at the end: there can only have been less before, so that what does not grow
    with it does not grow without it. Only if there is some is it collected after each step.
    """
    growth = _growth_over(run_step, live_when_settled, device, together)
    live = live_of_program(device)
    if not together.any(any(growth.values()) and live_at_rest(device, [0] * len(live)) != live):
        return growth
    return _growth_over(run_step, live_at_rest, device, together)


def _growth_over(run_step: Callable[[Rest], Figures], rest: Rest, device: Device, together: Alone) -> dict[str, int]:
    window = [run_step(rest) for _ in range(SETTLING_STEPS + WINDOW)][SETTLING_STEPS:]
    if together.any(keeps_now_and_then(window)):
        window += [run_step(rest) for _ in range(WINDOW)]
    return {device.name: growth_of(window)} | growth_elsewhere(window)


def keeps_now_and_then(window: Sequence[Figures]) -> bool:
    """Return whether some steps in a row kept bytes on a device, and too seldom to tell a leak from a cache.

    As many more tell whether others keep as much: a leak of every tenth step has kept bytes once or twice in `WINDOW` steps.
    """
    everywhere = [window, *steps_elsewhere(window).values()]
    return any(not growth_of(steps) and _never_falls(_live(steps)) for steps in everywhere)


def steps_elsewhere(steps: Sequence[Figures]) -> dict[str, list[Figures]]:
    """Return the figures of some steps in a row on the device's `others`, by their names, from the first that used it."""
    names = steps[-1].elsewhere
    return {name: [step.elsewhere[name] for step in steps if name in step.elsewhere] for name in names}


def growth_elsewhere(window: Sequence[Figures]) -> dict[str, int]:
    """Return the bytes that each of some steps in a row keeps on the device's `others`, by their names."""
    return {name: growth_of(steps) for name, steps in steps_elsewhere(window).items()}


def growth_of(window: Sequence[Figures]) -> int:
    """Return the bytes that each of some steps in a row keeps on their device.

    Of steps that do not all allocate as much, live bytes go up and down with what the latest one holds, such as its batch.
    """
    live = _live(window)
    growth = growth_per_step(live)
    if not growth or _never_falls(live) or len({step.turnover for step in window}) == 1:
        return growth
    return growth if _has_only_risen(window) or max(live[: len(live) // 2]) < min(live[len(live) // 2 :]) else 0


def _live(window: Sequence[Figures]) -> list[int]:
    return [window[0].live_before, *(step.live_after for step in window)]


def _never_falls(live: Sequence[int]) -> bool:
    return live[-1] > live[0] and list(live) == sorted(live)


def _has_only_risen(window: Sequence[Figures]) -> bool:
    """Return whether live bytes rose more than once, and never fell, from a step to the next one that allocates as much."""
    latest: dict[int, int] = {}
    rises, rose_until = 0, -1
    for number, step in enumerate(window):
        before = latest.get(step.turnover)
        latest[step.turnover] = number
        if before is None or step.live_after == window[before].live_after:
            continue
        if step.live_after < window[before].live_after:
            return False
        # What is kept once is in all rises across it.
        if before >= rose_until:
            rises, rose_until = rises + 1, number
    return rises > 1


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


def live_of_program(device: Device) -> list[int]:
    """Return the bytes that are live on each of `Device.everywhere`, without workspaces of the backend's libraries."""
    return [live - kept for live, kept in zip(live_everywhere(device), device.workspaces(), strict=True)]


Rest = Callable[["Device", "Sequence[int]"], "list[int]"]
"""Returns the bytes that are live on each of `Device.everywhere` at rest, without workspaces; so many are expected."""


def live_when_settled(device: Device, _expected: Sequence[int]) -> list[int]:
    """Return the bytes that are live when garbage among young objects has been collected."""
    device.settle()
    return live_of_program(device)


def live_at_rest(device: Device, expected: Sequence[int]) -> list[int]:
    """Return the bytes that are live without garbage, which is collected among all objects unless they are as ``expected``."""
    live = live_when_settled(device, expected)
    if live != list(expected):
        collect_everything()
        live = live_of_program(device)
    return live


class Reading:
    """Readings of one stretch of code on each of `Device.everywhere`, from just before it to its end.

    Args:
        device: Where it runs, garbage collected.
        foreign: The bytes that are not its own, on each device.
        live_before: The bytes that are live before it, on each device, without workspaces; read here by default.
    """

    def __init__(self, device: Device, foreign: Sequence[int], live_before: Sequence[int] | None = None) -> None:
        self._device = device
        self._foreign = foreign
        self.live_before = live_of_program(device) if live_before is None else list(live_before)
        self._workspaces_before = device.workspaces()
        self._unused = [one.unused() for one in device.everywhere]
        self._reserved = [one.reserved() for one in device.everywhere]
        self._turnover = [one.turnover() for one in device.everywhere]

    def ended(self) -> None:
        """Read what it allocated."""
        self._turnover = [
            one.turnover() - before for one, before in zip(self._device.everywhere, self._turnover, strict=True)
        ]
        self._device.empty_cache()
        self._live_run = live_everywhere(self._device)

    def figures(
        self,
        peaks: Sequence[Peak],
        live_after: Sequence[int],
        phases: Mapping[str, Sequence[Peak]],
        held_change: Sequence[int] | None = None,
        transient: Sequence[int] | None = None,
    ) -> Figures:
        """Return the figures of the stretch.

        Args:
            peaks: On each device.
            live_after: The bytes that are live at rest, on each device, without workspaces.
            phases: The peaks of each phase, on each device.
            held_change: How much more the test's fixtures hold than before, on each device.
            transient: The bytes of the peak that `Device.transient_workspaces` gave, on each device.
        """
        devices = self._device.everywhere
        workspaces = self._device.workspaces()
        read = [
            Figures(
                self._foreign[n],
                self.live_before[n],
                self._reserved[n],
                peaks[n],
                self._live_run[n] - workspaces[n],
                live_after[n],
                {name: of_phase[n] for name, of_phase in phases.items()},
                self._turnover[n],
                0 if held_change is None else held_change[n],
                workspaces[n] + (0 if transient is None else transient[n]),
                self._workspaces_before[n],
                self._unused[n],
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
    with device.transient_workspaces() as transient, device.window() as whole:
        for phase in phases:
            with device.window() as window:
                phase.run()
            before = peaks.get(phase.name, [None] * len(device.everywhere))
            peaks[phase.name] = [highest(*pair) for pair in zip(before, window.everywhere, strict=True)]
    reading.ended()
    return reading.figures(
        whole.everywhere, rest(device, reading.live_before), peaks if len(peaks) > 1 else {}, transient=transient
    )


def have_same_peaks(first: Figures, second: Figures) -> bool:
    return _settling(first) == _settling(second)


def _settling(figures: Figures) -> list[dict[str, int]]:
    """Return the metrics that are alike in two steps that repeat; a phase need not have a metric of its own."""
    everywhere = [one.memory_metrics() for one in figures.by_device("").values()]
    return [{name: here[name] for name in here if name not in METRICS or METRICS[name].settles} for here in everywhere]
