"""When a program on an emulated GPU ends, print its peaks and the lines that allocated the memory.

Peaks from before a ``torch.cuda.reset_peak_memory_stats()`` are included.

Example: ``gpumem emulate h100 -- python mlp.py`` prints this for a perceptron with 1,024, 4,096 and 1,024 units and its
backward pass on 64 samples. At most 8 lines of the program are listed. ::

    gpumem: NVIDIA H100 80GB HBM3 (emulated), cuda:0: peak 135.57 MB allocated, 140.51 MB reserved. Live then:
        68.18 MB      6 x  no line of the program
        33.57 MB      4 x  mlp.py:2 <module>
"""

from __future__ import annotations

import atexit
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.base.units import format_bytes
from pytest_gpumem.emulating.emulated_process.cuda_statistics import CudaStatistics, keeps_statistics
from pytest_gpumem.emulating.emulated_process.kept_peaks import KeptPeaks
from pytest_gpumem.emulating.emulation.load import current_emulation
from pytest_gpumem.emulating.host_values.scope import current
from pytest_gpumem.torch_support.private_api.allocator import cuda_snapshot, start_cuda_history, when_cuda_begins

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

MOST_LINES = 8
_OURS = str(Path(__file__).parents[2])
NOWHERE = "no line of the program"


@dataclass(frozen=True, slots=True)
class AtPeak:
    """The live bytes at the peak: the total, and for each allocating line, the number of blocks and their bytes."""

    nbytes: int
    blocks: Mapping[str, int]
    by_line: Mapping[str, int]


def at_peak(trace: Sequence[Mapping[str, Any]], torchs: str) -> AtPeak:
    """Find the peak in an allocator's history, and return the live bytes at this moment.

    Args:
        trace: The history's entries, as in torch's snapshots. Entries ``alloc`` and ``free_completed`` with ``addr``, ``size``
            and ``frames`` are used.
        torchs: torch's folder. A block is assigned to the innermost line outside this folder.
    """
    totals = [total for total, _ in _replayed(trace)]
    peak = max(range(len(totals)), key=totals.__getitem__, default=0)
    most, live = next(islice(_replayed(trace), peak, None), (0, {}))
    by_line: Counter[str] = Counter()
    blocks: Counter[str] = Counter()
    for entry in live.values():
        line = line_of(entry.get("frames", ()), torchs)
        by_line[line] += int(entry["size"])
        blocks[line] += 1
    return AtPeak(most, blocks, by_line)


def _replayed(trace: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[int, Mapping[str, Any]]]]:
    """Yield, after each entry in a history, the sum of live bytes and the ``alloc`` entries of live blocks by address."""
    live: dict[int, Mapping[str, Any]] = {}
    total = 0
    for entry in trace:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry
            total += int(entry["size"])
        elif entry["action"] == "free_completed" and entry["addr"] in live:
            total -= int(live.pop(entry["addr"])["size"])
        yield total, live


def line_of(frames: Sequence[Mapping[str, Any]], torchs: str) -> str:
    """Return the innermost line of the program in a call stack, as ``file:line function``; `NOWHERE` if there is none."""
    for frame in frames:
        file = str(frame["filename"])
        if not file.startswith((torchs, _OURS, "<")):
            return f"{file}:{frame['line']} {frame['name']}"
    return NOWHERE


def print_at_exit(*, is_quiet: bool) -> None:
    """When this process ends, print its peaks, and reasons why the peaks may be wrong.

    Args:
        is_quiet: If true, only the reasons are printed, and the allocator's history is not recorded.
    """
    when_cuda_begins(partial(_begin, is_quiet))


def _begin(is_quiet: bool) -> None:
    peaks = KeptPeaks(CudaStatistics())
    peaks.begin()
    atexit.register(_print_doubts, peaks)
    if not is_quiet:
        backend = torch.cuda.memory.get_allocator_backend()
        if backend == "native":
            start_cuda_history()
        atexit.register(
            _print, peaks, backend
        )  # exit functions run in reverse order, so this runs before `_print_doubts`


def _print_doubts(peaks: KeptPeaks) -> None:
    peaks.take()
    emulation, values = current_emulation(), current()
    lacking = None if emulation is None else emulation.cudnn.lacking(peaks.allocated)
    if lacking is not None:
        _say(f"gpumem: peaks may be too low: {lacking}")
    if values is not None and values.reads.first_trouble is not None:
        _say(f"gpumem: peaks may be wrong: {values.reads.first_trouble}")


def _print(peaks: KeptPeaks, backend: str) -> None:
    peaks.take()
    if not keeps_statistics():
        _say(f"gpumem: no peaks: the program's allocator ({backend}) keeps no statistics")
    elif backend == "native":
        _tell_with_lines(peaks)
    else:
        for device, allocated in sorted(peaks.allocated.items()):
            if allocated:
                peak = _peak(device, allocated, peaks.reserved[device])
                _say(f"{peak}. The live tensors at the peak are unknown: the allocator ({backend}) keeps no history")


def _tell_with_lines(peaks: KeptPeaks) -> None:
    torchs = str(Path(torch.__file__).parent)
    for device, trace in enumerate(cuda_snapshot()["device_traces"]):
        peak = at_peak(trace, torchs)
        if not peak.nbytes:
            continue
        # The history has sizes before rounding, and the statistics have rounded sizes.
        allocated = max(peak.nbytes, peaks.allocated[device])
        report = [f"{_peak(device, allocated, peaks.reserved[device])}. Live then:"]
        lines = sorted(peak.by_line.items(), key=lambda line: (-line[1], line[0]))
        report += [f"  {format_bytes(size):>10}  {peak.blocks[line]:>5} x  {line}" for line, size in lines[:MOST_LINES]]
        if len(lines) > MOST_LINES:
            rest = sum(size for _, size in lines[MOST_LINES:])
            report.append(f"  {format_bytes(rest):>10}  at {len(lines) - MOST_LINES} other lines")
        _say("\n".join(report))


def _peak(device: int, allocated: int, reserved: int) -> str:
    name = torch.cuda.get_device_name(device)
    return f"gpumem: {name}, cuda:{device}: peak {format_bytes(allocated)} allocated, {format_bytes(reserved)} reserved"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 -- the program's own output is on stdout
