"""Decide a program's outcome on an emulated GPU: whether the program fits, and its memory usage. Pure functions.

For example, let two processes use an A100 40GB (42.30 GB) at the same time, reserve 25.00 GB and 16.50 GB, and exit with
status 0. Each emulated process has a GPU to itself, so neither runs out of memory. But their 41.50 GB and two CUDA contexts of
0.55 GB are 42.59 GB in all, so the outcome is ``TOO_MUCH_TOGETHER``. With 25.00 GB and 16.00 GB the outcome is ``FITS``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from pytest_gpumem.emulating.emulated_process.usage import DeviceUsage
from pytest_gpumem.measuring.devices.capability import lacking_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.emulating.emulated_process.usage import OutOfMemory, ProcessUsage
    from pytest_gpumem.emulating.emulation.gpus import Gpu

_RAISED = re.compile(r"torch\.(?:cuda\.)?OutOfMemoryError: (?P<message>.+)")
_ADVICE = re.compile(r" If reserved but unallocated memory is large.*| See documentation for.*", re.DOTALL)
_NO_KERNEL_IMAGE = "no kernel image is available"
"""The words in CUDA's error if neither the program nor torch has kernels for the GPU."""
_MOST_LINES = 20


class FitOutcome(Enum):
    """A run's outcome. The value is a phrase for people and for programs."""

    FITS = "fits"
    WENT_ON = "ran out of memory and went on"
    OUT_OF_MEMORY = "out of memory"
    TOO_MUCH_TOGETHER = "out of memory together"
    """Each process has room on its own, but not with the other processes on the device."""
    CANNOT_RUN = "cannot run on it"
    """The GPU lacks a capability that the program needs, or the installed torch has no kernels for this GPU."""
    FAILED = "failed by itself"
    UNUSED = "no GPU memory used"


NOT_ENOUGH = (FitOutcome.WENT_ON, FitOutcome.OUT_OF_MEMORY, FitOutcome.TOO_MUCH_TOGETHER)
"""Outcomes that more memory would change."""


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """A program's end, and its processes' memory usage."""

    status: int
    """The exit status, or a negative signal number if a signal killed the program: -9 for SIGKILL."""
    output: str
    """The last 64 KiB from the standard error, or from the output if the standard error is empty."""
    processes: tuple[ProcessUsage, ...]


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run's outcome on a GPU. Bytes belong to the device with the highest peak."""

    outcome: FitOutcome
    status: int
    allocated: int = 0
    reserved: int = 0
    devices: int = 0
    """The number of used devices."""
    together: int = 1
    """The most processes on a device at the same time. Their peaks are added up."""
    retries: int = 0
    """Allocations that succeeded only after the allocator had freed its cache, which is slow. 0 if memory ran out."""
    times_out_of_memory: int = 0
    ran_out: OutOfMemory | None = None
    message: str = ""
    """PyTorch's message in an uncaught out-of-memory error."""
    last_lines: tuple[str, ...] = ()
    """The last lines of the output, if the program failed with another error."""
    expandable: bool = False
    """True if the allocator's segments were expandable."""
    unknown: str | None = None
    """The uncomputed value on which the program depended, as a clause."""
    without_statistics: bool = False
    """True if the program has its own allocator, which keeps no statistics, so the memory is unknown."""
    lacking: str | None = None
    """A clause that says why peaks may be too low, if cuDNN's memory is not included."""
    cannot_run: str | None = None
    """A clause that says why the program cannot run on the GPU, if the outcome is ``CANNOT_RUN``."""
    killed: int = 0
    """Processes that used CUDA and were killed before they wrote their usage."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A GPU with the program's outcome, and the outcome with expandable segments if they were tried."""

    gpu: Gpu
    plain: RunResult
    expanded: RunResult | None = None

    @property
    def fits(self) -> bool:
        return self.plain.outcome is FitOutcome.FITS

    @property
    def fits_expanded(self) -> bool:
        return not self.fits and self.expanded is not None and self.expanded.outcome is FitOutcome.FITS


def result_of(run: ProgramRun, gpu: Gpu, context_bytes: int) -> RunResult:
    """Return a run's outcome.

    Args:
        run: The program's end and its processes' usage.
        gpu: The GPU, or several equal GPUs.
        context_bytes: The bytes for each process's CUDA context. The emulated GPU has subtracted a single process's
            context. Contexts count here only if several processes share a device, because each emulated process has a GPU to
            itself.
    """
    numbers = sorted({device.device for process in run.processes for device in process.devices})
    devices = [_on_device(run.processes, number) for number in numbers]
    most = max((usage for usage, _ in devices), key=lambda usage: usage.reserved, default=None)
    together = any(
        processes > 1 and usage.reserved + processes * context_bytes > gpu.total_bytes for usage, processes in devices
    )
    times = sum(process.times_out_of_memory for process in run.processes)
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
    return RunResult(
        outcome=outcome,
        status=run.status,
        allocated=most.allocated if most else 0,
        reserved=most.reserved if most else 0,
        devices=len(devices),
        together=max((processes for _, processes in devices), default=1),
        retries=0 if times else sum(device.retries for process in run.processes for device in process.devices),
        times_out_of_memory=times,
        ran_out=next((process.ran_out for process in run.processes if process.ran_out is not None), None),
        message=_ADVICE.sub("", raised["message"]).strip() if raised else "",
        last_lines=tuple(lines[-_MOST_LINES:])
        if failed and not raised and outcome is not FitOutcome.CANNOT_RUN
        else (),
        expandable=any(process.expandable for process in run.processes),
        unknown=next((process.unknown for process in run.processes if process.unknown), None),
        without_statistics=any(process.without_statistics for process in run.processes),
        lacking=next((process.lacking for process in run.processes if process.lacking), None),
        cannot_run=cannot_run if outcome is FitOutcome.CANNOT_RUN else None,
        killed=sum(process.ended is None for process in run.processes),
    )


def _why_not(run: ProgramRun, gpu: Gpu) -> str | None:
    """Return the reason why a failed program cannot run on a GPU, or ``None`` if the program failed by itself."""
    no_kernels = next((process.no_kernels for process in run.processes if process.no_kernels), None)
    if no_kernels and _NO_KERNEL_IMAGE in run.output:
        return f"{no_kernels}, as on a real GPU; a build for another CUDA may have them"
    return lacking_in(run.output, gpu.capability)


def _on_device(processes: Sequence[ProcessUsage], number: int) -> tuple[DeviceUsage, int]:
    """Return the largest sum of concurrent processes' peaks on a device, and the number of processes."""
    users = [(process, device) for process in processes for device in process.devices if device.device == number]
    sums = []
    # The sum grows only when a process starts, so only starts are examined.
    for start, _ in users:
        concurrent = [
            device
            for process, device in users
            if process is start
            or (process.began <= start.began and (process.ended is None or process.ended > start.began))
        ]
        allocated, reserved = (
            sum(getattr(usage, figure) for usage in concurrent) for figure in ("allocated", "reserved")
        )
        retries = sum(usage.retries for usage in concurrent)
        sums.append((DeviceUsage(number, allocated, reserved, retries), len(concurrent)))
    return max(sums, key=lambda total: total[0].reserved)


def exit_status(fits: Sequence[Fit], *, every: bool) -> int:
    """Return the exit status: 0 if the program fits, 1 if memory ran out, 2 if neither is known.

    Args:
        fits: The outcomes by GPU.
        every: Whether the program has to fit into each GPU. Otherwise a single GPU is enough.
    """
    enough = all if every else any
    if fits and enough(fit.fits for fit in fits):
        return 0
    return 1 if any(fit.plain.outcome in NOT_ENOUGH for fit in fits) else 2


def ends_it(first: RunResult, *, every: bool) -> bool:
    """Return whether no further GPU needs to be tried after the first.

    No further GPU is needed if the program used no GPU memory or failed by itself. But with ``every``, a failed program is
    still tried on the other GPUs, because the user named them.
    """
    return first.outcome is FitOutcome.UNUSED or (first.outcome is FitOutcome.FAILED and not every)
