"""Interference with a timed step, as readings of counters (stolen seconds), which only grow, and gauges (a clock rate)."""

from __future__ import annotations

import math
from dataclasses import dataclass

PACE = 1.6
"""The exponent with which a lost pace may slow a step. If the pace is halved, the exponent
explains a time that is 2**1.6 = 3.03 times longer.

The speed of a virtual machine changed by a factor of 1.75 with little other work. In 577 pairs of runs there, the exponent's
median was 1.1 and its 90th percentile 1.66. Other work that uses memory slows the step more, and other factors cover this.
With the exponent 2, 5 % of the steps with twice the time could not be distinguished from a slow machine, with 1.6 about 1 %.
With both exponents, comparisons of a step with itself failed equally often (8 in 3,000)."""
UNREAD_PACE = 3
"""The exponent for a sample's factor if no pace can be compared. Sharing alone made steps up to 1.76 times as long."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The readings at a moment. ``None`` means that the device or machine does not support a reading.

    For counters (retries, graphs, seconds), only the difference between two readings has a meaning.
    """

    seconds: float
    """The monotonic clock's time in seconds."""

    retries: int | None = None
    """The number of times when the allocator found no memory, released its cache and tried again."""
    graphs: int | None = None
    """Graphs that torch.compile has compiled in this process."""

    waited: float | None = None
    """Seconds for which this thread was ready to run and had no core."""
    stolen: float | None = None
    """Seconds stolen by the hypervisor, summed over all cores and counted in ticks."""
    other_cpu_seconds: float | None = None
    """CPU seconds in other processes except this process's children, summed over all cores and counted in ticks."""
    cores: int | None = None
    """The number of cores in ``stolen`` and ``other_cpu_seconds``."""
    tick: float = 0.01
    """Seconds in a tick, the unit for ``stolen`` and ``other_cpu_seconds``."""

    clock_events: frozenset[str] | None = None
    """Limits on the GPU's clock by NVML's names: ``"SwPowerCap"``, ``"HwThermalSlowdown"``, ``"GpuIdle"``, ..."""
    sm_clock: float | None = None
    """The GPU's SM clock in Hz."""
    sm_clock_default: float | None = None
    """The GPU's default SM clock in Hz."""
    other_processes: int | None = None
    """The number of processes from other sessions on the GPU, without processes that NVML reports as idle."""
    other_pids: frozenset[int] = frozenset()
    """The pids of these processes. Empty if only their number is known, because a container has other pids."""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """The largest factors by which other work can have slowed a sample."""

    shared: float = 1.0
    """The factor for slowdowns visible in the pace."""
    refilled: float = 1.0
    """The factor for slowdowns not visible in the pace, such as cold caches."""

    def by(self, lost: float) -> float:
        """Return the factor for a pace that is lower by the ratio ``lost``, at least 1.

        Example:
            ``Slowdown(shared=1.2, refilled=1.1).by(1.5)`` is max(1.2, 1.1 * 1.5**1.6) = 2.10.
        """
        return max(self.shared, self.refilled * math.pow(lost, PACE))

    @property
    def alone(self) -> float:
        """The factor if no pace can be compared."""
        return max(self.shared, self.refilled) ** UNREAD_PACE
