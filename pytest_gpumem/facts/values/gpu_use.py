"""A GPU's memory outside a test's own allocator: other processes' bytes, and this process's CUDA context and libraries."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_gpumem.facts.values.annotations import Count


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with a CUDA context on a GPU, as NVML lists it."""

    pid: Count
    """The process id. In a container, it may be the host's process id."""
    nbytes: Count | None = None
    """The process's bytes on the GPU; ``None`` if NVML does not report them."""
    program: str | None = None
    """The program's name, such as ``python``; ``None`` if this process cannot read the name."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """A GPU's memory outside the test's allocator, as NVML reports it. No verdict depends on this memory.

    Example: ``GpuUse("cuda:0", (GpuProcess(4712, 24_100_000_000, "python"),), beside_torch=545_259_520)``
    """

    device: str
    """The GPU, such as ``cuda:0``."""
    processes: tuple[GpuProcess, ...] = ()
    """The other programs' processes on the GPU when the test began, the largest first."""
    may_include_own: bool = False
    """True if ``processes`` may include this session's own processes, because NVML lists them by other process ids, or because
    their programs' names cannot be read."""
    beside_torch: Count | None = None
    """This process's bytes on the GPU minus the reserved bytes in torch's allocator: the CUDA context, libraries such as NCCL
    and cuBLAS, and CUDA graphs. ``None`` if NVML does not list this process or its bytes."""
