"""Choose the source of the CPU times that reveal other work on the machine: /proc on Linux, psutil on other systems."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from pytest_gpumem.measuring.devices import proc, psutil_times

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.facts.values.interference import Conditions
    from pytest_gpumem.measuring.devices.proc import CpuTimes


class LoadSource(Protocol):
    """The functions that each source has. The modules `proc` and `psutil_times` are sources."""

    NAME: str
    """The source's name in messages, for example ``"psutil"``."""

    def cpu_times(self) -> CpuTimes | None:
        """Return the CPU times of all cores since the machine started; ``None`` if they are unknown."""
        ...

    def seconds_of_children(self) -> float:
        """Return the CPU seconds used by this process's descendants."""
        ...

    def seconds_of(self, pids: Iterable[int]) -> float:
        """Return the CPU seconds used by the processes ``pids`` and their descendants."""
        ...

    def siblings_with(self, variable: str) -> tuple[int, ...]:
        """Return the pids of other processes with the same parent and the same value in an environment variable."""
        ...


@functools.cache
def load_source() -> LoadSource | None:
    """Return the first source that reports CPU times; ``None`` if neither does.

    psutil is no dependency, because Linux does not need it, and many projects have it already.
    """
    sources: tuple[LoadSource, ...] = (proc, psutil_times)
    return next((source for source in sources if source.cpu_times() is not None), None)


def with_load(conditions: Conditions, other_ranks: Iterable[int]) -> Conditions:
    """Return ``conditions`` with the CPU time of other programs and of children; unchanged without a source.

    Args:
        conditions: A reading by this thread.
        other_ranks: The pids of the job's other ranks on this machine. They are no other programs.
    """
    source = load_source()
    times = None if source is None else source.cpu_times()
    if source is None or times is None:
        return conditions
    children = source.seconds_of_children()
    own = time.process_time() + children + source.seconds_of(other_ranks)
    return replace(
        conditions,
        off_core=conditions.seconds - time.thread_time(),
        children_cpu_seconds=children,
        stolen=times.stolen,
        other_cpu_seconds=times.busy - own,
        cores=times.cores,
    )


def siblings_with(variable: str) -> tuple[int, ...]:
    """Return the pids of a job's other processes, by `LoadSource.siblings_with`; empty without a source."""
    source = load_source()
    return () if source is None else source.siblings_with(variable)
