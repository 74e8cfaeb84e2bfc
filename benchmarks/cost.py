"""Cost of an action in seconds of the CPU and of the clock."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


@dataclass(frozen=True)
class Cost:
    """Seconds."""

    cpu: float
    wall: float


def cost_of(action: Callable[[], T]) -> tuple[Cost, T]:
    """Return what ``action`` took, with the child processes that ended meanwhile, and what it returned."""
    cpu, began = _cpu_seconds(), time.perf_counter()
    result = action()
    return Cost(_cpu_seconds() - cpu, time.perf_counter() - began), result


def _cpu_seconds() -> float:
    of_both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in of_both)
