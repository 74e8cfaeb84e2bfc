"""Interference with a timed step, as read at one moment: counters that only grow, and gauges."""

from __future__ import annotations

import math
from dataclasses import dataclass

PACE = 1.6
"""The power of what the pace lost by which a step may be slowed. Where a virtual machine's speed moved by 1.75 times with
little else at work, it was 1.1 in the median of 577 pairs of runs and 1.66 in the highest tenth. What else goes through memory
slows the step by more; of that the other factors tell. With 2, 5 % of steps twice as long could not be told from a slow machine
there, with 1.6 about 1 %, and comparisons of a step with itself failed as often (8 of 3,000)."""
UNREAD_PACE = 3
"""Power of what slowed a sample where no pace can be compared: alone, sharing made steps up to 1.76 times as long."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The readings of one moment. ``None`` is what this device or machine does not tell.

    Of counters (retries, graphs, seconds) only differences of two readings mean anything.
    """

    seconds: float
    """The time in seconds of the monotonic clock."""

    retries: int | None = None
    """The number of times that the allocator found no memory, gave back what it had cached and tried again."""
    graphs: int | None = None
    """Graphs that torch.compile has compiled in this process."""

    waited: float | None = None
    """Seconds that this thread was ready to run and had no core."""
    stolen: float | None = None
    """Seconds that the hypervisor gave this machine's cores to others, all cores together; counted in ticks."""
    others: float | None = None
    """CPU seconds of all processes but this one and those that it started, all cores together; counted in ticks."""
    cores: int | None = None
    """Cores of the machine, which ``stolen`` and ``others`` are counted on."""
    tick: float = 0.01
    """Seconds in which ``stolen`` and ``others`` are counted."""

    clock_events: frozenset[str] | None = None
    """Limits on the GPU's clock by NVML's names: ``"SwPowerCap"``, ``"HwThermalSlowdown"``, ``"GpuIdle"``, ..."""
    sm_clock: float | None = None
    """The GPU's SM clock in Hz."""
    sm_clock_default: float | None = None
    """The SM clock in Hz that the GPU has unless told otherwise."""
    other_processes: int | None = None
    """Processes on the GPU that are none of this session's, without those that NVML knows to be idle."""
    other_pids: frozenset[int] = frozenset()
    """Their pids; empty where only their number is known (in a container, where pids are another namespace's)."""


@dataclass(frozen=True, slots=True)
class Slowed:
    """The largest factors by which other work can have slowed a sample."""

    shared: float = 1.0
    """The factor of slowdowns that show in the pace."""
    refilled: float = 1.0
    """The factor of slowdowns that do not show in the pace, such as cold caches."""

    def by(self, lost: float) -> float:
        """Return the factor for a pace that is lower by the ratio ``lost``, at least 1."""
        return max(self.shared, self.refilled * math.pow(lost, PACE))

    @property
    def alone(self) -> float:
        """The factor if no pace can be compared."""
        return max(self.shared, self.refilled) ** UNREAD_PACE
