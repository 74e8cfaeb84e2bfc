"""Absolute limits of a test, from markers and settings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpumem.units import Rate


@dataclass(frozen=True, slots=True)
class Budget:
    """What a test may use at most, and how much it must get done. ``None`` is no limit.

    Bytes, ratios of growth and slowdown against its baseline, and work per second.
    """

    peak_allocated: int | None = None
    peak_reserved: int | None = None
    retained: int | None = None
    max_growth: float | None = None
    """How much `peak_allocated` may grow against the baseline (0.02 is 2 %); replaces the tolerance."""
    max_slowdown: float | None = None
    """How much longer a step may take than in the baseline (0.05 is 5 %); replaces the tolerance."""
    min_throughput: Rate | None = None
    device: str | None = None

    def or_else(self, fallback: Budget) -> Budget:
        """This budget, with what it leaves open taken from ``fallback``."""
        return Budget(
            **{
                field.name: value if (value := getattr(self, field.name)) is not None else getattr(fallback, field.name)
                for field in fields(self)
            }
        )

    def limit(self, metric: str) -> int | None:
        """The limit of a metric, in bytes."""
        return {
            "peak_allocated": self.peak_allocated,
            "peak_reserved": self.peak_reserved,
            "retained": self.retained,
        }.get(metric)
