"""Other work that slows a timed step down. It shows in counters, such as stolen seconds, and in the GPU's clock rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

PACE = 1.6
"""The exponent for converting a lower processor speed (`Round.pace`) into an upper bound on a step's slowdown.

If the speed is halved, a step may take up to 2**1.6 = 3.03 times as long.

The value comes from a virtual machine whose speed varied by a factor 1.75 with little other work. In 577 pairs of runs, the
median exponent was 1.1 and the 90th percentile was 1.66. Other work with much memory traffic slows a step more than this
exponent says, and `Slowdown.refilled` covers this slowdown. A larger exponent hides slow steps: with the exponent 2, a step
with twice the time was mistaken for a slow machine in 5 % of all runs, and with the exponent 1.6 in about 1 %. False alarms did
not depend on the exponent: comparing a step with itself failed 8 times in 3,000."""
UNREAD_PACE = 3
"""If the processor's speed was not read, the upper bound on a sample's slowdown is raised to this power, to be safe. In
experiments, sharing the processor made steps up to 1.76 times as long."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Counters and clock rates, read before and after a round. A field is ``None`` if the machine cannot report its value.

    A counter's value (retries, graphs, seconds) has no meaning by itself. Only the difference between two readings has.
    """

    seconds: float
    """The time on the monotonic clock in seconds."""

    retries: int | None = None
    """The number of times that the CUDA allocator found no free memory, released its cached blocks and tried again."""
    graphs: int | None = None
    """The number of graphs compiled by torch.compile in this process."""

    waited: float | None = None
    """Seconds for which this thread was ready to run but waited for a core. Only Linux counts them."""
    off_core: float | None = None
    """Seconds for which this thread did not run on a core, because it waited for a core or for something else.

    The value is an upper bound for the waiting that nothing counts. It is the time on the clock minus the thread's CPU time,
    and is read if ``other_cpu_seconds`` is known.
    """
    children_cpu_seconds: float | None = None
    """CPU seconds in this process's descendants. If they worked for the step, the thread slept until they had a core."""
    stolen: float | None = None
    """Seconds in which the hypervisor ran other virtual machines, summed over all cores and counted in ticks."""
    other_cpu_seconds: float | None = None
    """CPU seconds in all other processes, except this process's children, summed over all cores and counted in ticks. A GPU
    reads it only beside children."""
    cores: int | None = None
    """The number of cores summed in ``stolen`` and ``other_cpu_seconds``."""
    tick: float = 0.01
    """A tick in seconds. The system counts ``stolen`` and ``other_cpu_seconds`` in whole ticks."""

    clock_events: frozenset[str] | None = None
    """The current limits on the GPU's clock by NVML's names: ``"SwPowerCap"``, ``"HwThermalSlowdown"``, ``"GpuIdle"``."""
    sm_clock: float | None = None
    """The GPU's current SM clock in Hz."""
    sm_clock_default: float | None = None
    """The GPU's default SM clock in Hz."""
    other_processes: int | None = None
    """The number of processes from outside this session on the GPU, except processes reported as idle by NVML."""
    other_pids: frozenset[int] = frozenset()
    """The process ids of ``other_processes``. Empty in a container, because NVML reports the host's process ids."""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Upper bounds on the factors by which other work slowed a sample."""

    shared: float = 1.0
    """Upper bound on slowdowns that also lower the processor's measured speed (`Round.pace`), such as sharing a core."""
    refilled: float = 1.0
    """Upper bound on slowdowns without an effect on the measured speed, for example because caches must be refilled."""

    def by(self, lost: float) -> float:
        """Return the upper bound on a slowdown in a sample whose processor ran slower than usual.

        ``lost`` is the usual speed divided by the speed in the sample, at least 1.

        Example:
            ``Slowdown(shared=1.2, refilled=1.1).by(1.5)`` is max(1.2, 1.1 * 1.5**1.6) = 2.10.
        """
        return max(self.shared, self.refilled * math.pow(lost, PACE))

    @property
    def alone(self) -> float:
        """The upper bound on a slowdown if the processor's speed was not read."""
        return max(self.shared, self.refilled) ** UNREAD_PACE
