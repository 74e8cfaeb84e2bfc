"""psutil's results on each system, with the fields that it has there, and a psutil that returns them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable


class Linux(NamedTuple):
    user: float
    nice: float = 0.0
    system: float = 0.0
    idle: float = 0.0
    iowait: float = 0.0
    irq: float = 0.0
    softirq: float = 0.0
    steal: float = 0.0
    guest: float = 0.0
    guest_nice: float = 0.0


class MacOS(NamedTuple):
    user: float
    nice: float = 0.0
    system: float = 0.0
    idle: float = 0.0


class Windows(NamedTuple):
    user: float
    system: float = 0.0
    idle: float = 0.0
    interrupt: float = 0.0
    dpc: float = 0.0


class OfProcess(NamedTuple):
    user: float
    system: float = 0.0
    children_user: float = 0.0
    children_system: float = 0.0


def fake_psutil(
    cpu_times: Callable[[], tuple[float, ...]], cores: int, children: tuple[OfProcess, ...] = ()
) -> SimpleNamespace:
    """A psutil on a machine with these times, whose every process has the same children."""
    processes = [SimpleNamespace(cpu_times=lambda times=times: times) for times in children]
    return SimpleNamespace(
        cpu_times=cpu_times,
        cpu_count=lambda: cores,
        Process=lambda pid: SimpleNamespace(children=lambda recursive: processes),
        Error=psutil.Error,
    )
