"""Judge whether times are valid. All functions are pure.

They find the interference between two readings, compare it with limits, and compute the slowdown that it can explain. Each
kind of interference can slow a step by a bounded factor. A larger slowdown comes from the code.

- Interference that *takes time* from the step, such as another process on its core, is known for each interval between two
  readings. The times in the interval are divided by the factor for this interference.
- Interference that *slows* the running step is known for a whole sample. Programs on other cores share caches and memory with
  the step. This slows the measured clock rate (the pace) as well as the step, so the larger of both factors counts. Cold
  caches after waiting do not show in the pace, because a pace is the best result from a few readings. So their factor is
  multiplied with the pace's factor.

Example: a thread waited for 10 % of a 20 ms round. Without the waiting, the round took 20 * 0.9 = 18 ms,
so `time_factor` is 1 / 0.9 = 1.11.

The constants for the CPU were measured on virtual machines with two cores (AMD EPYC, Intel Xeon): a step's time without
waiting, divided by its time on an otherwise idle machine (`benchmarks/results/cpu-x86_64/time-gate.md`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.base.units import word_form
from pytest_gpumem.facts.values.interference import Slowdown

if TYPE_CHECKING:
    from pytest_gpumem.facts.values.interference import Conditions


WAITED = 0.02
"""A time counts as disturbed if the thread waited for a core during more than this share. Waiting makes a step at least this
much longer. A thread waited 0 % on an idle machine, and 1 % if each of the other cores was busy. With a process that
shared the core for a tenth of the time, a thread waited 11 %, and steps took 12 % to 33 % longer."""
STOLEN = 0.03
"""A time counts as disturbed if the hypervisor took more than this share of a busy core. Stolen time acts like waiting."""
OTHERS = 0.25
"""A time counts as disturbed if other processes used more than this share of the other cores. On two cores with a common L3
cache, computing on the other core made GPT-2 steps up to 8 % longer, and copying through memory up to 41 %. Copying for a
quarter of the time made steps up to 9 % longer. For steps of 3 ms, the three figures are 15 %, 76 % and 11 %. But such short
steps varied by up to 38 % even without another process."""
SLOWEST_CLOCK = 0.75
"""The lowest SM clock, as a share of its default. NVIDIA's nvbench discards samples below the same share."""

_TICK_COUNTERS = 5
"""The largest number of counters that are added up for ``other_cpu_seconds``. Each counter may be wrong by one tick."""

_TIMES = {1: "once", 2: "twice"}
_SLOWDOWNS = {
    "HwThermalSlowdown": "thermal slowdown by hardware",
    "SwThermalSlowdown": "thermal slowdown by the driver",
    "HwPowerBrakeSlowdown": "external power brake",
    "HwSlowdown": "slowdown by hardware",
}
_CLOCK_MEANS_NOTHING = frozenset({"GpuIdle", "SwPowerCap", "ApplicationsClocksSetting"})
"""Reasons for a lower clock that are not interference. An idle GPU lowers its clock. The power limit lowers the clock in
every large matrix product, so the step itself is the cause. Lower application clocks are set on purpose, and are equal in
every run."""


def disturbance(before: Conditions, after: Conditions) -> str | None:
    """Return a clause with all known disturbances between two readings; ``None`` if nothing disturbed the time.

    The interval between the readings may have any length. Some counters advance in ticks, and count only beyond this
    resolution. So they may show a disturbance in a sample that takes a second, but hardly in a round of 20 ms. The GPU's clock
    is judged at the second reading, because a GPU is idle before its first work.
    """
    return _clauses(
        _retried(before, after),
        _compiled(before, after),
        _throttled(before, after),
        _slow_clock(after),
        _other_processes(before, after),
        _waited(before, after),
        _may_have_waited(before, after),
        _stolen(before, after),
        _others(before, after),
    )


def tick_disturbance(before: Conditions, after: Conditions) -> str | None:
    """Return a clause with the disturbances that are counted in ticks, for a whole sample; ``None`` if there are none."""
    return _clauses(_may_have_waited(before, after), _stolen(before, after), _others(before, after))


def _clauses(*clauses: str | None) -> str | None:
    return ", ".join(clause for clause in clauses if clause is not None) or None


def _retried(before: Conditions, after: Conditions) -> str | None:
    times = increase(before.retries, after.retries)
    return f"the allocator retried {_TIMES.get(times, f'{times} times')}" if times else None


def _compiled(before: Conditions, after: Conditions) -> str | None:
    graphs = increase(before.graphs, after.graphs)
    if not graphs:
        return None
    return word_form(graphs, "a graph was compiled meanwhile", f"{graphs} graphs were compiled meanwhile")


def increase(before: int | None, after: int | None) -> int:
    """Return a counter's increase between two readings. If the counter was reset to 0, return the second reading."""
    if before is None or after is None:
        return 0
    return after - before if after >= before else after


def is_throttled(before: Conditions, after: Conditions) -> bool:
    """Return whether the GPU's clock was lowered to protect the GPU, at either reading."""
    return not _SLOWDOWNS.keys().isdisjoint(_events(before, after))


def _events(before: Conditions, after: Conditions) -> frozenset[str]:
    return (before.clock_events or frozenset()) | (after.clock_events or frozenset())


def _throttled(before: Conditions, after: Conditions) -> str | None:
    events = _events(before, after)
    named = [words for event, words in _SLOWDOWNS.items() if event in events]
    if len(named) > 1 and "HwSlowdown" in events:
        # NVML sets this event together with the two specific hardware events.
        named.remove(_SLOWDOWNS["HwSlowdown"])
    return f"the GPU was throttled: {' and '.join(named)}" if named else None


def sm_clock_share(after: Conditions) -> float | None:
    """Return the SM clock divided by its default if the clock is too low; otherwise ``None``.

    Return ``None`` also for a low clock that the step's power draw or a setting explains.
    """
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
    """Return the number of processes from outside this session that used the GPU at either reading."""
    return max(len(before.other_pids | after.other_pids), before.other_processes or 0, after.other_processes or 0)


def _other_processes(before: Conditions, after: Conditions) -> str | None:
    pids = sorted(before.other_pids | after.other_pids)
    if len(pids) == 1:
        return f"process {pids[0]} also used the GPU"
    if pids:
        return f"processes {', '.join(map(str, pids[:-1]))} and {pids[-1]} also used the GPU"
    number = other_processes(before, after)
    if not number:
        return None
    return word_form(number, "another process also used the GPU", f"{number} other processes also used the GPU")


def _waited(before: Conditions, after: Conditions) -> str | None:
    waited = share(before, after, before.waited, after.waited)
    if waited is None or waited <= WAITED:
        return None
    return f"the thread waited {percent(waited)} of the time for a core"


def _may_have_waited(before: Conditions, after: Conditions) -> str | None:
    """Return a clause if there may be uncounted waiting (`_uncounted_waiting`), beyond the counters' resolution."""
    off_core = share(before, after, before.off_core, after.off_core)
    used = share(before, after, before.other_cpu_seconds, after.other_cpu_seconds)
    if off_core is None or used is None:
        return None
    uncounted = _uncounted_waiting(before, after)
    tick = after.tick / elapsed(before, after)
    if min(uncounted - tick, used - _TICK_COUNTERS * tick) <= WAITED:
        return None
    who = "the thread" if after.waited is None else "the step's other processes"
    return f"{who} may have waited {percent(min(uncounted, MOST_STOLEN))} of the time for a core"


def _stolen(before: Conditions, after: Conditions) -> str | None:
    stolen = share(before, after, before.stolen, after.stolen)
    if stolen is None:
        return None
    # Time can only be stolen from busy cores: the step's core and the cores that other processes keep busy.
    busy = 1 + max(share(before, after, before.other_cpu_seconds, after.other_cpu_seconds) or 0.0, 0.0)
    if (stolen - after.tick / elapsed(before, after)) / busy <= STOLEN:
        return None
    return f"the hypervisor took {percent(stolen / busy)} of the time of each busy core"


def _others(before: Conditions, after: Conditions) -> str | None:
    used = share(before, after, before.other_cpu_seconds, after.other_cpu_seconds)
    # On a single core, other processes take turns with the thread, so the thread's time off the core shows them.
    if used is None or after.cores is None or after.cores < 2:
        return None
    if used - _TICK_COUNTERS * after.tick / elapsed(before, after) <= OTHERS * (after.cores - 1):
        return None
    return f"other processes used {used:.2f} of {after.cores} cores meanwhile"


def share(before: Conditions, after: Conditions, earlier: float | None, later: float | None) -> float | None:
    """Return the increase in a count of seconds, divided by the elapsed time; ``None`` if a reading is missing.

    Args:
        before: The first reading.
        after: The second reading.
        earlier: The count in the first reading.
        later: The count in the second reading.
    """
    seconds = elapsed(before, after)
    return None if earlier is None or later is None or seconds <= 0 else (later - earlier) / seconds


def elapsed(before: Conditions, after: Conditions) -> float:
    """Return the seconds between two readings."""
    return after.seconds - before.seconds


def percent(ratio: float) -> str:
    """Return a ratio as text: ``12 %``."""
    return f"{100 * ratio:.0f} %"


OTHER_CORES = 0.2
"""Each other busy core slows a step by at most this share. At most 0.12 was measured while the device's speed (`Device.pace`)
stayed the same. A larger slowdown also lowers the measured speed."""
REFILLING = 0.45
"""An upper bound for the slowdown by cold caches. While the thread waits for a core, other processes fill the caches, so the
step is slower afterwards. The slowdown is at most this number, multiplied by the time off the core and divided by the time on
the core. For example, if a thread waits for half of the time, the step takes at most 1.45 times as long, not counting the wait
itself. On the EPYC, steps took up to 1.14 times as long with 40 % waiting, and up to 1.34 times with 50 %. The slowdown itself
has no upper limit. With a limit of 1.7, 7 of 1,000 comparisons of a step with itself failed on the Xeon, with four processes
for each core."""
MOST_SLOWED = 5.0
"""An upper bound for the slowdown by all other busy cores, which share the memory's bandwidth. It was not measured."""
MOST_STOLEN = 0.95
THROTTLED = 4.0
"""An upper bound for the slowdown by a lowered clock. The hardware halves the GPU's clock (``nvmlClocksEventReasonHwSlowdown``
in nvml.h), so a step takes up to twice as long. This bound is twice as high, to be safe."""
OTHERS_ON_GPU = 2.0
"""An upper bound for the slowdown on a shared GPU, to be multiplied by the number of processes on the GPU. With equal time
slices, two processes take twice as long. This bound is twice as high, to be safe."""
SECONDS_A_RETRY = 1.0
"""An upper bound for the seconds of a retry, in which the allocator releases its cache (up to all memory) and tries again."""
SECONDS_A_GRAPH = 100.0
"""An upper bound for the seconds in which torch.compile compiles a graph."""
GPU_CLOCK = 2
"""A lowered GPU clock slows a step by at most the clock's ratio to this power: at half the clock, to at most 4 times the time.
The exponent was not measured."""


def time_factor(before: Conditions, after: Conditions) -> float:
    """Return an upper bound for the factor by which interference lengthened the time between two readings.

    Only interference that takes time from the step counts, for example other processes on the step's core.
    """
    waited = _waiting(before, after)
    events = SECONDS_A_RETRY * increase(before.retries, after.retries) + SECONDS_A_GRAPH * increase(
        before.graphs, after.graphs
    )
    other_count = other_processes(before, after)
    on_gpu = OTHERS_ON_GPU * (1 + other_count) if other_count else 1.0
    seconds = elapsed(before, after)
    # If retries and compiling may have filled the whole interval, nothing is known about the step.
    left = max(seconds - events, 1e-6 * seconds) / seconds if seconds > 0 else 1.0
    return on_gpu / left / (1 - waited)


def slowdown(before: Conditions, after: Conditions) -> Slowdown:
    """Return upper bounds for the factors by which the running step was slowed, from the host's counters for a sample.

    The counter for stolen time adds up all cores, and this step's core may have lost all of the stolen time. The bounds include
    uncounted waiting, because the ticks of its bound are too coarse for a round.
    """
    stolen = min(max(share(before, after, before.stolen, after.stolen) or 0.0, 0.0), MOST_STOLEN)
    waiting = _waiting(before, after)
    off_core = 1 - (1 - waiting) * (1 - stolen)
    refilling = REFILLING * off_core / (1 - off_core)
    busy_cores = min(
        max(share(before, after, before.other_cpu_seconds, after.other_cpu_seconds) or 0.0, 0.0), (after.cores or 1) - 1
    )
    uncounted = 1 / (1 - min(_uncounted_waiting(before, after), MOST_STOLEN))
    return Slowdown(
        min(1 + OTHER_CORES * busy_cores, MOST_SLOWED) * uncounted, (1 + refilling) / (1 - stolen) * uncounted
    )


def gpu_slowdown(before: Conditions, after: Conditions) -> float:
    """Return an upper bound for the factor by which a lowered clock slowed the GPU."""
    throttled = THROTTLED if is_throttled(before, after) else 1.0
    clock = sm_clock_share(after)
    return max(throttled, 1.0 if clock is None else clock**-GPU_CLOCK)


def contention_factor(conditions: Conditions) -> float:
    """Return the largest factor by which another measured test can slow a step if both use the device at once.

    On the host, the factor is 1, because the CPU time of other processes already includes the other test. A GPU does not
    report such a time.
    """
    return 1.0 if conditions.cores is not None else 2 * OTHERS_ON_GPU


def _waiting(before: Conditions, after: Conditions) -> float:
    """Return an upper bound for the share of time in which the step was ready to run but waited for a core."""
    waited = share(before, after, before.waited, after.waited) or 0.0
    return min(max(waited, 0.0) + _uncounted_waiting(before, after), MOST_STOLEN)


def _uncounted_waiting(before: Conditions, after: Conditions) -> float:
    """Return an upper bound for the share of time in which the step waited for a core, but nothing counted it.

    The system may not count waiting. If it does, it counts the waiting of this thread, which may sleep while a child waits for
    a core, for example a server asked by the step. The share is at most other programs' CPU time, and at most the
    time in which this thread did not run and did not wait itself.

    Example: In 1 s, the thread ran for 0.7 s, and other programs used 0.2 s. The step waited for at most 0.2 s.
    """
    used = share(before, after, before.other_cpu_seconds, after.other_cpu_seconds) or 0.0
    off_core = share(before, after, before.off_core, after.off_core)
    waited = share(before, after, before.waited, after.waited)
    if waited is not None:
        children = share(before, after, before.children_cpu_seconds, after.children_cpu_seconds)
        if off_core is None or not children:
            return 0.0
        off_core -= waited
    return max(used if off_core is None else min(used, off_core), 0.0)
