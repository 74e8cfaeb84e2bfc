"""Find out how many bytes other processes hold on GPUs beside torch: their CUDA contexts, libraries and graphs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pytest_gpumem.emulating.emulated_process.usage import ProcessUsage
    from pytest_gpumem.measuring.devices.contract import Device


@dataclass(eq=False, repr=False)
class ProcessBytes:
    """The highest bytes that NVML has reported for each process, summed over all GPUs."""

    gpus: Sequence[Device]
    """The GPUs that the test's own process sees."""
    by_pid: dict[int, int] = field(default_factory=dict)
    is_read: bool = False
    """True if NVML has listed processes."""

    def look(self, pids: Collection[int]) -> None:
        """Read the current bytes of the processes with ``pids``. This asks NVML once for each GPU."""
        sums = Counter[int]()
        for gpu in self.gpus:
            bytes_by_pid = gpu.bytes_by_pid()
            if bytes_by_pid is not None:
                self.is_read = True
                sums.update({pid: nbytes for pid, nbytes in bytes_by_pid.items() if pid in pids and nbytes is not None})
        for pid, nbytes in sums.items():
            self.by_pid[pid] = max(nbytes, self.by_pid.get(pid, 0))


def beside_torch(usages: Sequence[ProcessUsage], bytes_by_pid: Mapping[int, int]) -> dict[int, int | None]:
    """Return a lower bound for each process's bytes beside torch, by pid; ``None`` if they were not seen.

    Whenever NVML is read, torch has reserved at most its peak. For example, NVML reported at most 4.00 GB, and the peak of the
    reserved bytes is 3.40 GB, so at that moment the process held at least 0.60 GB beside torch.

    If a program replaced itself by ``exec``, both programs have the same pid, so none of their bytes count as seen.

    Args:
        usages: The processes' usages in the time in which NVML was read.
        bytes_by_pid: The highest bytes that NVML reported for each process.
    """
    programs = Counter(usage.process.pid for usage in usages)
    bounds: dict[int, int | None] = {}
    for usage in usages:
        pid = usage.process.pid
        bound = bytes_by_pid.get(pid, 0) - sum(device.reserved for device in usage.devices)
        bounds[pid] = bound if bound > 0 and programs[pid] == 1 else None
    return bounds
