"""Absolute limits of a test, from markers and settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.units import Rate


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Budget:
    """What a test may use at most, and how much it must get done. ``None`` is no limit.

    Bytes, ratios of growth and slowdown against its baseline, and work per second.
    """

    limits: Mapping[str, int] = field(default_factory=dict)
    """By metric, in bytes."""
    max_growth: float | None = None
    """How much `peak_allocated` may grow against the baseline (0.02 is 2 %); replaces the tolerance."""
    max_slowdown: float | None = None
    """How much longer a step may take than in the baseline (0.05 is 5 %); replaces the tolerance."""
    min_throughput: Rate | None = None
    device: str | None = None

    def or_else(self, fallback: Budget) -> Budget:
        """This budget, with what it leaves open taken from ``fallback``."""
        return Budget(
            {**fallback.limits, **self.limits},
            _first(self.max_growth, fallback.max_growth),
            _first(self.max_slowdown, fallback.max_slowdown),
            _first(self.min_throughput, fallback.min_throughput),
            _first(self.device, fallback.device),
        )


def _first(value: T | None, fallback: T | None) -> T | None:
    return fallback if value is None else value
