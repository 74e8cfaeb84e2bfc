"""The live bytes during a step, over time and by category, for a report's chart. Frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from pytest_gpumem.facts.values.annotations import Count
from pytest_gpumem.facts.values.categories import Category
from pytest_gpumem.facts.values.plain import FrozenValue

MOST_MOMENTS = 300
"""A report's chart of the bytes over time has about this many moments."""


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """The time span of a phase in a step."""

    name: str
    """The phase's name: forward, backward or optimizer."""
    begin: int
    """The phase's beginning, in nanoseconds after the step's first event."""
    end: int
    """The phase's end, in nanoseconds after the step's first event."""


@dataclass(frozen=True, slots=True)
class OverTime(FrozenValue):
    """The live bytes in a step after each allocation and free. All series have the same length.

    The recorded step is slower than an unrecorded step, because recording takes time.
    """

    time_ns: tuple[int, ...]
    """The time of each moment, in nanoseconds after the step's first event. The first moment is the step's beginning, and each
    allocation or free is a further moment."""
    total: tuple[int, ...]
    """The live bytes after each moment, until the next."""
    categories: Mapping[Category, tuple[int, ...]]
    """The live bytes after each moment in each category (``"activation"``). The categories add up to ``total``."""
    peak: Count
    """The index of the moment with the peak."""
    phases: tuple[PhaseSpan, ...] = ()
    """The time span of each phase, in the order in which the phases ran."""

    def __post_init__(self) -> None:
        self._freeze(categories=self.categories)
        moments = len(self.time_ns)
        if any(len(series) != moments for series in (self.total, *self.categories.values())):
            raise ValueError(f"over_time: total and each category need a value for each of the {moments} moments")
        if not 0 <= self.peak < moments:
            raise ValueError(f"over_time.peak is {self.peak}, expected the number of one of the {moments} moments")

    def thinned(self, most: int = MOST_MOMENTS) -> OverTime:
        """Return the series with about ``most`` moments, so a chart is small but shows all extremes.

        The result contains the first moment, the last moment and the peak. All moments are divided into buckets, and the
        result contains the highest and the lowest moment of each bucket.
        """
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
