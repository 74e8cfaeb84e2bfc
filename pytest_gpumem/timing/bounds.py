"""Bounds of interference: by what factor each kind can slow a step at most. The rest is the code's. Pure.

Two kinds of factors. What *took time* from the step (another process on its core, say) is known stretch by stretch, and is
divided out there. What *slowed* the step while it ran is known of a whole sample. What is shared with a neighbour (caches,
memory, a core's two halves) slows the pace, too, so of both factors the larger one holds. That caches are another process's
after waiting does not show in the pace, which is the best of a few, so it comes on top of what the pace lost.

Measured are those of the CPU, on virtual machines with two cores (AMD EPYC, Intel Xeon), as the time of a step without its
waiting, over that of quiet runs (`benchmarks/results/cpu-x86_64/time-gate.md`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.timing.validity import elapsed, growth, is_throttled, other_processes, share, sm_clock_share
from pytest_gpumem.values.interference import Slowed

if TYPE_CHECKING:
    from pytest_gpumem.values.interference import Conditions

OTHER_CORES = 0.2
"""For each other core that is kept busy. At most 0.12 was measured where the pace stayed; elsewhere the pace shows more."""
REFILLING = 0.45
"""For each second of waiting, over the seconds on a core: caches are another process's when the thread comes back. At most 0.25
was measured on the EPYC where it waited up to 60 % of the time (1.14 times as long at 40 %, 1.34 at 50 %). It has no limit:
with one of 1.7, 7 of 1,000 comparisons of a step with itself failed on the Xeon, with four processes for each core."""
MOST_SLOWED = 5.0
"""On machines with many cores, all of them busy: the memory's bandwidth is shared by all. Not measured."""
MOST_STOLEN = 0.95
THROTTLED = 4.0
"""The hardware lowers the GPU's clock to a half (``nvmlClocksEventReasonHwSlowdown`` in nvml.h), and that may count twice."""
OTHERS_ON_GPU = 2.0
"""On a GPU, for each process including this one: they take turns by equal slices of time, and that may count twice."""
SECONDS_A_RETRY = 1.0
"""For the allocator to give back all that it cached, up to a whole GPU's memory, and to take it again."""
SECONDS_A_GRAPH = 100.0
"""For torch.compile to compile a graph."""
GPU_CLOCK = 2
"""The same of a GPU's clock. Not measured."""


def taken(before: Conditions, after: Conditions) -> float:
    """Return the largest factor by which interference that takes time from the step lengthens the time between two readings."""
    waited = _waited(before, after)
    events = SECONDS_A_RETRY * growth(before.retries, after.retries) + SECONDS_A_GRAPH * growth(
        before.graphs, after.graphs
    )
    others = other_processes(before, after)
    on_gpu = OTHERS_ON_GPU * (1 + others) if others else 1.0
    seconds = elapsed(before, after)
    # Of a stretch that an event may have filled, nothing is known of the step.
    left = max(seconds - events, 1e-6 * seconds) / seconds if seconds > 0 else 1.0
    return on_gpu / left / (1 - waited)


def slowed(before: Conditions, after: Conditions) -> Slowed:
    """Return the largest factors by which the step ran slower while it ran, from the host's counters over a sample.

    Stolen time is counted for all cores together, so all of it may have been taken from this step's.
    """
    stolen = min(max(share(before, after, before.stolen, after.stolen) or 0.0, 0.0), MOST_STOLEN)
    off_core = 1 - (1 - _waited(before, after)) * (1 - stolen)
    refilling = REFILLING * off_core / (1 - off_core)
    busy_cores = min(max(share(before, after, before.others, after.others) or 0.0, 0.0), (after.cores or 1) - 1)
    return Slowed(min(1 + OTHER_CORES * busy_cores, MOST_SLOWED), (1 + refilling) / (1 - stolen))


def slowed_on_gpu(before: Conditions, after: Conditions) -> float:
    """Return the largest factor by which a GPU ran slower than with its usual clock."""
    throttled = THROTTLED if is_throttled(before, after) else 1.0
    clock = sm_clock_share(after)
    return max(throttled, 1.0 if clock is None else clock**-GPU_CLOCK)


def contended(now: Conditions) -> float:
    """Return the largest factor by which another measured test can slow a step that was not alone on the device.

    Where other processes' CPU time is read, that one shows there. On a GPU it is none of them.
    """
    return 1.0 if now.others is not None else 2 * OTHERS_ON_GPU


def _waited(before: Conditions, after: Conditions) -> float:
    """Return the share of the time in which the thread had no core, or that others used where it is not counted."""
    waited = share(before, after, before.waited, after.waited)
    if waited is None:
        waited = share(before, after, before.others, after.others)
    return min(max(waited or 0.0, 0.0), MOST_STOLEN)
