"""Validity of times: interference between two readings, whether it is too much, and how much it explains at most. Pure.

Each kind of interference can slow a step by a bounded factor; the rest is the code's. What *took time* from the step (another
process on its core, say) is known interval by interval, and is divided out there. What *slowed* the step while it ran is known
of a whole sample. What is shared with a neighbour (caches, memory, a core's two halves) slows the pace, too, so of both
factors the larger one holds. That caches are another process's after waiting does not show in the pace, which is the best of a
few, so it comes on top of what the pace lost.

Measured are those of the CPU, on virtual machines with two cores (AMD EPYC, Intel Xeon), as the time of a step without its
waiting, over that of quiet runs (`benchmarks/results/cpu-x86_64/time-gate.md`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.units import agreeing
from pytest_gpumem.values.interference import Slowed

if TYPE_CHECKING:
    from pytest_gpumem.values.interference import Conditions


WAITED = 0.02
"""Share of the time that the thread may have waited for a core: that much longer the step took, at least. A quiet machine
has none, a busy process on each other core gave 1 %; one that shared the core for a tenth of the time gave 11 %, and
steps that took 12 % to 33 % longer."""
STOLEN = 0.03
"""Share of the time that the hypervisor may have taken from a core that was in use; acts as `WAITED` does."""
OTHERS = 0.25
"""Share of the other cores that other processes may have used. On two cores with a common L3 cache, computing on the other
one cost GPT-2 steps up to 8 %, and copying through memory up to 41 %; copying for a quarter of the time, up to 9 %. Steps
of 3 ms moved by 15 %, 76 % and 11 %, and by up to 38 % with no other process at work."""
SLOWEST_CLOCK = 0.75
"""Share of the default SM clock, as in NVIDIA's nvbench, which discards samples below."""

_TICK_COUNTERS = 5
"""``others`` is the sum of so many counters of /proc/stat, each of which may be a tick off."""

_TIMES = {1: "once", 2: "twice"}
_SLOWDOWNS = {
    "HwThermalSlowdown": "thermal slowdown by hardware",
    "SwThermalSlowdown": "thermal slowdown by the driver",
    "HwPowerBrakeSlowdown": "external power brake",
    "HwSlowdown": "slowdown by hardware",
}
_CLOCK_MEANS_NOTHING = frozenset({"GpuIdle", "SwPowerCap", "ApplicationsClocksSetting"})
"""An idle GPU lowers its clock. Its power limit lowers it in every large matrix product, and is the step's own doing;
lower application clocks are set on purpose, and the same in every run."""


def disturbance(before: Conditions, after: Conditions) -> str | None:
    """Return, as a clause, what disturbed the time between two readings; ``None`` when nothing is known to have.

    Sound for intervals of any length: what is counted in ticks is claimed only as far as it is beyond their resolution,
    so that a round of 20 ms says nothing of them and a sample of a second does. The clock is judged as it was in the
    end, since before its first work a GPU is at rest.
    """
    return _clauses(
        _retried(before, after),
        _compiled(before, after),
        _throttled(before, after),
        _slow_clock(after),
        _other_processes(before, after),
        _waited(before, after),
        _stolen(before, after),
        _others(before, after),
    )


def load(before: Conditions, after: Conditions) -> str | None:
    """Return the same as `disturbance` for what is counted in ticks: of a whole sample, whose rounds were judged singly."""
    return _clauses(_stolen(before, after), _others(before, after))


def _clauses(*found: str | None) -> str | None:
    return ", ".join(clause for clause in found if clause is not None) or None


def _retried(before: Conditions, after: Conditions) -> str | None:
    times = increase(before.retries, after.retries)
    return f"the allocator retried {_TIMES.get(times, f'{times} times')}" if times else None


def _compiled(before: Conditions, after: Conditions) -> str | None:
    graphs = increase(before.graphs, after.graphs)
    if not graphs:
        return None
    return agreeing(graphs, "a graph was compiled meanwhile", f"{graphs} graphs were compiled meanwhile")


def increase(before: int | None, after: int | None) -> int:
    """Return the increase of a counter of events; one that is lower than before was reset to 0 in between."""
    if before is None or after is None:
        return 0
    return after - before if after >= before else after


def is_throttled(before: Conditions, after: Conditions) -> bool:
    """Return whether the GPU's clock was lowered to protect it, at either end of the interval."""
    return not _SLOWDOWNS.keys().isdisjoint(_events(before, after))


def _events(before: Conditions, after: Conditions) -> frozenset[str]:
    return (before.clock_events or frozenset()) | (after.clock_events or frozenset())


def _throttled(before: Conditions, after: Conditions) -> str | None:
    events = _events(before, after)
    named = [words for event, words in _SLOWDOWNS.items() if event in events]
    if len(named) > 1 and "HwSlowdown" in events:
        # NVML sets this one along with the hardware's two, which say why.
        named.remove(_SLOWDOWNS["HwSlowdown"])
    return f"the GPU was throttled: {' and '.join(named)}" if named else None


def sm_clock_share(after: Conditions) -> float | None:
    """Return the SM clock over its default where it is too low and neither the step's power nor a setting explains it."""
    if not after.sm_clock or not after.sm_clock_default:
        return None
    if after.clock_events is None or after.clock_events & _CLOCK_MEANS_NOTHING:
        return None
    clock = after.sm_clock / after.sm_clock_default
    return clock if clock < SLOWEST_CLOCK else None


def _slow_clock(after: Conditions) -> str | None:
    clock = sm_clock_share(after)
    return None if clock is None else f"the SM clock was at {percent(clock)} of its default"


def other_processes(before: Conditions, after: Conditions) -> int:
    """Return the number of other sessions' processes that used the GPU at either of the two readings."""
    return max(len(before.other_pids | after.other_pids), before.other_processes or 0, after.other_processes or 0)


def _other_processes(before: Conditions, after: Conditions) -> str | None:
    pids = sorted(before.other_pids | after.other_pids)
    if len(pids) == 1:
        return f"process {pids[0]} used the GPU, too"
    if pids:
        return f"processes {', '.join(map(str, pids[:-1]))} and {pids[-1]} used the GPU, too"
    number = other_processes(before, after)
    if not number:
        return None
    return agreeing(number, "another process used the GPU, too", f"{number} other processes used the GPU, too")


def _waited(before: Conditions, after: Conditions) -> str | None:
    waited = share(before, after, before.waited, after.waited)
    if waited is None or waited <= WAITED:
        return None
    return f"the thread waited {percent(waited)} of the time for a core"


def _stolen(before: Conditions, after: Conditions) -> str | None:
    stolen = share(before, after, before.stolen, after.stolen)
    if stolen is None:
        return None
    # Only from a core that has work can time be stolen: from ours, and from those that other processes keep busy.
    busy = 1 + max(share(before, after, before.others, after.others) or 0.0, 0.0)
    if (stolen - after.tick / elapsed(before, after)) / busy <= STOLEN:
        return None
    return f"the hypervisor took {percent(stolen / busy)} of the time of each busy core"


def _others(before: Conditions, after: Conditions) -> str | None:
    used = share(before, after, before.others, after.others)
    # On a single core they take turns with the thread, which has waited then.
    if used is None or after.cores is None or after.cores < 2:
        return None
    if used - _TICK_COUNTERS * after.tick / elapsed(before, after) <= OTHERS * (after.cores - 1):
        return None
    return f"other processes used {used:.2f} of {after.cores} cores meanwhile"


def share(before: Conditions, after: Conditions, then: float | None, now: float | None) -> float | None:
    """Return the increase of a count of seconds over the time that has passed."""
    seconds = elapsed(before, after)
    return None if then is None or now is None or seconds <= 0 else (now - then) / seconds


def elapsed(before: Conditions, after: Conditions) -> float:
    """Return the seconds between two readings."""
    return after.seconds - before.seconds


def percent(ratio: float) -> str:
    """Return a ratio as text: ``12 %``."""
    return f"{100 * ratio:.0f} %"


OTHER_CORES = 0.2
"""Bound of the slowdown for each other core that is kept busy. At most 0.12 was measured where the pace stayed; where it did
not, it shows more."""
REFILLING = 0.45
"""Bound of the slowdown for each second of waiting, over the seconds on a core: caches are another process's when the thread
comes back. At most 0.25 was measured on the EPYC where it waited up to 60 % of the time (1.14 times as long at 40 %, 1.34 at
50 %). It has no limit: with one of 1.7, 7 of 1,000 comparisons of a step with itself failed on the Xeon, with four processes
for each core."""
MOST_SLOWED = 5.0
"""Bound on machines with many cores, all of them busy: the memory's bandwidth is shared by all. Not measured."""
MOST_STOLEN = 0.95
THROTTLED = 4.0
"""Bound of a lowered clock: the hardware lowers the GPU's clock to a half (``nvmlClocksEventReasonHwSlowdown`` in nvml.h), and
that may count twice."""
OTHERS_ON_GPU = 2.0
"""Bound on a GPU, for each process including this one: they take turns by equal slices of time, and that may count twice."""
SECONDS_A_RETRY = 1.0
"""Bound of the time for the allocator to give back all that it cached, up to a whole GPU's memory, and to take it again."""
SECONDS_A_GRAPH = 100.0
"""Bound of the time for torch.compile to compile a graph."""
GPU_CLOCK = 2
"""Power of the share that a GPU's clock lost by which a step may be slowed. Not measured."""


def taken(before: Conditions, after: Conditions) -> float:
    """Return the largest factor by which interference that takes time from the step lengthens the time between two readings."""
    waited = _waiting(before, after)
    events = SECONDS_A_RETRY * increase(before.retries, after.retries) + SECONDS_A_GRAPH * increase(
        before.graphs, after.graphs
    )
    others = other_processes(before, after)
    on_gpu = OTHERS_ON_GPU * (1 + others) if others else 1.0
    seconds = elapsed(before, after)
    # Of an interval that an event may have filled, nothing is known of the step.
    left = max(seconds - events, 1e-6 * seconds) / seconds if seconds > 0 else 1.0
    return on_gpu / left / (1 - waited)


def slowed(before: Conditions, after: Conditions) -> Slowed:
    """Return the largest factors by which the step ran slower while it ran, from the host's counters over a sample.

    Stolen time is counted for all cores together, so all of it may have been taken from this step's.
    """
    stolen = min(max(share(before, after, before.stolen, after.stolen) or 0.0, 0.0), MOST_STOLEN)
    off_core = 1 - (1 - _waiting(before, after)) * (1 - stolen)
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


def _waiting(before: Conditions, after: Conditions) -> float:
    """Return the share of the time in which the thread had no core, or that others used where it is not counted."""
    waited = share(before, after, before.waited, after.waited)
    if waited is None:
        waited = share(before, after, before.others, after.others)
    return min(max(waited or 0.0, 0.0), MOST_STOLEN)
