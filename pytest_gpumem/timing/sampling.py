"""The median time of a step, from rounds of several steps."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.devices.contract import Device

ROUNDS = 5
SECONDS_A_ROUND = 0.02
"""A round is made of enough steps to last this long, so that the clock's resolution and a launch do not count."""
BUDGET_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a step, one for each round: a round's time over its steps."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


def time_step(step: Callable[[], object], device: Device) -> Times:
    """Time ``step`` in up to `ROUNDS` rounds, or fewer (at least one) when `BUDGET_SECONDS` are spent.

    The first step of all finds out how many make a round, and counts only when it filled one by itself.
    """
    first = device.time(lambda: _repeat(step, 1))
    steps = max(1, math.ceil(SECONDS_A_ROUND / first)) if first > 0 else 1
    rounds = [first] if steps == 1 else []
    spent = first
    while not rounds or (len(rounds) < ROUNDS and spent < BUDGET_SECONDS):
        seconds = device.time(lambda: _repeat(step, steps))
        rounds.append(seconds / steps)
        spent += seconds
    return Times(tuple(rounds))


def _repeat(step: Callable[[], object], times: int) -> None:
    for _ in range(times):
        step()
