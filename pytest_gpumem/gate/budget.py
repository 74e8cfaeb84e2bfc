"""Absolute limits of a test, from markers and settings."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Budget:
    """What a test may use at most: bytes, and a ratio of growth against its baseline. ``None`` is no limit."""

    peak_allocated: int | None = None
    peak_reserved: int | None = None
    retained: int | None = None
    max_growth: float | None = None
    """How much `peak_allocated` may grow against the baseline (0.02 is 2 %); replaces the tolerance."""
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
