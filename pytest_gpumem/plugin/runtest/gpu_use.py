"""Read a GPU's memory outside a test's allocator before and after the test, and show this memory if the test fails."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.facts.values.gpu_use import GpuUse
from pytest_gpumem.measuring.explain.recording import is_out_of_memory
from pytest_gpumem.reporting.reports.gpu_use import gpu_use_lines

if TYPE_CHECKING:
    import pytest

    from pytest_gpumem.base.units import UnitSystem
    from pytest_gpumem.judging.gate.verdict import FailedIn
    from pytest_gpumem.measuring.devices.contract import Device

_SECTION = "gpumem GPU memory"
_FULL = ("out of memory", "STATUS_ALLOC_FAILED")
"""Parts of error messages if CUDA, cuBLAS or cuDNN cannot allocate memory outside torch's allocator."""


def gpu_uses(device: Device) -> tuple[GpuUse, ...]:
    """Return the memory outside this process's allocator on each GPU that the process uses. This asks NVML once for each GPU.

    Devices without NVML are left out.
    """
    uses = [gpu.gpu_use() for gpu in device.everywhere if gpu.is_used]
    return tuple(use for use in uses if use is not None)


def at_end(device: Device, at_start: tuple[GpuUse, ...]) -> tuple[GpuUse, ...]:
    """Return the uses at a test's end: the current bytes beside torch, and the other processes when the test began.

    If the test was the first to use a GPU, the other processes on this GPU are unknown, because they were not read.
    """
    begun = {use.device: use for use in at_start}
    for use in gpu_uses(device):
        begun[use.device] = replace(begun.get(use.device, GpuUse(use.device)), beside_torch=use.beside_torch)
    return tuple(begun.values())


def report_full_gpu(
    item: pytest.Item,
    device: Device,
    at_start: tuple[GpuUse, ...],
    error: BaseException,
    when: FailedIn,
    units: UnitSystem,
) -> None:
    """Add the memory outside the allocator to a test's report, if ``error`` means that a GPU's memory ran out."""
    if not isinstance(error, RuntimeError):
        return
    if is_out_of_memory(error) or any(part in str(error) for part in _FULL):
        lines = gpu_use_lines(at_end(device, at_start), units)
        if lines:
            item.add_report_section(when, _SECTION, "\n".join(lines))
