"""Reads the memory of a region of code, or of a step made of phases, on each device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.devices.contract import highest
from pytest_gpumem.torch_support.garbage_collector import collect_everything, cyclic_collector_off
from pytest_gpumem.units import format_bytes
from pytest_gpumem.values.option_words import LACKS_WORKSPACES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pytest_gpumem.devices.contract import Device, Peak, Window


@dataclass(frozen=True, slots=True)
class Figures:
    """Readings around a region of code on one device. Live bytes and peaks count from the same zero.

    ``not_own`` bytes are live all the time and are not the region's own. ``live_before`` is read before it ran; ``live_run``
    right after it ran; ``live_after`` when garbage has been collected. They are without workspaces, which peaks have.
    """

    not_own: int
    live_before: int
    reserved_before: int | None
    peak: Peak
    live_run: int
    live_after: int
    phases: Mapping[str, Peak] = field(default_factory=dict)
    turnover: int = 0
    """Bytes that were allocated in all, whether freed or not."""
    held_change: int = 0
    """The bytes that the test's fixtures hold more than before: kept on purpose, not retained."""
    workspaces: int = 0
    """Bytes of the peak that the backend's libraries took for themselves, between operations or in one of them."""
    workspaces_before: int = 0
    """Bytes that they held when it began: what the program's earlier steps have left there."""
    unused_before: int = 0
    """Bytes that were reserved and not used when it began, in segments that hold something."""
    loaded: int | None = None
    """Bytes that what it loaded holds; ``None`` of a region that is no `load`."""

    @property
    def own(self) -> int:
        """Bytes of the region's own when it began, with workspaces."""
        return self.live_before + self.workspaces_before - self.not_own

    @property
    def own_peak(self) -> int:
        """Peak of the region's own bytes."""
        return self.peak.allocated - self.not_own

    @property
    def missing(self) -> int:
        """Bytes that the peak may lack because the device did not plan workspaces of convolutions."""
        return 0 if self.peak.reaching is None else max(0, self.peak.reaching - self.peak.allocated)

    @property
    def peak_reserved(self) -> int | None:
        """Bytes that were reserved for the region at most; ``None`` where the device does not reserve."""
        if self.peak.reserved is None or self.reserved_before is None:
            return None
        # Room that was left in segments reserved before is not in the difference, but tensors were put there.
        return max(self.peak.reserved - self.reserved_before + self.own, self.own_peak)

    @property
    def retained(self) -> int:
        """Bytes that outlived the region and that its test's fixtures do not hold."""
        return max(0, self.live_after - self.live_before - self.held_change)

    @property
    def keeps(self) -> bool:
        """True if it kept bytes."""
        return self.live_after > self.live_before

    def memory_metrics(self) -> dict[str, int]:
        """Return the memory metrics of the region, in bytes."""
        metrics = {"peak_allocated": self.own_peak}
        metrics |= {f"peak_{name}": peak.allocated - self.not_own for name, peak in self.phases.items()}
        if self.peak_reserved is not None:
            metrics["peak_reserved"] = self.peak_reserved
        metrics["retained"] = self.retained
        if self.loaded is not None:
            metrics["loaded"] = self.loaded
        metrics["cyclic_garbage"] = max(0, self.live_run - self.live_after)
        return metrics


def largest_of(metrics: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the largest value of each metric among those of several devices."""
    largest: dict[str, int] = {}
    for one in metrics:
        largest |= {name: max(value, largest.get(name, value)) for name, value in one.items()}
    return largest


def notes_on_missing(figures: Iterable[Figures]) -> tuple[str, ...]:
    """Return a note on what peaks lack of workspaces, on the GPU that lacks most; none if nothing is missing."""
    missing = max((one.missing for one in figures), default=0)
    return (f"{LACKS_WORKSPACES}: at most {format_bytes(missing)} more is needed",) if missing else ()


ByDevice = Mapping[str, Figures]
"""The figures of a region on each device that the process uses, by the device's name; that of `Device` itself is the first."""


def on_each(steps: Sequence[ByDevice]) -> dict[str, tuple[Figures, ...]]:
    """Return the figures of some steps in a row on each device, by its name, from the first step that used it."""
    return {name: tuple(step[name] for step in steps if name in step) for name in steps[-1]}


class Phase(NamedTuple):
    """A named part of a step. Phases run in order; the peak is taken at each boundary. Those of one name are one phase."""

    name: str
    run: Callable[[], object]


def run_phases(phases: Iterable[Phase]) -> None:
    """Run the phases of a step, one after another."""
    for phase in phases:
        phase.run()


def live_everywhere(device: Device) -> list[int]:
    """Return the bytes that are live on each of `Device.everywhere`."""
    return [one.live() for one in device.everywhere]


def live_of_program(device: Device) -> list[int]:
    """Return the bytes that are live on each of `Device.everywhere`, without workspaces of the backend's libraries."""
    return [live - kept for live, kept in zip(live_everywhere(device), device.workspaces(), strict=True)]


def live_when_settled(device: Device) -> list[int]:
    """Return the bytes that are live, without workspaces, when garbage among young objects has been collected."""
    device.settle()
    return live_of_program(device)


def live_without_older_garbage(device: Device, live: list[int], expected: Sequence[int]) -> list[int]:
    """Collect garbage among all objects where ``live`` is not as ``expected``, and return the bytes that are live."""
    if live == list(expected):
        return live
    collect_everything()
    return live_of_program(device)


class Reading:
    """Readings of one region of code on each of `Device.everywhere`, from just before it to its end; see `read`.

    Args:
        device: Where it runs, garbage collected.
        not_own: The bytes that are not its own, on each device.
        live_before: The bytes that are live before it, on each device, without workspaces; read here by default.
    """

    def __init__(self, device: Device, not_own: Sequence[int], live_before: Sequence[int] | None = None) -> None:
        self._device = device
        self._not_own = not_own
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

    def settled(self) -> None:
        """Collect garbage among young objects, and read what is live then, without workspaces, into `live_settled`."""
        self.live_settled = live_when_settled(self._device)

    def figures(
        self,
        peaks: Sequence[Peak],
        live_after: Sequence[int],
        phases: Mapping[str, Sequence[Peak]],
        held_change: Sequence[int] | None = None,
        transient: Sequence[int] | None = None,
    ) -> ByDevice:
        """Return the figures of the region.

        Args:
            peaks: On each device.
            live_after: The bytes that are live at rest, on each device, without workspaces.
            phases: The peaks of each phase, on each device.
            held_change: How much more the test's fixtures hold than before, on each device.
            transient: The bytes of the peak that `Device.transient_workspaces` gave, on each device.
        """
        devices = self._device.everywhere
        workspaces = self._device.workspaces()
        of_each = (
            Figures(
                self._not_own[n],
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
        )
        return {
            str(one.torch_device): figures
            for one, figures in zip(devices, of_each, strict=True)
            if one is devices[0] or one.is_used
        }


@contextmanager
def read(
    device: Device, not_own: Sequence[int], live_before: Sequence[int] | None = None
) -> Iterator[tuple[Reading, Window, Sequence[int]]]:
    """Measure the block, in a window of its own.

    Args:
        device: Where it runs, garbage collected.
        not_own: The bytes that are not its own, on each of `Device.everywhere`.
        live_before: The bytes that are live before it, on each device, without workspaces; read here by default.

    Yields:
        The readings, which are complete when the block has ended, its window, and the bytes of `Device.transient_workspaces`.
    """
    with ExitStack() as within:
        with device.one_moment():
            reading = Reading(device, not_own, live_before)
            transient = within.enter_context(device.transient_workspaces())
            window = within.enter_context(device.window())
        yield reading, window, transient
        with device.one_moment():
            within.close()
            reading.ended()
        # Not of that moment: a collection may free memory though it finds nothing, by a finalizer or another's callback.
        reading.settled()


@contextmanager
def read_once(
    device: Device,
    not_own: Sequence[int],
    held: Callable[[], Sequence[int]],
    before: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Iterator[Callable[[], ByDevice]]:
    """Measure what runs within, once. Its figures are there, by calling what is yielded, when it has ended.

    Args:
        device: Where it runs, at rest.
        not_own: The bytes that are not its own, on each of `Device.everywhere`.
        held: Returns the bytes that are kept on purpose now, on each device.
        before: What ``held`` gave and what is live without workspaces, before it; read here by default.
    """
    held_before, live_before = (held(), None) if before is None else before
    ended: list[ByDevice] = []
    with cyclic_collector_off():
        with read(device, not_own, live_before) as (reading, window, transient):
            yield lambda: ended[0]
        held_change = [now - then for now, then in zip(held(), held_before, strict=True)]
        expected = [sum(pair) for pair in zip(reading.live_before, held_change, strict=True)]
        live_after = live_without_older_garbage(device, reading.live_settled, expected)
    ended.append(reading.figures(window.everywhere, live_after, {}, held_change, transient))


def run_one_step(
    phases: Sequence[Phase],
    device: Device,
    not_own: Sequence[int],
    *,
    older_garbage: bool = True,
) -> ByDevice:
    """Run a step once, and return its figures on each device.

    Args:
        phases: The parts of the step, in order.
        device: Where it runs.
        not_own: The bytes that are not its own, on each of `Device.everywhere`.
        older_garbage: Whether garbage among all objects is collected, and not only among young ones, where other bytes are live
            after it than before.
    """
    device.consensus.rest()
    with read(device, not_own) as (reading, window, transient):
        for n, phase in enumerate(phases):
            if n:
                device.split(window)
            phase.run()
    live_after = reading.live_settled
    if older_garbage:
        live_after = live_without_older_garbage(device, live_after, reading.live_before)
    peaks: dict[str, Sequence[Peak]] = {}
    for phase, of_phase in zip(phases, window.parts_everywhere, strict=True):
        before = peaks.get(phase.name, [None] * len(device.everywhere))
        peaks[phase.name] = [highest(*pair) for pair in zip(before, of_phase, strict=True)]
    return reading.figures(window.everywhere, live_after, peaks if len(peaks) > 1 else {}, transient=transient)
