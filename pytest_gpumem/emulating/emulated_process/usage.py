"""Memory usage of a program's processes, on GPUs or on the CPU. Each writes a file, and the parent process reads all files."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem import __version__
from pytest_gpumem.base.atomic_file import write_atomically
from pytest_gpumem.emulating.emulated_process.exit_status import exit_status
from pytest_gpumem.emulating.emulated_process.marks import SEEN, bytes_of, mark_in, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


MOST_BYTES = 256 * 2**20
"""A larger report is not read."""

_RELEASE = "release"
"""The key for this package's release in a report."""
_LONGEST_RELEASE = 40
_INVALID = "wrote an invalid report on its GPU memory"
_SAME = "Install the same release in both"
TOO_LONG = f"{_INVALID}: the report has more than {MOST_BYTES >> 20} MiB"
"""A clause about a process with a report that is too long."""

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
"""Variables set by torchrun and deepspeed, by Open MPI's mpirun, and by other launchers of MPI programs."""
_LOCAL_RANK = "LOCAL_RANK"
"""Variable with the rank on this machine. Lightning sets no other variable for its processes."""
_STEP_TASKS = "SLURM_STEP_NUM_TASKS"
_MOST_DIGITS = 9

RECORD = "record"
"""Name of a file beside the usages. While it exists, processes record their allocations."""


Frame = tuple[str, int, str]
"""A Python frame: the file's path, the line and the function's name."""


class InvalidReport(ValueError):
    """A process's report cannot be read, for example because another release wrote it."""


@dataclass(frozen=True, slots=True)
class RecordedBlocks:
    """Equal memory blocks in a process that records its allocations.

    Example:
        ``RecordedBlocks(8192, 2, "other", "", "float32[1024]", (("/srv/serve.py", 9, "ask"),))`` are two tensors in a list.
    """

    nbytes: int
    """The requested bytes, summed over the blocks."""
    count: int
    category: str
    """``parameter``, ``buffer``, ``gradient`` or ``optimizer state`` if a module or optimizer refers to the blocks at the
    window's begin or end, ``workspace``, ``temporary`` if backward made the blocks, or ``other``."""
    module: str
    """The path of the module that ran, or that refers to the blocks. In backward, the module that created the autograd node.
    Empty if there is none."""
    tensor: str
    """The dtype and shape of a tensor that refers to the whole block at the window's begin or end, or for which the block was
    allocated in the window. Empty if all are unknown."""
    frames: tuple[Frame, ...] = ()
    """The allocation's call stack, innermost frame first. Empty for blocks from before the window, and in a thread
    without Python code, such as autograd's."""
    holder: str | None = None
    """The path to the object that keeps the blocks alive: ``serve.cache[...]``. Empty if no holder was found, and ``None`` if
    none was searched. Only retained blocks of a running process have holders."""
    operator: str = ""
    """The operator that allocated the blocks, ``mm``, or the autograd node in backward, ``MmBackward0``. Empty if unknown."""
    node_frames: tuple[Frame, ...] = ()
    """The call stack that created the autograd node, innermost frame first. Empty outside of backward, or if unknown."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The blocks on a GPU in a window whose allocations were recorded."""

    at_peak: tuple[RecordedBlocks, ...] = ()
    """The blocks at the peak."""
    retained: tuple[RecordedBlocks, ...] = ()
    """The blocks that were allocated in the window and are live at its end."""
    modules: tuple[str, ...] = ()
    """The paths of all modules in the process's models."""
    freed: tuple[RecordedBlocks, ...] = ()
    """The blocks from before the window that were freed in it."""


class Workspaces(NamedTuple):
    """The workspaces on a GPU in bytes."""

    total: int = 0
    once: int = 0
    """The bytes if a single thread multiplied matrices."""
    addresses: frozenset[int] = frozenset()

    @property
    def by_chance(self) -> int:
        """The bytes of workspaces that exist because threads ran at the same time."""
        return self.total - self.once


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """A process's memory on a GPU or on the CPU, in bytes.

    Peaks count from the process's start, or from the begin of its window.
    """

    device: int
    """The GPU's index among all GPUs, independent of ``CUDA_VISIBLE_DEVICES``; 0 for the CPU."""
    allocated: int
    """The peak of allocated bytes in torch's allocator."""
    reserved: int
    """The peak of reserved bytes in torch's allocator."""
    retries: int
    """The number of times that the allocator found no free memory, released its cached memory and tried again."""
    requested: int = 0
    """The peak of requested bytes. Unlike allocated bytes, they do not depend on blocks that earlier tensors left behind.

    In an answer to a request, the workspaces of several threads count once, because chance decides their number."""
    live: int = 0
    """The requested bytes in tensors at the time of the report. An answer to a request leaves workspaces out."""
    live_before: int = 0
    """The requested bytes in tensors when the window began, without workspaces."""
    allocations: int = 0
    """The number of allocations since the process's start, or since the begin of its window."""
    recorded: Recorded | None = None
    """The blocks, if the process recorded its allocations."""
    live_first: int = 0
    """The requested bytes in tensors when the process's first window began. The test's process adds this value."""
    published: int | None = None
    """The bytes in tensors that the process published (`shared_bytes`) when it wrote this report, in allocated bytes.

    ``None`` if it did not publish each change of its bytes."""


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
    started: int = 0
    """Start time in ticks of the system's clock, which orders siblings. 0 if unknown."""
    command: tuple[str, ...] = ()
    """The command with the interpreter: ``("/usr/bin/python", "-u", "train.py", "--lr", "0.1")``."""
    name: str = ""
    """The name from `multiprocessing`, such as ``SpawnProcess-1``. Empty for other processes."""
    rank: int | None = None
    """The rank from `rank_in` for the process's environment."""
    rank_variable: str = ""
    """The variable with the rank: ``RANK``. Empty without a rank."""
    local_rank: int | None = None
    """The rank on this machine."""
    restart: int = 0
    """The number of times that torchrun has started all ranks again before it started this process."""
    parent: tuple[str, ...] = ()
    """The command of the parent process when this process first used the device. Empty if it is unknown."""
    parent_pid: int = 0
    """The parent's pid at this time."""


def rank_in(environment: Mapping[str, str]) -> tuple[int | None, str]:
    """Return a process's rank and the variable with the rank. If no launcher has set a variable, return ``None`` and ``""``.

    ``SLURM_PROCID`` is 0 in every batch script, and its children inherit it. Only ``srun`` sets ``SLURM_STEP_NUM_TASKS``. The
    rank on this machine counts if no variable has the rank among all machines.
    """
    of_srun = () if _number(environment.get(_STEP_TASKS)) in (None, 1) else ("SLURM_PROCID",)
    numbers = ((_number(environment.get(name)), name) for name in (*_RANKS, *of_srun, _LOCAL_RANK))
    return next(((number, name) for number, name in numbers if number is not None), (None, ""))


def local_rank_in(environment: Mapping[str, str]) -> int | None:
    """Return a process's rank on this machine; ``None`` if no launcher has set it."""
    return _number(environment.get(_LOCAL_RANK))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) <= _MOST_DIGITS else None


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """A process's usage of memory. ``devices`` has the GPUs on which the process reserved memory, or the CPU."""

    began: int
    """Time when the process first used CUDA, or allocated on the CPU, in ns on the machine's monotonic clock."""
    ended: int | None
    """Time when the process ended; ``None`` in the report of a running process. A killed process leaves such a report."""
    devices: tuple[DeviceUsage, ...] = ()
    times_out_of_memory: int = 0
    """The number of times that the process ran out of memory, even if the program caught the error."""
    ran_out: OutOfMemory | None = None
    """The state when the process first ran out of memory; ``None`` if this did not happen."""
    expandable: bool = False
    """True if the allocator used expandable segments. Always false in a measured job."""
    unknown: str | None = None
    """A text about the first read of an uncomputed value, with its line, if the read may have changed the peaks."""
    invalid: str | None = None
    """A text about the first read of an uncomputed value, with its line, after which the peaks mean nothing."""
    without_statistics: bool = False
    """True if the allocator keeps no statistics, so the process's memory is unknown."""
    lacking: str | None = None
    """The reason why peaks may be too low, if cuDNN's workspaces are not fully known."""
    no_kernels: str | None = None
    """The result of the function `no_kernels` for the process's GPU."""
    imported: tuple[str, ...] = ()
    """Imported modules from installed packages, in import order. After the first use of CUDA, only torch's modules count."""
    process: ProcessIdentity = ProcessIdentity()
    """The process itself."""
    window: int | None = None
    """The number of the window in which the figures were read. ``None`` if the process began after the window's begin."""
    unrecorded: str | None = None
    """The reason why the process did not record its allocations, although the test asked for a recording."""
    written: int = 0
    """Time of this report in the same ticks as `ProcessIdentity.started`. 0 if unknown."""
    status: int | None = None
    """An ended process's exit status, or the ending signal's negative number. ``None`` if unknown."""


def ticks_now() -> int:
    """Return the current time in ticks since the machine started, as in `ProcessIdentity.started`; 0 if unknown."""
    return ticks_of(time.clock_gettime(time.CLOCK_BOOTTIME)) if hasattr(time, "CLOCK_BOOTTIME") else 0


def ticks_of(seconds: float) -> int:
    """Return a time in ticks as in `ProcessIdentity.started`. ``seconds`` are those since the machine started."""
    return int(seconds * os.sysconf("SC_CLK_TCK"))


def write_usage(folder: Path, name: str, usage: ProcessUsage) -> None:
    """Write a process's usage to a file called ``name`` in ``folder``. An earlier file with this name is replaced."""
    write_atomically(folder / f"{name}.json", usage_text(usage), is_lasting=False)


@dataclass(frozen=True, slots=True)
class Reports:
    """The reports in a folder, each with its file."""

    usages: Mapping[Path, ProcessUsage]
    """The usages, in the order of `ProcessUsage.began`."""
    invalid: Mapping[Path, str]
    """A sentence for each file that is not a report from this release."""


def read_reports(folder: Path) -> Reports:
    """Read all processes' usages from ``folder``."""
    usages: dict[Path, ProcessUsage] = {}
    invalid: dict[Path, str] = {}
    for path in folder.glob("*.json"):
        try:
            if path.stat().st_size > MOST_BYTES:
                raise InvalidReport(TOO_LONG)
            usage = usage_from(path.read_bytes())
            status = exit_status(path)
            usages[path] = usage if status is None else replace(usage, status=status)
        except FileNotFoundError:
            continue  # the process has ended, and its folder is removed
        except (OSError, InvalidReport) as error:
            reason = f"wrote a report that cannot be read: {error}" if isinstance(error, OSError) else str(error)
            pid = path.name.partition("-")[0]
            command = text_of(mark_in(bytes_of(folder / f"{pid}{SEEN}"))[0])
            invalid[path] = f"`{command}` {reason}" if command else f"process {pid} {reason}"
    return Reports(dict(sorted(usages.items(), key=lambda entry: entry[1].began)), invalid)


def read_usages(folder: Path) -> tuple[ProcessUsage, ...]:
    """Read all processes' usages from ``folder``, in the order of `ProcessUsage.began`.

    Raises:
        InvalidReport: A file is not a report from this release.
    """
    reports = read_reports(folder)
    for sentence in reports.invalid.values():
        raise InvalidReport(sentence)
    return tuple(reports.usages.values())


def usage_text(usage: ProcessUsage) -> str:
    """Return a process's usage as JSON in a single line, for `usage_from`."""
    return json.dumps({_RELEASE: __version__, **asdict(usage)})


def usage_from(text: str | bytes) -> ProcessUsage:
    """Return the usage in a text from `usage_text`.

    The process may run in another virtual environment, with another release of this package.

    Raises:
        InvalidReport: The text comes from another release, or from elsewhere. The error is a clause about the process:
            ``runs pytest-gpumem 0.1.0, and this session 0.2.0. Install the same release in both``.
    """
    from pytest_gpumem.facts.values.plain import from_plain
    from pytest_gpumem.facts.values.plain_error import PlainError

    try:
        plain = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidReport(f"{_INVALID}: the report is not JSON, or is truncated") from None
    release = plain.pop(_RELEASE, None) if isinstance(plain, dict) else None
    if isinstance(release, str) and release != __version__:
        shown = ascii(release[:_LONGEST_RELEASE])[1:-1]
        raise InvalidReport(f"runs pytest-gpumem {shown}, and this session {__version__}. {_SAME}")
    try:
        if isinstance(plain, dict) and release is None:
            raise PlainError("is missing", _RELEASE)
        return from_plain(ProcessUsage, plain)
    except (PlainError, RecursionError) as error:
        raise InvalidReport(f"{_INVALID}: {error}. {_SAME}") from None


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
