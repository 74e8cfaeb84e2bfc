"""What may disturb a timed step, read at one moment: counters that only grow, and gauges."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Conditions:
    """The readings of one moment. ``None`` is what this device or machine does not tell.

    Of counters (retries, graphs, seconds) only differences of two readings mean anything.
    """

    seconds: float
    """When: seconds of the monotonic clock."""

    retries: int | None = None
    """How often the allocator found no memory, gave back what it had cached and tried again."""
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
    """Why the GPU's clock is not higher, by NVML's names: ``"SwPowerCap"``, ``"HwThermalSlowdown"``, ``"GpuIdle"``, ..."""
    sm_clock: float | None = None
    """The GPU's SM clock in Hz."""
    sm_clock_default: float | None = None
    """The SM clock in Hz that the GPU has unless told otherwise."""
    strangers: int | None = None
    """Processes on the GPU that are none of this session's, without those that NVML knows to be idle."""
    stranger_pids: frozenset[int] = frozenset()
    """Which they are; empty where only their number is known (in a container, where pids are another namespace's)."""
