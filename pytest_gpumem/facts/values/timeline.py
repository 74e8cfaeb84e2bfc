"""A step's live bytes over time, by category. Frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from pytest_gpumem.facts.values.plain import FrozenValue

MOST_MOMENTS = 300
"""The number of moments in a picture. Each bucket contributes its highest and its lowest moment."""


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A phase of the step."""

    name: str
    """forward, backward or optimizer."""
    begin: int
    """Nanoseconds from the step's first event."""
    end: int
    """Nanoseconds from the step's first event."""


@dataclass(frozen=True, slots=True)
class OverTime(FrozenValue):
    """A step's bytes at each moment, from its beginning to its end. All series have the same length.

    Recording takes time, so the moments are further apart than in an unrecorded step.
    """

    time_ns: tuple[int, ...]
    """Nanoseconds from the first event: the beginning, then one moment for each allocation and free."""
    total: tuple[int, ...]
    """The step's bytes from each moment to the next."""
    categories: Mapping[str, tuple[int, ...]]
    """Bytes by category. At each moment they add up to ``total``."""
    peak: int
    """The peak's index."""
    phases: tuple[PhaseSpan, ...] = ()
    """The phases in order."""

    def __post_init__(self) -> None:
        self._freeze(categories=self.categories)
        moments = len(self.time_ns)
        if any(len(series) != moments for series in (self.total, *self.categories.values())):
            raise ValueError(f"over_time: total and each category need a value for each of the {moments} moments")
        if not 0 <= self.peak < moments:
            raise ValueError(f"over_time.peak is {self.peak}, expected the number of one of the {moments} moments")

    def thinned(self, most: int = MOST_MOMENTS) -> OverTime:
        """Return the series with about ``most`` moments: the first, the last, the peak, and extremes in between."""
        count = len(self.time_ns)
        if count <= most:
            return self
        buckets = max(1, (most - 3) // 2)
        borders = [number * count // buckets for number in range(buckets + 1)]
        moments_kept = {0, self.peak, count - 1}
        for first, end in pairwise(borders):
            moments_kept.add(max(range(first, end), key=self.total.__getitem__))
            moments_kept.add(min(range(first, end), key=self.total.__getitem__))
        moments = sorted(moments_kept)
        return OverTime(
            tuple(self.time_ns[moment] for moment in moments),
            tuple(self.total[moment] for moment in moments),
            {name: tuple(series[moment] for moment in moments) for name, series in self.categories.items()},
            moments.index(self.peak),
            self.phases,
        )
