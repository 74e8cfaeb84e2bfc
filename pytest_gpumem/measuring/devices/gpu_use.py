"""Decide which processes on a GPU are other programs', and how much of its memory this process holds beside torch. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.facts.values.gpu_use import GpuProcess, GpuUse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def gpu_use_of(
    gpu: str,
    bytes_by_pid: Mapping[int, int | None],
    own_pid: int,
    is_ours: Callable[[int], bool],
    workers: int,
    reserved: int,
    program_of: Callable[[int], str | None],
) -> GpuUse:
    """Return a GPU's memory outside this process's allocator.

    NVML may list processes by the pids of a container's host. Then this process's pid is missing in the list, so nothing is
    known about a single listed process. If there are more processes than ``workers``, all are returned, without names. For
    example, a session with 1 worker in a container and 2 listed processes: either of them may be this process.

    Args:
        gpu: The GPU, such as ``cuda:0``.
        bytes_by_pid: The processes with a CUDA context on the GPU, from `NvmlGpu.bytes_by_pid`.
        own_pid: This process's pid.
        is_ours: Returns whether the process with a pid belongs to this session.
        workers: The number of this session's processes that have used the GPU, as far as known: pytest-xdist's workers, or 0
            if this process could not use the GPU.
        reserved: The reserved bytes in this process's allocator.
        program_of: Returns a process's program by its pid; ``None`` if the process is not visible.
    """
    is_own_listed = own_pid in bytes_by_pid
    if is_own_listed:
        pids = [pid for pid in bytes_by_pid if pid != own_pid and not is_ours(pid)]
        processes = [GpuProcess(pid, bytes_by_pid[pid], program_of(pid)) for pid in pids]
    else:
        are_more = len(bytes_by_pid) > workers
        processes = [GpuProcess(pid, nbytes) for pid, nbytes in bytes_by_pid.items() if are_more]
    processes.sort(key=lambda process: (-(process.nbytes or 0), process.pid))
    # On the host, another process may by chance have this process's pid. Then this process is listed by a pid that is not
    # visible in the container.
    may_include_own = any(process.program is None for process in processes)
    own_bytes = bytes_by_pid.get(own_pid)
    # A process with fewer bytes than torch has reserved here is another process with this pid.
    beside_torch = None if own_bytes is None or own_bytes < reserved else own_bytes - reserved
    return GpuUse(gpu, tuple(processes), may_include_own, beside_torch)
