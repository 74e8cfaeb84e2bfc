"""A job's figures, computed from its processes' usage, and a name for each process. All functions are pure.

Example: ``torchrun --nproc-per-node=2 train.py`` starts two processes with peaks of 3.2 GB on ``cuda:0`` and 3.4 GB on
``cuda:1``. Their names are ``train.py rank 0`` and ``train.py rank 1``. The job's figure is 3.4 GB, the largest figure on any
GPU. If both processes had used ``cuda:0`` the job's figure would be the sum, 6.6 GB.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpumem.emulating.emulated_process.usage import ProcessIdentity, ProcessUsage

_OPTIONS_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})
"""Options of the Python interpreter with a value in the next word."""
_MULTIPROCESSING = ("from multiprocessing.spawn import", "from multiprocessing.forkserver import")
"""`multiprocessing` starts an interpreter with code that begins so."""
_LONG_NUMBER = re.compile(r"\d{3,}")
_METRICS = ("peak_allocated", "peak_reserved")
_DEFAULT_NAME = re.compile(r"(Fork|Spawn|ForkServer)?(Pool)?(Process|Worker)-[\d:]+")
"""Names that `multiprocessing` gives to processes: ``SpawnProcess-1``."""


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """A process's peaks in bytes, by GPU and by metric: ``{"cuda:0": {"peak_allocated": 3200, "peak_reserved": 4096}}``."""

    name: str
    """The process's name in the job: ``train.py rank 0``."""
    by_gpu: Mapping[str, Mapping[str, int]]
    notes: tuple[str, ...] = ()
    """Remarks, each a clause: ``the process ran out of memory 2 times``."""


@dataclass(frozen=True, slots=True)
class JobFigures:
    """A job's figures by GPU, and the figures for each process with GPU memory."""

    by_gpu: Mapping[str, Mapping[str, int]]
    processes: tuple[ProcessFigures, ...]
    notes: tuple[str, ...] = ()


def job_figures(usages: Iterable[ProcessUsage], gpu: str = "cuda") -> JobFigures:
    """Return a job's figures. Processes without reserved memory on a GPU are left out.

    A GPU's figure is the sum over all its processes, whether or not they run at the same time, because chance may decide that.
    GPUs are numbered among the job's own GPUs, because a job on the GPUs 2 and 3 has the same figures as on 0 and 1.

    Args:
        usages: The usage of each process with CUDA. All processes have ended.
        gpu: The GPUs' type in torch. ``"cuda"`` gives the names ``cuda:0`` and ``cuda:1``.
    """
    used = sorted((usage for usage in usages if usage.devices), key=_place)
    names = process_names([usage.process for usage in used])
    numbers = sorted({device.device for usage in used for device in usage.devices})
    gpus = {number: f"{gpu}:{index}" for index, number in enumerate(numbers)}
    processes = tuple(
        ProcessFigures(name, _by_gpu(usage, gpus), _notes(usage)) for name, usage in zip(names, used, strict=True)
    )
    attempts = [usage.process.restart for usage in used]
    by_gpu, notes = {}, []
    for gpu_name in gpus.values():
        # torchrun ends all ranks before it starts them again, so ranks of two attempts never run at the same time.
        sums = {attempt: Counter[str]() for attempt in attempts}
        counts = Counter[int]()
        for process, attempt in zip(processes, attempts, strict=True):
            sums[attempt].update(process.by_gpu.get(gpu_name, {}))
            counts[attempt] += gpu_name in process.by_gpu
        by_gpu[gpu_name] = {metric: max(total[metric] for total in sums.values()) for metric in _METRICS}
        number = max(counts.values())
        if number > 1:
            notes.append(
                f"{gpu_name}: the sum of {number} processes' peaks, an upper bound, because the peaks may be at different times"
            )
    notes += [f"{process.name}: {note}" for process in processes for note in process.notes]
    return JobFigures(by_gpu, processes, tuple(notes))


def _place(usage: ProcessUsage) -> tuple[int, ...]:
    """Return the sort key for a job's processes: torchrun's restart, then the rank, then the time of the start."""
    process = usage.process
    return (process.restart, -1 if process.rank is None else process.rank, process.started, process.pid, usage.began)


def process_names(processes: Sequence[ProcessIdentity]) -> list[str]:
    """Return a distinct name for each process in a job: its program, with its rank or its number among equal programs.

    A name given by ``multiprocessing.Process(name=...)`` replaces the program. A number with three or more digits in such a
    name becomes ``N``, because it may be a pid, which differs between two runs. Arguments may differ as well, so names have
    none. A rank that torchrun has started again is called ``train.py rank 0 restart 1``.

    Example: ``["serve.py", "serve.py 2", "train.py rank 0", "train.py rank 1"]``.

    Args:
        processes: The processes, ordered by start.
    """
    names: list[str] = []
    numbers: Counter[str] = Counter()
    for process in processes:
        is_named = process.name and not _DEFAULT_NAME.fullmatch(process.name)
        name = _LONG_NUMBER.sub("N", process.name) if is_named else program_name(process.command)
        name = name if process.rank is None else f"{name} rank {process.rank}"
        name = name if not process.restart else f"{name} restart {process.restart}"
        numbers[name] += 1
        names.append(name if numbers[name] == 1 else f"{name} {numbers[name]}")
    return names


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
            return "multiprocessing" if next(words, "").startswith(_MULTIPROCESSING) else "-c"
        elif word == "-m":
            return f"-m {next(words, '')}".rstrip()
        elif not word.startswith("-"):
            return PurePath(word).name
    return "python"


def _by_gpu(usage: ProcessUsage, gpus: Mapping[int, str]) -> dict[str, dict[str, int]]:
    return {
        gpus[device.device]: dict(zip(_METRICS, (device.allocated, device.reserved), strict=True))
        for device in usage.devices
    }


def _notes(usage: ProcessUsage) -> tuple[str, ...]:
    notes = []
    if usage.times_out_of_memory:
        notes.append(f"the process ran out of memory {counted(usage.times_out_of_memory, 'time')}")
    notes += [note for note in (usage.unknown, usage.lacking, usage.no_kernels) if note is not None]
    return tuple(notes)
