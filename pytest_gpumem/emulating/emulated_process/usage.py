"""GPU memory usage of a program's processes. Each process writes a file, and the parent process reads all files."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.base.atomic_file import write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


SEEN = ".seen"
"""Suffix for a file beside the usages. A reporting process with the pid 4711 writes its command into ``4711.seen``."""


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """A process's peaks on an emulated GPU in bytes, from the start of the process to its end."""

    device: int
    """The GPU's index among all emulated GPUs, independent of ``CUDA_VISIBLE_DEVICES``."""
    allocated: int
    """The peak of allocated bytes in torch's allocator."""
    reserved: int
    """The peak of reserved bytes in torch's allocator."""
    retries: int
    """The number of times that the allocator found no free memory, released its cached memory and tried again."""


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The state of a GPU when a process first ran out of memory. All sizes are in bytes."""

    device: int
    """The GPU's index among all emulated GPUs."""
    wanted: int
    """Size of the failed allocation."""
    allocated: int
    """Allocated bytes before the failed allocation."""
    reserved: int
    """Reserved bytes before the failed allocation."""
    line: str
    """The program's line that allocated or called ``backward()``: ``/path/train.py:12 step``. Empty if unknown."""
    without_tensor: int | None = None
    """Allocated bytes outside the program's own tensors. Autograd graphs may keep them alive.

    ``None`` if graphs are not the reason, for example because a backward pass has run.
    """


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process among the other processes of its job."""

    pid: int = 0
    parent: int = 0
    """The parent's pid."""
    started: int = 0
    """Start time in ticks of the system's clock, which orders siblings. 0 if unknown."""
    command: tuple[str, ...] = ()
    """The command with the interpreter: ``("/usr/bin/python", "-u", "train.py", "--lr", "0.1")``."""
    name: str = ""
    """The name from `multiprocessing`, such as ``SpawnProcess-1``. Empty for other processes."""
    rank: int | None = None
    """``RANK`` in the process's environment, set by torchrun."""
    local_rank: int | None = None
    """``LOCAL_RANK`` in the process's environment."""
    world: int | None = None
    """``WORLD_SIZE`` in the process's environment."""
    restart: int = 0
    """The number of times that torchrun has started all ranks again before it started this process."""


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """A process's usage of GPU memory. ``devices`` has the GPUs on which the process reserved memory."""

    began: int
    """Time when the process first used CUDA, in ns on the machine's monotonic clock."""
    ended: int | None
    """Time when the process ended. ``None`` if the process was killed; then all other values are from before its end."""
    devices: tuple[DeviceUsage, ...] = ()
    times_out_of_memory: int = 0
    """The number of times that the process ran out of memory, even if the program caught the error."""
    ran_out: OutOfMemory | None = None
    """The state when the process first ran out of memory; ``None`` if this did not happen."""
    expandable: bool = False
    """True if the allocator used expandable segments."""
    unknown: str | None = None
    """A text about the first read of an uncomputed value, with its line, if the read may have changed the peaks."""
    without_statistics: bool = False
    """True if the program has its own allocator, which keeps no statistics, so the process's memory is unknown."""
    lacking: str | None = None
    """The reason why peaks may be too low, if cuDNN's workspaces are not fully known."""
    no_kernels: str | None = None
    """The result of the function `no_kernels` for the process's GPU."""
    imported: tuple[str, ...] = ()
    """Imported modules from installed packages, in import order. After the first use of CUDA, only torch's modules count."""
    process: ProcessIdentity = ProcessIdentity()
    """The process itself."""


def write_usage(folder: Path, name: str, usage: ProcessUsage) -> None:
    """Write a process's usage to a file called ``name`` in ``folder``. An earlier file with this name is replaced."""
    write_atomically(folder / f"{name}.json", json.dumps(asdict(usage)))


def read_usages(folder: Path) -> tuple[ProcessUsage, ...]:
    """Read all processes' usages from ``folder``, in the order in which the processes first used CUDA."""
    usages = []
    for path in folder.glob("*.json"):
        plain = json.loads(path.read_text(encoding="utf-8"))
        devices = tuple(DeviceUsage(**device) for device in plain["devices"])
        ran_out = None if plain["ran_out"] is None else OutOfMemory(**plain["ran_out"])
        changed = {
            "devices": devices,
            "ran_out": ran_out,
            "imported": tuple(plain["imported"]),
            "process": ProcessIdentity(**{**plain["process"], "command": tuple(plain["process"]["command"])}),
        }
        usages.append(ProcessUsage(**{**plain, **changed}))
    return tuple(sorted(usages, key=lambda usage: usage.began))


def no_kernels(torch: str, architectures: Sequence[str], capability: tuple[int, int]) -> str | None:
    """Return a message if a release of torch has no kernels that run on a GPU; otherwise ``None``.

    Kernels for ``sm_86`` run on GPUs with compute capability 8.6 or higher, but below 9.0. From PTX for ``compute_90``, the
    driver compiles kernels for any GPU with 9.0 or higher (CUDA C++ Programming Guide, "Application Compatibility").

    Example:
        ``no_kernels("2.9.0", ["sm_80", "sm_90"], (12, 0))`` returns ``"torch 2.9.0 has kernels for compute capability 8.0,
        9.0, and none for 12.0"``.

    Args:
        torch: The torch release.
        architectures: The result of `torch.cuda.get_arch_list`.
        capability: The GPU's compute capability.
    """
    matches = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", architecture) for architecture in architectures]
    built = [(match[1], (int(match[2]), int(match[3]))) for match in matches if match]
    if not built or any(
        version <= capability and (kind == "compute" or version[0] == capability[0]) for kind, version in built
    ):
        return None
    major, minor = capability
    built_for = ", ".join(f"{version[0]}.{version[1]}" for version in sorted({version for _, version in built}))
    return f"torch {torch} has kernels for compute capability {built_for}, and none for {major}.{minor}"


def among_all(device: int, visible: str | None) -> int:
    """Convert a GPU's index in a process to its index in the machine.

    Example: if ``CUDA_VISIBLE_DEVICES=2,3``, GPU 0 in the process is GPU 2 in the machine.

    Args:
        device: The GPU's index in the process.
        visible: The process's ``CUDA_VISIBLE_DEVICES``. If it has names instead of numbers, the result is ``device``.
    """
    numbers = [number.strip() for number in (visible or "").split(",")]
    return int(numbers[device]) if device < len(numbers) and numbers[device].isdigit() else device
