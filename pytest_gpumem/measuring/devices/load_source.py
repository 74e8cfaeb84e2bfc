"""Choose the source of the CPU times that reveal other work on the machine: /proc on Linux, psutil on other systems."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Protocol

from pytest_gpumem.measuring.devices import proc, psutil_times

if TYPE_CHECKING:
    from collections.abc import Iterable

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


def siblings_with(variable: str) -> tuple[int, ...]:
    """Return the pids of a job's other processes, by `LoadSource.siblings_with`; empty without a source."""
    source = load_source()
    return () if source is None else source.siblings_with(variable)
