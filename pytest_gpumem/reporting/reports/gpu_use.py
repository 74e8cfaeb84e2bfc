"""Make lines on a GPU's memory outside a test's allocator, for a failed test. Pure."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import UnitSystem, format_bytes
from pytest_gpumem.reporting.reports.layout import Screen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpumem.facts.values.gpu_use import GpuProcess, GpuUse

MOST_PROCESSES = 3
"""At most this many processes are listed one by one. Of the smaller processes, a line shows the number and the sum."""


def gpu_use_lines(
    uses: Sequence[GpuUse], units: UnitSystem, jobs_beside_torch: Mapping[str, int | None] = MappingProxyType({})
) -> list[str]:
    """Return lines on the processes that were on the GPUs before a test, and on the test's own bytes beside torch.

    Example:
        ``"other processes on cuda:0 when the test began: python (pid 4712) 24.10 GB, Xorg (pid 900) bytes unknown"`` and
        ``"beside torch: 545.26 MB on cuda:0 (CUDA context, libraries)"``
    """
    lines = []
    for use in uses:
        if use.processes:
            of_whom = "processes, perhaps this test's own among them," if use.may_include_own else "other processes"
            lines.append(
                f"{of_whom} on {use.device} when the test began: {', '.join(_processes(use.processes, units))}"
            )
    seen = [f"{format_bytes(use.beside_torch, units)} on {use.device}" for use in uses if use.beside_torch is not None]
    unseen = [use.device for use in uses if use.beside_torch is None]
    clauses = [f"{', '.join(seen)} (CUDA context, libraries)"] if seen else []
    if unseen:
        clauses.append(f"not seen on {', '.join(unseen)}, because NVML does not report this process's bytes")
    lines += [f"beside torch: {'; '.join(clauses)}"] if clauses else []
    for name, nbytes in jobs_beside_torch.items():
        seen_of_process = "not seen" if nbytes is None else f"at least {format_bytes(nbytes, units)}"
        lines.append(f"beside torch in {Screen().legible(name)}: {seen_of_process}")
    return lines


def _processes(processes: Sequence[GpuProcess], units: UnitSystem) -> list[str]:
    """Return a text for each of the first processes, and a text for all others."""
    texts = [
        f"{_name(process)} {'bytes unknown' if process.nbytes is None else format_bytes(process.nbytes, units)}"
        for process in processes[:MOST_PROCESSES]
    ]
    rest = processes[MOST_PROCESSES:]
    sizes = [process.nbytes for process in rest if process.nbytes is not None]
    if rest:
        at_least = "at least " if len(sizes) < len(rest) else ""
        texts.append(f"{len(rest)} more {at_least + format_bytes(sum(sizes), units) if sizes else 'bytes unknown'}")
    return texts


def _name(process: GpuProcess) -> str:
    if process.program is None:
        return f"pid {process.pid}"
    return f"{Screen().legible(process.program)} (pid {process.pid})"
