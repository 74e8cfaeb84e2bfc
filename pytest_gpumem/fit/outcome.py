"""Outcome of a program's run on an emulated GPU: whether it fits, and its usage of memory. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from pytest_gpumem.devices.capability import lacking_in
from pytest_gpumem.emulated_process.usage import DeviceUsage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.emulated_process.usage import ProcessUsage, RanOut
    from pytest_gpumem.emulation.gpus import Gpu

_RAISED = re.compile(r"torch\.(?:cuda\.)?OutOfMemoryError: (?P<message>.+)")
_ADVICE = re.compile(r" If reserved but unallocated memory is large.*| See documentation for.*", re.DOTALL)
_NO_KERNEL_IMAGE = "no kernel image is available"
"""The words of CUDA's error where a program has no kernels for a GPU, its own or torch's."""
_MOST_LINES = 20


class FitOutcome(Enum):
    """Outcome of a run. The value is a phrase for people and for programs."""

    FITS = "fits"
    WENT_ON = "ran out of memory and went on"
    OUT_OF_MEMORY = "out of memory"
    TOO_MUCH_TOGETHER = "out of memory together"
    """Each process alone had room, but not those that used a device at the same time."""
    CANNOT_RUN = "cannot run on it"
    """The GPU, real or not, lacks what the program asks for, or the installed torch has no kernels for it."""
    FAILED = "failed by itself"
    UNUSED = "no GPU memory used"


NOT_ENOUGH = (FitOutcome.WENT_ON, FitOutcome.OUT_OF_MEMORY, FitOutcome.TOO_MUCH_TOGETHER)
"""Outcomes that more memory would change."""


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """The end of a program, and the usage of its processes."""

    status: int
    """Its exit status; negative for the signal that killed it."""
    output: str
    """The end of its standard error; of its output where it wrote none."""
    processes: tuple[ProcessUsage, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """Outcome of a run on one GPU. Bytes are of the device that took most."""

    outcome: FitOutcome
    status: int
    allocated: int = 0
    reserved: int = 0
    devices: int = 0
    """The number of them that were used."""
    together: int = 1
    """The number of processes that used a device at the same time: their peaks are added up."""
    retries: int = 0
    """Allocations that succeeded only after cached memory had been given back, which is slow. 0 where memory ran out."""
    times_out_of_memory: int = 0
    ran_out: RanOut | None = None
    message: str = ""
    """PyTorch's own, of an error that was not caught."""
    last_lines: tuple[str, ...] = ()
    """The end of its output, where the program failed with another error."""
    expandable: bool = False
    unknown: str | None = None
    without_statistics: bool = False
    """True for an allocator of the program's own, which keeps none: then nothing is known of what it took."""
    lacking: str | None = None
    """The reason why peaks may be too low, as a clause, where what cuDNN takes on a GPU is not in them."""
    cannot_run: str | None = None
    """The reason why it cannot run on the GPU, as a clause, where that is the outcome."""
    killed: int = 0
    """Processes that used CUDA and were killed before they wrote their usage."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A GPU, the outcome of the program on it, and that with expandable segments where they were tried."""

    gpu: Gpu
    plain: Found
    expanded: Found | None = None

    @property
    def fits(self) -> bool:
        return self.plain.outcome is FitOutcome.FITS

    @property
    def fits_expanded(self) -> bool:
        return not self.fits and self.expanded is not None and self.expanded.outcome is FitOutcome.FITS


def found(run: ProgramRun, gpu: Gpu, context_bytes: int) -> Found:
    """Return the outcome of a run.

    Args:
        run: How the program ended.
        gpu: The GPU, or several of one.
        context_bytes: What the context of each process takes of it. For one process the emulated GPU has taken it off; it
            counts here only for further processes on a device, since each has a GPU to itself when it is emulated.
    """
    numbers = sorted({device.device for one in run.processes for device in one.devices})
    devices = [_on_device(run.processes, number) for number in numbers]
    most = max((usage for usage, _ in devices), key=lambda usage: usage.reserved, default=None)
    together = any(
        processes > 1 and usage.reserved + processes * context_bytes > gpu.total_bytes for usage, processes in devices
    )
    times = sum(one.times_out_of_memory for one in run.processes)
    raised = _RAISED.search(run.output)
    failed = run.status != 0
    cannot_run = _why_not(run, gpu) if failed else None
    if failed and (times or raised):
        outcome = FitOutcome.OUT_OF_MEMORY
    elif failed and cannot_run:
        outcome = FitOutcome.CANNOT_RUN
    elif failed:
        outcome = FitOutcome.FAILED
    elif times:
        outcome = FitOutcome.WENT_ON
    elif together:
        outcome = FitOutcome.TOO_MUCH_TOGETHER
    else:
        outcome = FitOutcome.UNUSED if most is None else FitOutcome.FITS
    lines = [line for line in run.output.splitlines() if line.strip()]
    return Found(
        outcome=outcome,
        status=run.status,
        allocated=most.allocated if most else 0,
        reserved=most.reserved if most else 0,
        devices=len(devices),
        together=max((processes for _, processes in devices), default=1),
        retries=0 if times else sum(device.retries for one in run.processes for device in one.devices),
        times_out_of_memory=times,
        ran_out=next((one.ran_out for one in run.processes if one.ran_out is not None), None),
        message=_ADVICE.sub("", raised["message"]).strip() if raised else "",
        last_lines=tuple(lines[-_MOST_LINES:])
        if failed and not raised and outcome is not FitOutcome.CANNOT_RUN
        else (),
        expandable=any(one.expandable for one in run.processes),
        unknown=next((one.unknown for one in run.processes if one.unknown), None),
        without_statistics=any(one.without_statistics for one in run.processes),
        lacking=next((one.lacking for one in run.processes if one.lacking), None),
        cannot_run=cannot_run if outcome is FitOutcome.CANNOT_RUN else None,
        killed=sum(one.ended is None for one in run.processes),
    )


def _why_not(run: ProgramRun, gpu: Gpu) -> str | None:
    """Return why a program that failed cannot run on a GPU, as a clause; ``None`` where it failed by itself."""
    no_kernels = next((one.no_kernels for one in run.processes if one.no_kernels), None)
    if no_kernels and _NO_KERNEL_IMAGE in run.output:
        return f"{no_kernels}, as on a real one; a build for another CUDA may have them"
    return lacking_in(run.output, gpu.capability)


def _on_device(processes: Sequence[ProcessUsage], number: int) -> tuple[DeviceUsage, int]:
    """Return the largest sum of peaks on a device over processes that used it at the same time, and their number."""
    users = [(one, device) for one in processes for device in one.devices if device.device == number]
    sums = []
    # The maximum of concurrent processes is reached when one of them starts, so only starts are looked at.
    for at, _ in users:
        there = [
            device
            for one, device in users
            if one is at or (one.began <= at.began and (one.ended is None or one.ended > at.began))
        ]
        allocated, reserved = (sum(getattr(one, of) for one in there) for of in ("allocated", "reserved"))
        retries = sum(one.retries for one in there)
        sums.append((DeviceUsage(number, allocated, reserved, retries), len(there)))
    return max(sums, key=lambda one: one[0].reserved)


def exit_status(fits: Sequence[Fit], *, every: bool) -> int:
    """Return 0 where the program fits, 1 where memory ran out, 2 where neither is known.

    Args:
        fits: The outcomes by GPU.
        every: Whether it has to fit into each of the GPUs, or into one of them.
    """
    enough = all if every else any
    if fits and enough(one.fits for one in fits):
        return 0
    return 1 if any(one.plain.outcome in NOT_ENOUGH for one in fits) else 2


def ends_it(first: Found, *, every: bool) -> bool:
    """Return whether no other GPU needs to be tried after the first: the program uses none, or does not run at all.

    Where GPUs were asked for (``every``), a program that fails on one may run on the others.
    """
    return first.outcome is FitOutcome.UNUSED or (first.outcome is FitOutcome.FAILED and not every)
