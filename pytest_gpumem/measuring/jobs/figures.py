"""A job's figures, computed from its processes' usage, and a name for each process. All functions are pure.

Example: ``torchrun --nproc-per-node=2 train.py`` starts two processes with peaks of 3.2 GB on ``cuda:0`` and 3.4 GB on
``cuda:1``. Their names are ``train.py rank 0`` and ``train.py rank 1``. The job's figure is 3.4 GB, the largest figure on any
GPU. If both processes had used ``cuda:0`` the job's figure would be the sum, 6.6 GB.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from pathlib import PurePath
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from pytest_gpumem.base.shown_command import shown_words
from pytest_gpumem.base.units import counted, format_bytes, rounded
from pytest_gpumem.facts.values.process import ProcessDetails

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from pytest_gpumem.emulating.emulated_process.usage import DeviceUsage, ProcessIdentity, ProcessUsage, Recorded

_OPTIONS_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})
"""Options of the Python interpreter with a value in the next word."""
_MULTIPROCESSING = ("from multiprocessing.spawn import", "from multiprocessing.forkserver import")
"""`multiprocessing` starts an interpreter with code that begins like this."""
_LONG_NUMBER = re.compile(r"\d{3,}")
_OF_RANKS = re.compile(r"( rank \d+) of( |$)")
_ON_GPU = re.compile(r" on (\w+:\d+)$")
_MOST_CHARACTERS = 100
"""The most characters of a process's own name."""
ALL = "all processes"
"""The name for the sum over a test's own process and its other processes."""
PROCESS, PROCESSES = "process", "processes"
"""The steps in the workloads of another process, and of all processes together (`Workload.step`)."""
_METRICS = ("peak_allocated", "peak_reserved")
_AT_DIFFERENT_TIMES = "the peaks may be at different times"
WITHOUT_STATISTICS = (
    "has an allocator without statistics (its own, or torch's with PYTORCH_NO_CUDA_MEMORY_CACHING), so its memory is not "
    "known"
)
"""The rest of a sentence about a process."""
_NOT_SIMULTANEOUS = (
    f"{_AT_DIFFERENT_TIMES}. The bytes at the same time are known only on Linux with a C compiler, and with torch's own "
    "allocator"
)
_DEFAULT_NAME = re.compile(r"(Fork|Spawn|ForkServer)?(Pool)?(Process|Worker)-[\d:]+")
"""Names that `multiprocessing` gives to processes: ``SpawnProcess-1``."""


class Live(NamedTuple):
    """A process's tensors on a GPU, in requested bytes. After the process's end there are none."""

    before: int
    after: int
    allocations: int
    """The number of allocations in between."""
    is_new: bool = False
    """True if the process began in between."""


class ProcessName(NamedTuple):
    """A process's name in its job."""

    name: str
    """The distinct name: ``serve.py 2``."""
    program: str
    """The name without the number among equal names: ``serve.py``. A program may have given the process a name that ends with
    a number, ``stage 2``, which stays."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names of processes and GPUs. They stay from a step to the next step, which may have further processes.

    Example:
        Each step asks the server ``serve.py``, and starts ``job.py``, which ends. In each step the server is ``serve.py``, and
        the new process is ``job.py`` and not ``job.py 2``.
    """

    processes: Mapping[tuple[int, int], ProcessName] = field(default_factory=dict)
    """Names by pid and begin (`ProcessUsage.began`)."""
    gpus: Mapping[int, str] = field(default_factory=dict)
    """The GPUs' names in the test's process, by the index in the machine: ``{2: "cuda:0"}``."""


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """A process's peaks in bytes, by GPU and by metric: ``{"cuda:0": {"peak_allocated": 3200, "peak_reserved": 4096}}``."""

    name: str
    """The process's name in the job: ``train.py rank 0``."""
    by_gpu: Mapping[str, Mapping[str, int]]
    notes: tuple[str, ...] = ()
    """Remarks, each a clause: ``the process ran out of memory 2 times``."""
    pid: int = 0
    recorded: Mapping[str, Recorded] = field(default_factory=dict)
    """The recorded blocks by GPU, if the process recorded its allocations."""
    unrecorded: str | None = None
    """The reason why the process did not record its allocations, although the test asked for a recording."""
    gained: Mapping[str, int] = field(default_factory=dict)
    """For each GPU, the bytes by which the process's tensors grew from its first window's begin to this window's begin. The
    number is negative if the process has freed bytes since then."""
    live: Mapping[str, Live] = field(default_factory=dict)
    """The process's tensors on each GPU."""
    program: str = ""
    """`ProcessName.program`."""
    details: ProcessDetails | None = None
    """`Measurement.process`"""

    imbalance: ClassVar[None] = None
    """Only a job has ranks."""
    simultaneous: ClassVar[Mapping[str, int]] = {}
    """Only a job has several processes."""

    @property
    def gained_before(self) -> int:
        """The growth before this window on the GPU with the largest change."""
        return max(self.gained.values(), key=abs, default=0)

    @property
    def peak_allocated(self) -> int:
        """The largest peak on any GPU in bytes."""
        return max((metrics["peak_allocated"] for metrics in self.by_gpu.values()), default=0)


@dataclass(frozen=True, slots=True)
class OwnPeak:
    """The peak of the test's own process on a GPU."""

    gpu: str
    """The GPU's name in this process: ``cuda:0``."""
    peak_allocated: int
    """The peak in bytes, without bytes that belong to other tests."""
    published_by_others: int | None = None
    """The bytes of other tests within the bytes that this process publishes; ``None`` if its published bytes are not known."""


@dataclass(frozen=True, slots=True)
class JobFigures:
    """A job's figures by GPU, and the figures for each process with GPU memory."""

    by_gpu: Mapping[str, Mapping[str, int]]
    processes: tuple[ProcessFigures, ...]
    own_notes: tuple[str, ...] = ()
    """Remarks on the whole job, each a clause."""
    imbalance: float | None = None
    """The largest peak of a rank divided by the smallest; ``None`` if fewer than two ranks used a GPU."""
    gained_before: int = 0
    """The sum of `ProcessFigures.gained` over all processes, on the GPU with the largest change."""
    names: Names = Names()
    """The names in this job, for the next step."""
    simultaneous: Mapping[str, int] = field(default_factory=dict)
    """`Measurement.simultaneous`"""
    unknown: frozenset[str] = frozenset()
    """The GPUs on which several processes held an unknown number of bytes at the same time."""

    details: ClassVar[None] = None
    """Only a process has details."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the whole job and on its processes."""
        return (*self.own_notes, *(f"{process.name}: {note}" for process in self.processes for note in process.notes))


def job_figures(
    usages: Iterable[ProcessUsage],
    name: str = "cuda:{}",
    own: Mapping[int, OwnPeak] | None = None,
    earlier: Names | None = None,
    simultaneous: Mapping[int, int] | None = None,
    own_pid: int = -1,
) -> JobFigures:
    """Return a job's figures. Processes without memory on a device are left out.

    A GPU's figure is the largest sum over processes that ran at the same time, because their peaks may be at the same time. Two
    processes did not run at the same time if one started after the other had ended.

    This sum repeats from run to run. The most bytes that the processes held at the same time depend on the clock
    (`JobFigures.simultaneous`). They are known only if all processes with a peak on the GPU publish their bytes.

    GPUs are numbered among the job's own GPUs, because a job on the GPUs 2 and 3 has the same figures as on 0 and 1.

    Args:
        usages: Each reporting process's usage. A process from before a window counts if it allocated.
        name: The devices' name in torch, with ``{}`` for the index: ``"cuda:{}"`` or ``"cpu"``.
        own: The peaks of the test's own process, by the GPU's index in the machine. The process runs during the whole job.
        earlier: The names in the step before. A process with such a name counts even if it did not allocate.
        simultaneous: The most bytes published by all processes at the same time, by the GPU's index in the machine.
        own_pid: The own process's pid; -1 if it does not matter.
    """
    own, earlier, usages = own or {}, earlier or Names(), tuple(usages)
    used = sorted(
        (usage for usage in usages if usage.devices and (is_active(usage) or _key(usage) in earlier.processes)),
        key=_place,
    )
    names = _names_of(used, earlier.processes, (ALL,) if own else ())
    gpus = {**earlier.gpus, **{number: peak.gpu for number, peak in own.items()}}
    further_gpus = sorted({device.device for usage in used for device in usage.devices}.difference(gpus))
    all_names = (name.format(index) for index in range(len(gpus) + len(further_gpus)))
    free_names = (free for free in all_names if free not in gpus.values())
    gpus = {**gpus, **dict(zip(further_gpus, free_names, strict=False))}
    processes = tuple(
        ProcessFigures(
            name.name,
            {gpus[device.device]: _metrics(usage, device) for device in usage.devices},
            _notes(usage),
            usage.process.pid,
            {gpus[device.device]: device.recorded for device in usage.devices if device.recorded is not None},
            usage.unrecorded,
            _gained(usage, gpus),
            {gpus[device.device]: _live(usage, device) for device in usage.devices},
            name.program,
            _details(usage, number, len(used), own_pid),
        )
        for number, (name, usage) in enumerate(zip(names, used, strict=True), start=1)
    )
    published = _simultaneous(usages, used, simultaneous or {})
    by_gpu, notes, held, unknown = {}, [], {}, set()
    for number, gpu_name in gpus.items():
        on_own_gpu = own.get(number, OwnPeak(gpu_name, 0, 0))
        own_bytes = on_own_gpu.peak_allocated
        on_gpu = [
            (usage, process.by_gpu[gpu_name])
            for usage, process in zip(used, processes, strict=True)
            if gpu_name in process.by_gpu
        ]
        groups = [[metrics for usage, metrics in on_gpu if _overlap(usage, first_usage)] for first_usage, _ in on_gpu]
        metric_names = _METRICS if not own and all(_METRICS[1] in metrics for _, metrics in on_gpu) else _METRICS[:1]
        by_gpu[gpu_name] = {
            metric: max((sum(metrics[metric] for metrics in group) for group in groups), default=0)
            + (own_bytes if metric == _METRICS[0] else 0)
            for metric in metric_names
        }
        most = max(map(len, groups), default=0) + bool(own_bytes)
        if most < 2:
            continue
        sum_of_peaks, others = by_gpu[gpu_name][_METRICS[0]], on_own_gpu.published_by_others
        if published is not None and others is not None:
            peaks = [own_bytes, *(metrics[_METRICS[0]] for _, metrics in on_gpu)]
            held[gpu_name] = sorted((max(peaks), published.get(number, 0) - others, sum_of_peaks))[1]
        else:
            unknown.add(gpu_name)
        if held.get(gpu_name) != sum_of_peaks:
            bound = f"{gpu_name}: {format_bytes(sum_of_peaks)} is the sum of {most} processes' peaks, an upper bound"
            notes.append(f"{bound}, because {_NOT_SIMULTANEOUS if gpu_name in unknown else _AT_DIFFERENT_TIMES}")
    gained = (sum(process.gained.get(gpu_name, 0) for process in processes) for gpu_name in gpus.values())
    ratio, imbalance_notes = imbalance(used, [name.name for name in names])
    kept_names = Names(dict(zip(map(_key, used), names, strict=True)), gpus)
    largest_gain = max(gained, key=abs, default=0)
    return JobFigures(
        by_gpu, processes, (*notes, *imbalance_notes), ratio, largest_gain, kept_names, held, frozenset(unknown)
    )


def _simultaneous(
    usages: Iterable[ProcessUsage], used: Sequence[ProcessUsage], simultaneous: Mapping[int, int]
) -> Mapping[int, int] | None:
    """Return the most bytes that the used processes held at the same time on each GPU, or an upper bound.

    The other processes allocated nothing. So those that still run held at least their current bytes all the time.

    Args:
        usages: All processes.
        used: The processes that count.
        simultaneous: The most bytes of all processes.

    Returns:
        The bytes by the GPU's index in the machine; ``None`` if a process that counts did not publish its bytes.
    """
    if any(device.published is None for usage in used for device in usage.devices):
        return None
    idle, used_keys = Counter[int](), set(map(_key, used))
    for usage in usages:
        if usage.ended is None and _key(usage) not in used_keys:
            idle.update({device.device: device.published or 0 for device in usage.devices})
    return {gpu: max(0, nbytes - idle[gpu]) for gpu, nbytes in simultaneous.items()}


def _key(usage: ProcessUsage) -> tuple[int, int]:
    return usage.process.pid, usage.began


def _names_of(
    used: Sequence[ProcessUsage], earlier: Mapping[tuple[int, int], ProcessName], reserved: Sequence[str]
) -> list[ProcessName]:
    """Return a name for each process. Processes with an earlier name keep it, and new processes get free names."""
    kept = [earlier.get(_key(usage)) for usage in used]
    new = [usage.process for usage, name in zip(used, kept, strict=True) if name is None]
    new_names = iter(process_names(new, reserved=(*reserved, *(name.name for name in kept if name is not None))))
    return [name or next(new_names) for name in kept]


def imbalance(usages: Iterable[ProcessUsage], names: Iterable[str]) -> tuple[float | None, tuple[str, ...]]:
    """Return the largest peak of a rank divided by the smallest peak, and a note that names both ranks.

    A rank may have several processes, because a child inherits ``RANK``. Then its peak is the largest process's, because the
    sum would depend on whether the processes run at the same time. If torchrun restarted the job, only the ranks of the last
    attempt count, because an earlier attempt may have ended before its peaks.

    Example:
        Rank 0 has a peak of 4 GB, and rank 1 has 5 GB. The ratio is 1.25, and the note is ``train.py rank 1 has the largest
        peak of all ranks, 5.00 GB, and train.py rank 0 the smallest, 4.00 GB``.

    Args:
        usages: The usage of each process on a GPU, ordered by rank.
        names: The process's name for each usage.

    Returns:
        The ratio with four digits, or ``None`` if fewer than two ranks have a peak. A ratio of 1 has no note.
    """
    ranked = [(usage, name) for usage, name in zip(usages, names, strict=True) if usage.process.rank is not None]
    last_attempt = max((usage.process.restart for usage, _ in ranked), default=0)
    peaks: dict[int | None, tuple[int, str]] = {}
    for usage, name in ranked:
        peak, rank = max(device.allocated for device in usage.devices), usage.process.rank
        is_largest = rank not in peaks or peak > peaks[rank][0]
        if usage.process.restart == last_attempt and peak and is_largest:
            peaks[rank] = peak, name
    if len(peaks) < 2:
        return None, ()
    # If ranks have equal peaks, the lowest rank is named.
    smallest, largest = (choose(peaks.values(), key=lambda entry: entry[0]) for choose in (min, max))
    ratio = rounded(largest[0] / smallest[0])
    if ratio == 1:
        return ratio, ()
    note = (
        f"{largest[1]} has the largest peak of all ranks, {format_bytes(largest[0])}, and {smallest[1]} the smallest, "
        f"{format_bytes(smallest[0])}"
    )
    return ratio, (note,)


def invalid_figures(usages: Iterable[ProcessUsage]) -> str | None:
    """Return the reason why a process's figures are invalid; ``None`` if all processes have valid figures."""
    reasons = (f"{program_name(usage.process.command)}: {usage.invalid}" for usage in usages if usage.invalid)
    return next(reasons, None)


def is_active(usage: ProcessUsage) -> bool:
    """Return whether a process began in the window, or allocated memory there. Without statistics, it may have allocated.

    An idle server does not count, or figures would depend on the order of the tests.
    """
    is_new = usage.window is None
    return is_new or usage.without_statistics or any(device.allocations for device in usage.devices)


def killed_in(usages: Iterable[ProcessUsage]) -> list[str]:
    """Return a sentence for each killed process in a job whose processes have all ended."""
    killed = [usage for usage in usages if usage.ended is None]
    names = process_names([usage.process for usage in killed])
    return [f"{name.name} {killed_text(usage)}" for name, usage in zip(names, killed, strict=True)]


def killed_text(usage: ProcessUsage) -> str:
    """Return a clause about a process that was killed, or that C code ended, with a lower bound from its last report."""
    peak = max((device.allocated for device in usage.devices), default=0)
    bound = (
        f". Its peak was at least {format_bytes(peak)}, and may have been larger"
        if peak
        else ", so its peak is not known"
    )
    how = "was killed" if usage.status is None else f"ended with status {usage.status} by `exit` in C code,"
    return f"{how} before it could report its memory{bound}"


def _overlap(usage: ProcessUsage, at_start_of: ProcessUsage) -> bool:
    """Return whether a process ran when another process started. A process overlaps with itself."""
    start, process = at_start_of.process.started, usage.process
    if usage is at_start_of or not start or not usage.written:
        return True
    if (process.pid, process.started) == (at_start_of.process.pid, start):
        return False  # the process ran one program, and then another by `exec`
    return usage.process.started <= start and (usage.ended is None or start < usage.written)


def _place(usage: ProcessUsage) -> tuple[int, ...]:
    """Return the sort key for a job's processes: torchrun's restart, then the rank, then the time of the start."""
    process = usage.process
    return (process.restart, -1 if process.rank is None else process.rank, process.started, process.pid, usage.began)


def process_names(processes: Sequence[ProcessIdentity], reserved: Collection[str] = ()) -> list[ProcessName]:
    """Return a distinct name for each process in a job: its program, with its rank or its number among equal programs.

    A name given by ``multiprocessing.Process(name=...)`` replaces the program. A number with three or more digits in such a
    name becomes ``N``, because it may be a pid, which differs between two runs. Arguments may differ as well, so names have
    no arguments. A rank that torchrun has started again is called ``train.py rank 0 restart 1``. A name that the store cannot
    keep is changed.

    Example: The names are ``serve.py``, ``serve.py 2``, ``train.py rank 0`` and ``train.py rank 1``. Both servers have
    the program ``serve.py``.

    Args:
        processes: The processes, ordered by start.
        reserved: Names for other figures and processes. A process with such a name gets a number.
    """
    names: list[ProcessName] = []
    for process in processes:
        is_named = process.name and not _DEFAULT_NAME.fullmatch(process.name)
        name = _storable(_LONG_NUMBER.sub("N", process.name) if is_named else program_name(process.command))
        name = name if process.rank is None else f"{name} rank {process.rank}"
        name = name if not process.restart else f"{name} restart {process.restart}"
        numbered = (name if number == 1 else f"{name} {number}" for number in count(1))
        taken = {*reserved, *(earlier.name for earlier in names)}
        names.append(ProcessName(next(candidate for candidate in numbered if candidate not in taken), name))
    return names


def _storable(name: str) -> str:
    """Return a process's name as a part of a measurement's name, which names neither a rank nor a GPU and fits into a file.

    Example: ``worker rank 0/2`` for ``worker rank 0 of 2``, and ``worker (cuda:1)`` for ``worker on cuda:1``.
    """
    name = name.encode(errors="backslashreplace").decode()
    name = _ON_GPU.sub(r" (\1)", _OF_RANKS.sub(r"\1/", name))
    return name if len(name) <= _MOST_CHARACTERS else f"{name[:_MOST_CHARACTERS]}..."


def program_name(command: Sequence[str]) -> str:
    """Return a short name for the program in a Python command.

    Example: ``train.py`` for ``["/usr/bin/python", "-u", "jobs/train.py", "--lr=0.1"]``, ``-m serve`` for ``["python", "-m",
    "serve"]``, and ``multiprocessing`` for an interpreter from `multiprocessing`.

    Args:
        command: The interpreter, its options, the program and the program's arguments.
    """
    words = iter(command[1:])
    for word in words:
        if word in _OPTIONS_WITH_VALUE:
            next(words, None)
        elif word == "-c":
            return "multiprocessing" if next(words, "").startswith(_MULTIPROCESSING) else "python -c"
        elif word == "-m":
            return f"-m {next(words, '')}".rstrip()
        elif not word.startswith("-"):
            return PurePath(word).name
    return "python"


def shown_process(process: ProcessIdentity) -> tuple[str, ...]:
    """Return a process's command without secrets.

    An interpreter from `multiprocessing` has the name of its process there: ``("multiprocessing", "SpawnPoolWorker-1")``.
    """
    program = program_name(process.command)
    if process.name and program in ("multiprocessing", "fork"):
        return (program, process.name)
    return shown_words([*(PurePath(word).name for word in process.command[:1]), *process.command[1:]])


def _details(usage: ProcessUsage, number: int, among: int, own_pid: int) -> ProcessDetails:
    process, parent = usage.process, None
    if process.parent:
        program = PurePath(process.parent[0]).name
        parent = program_name(process.parent) if program.startswith("python") else program
        # A worker of pytest-xdist is ``python -c``. A script runs in `gpumem run`.
        parent = "pytest" if process.parent_pid == own_pid and parent != "gpumem" else parent
    return ProcessDetails(
        number,
        among,
        shown_process(process),
        parent,
        process.rank,
        process.local_rank,
        still_runs=usage.ended is None and usage.status is None,
        status=usage.status,
    )


def _gained(usage: ProcessUsage, gpus: Mapping[int, str]) -> dict[str, int]:
    return {gpus[device.device]: device.live_before - device.live_first for device in usage.devices}


def _live(usage: ProcessUsage, device: DeviceUsage) -> Live:
    after = device.live if usage.ended is None else 0
    return Live(device.live_before, after, device.allocations, is_new=usage.window is None)


def _metrics(usage: ProcessUsage, device: DeviceUsage) -> dict[str, int]:
    """Return a process's metrics on a GPU.

    If the process began and ended in the window, its allocator began empty, so its allocated and reserved bytes repeat. In any
    other process they depend on earlier requests, and only requested bytes repeat.
    """
    if usage.window is None and usage.ended is not None:
        metrics = dict(zip(_METRICS, (device.allocated, device.reserved), strict=True))
        return metrics if device.reserved else {_METRICS[0]: device.allocated}
    metrics = {"peak_allocated": device.requested or device.allocated}
    if usage.ended is None:
        metrics["retained"] = max(0, device.live - device.live_before)
    return metrics


def _notes(usage: ProcessUsage) -> tuple[str, ...]:
    notes = []
    if usage.times_out_of_memory:
        notes.append(f"the process ran out of memory {counted(usage.times_out_of_memory, 'time')}")
    notes += [note for note in (usage.unknown, usage.lacking, usage.no_kernels) if note is not None]
    return tuple(notes)
