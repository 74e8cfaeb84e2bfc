"""Derive a program's outcome on an emulated GPU: whether the program fits into memory, and its memory usage. Pure functions.

For example, let two processes use an A100 40GB (42.30 GB) at the same time, reserve 25.00 GB and 16.50 GB, and exit with
status 0. Each process emulates a GPU for itself, so neither process runs out of memory. On a real A100, both processes would
share the memory, and would need 42.59 GB: 41.50 GB and two CUDA contexts of 0.55 GB. So the outcome is ``TOO_MUCH_TOGETHER``.
With 25.00 GB and 16.00 GB, the outcome is ``FITS``.
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
"""Words in CUDA's error if neither the program nor torch has kernels for the GPU."""
_MOST_LINES = 20


class FitOutcome(Enum):
    """The outcome of a run. The values appear in tables and in JSON."""

    FITS = "fits"
    WENT_ON = "ran out of memory and went on"
    OUT_OF_MEMORY = "out of memory"
    TOO_MUCH_TOGETHER = "out of memory together"
    """Each process fits alone, but not together with the other processes on the device."""
    CANNOT_RUN = "cannot run on it"
    """The GPU lacks a capability that the program needs, or the installed torch has no kernels for this GPU."""
    FAILED = "failed by itself"
    UNUSED = "no GPU memory used"


NOT_ENOUGH = (FitOutcome.WENT_ON, FitOutcome.OUT_OF_MEMORY, FitOutcome.TOO_MUCH_TOGETHER)
"""The outcomes in which the GPU's memory was too small."""


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """A finished run: the program's exit status, its output, and the memory usage of its processes."""

    status: int
    """The exit status, or a negative signal number if a signal killed the program: -9 for SIGKILL."""
    output: str
    """The last 64 KiB of the standard error, or of the standard output if the standard error is empty."""
    processes: tuple[ProcessUsage, ...]


@dataclass(frozen=True, slots=True)
class RunResult:
    """The outcome of a run on a GPU. ``allocated`` and ``reserved`` are the bytes on the device with the highest peak."""

    outcome: FitOutcome
    status: int
    allocated: int = 0
    reserved: int = 0
    devices: int = 0
    """The number of devices used by the program."""
    together: int = 1
    """The maximum number of processes on a device at the same time. The peaks of processes that ran at the same time are
    added up."""
    retries: int = 0
    """The number of allocations for which the allocator first had to free its cache, which is slow. 0 if memory ran out."""
    times_out_of_memory: int = 0
    ran_out: OutOfMemory | None = None
    message: str = ""
    """PyTorch's message in an uncaught out-of-memory error."""
    last_lines: tuple[str, ...] = ()
    """The last lines of the output, if the program failed with another error."""
    expandable: bool = False
    """True if the allocator's segments were expandable."""
    unknown: str | None = None
    """A clause about the uncomputed value on which the program depended; ``None`` without such a value."""
    without_statistics: bool = False
    """True if the program's allocator keeps no statistics, so the memory is unknown."""
    lacking: str | None = None
    """The reason why peaks may be too low, as a clause. For example, cuDNN's memory may not be included. ``None`` otherwise."""
    cannot_run: str | None = None
    """The reason for the outcome ``CANNOT_RUN``, as a clause. ``None`` for other outcomes."""
    killed: int = 0
    """The number of processes that used CUDA and were killed before they reported their memory usage."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The results of a program on a GPU: ``plain``, and ``expanded`` if a run with expandable segments was tried."""

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
    """Return the outcome and the memory usage of a run.

    Args:
        run: The finished run.
        gpu: The GPU, or several equal GPUs.
        context_bytes: The bytes in a CUDA context. Each process emulates a GPU for itself, and one context is already
            subtracted from that GPU's memory. So contexts are counted here only if several processes share a device.
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
        return f"{no_kernels}, as on a real GPU; a torch build for another CUDA release may have them"
    return lacking_in(run.output, gpu.capability)


def _on_device(processes: Sequence[ProcessUsage], number: int) -> tuple[DeviceUsage, int]:
    """Add up the peaks of all processes on a device at the same time. Return the largest sum, and the number of processes in
    it.
    """
    users = [(process, device) for process in processes for device in process.devices if device.device == number]
    sums = []
    # The sum is largest just after a process has started, so compute it only at the starts.
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
    """Return the exit status: 0 if the program fits, 1 if memory ran out, 2 otherwise, for example if the program failed by
    itself.

    Args:
        fits: The results on all GPUs.
        every: Whether the program has to fit into all GPUs. Otherwise, it has to fit into at least one GPU.
    """
    enough = all if every else any
    if fits and enough(fit.fits for fit in fits):
        return 0
    return 1 if any(fit.plain.outcome in NOT_ENOUGH for fit in fits) else 2


def ends_it(first: RunResult, *, every: bool) -> bool:
    """Return whether the result on the first GPU makes runs on further GPUs unnecessary.

    Further runs are unnecessary if the program used no GPU memory or failed by itself. With ``every``, a program with its own
    error still runs on the other GPUs, because the user named these GPUs.
    """
    return first.outcome is FitOutcome.UNUSED or (first.outcome is FitOutcome.FAILED and not every)
