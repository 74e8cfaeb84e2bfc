"""A step's live bytes over time, by category. Frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from pytest_gpumem.values.plain import FrozenValue

MOST_MOMENTS = 300
"""Moments that are enough for a picture: a bucket of moments gives its highest and its lowest."""


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A phase of the step, in nanoseconds since its first event."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class OverTime(FrozenValue):
    """Bytes that a step held at each moment: the categories' bytes add up to ``total``.

    ``time_ns`` counts from the first event; each value holds until the next moment. ``peak`` is an index.
    """

    time_ns: tuple[int, ...]
    total: tuple[int, ...]
    categories: Mapping[str, tuple[int, ...]]
    peak: int
    phases: tuple[PhaseSpan, ...] = ()

    def __post_init__(self) -> None:
        self._freeze(categories=self.categories)
        moments = len(self.time_ns)
        if any(len(series) != moments for series in (self.total, *self.categories.values())):
            raise ValueError(f"over_time: total and each category need a value for each of the {moments} moments")
        if not 0 <= self.peak < moments:
            raise ValueError(f"over_time.peak is {self.peak}, expected the number of one of the {moments} moments")

    def thinned(self, most: int = MOST_MOMENTS) -> OverTime:
        """Return it with about ``most`` moments: the first, the last, the peak, and the highest and lowest in between."""
        count = len(self.time_ns)
        if count <= most:
            return self
        buckets = max(1, (most - 3) // 2)
        borders = [number * count // buckets for number in range(buckets + 1)]
        kept = {0, self.peak, count - 1}
        for first, end in pairwise(borders):
            kept.add(max(range(first, end), key=self.total.__getitem__))
            kept.add(min(range(first, end), key=self.total.__getitem__))
        moments = sorted(kept)
        return OverTime(
            tuple(self.time_ns[moment] for moment in moments),
            tuple(self.total[moment] for moment in moments),
            {name: tuple(series[moment] for moment in moments) for name, series in self.categories.items()},
            moments.index(self.peak),
            self.phases,
        )
