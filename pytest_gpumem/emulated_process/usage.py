"""Usage of emulated GPUs by a program's processes. Each writes its own to a folder, which the process that started it reads."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """The peaks of PyTorch's allocator on one device over a process's life, in bytes."""

    device: int
    """Its number among all that are emulated, whatever ``CUDA_VISIBLE_DEVICES`` says."""
    allocated: int
    reserved: int
    retries: int
    """Allocations that succeeded or failed only after cached memory had been given back."""


@dataclass(frozen=True, slots=True)
class RanOut:
    """The first time that a process ran out of memory."""

    device: int
    wanted: int
    """Bytes that could not be allocated."""
    allocated: int
    reserved: int
    line: str
    """The program's line that allocated, or called ``backward()``: ``/path/train.py:12 step``. Empty where there is none."""
    without_tensor: int | None = None
    """Allocated bytes that no tensor of the program holds, if graphs of gradients can hold them: no backward had run, and the
    program had no optimizer. ``None`` otherwise."""


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Usage of emulated GPUs by one process."""

    began: int
    """The time of its first use of CUDA, in ns of the machine's monotonic clock."""
    ended: int | None
    """``None`` where it was killed before it could write it: then all else is as it was when it was last written."""
    devices: tuple[DeviceUsage, ...] = ()
    times_out_of_memory: int = 0
    ran_out: RanOut | None = None
    expandable: bool = False
    """True if the allocator's segments were expandable."""
    unknown: str | None = None
    """The first read of a value that is not computed and may have changed what came after, with its line."""
    without_statistics: bool = False
    """True for an allocator of the program's own, which keeps none: then nothing is known of what it took."""
    lacking: str | None = None
    """The reason why its peaks may be too low, as a clause, where they lack what cuDNN takes on a GPU."""
    no_kernels: str | None = None
    """The clause that torch has no kernels for the GPU, and for which it has; ``None`` where it has."""
    imported: tuple[str, ...] = ()
    """Modules of installed packages, in the order of their imports: those from before CUDA was used, and all of torch's."""


def write_usage(folder: Path, name: str, usage: ProcessUsage) -> None:
    """Write ``usage`` into ``folder``, in place of an earlier one of this name."""
    write_whole(folder / f"{name}.json", json.dumps(asdict(usage)))


def read_usages(folder: Path) -> tuple[ProcessUsage, ...]:
    """Return the usages in ``folder``, in the order in which the processes began to use CUDA."""
    found = []
    for path in folder.glob("*.json"):
        plain = json.loads(path.read_text(encoding="utf-8"))
        devices = tuple(DeviceUsage(**device) for device in plain["devices"])
        ran_out = None if plain["ran_out"] is None else RanOut(**plain["ran_out"])
        imported = tuple(plain["imported"])
        found.append(ProcessUsage(**{**plain, "devices": devices, "ran_out": ran_out, "imported": imported}))
    return tuple(sorted(found, key=lambda usage: usage.began))


def no_kernels(torch: str, architectures: Sequence[str], capability: tuple[int, int]) -> str | None:
    """Return a clause where a release of torch has no kernels for a GPU.

    Those compiled for ``sm_86`` run on GPUs of the same major version from 8.6 on; ``compute_90`` is compiled by the driver,
    for any from 9.0 on (CUDA C++ Programming Guide, "Application Compatibility").

    Args:
        torch: The release.
        architectures: What `torch.cuda.get_arch_list` returns.
        capability: The GPU's compute capability.
    """
    theirs = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", one) for one in architectures]
    built = [(one[1], (int(one[2]), int(one[3]))) for one in theirs if one]
    if not built or any(
        version <= capability and (kind == "compute" or version[0] == capability[0]) for kind, version in built
    ):
        return None
    major, minor = capability
    known = ", ".join(f"{one[0]}.{one[1]}" for one in sorted({version for _, version in built}))
    return f"torch {torch} has kernels for compute capability {known}, and none for {major}.{minor}"


def among_all(device: int, visible: str | None) -> int:
    """Return the number among all devices of the one that a process calls ``device``.

    Args:
        device: Its number in the process.
        visible: The process's ``CUDA_VISIBLE_DEVICES``. Devices that are named otherwise than by number are taken as they come.
    """
    numbers = [number.strip() for number in (visible or "").split(",")]
    return int(numbers[device]) if device < len(numbers) and numbers[device].isdigit() else device
