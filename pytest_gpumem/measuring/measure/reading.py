"""Reads memory figures for a region of code, or for a step with phases, on each device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.base.units import format_bytes
from pytest_gpumem.facts.values.option_words import LACKS_WORKSPACES
from pytest_gpumem.measuring.devices.contract import highest
from pytest_gpumem.torch_support.garbage_collector import collect_everything, cyclic_collector_off

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pytest_gpumem.measuring.devices.contract import Device, Peak, Window


@dataclass(frozen=True, slots=True)
class Figures:
    """Memory figures for a region of code on one device, in bytes.

    Live bytes and peaks are counted from the same zero point, so they can be subtracted from each other. ``other_bytes`` belong
    to other code and are live during the whole region. ``live_before`` is read before the region runs, ``live_run`` right after
    the region, and ``live_after`` after a further garbage collection. These three values exclude workspaces. Peaks include
    workspaces. ``live_run`` is ``None`` for another process, because it collects garbage before it reports its bytes.

    Example:
        The second run of a training step on a CPU: ``live_before`` and ``live_after`` are 8,471,584 bytes,
        ``peak.allocated`` is 10,575,904 bytes and ``other_bytes`` is 0. So ``own_peak`` is 10,575,904 bytes and ``retained`` is
        0 bytes.
    """

    other_bytes: int
    live_before: int
    reserved_before: int | None
    peak: Peak
    live_run: int | None
    live_after: int
    phases: Mapping[str, Peak] = field(default_factory=dict)
    turnover: int = 0
    """The bytes of all allocations in the region together, including blocks that were freed later."""
    held_change: int = 0
    """The growth of the bytes held by the test's fixtures. Fixtures hold tensors on purpose, so `retained` excludes this
    growth."""
    workspaces: int = 0
    """The bytes in workspaces at the peak. Libraries hold workspaces during an operation or between operations."""
    workspaces_before: int = 0
    """The bytes in workspaces before the region, left by earlier steps."""
    unused_before: int = 0
    """The reserved but unused bytes before the region, in the allocator's segments that contain at least one block."""
    loaded: int | None = None
    """The bytes in the object returned by `load`; ``None`` for other regions."""
    published_before: int | None = field(default=None, compare=False)
    """`Device.published` before the region; ``None`` if the published bytes in the region are not known."""

    @property
    def own(self) -> int:
        """The bytes of the measured code before the region, including workspaces, without other code's bytes."""
        return self.live_before + self.workspaces_before - self.other_bytes

    @property
    def own_peak(self) -> int:
        """The peak without other code's bytes."""
        return self.peak.allocated - self.other_bytes

    @property
    def published_by_others(self) -> int | None:
        """The published bytes that belong to other code; ``None`` if this process's published bytes are not known."""
        return None if self.published_before is None else self.published_before - self.own

    @property
    def missing(self) -> int:
        """An upper bound for bytes missing from the peak, because the device did not plan workspaces for convolutions."""
        return 0 if self.peak.reaching is None else max(0, self.peak.reaching - self.peak.allocated)

    @property
    def peak_reserved(self) -> int | None:
        """The peak of reserved bytes without other code's bytes; ``None`` if the device does not reserve."""
        if self.peak.reserved is None or self.reserved_before is None:
            return None
        # Tensors may also use unused bytes in older segments. Then the reserved bytes grow less than the allocated bytes, so
        # return at least `own_peak`.
        return max(self.peak.reserved - self.reserved_before + self.own, self.own_peak)

    @property
    def retained(self) -> int:
        """The bytes still allocated after the region, without bytes held by the test's fixtures."""
        return max(0, self.live_after - self.live_before - self.held_change)

    @property
    def keeps_bytes(self) -> bool:
        """True if more bytes are live after the region than before."""
        return self.live_after > self.live_before

    def memory_metrics(self) -> dict[str, int]:
        """Return the region's memory metrics, in bytes."""
        metrics = {"peak_allocated": self.own_peak}
        metrics |= {f"peak_{name}": peak.allocated - self.other_bytes for name, peak in self.phases.items()}
        if self.peak_reserved is not None:
            metrics["peak_reserved"] = self.peak_reserved
        metrics["retained"] = self.retained
        if self.loaded is not None:
            metrics["loaded"] = self.loaded
        if self.live_run is not None:
            metrics["cyclic_garbage"] = max(0, self.live_run - self.live_after)
        return metrics


def largest_of(metrics: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return each metric's largest value among several devices."""
    largest: dict[str, int] = {}
    for device_metrics in metrics:
        largest |= {name: max(value, largest.get(name, value)) for name, value in device_metrics.items()}
    return largest


def notes_on_missing(figures: Iterable[Figures]) -> tuple[str, ...]:
    """Return a note if peaks lack workspaces, with the largest number of missing bytes on any GPU."""
    missing = max((device_figures.missing for device_figures in figures), default=0)
    return (f"{LACKS_WORKSPACES}: at most {format_bytes(missing)} more is needed",) if missing else ()


ByDevice = Mapping[str, Figures]
"""A region's figures on each device used by the process, by device name. The measured device comes first.

Figures of other processes in a step follow, by GPU and process: ``"cuda:0 in serve.py"`` (`beside_processes`)."""


def by_device(steps: Sequence[ByDevice]) -> dict[str, tuple[Figures, ...]]:
    """Return the figures of consecutive steps by device. A device's figures begin at the first step on this device."""
    return {name: tuple(step[name] for step in steps if name in step) for name in steps[-1]}


class Phase(NamedTuple):
    """A named part of a step. The parts of a step run in order, and parts with equal names share a peak.

    For example, with two micro-batches a training step has the parts forward, backward, forward, backward and optimizer. It has
    three peaks: for forward, backward and optimizer.
    """

    name: str
    run: Callable[[], object]


def run_phases(phases: Iterable[Phase]) -> None:
    """Run a step's phases in order."""
    for phase in phases:
        phase.run()


def live_everywhere(device: Device) -> list[int]:
    """Return the live bytes on each device (`Device.everywhere`)."""
    return [each_device.live() for each_device in device.everywhere]


def live_of_program(device: Device) -> list[int]:
    """Return the live bytes on each device (`Device.everywhere`), without workspaces."""
    return [live - workspaces for live, workspaces in zip(live_everywhere(device), device.workspaces(), strict=True)]


def live_when_settled(device: Device) -> list[int]:
    """Collect garbage among young objects, and return the live bytes on each device without workspaces."""
    device.settle()
    return live_of_program(device)


def live_without_older_garbage(device: Device, live: list[int], expected: Sequence[int]) -> list[int]:
    """Return the live bytes on each device without garbage and workspaces.

    If ``live`` equals ``expected``, there is no garbage, and ``live`` is returned. Otherwise garbage among all objects is
    collected first.
    """
    if live == list(expected):
        return live
    collect_everything()
    return live_of_program(device)


class Reading:
    """Memory readings before and after a region of code, on each device (`Device.everywhere`). See `read` for their order.

    Args:
        device: The region's device. Garbage must have been collected.
        other_bytes: Other code's live bytes on each device.
        live_before: The live bytes before the region, on each device, without workspaces. By default, they are read now.
    """

    def __init__(self, device: Device, other_bytes: Sequence[int], live_before: Sequence[int] | None = None) -> None:
        self._device = device
        self._other_bytes = other_bytes
        self.live_before = live_of_program(device) if live_before is None else list(live_before)
        self._workspaces_before = device.workspaces()
        self._unused = [each_device.unused() for each_device in device.everywhere]
        self._reserved = [each_device.reserved() for each_device in device.everywhere]
        self._turnover = [each_device.turnover() for each_device in device.everywhere]
        self._published = [each_device.published() for each_device in device.everywhere]
        self._excess = [each_device.published_excess() for each_device in device.everywhere]

    def read_end(self) -> None:
        """Read the turnover, the live bytes and the published bytes, right after the region."""
        self._turnover = [
            each_device.turnover() - before
            for each_device, before in zip(self._device.everywhere, self._turnover, strict=True)
        ]
        self._device.empty_cache()
        self._live_run = live_everywhere(self._device)
        for n, (each_device, before) in enumerate(zip(self._device.everywhere, self._excess, strict=True)):
            # A session within the test may have taken this process's bytes out of the file.
            excess = each_device.published_excess()
            if before is None or excess is None or excess < before:
                self._published[n] = None

    def read_settled(self) -> None:
        """Collect garbage among young objects, and store the live bytes without workspaces in `live_settled`."""
        self.live_settled = live_when_settled(self._device)

    def figures(
        self,
        peaks: Sequence[Peak],
        live_after: Sequence[int],
        phases: Mapping[str, Sequence[Peak]],
        held_change: Sequence[int] | None = None,
        transient: Sequence[int] | None = None,
    ) -> ByDevice:
        """Return the region's figures.

        Args:
            peaks: The peak on each device.
            live_after: The live bytes after garbage collection, on each device, without workspaces.
            phases: Each phase's peaks, on each device.
            held_change: The growth of the bytes held by the test's fixtures, on each device.
            transient: The workspace bytes in the peak from `Device.transient_workspaces`, on each device.

        Returns:
            The figures by device name, for the first device and every other device used by the process.
        """
        devices = self._device.everywhere
        workspaces = self._device.workspaces()
        figures_in_order = (
            Figures(
                self._other_bytes[n],
                self.live_before[n],
                self._reserved[n],
                peaks[n],
                self._live_run[n] - workspaces[n],
                live_after[n],
                {name: phase_peaks[n] for name, phase_peaks in phases.items()},
                self._turnover[n],
                0 if held_change is None else held_change[n],
                workspaces[n] + (0 if transient is None else transient[n]),
                self._workspaces_before[n],
                self._unused[n],
                published_before=self._published[n],
            )
            for n in range(len(devices))
        )
        return {
            str(each_device.torch_device): figures
            for each_device, figures in zip(devices, figures_in_order, strict=True)
            if each_device is devices[0] or each_device.is_used
        }


@contextmanager
def read(
    device: Device, other_bytes: Sequence[int], live_before: Sequence[int] | None = None
) -> Iterator[tuple[Reading, Window, Sequence[int]]]:
    """Measure the code within the context in a new window.

    Args:
        device: The code's device. Garbage must have been collected.
        other_bytes: Other code's live bytes on each device (`Device.everywhere`).
        live_before: The live bytes before the context, on each device, without workspaces. By default, they are read now.

    Yields:
        The readings, the window, and the bytes from `Device.transient_workspaces`. All three are complete when the context has
        ended.
    """
    with ExitStack() as within:
        with device.one_moment():
            reading = Reading(device, other_bytes, live_before)
            transient = within.enter_context(device.transient_workspaces())
            window = within.enter_context(device.window())
        yield reading, window, transient
        with device.one_moment():
            within.close()
            reading.read_end()
        # This collects garbage, so it comes after `one_moment`, in which nothing may be freed. Even a collection that finds no
        # garbage may free memory, for example in a callback.
        reading.read_settled()


@contextmanager
def read_once(
    device: Device,
    other_bytes: Sequence[int],
    held: Callable[[], Sequence[int]],
    before: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Iterator[Callable[[], ByDevice]]:
    """Measure a single run of the code within the context.

    Args:
        device: The code's device, after `Device.quiesce`.
        other_bytes: Other code's live bytes on each device (`Device.everywhere`).
        held: Returns the bytes currently held by fixtures, on each device.
        before: The result from ``held``, and the live bytes without workspaces, both from before the context. By default, both
            are read now.

    Yields:
        A function that returns the figures. Call this function when the context has ended.
    """
    held_before, live_before = (held(), None) if before is None else before
    ended: list[ByDevice] = []
    with cyclic_collector_off():
        with read(device, other_bytes, live_before) as (reading, window, transient):
            yield lambda: ended[0]
        held_change = [after - earlier for after, earlier in zip(held(), held_before, strict=True)]
        expected = [sum(pair) for pair in zip(reading.live_before, held_change, strict=True)]
        live_after = live_without_older_garbage(device, reading.live_settled, expected)
    ended.append(reading.figures(window.everywhere, live_after, {}, held_change, transient))


def run_one_step(
    phases: Sequence[Phase],
    device: Device,
    other_bytes: Sequence[int],
    *,
    older_garbage: bool = True,
) -> ByDevice:
    """Run a step once, and return its figures on each device.

    Args:
        phases: The step's phases, in order.
        device: The step's device.
        other_bytes: Other code's live bytes on each device (`Device.everywhere`).
        older_garbage: True to collect garbage among all objects if the step changed the live bytes. If this is false, only
            garbage among young objects is collected.
    """
    device.consensus.rest()
    with read(device, other_bytes) as (reading, window, transient):
        for n, phase in enumerate(phases):
            if n:
                device.split(window)
            phase.run()
    live_after = reading.live_settled
    if older_garbage:
        live_after = live_without_older_garbage(device, live_after, reading.live_before)
    peaks: dict[str, Sequence[Peak]] = {}
    for phase, part_peaks in zip(phases, window.parts_everywhere, strict=True):
        earlier_peaks = peaks.get(phase.name, [None] * len(device.everywhere))
        peaks[phase.name] = [highest(*pair) for pair in zip(earlier_peaks, part_peaks, strict=True)]
    return reading.figures(window.everywhere, live_after, peaks if len(peaks) > 1 else {}, transient=transient)
