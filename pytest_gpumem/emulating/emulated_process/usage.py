"""GPU memory usage of a program's processes. Each process writes a file to a folder, and the parent process reads them."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.base.atomic_file import write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """The peaks of PyTorch's allocator on a device during the life of a process, in bytes."""

    device: int
    """Index among all emulated devices, independent of ``CUDA_VISIBLE_DEVICES``."""
    allocated: int
    reserved: int
    retries: int
    """Number of allocations that were tried again after the allocator had released cached memory."""


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The state when a process first ran out of memory. Figures are in bytes."""

    device: int
    wanted: int
    """Size of the failed allocation."""
    allocated: int
    reserved: int
    line: str
    """The program's line that allocated or called ``backward()``: ``/path/train.py:12 step``. May be empty."""
    without_tensor: int | None = None
    """Allocated bytes that belong to no tensor in the program, so gradient graphs may keep them.

    ``None`` if a backward pass had run or the program had an optimizer.
    """


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """GPU memory usage of a process."""

    began: int
    """Time of the first use of CUDA, in ns on the machine's monotonic clock."""
    ended: int | None
    """Time of the process's end. ``None`` if it was killed; then all figures are from the last file that it wrote."""
    devices: tuple[DeviceUsage, ...] = ()
    times_out_of_memory: int = 0
    ran_out: OutOfMemory | None = None
    expandable: bool = False
    """True if the allocator used expandable segments."""
    unknown: str | None = None
    """The first read of an uncomputed value that may have changed the program's memory, with its line."""
    without_statistics: bool = False
    """True if the program set its own allocator, which keeps no statistics, so its memory is unknown."""
    lacking: str | None = None
    """The reason why peaks may be too low, as a clause, if cuDNN's memory is not fully known."""
    no_kernels: str | None = None
    """A clause from `no_kernels`, if torch has no kernels for the GPU."""
    imported: tuple[str, ...] = ()
    """Modules from installed packages in import order: all that were imported before CUDA was used, and all from torch."""


def write_usage(folder: Path, name: str, usage: ProcessUsage) -> None:
    """Write a usage file into ``folder``. An earlier file with the same name is replaced."""
    write_atomically(folder / f"{name}.json", json.dumps(asdict(usage)))


def read_usages(folder: Path) -> tuple[ProcessUsage, ...]:
    """Return the usages in ``folder``, in the order in which the processes began to use CUDA."""
    usages = []
    for path in folder.glob("*.json"):
        plain = json.loads(path.read_text(encoding="utf-8"))
        devices = tuple(DeviceUsage(**device) for device in plain["devices"])
        ran_out = None if plain["ran_out"] is None else OutOfMemory(**plain["ran_out"])
        imported = tuple(plain["imported"])
        usages.append(ProcessUsage(**{**plain, "devices": devices, "ran_out": ran_out, "imported": imported}))
    return tuple(sorted(usages, key=lambda usage: usage.began))


def no_kernels(torch: str, architectures: Sequence[str], capability: tuple[int, int]) -> str | None:
    """Return a clause if a release of torch has no kernels for a GPU; otherwise ``None``.

    Kernels for ``sm_86`` run on GPUs with the same major version from 8.6 on. The driver compiles ``compute_90`` for any GPU
    from 9.0 on (CUDA C++ Programming Guide, "Application Compatibility").

    Example:
        ``no_kernels("2.9.0", ["sm_80", "sm_90"], (12, 0))`` returns ``"torch 2.9.0 has kernels for compute capability 8.0,
        9.0, and none for 12.0"``.

    Args:
        torch: The torch release.
        architectures: Return value of `torch.cuda.get_arch_list`.
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
    """Convert a process's device index to the index among all devices in the machine.

    Example: with ``CUDA_VISIBLE_DEVICES=2,3``, device 0 in the process is device 2 among all.

    Args:
        device: Index of the device in the process.
        visible: The process's ``CUDA_VISIBLE_DEVICES``. If it contains names instead of numbers, ``device`` is returned.
    """
    numbers = [number.strip() for number in (visible or "").split(",")]
    return int(numbers[device]) if device < len(numbers) and numbers[device].isdigit() else device
