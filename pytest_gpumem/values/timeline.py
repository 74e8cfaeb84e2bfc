"""A step's live bytes over time, by category. Frozen values, to and from plain ones."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_MOMENTS = 300
"""So many are enough for a picture: a bucket of moments gives its highest and its lowest."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of the step, in nanoseconds since its first event."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class OverTime:
    """Bytes that a step held at each moment: the categories' bytes add up to ``total``.

    ``time_ns`` counts from the first event; each value holds until the next moment. ``peak`` is an index.
    """

    time_ns: tuple[int, ...]
    total: tuple[int, ...]
    categories: Mapping[str, tuple[int, ...]]
    peak: int
    phases: tuple[Phase, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "categories", MappingProxyType(dict(self.categories)))

    def __reduce__(self) -> tuple[Any, ...]:
        return over_time_from_plain, (self.to_plain(),)

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

    def to_plain(self) -> dict[str, Any]:
        """Return dicts, lists, strings and numbers only; `over_time_from_plain` is the inverse."""
        return {
            "time_ns": list(self.time_ns),
            "total": list(self.total),
            "categories": {name: list(series) for name, series in self.categories.items()},
            "peak": self.peak,
            "phases": [asdict(phase) for phase in self.phases],
        }


def over_time_from_plain(plain: Mapping[str, Any]) -> OverTime:
    """Return the timeline that `OverTime.to_plain` turned into plain values."""
    return OverTime(
        tuple(plain["time_ns"]),
        tuple(plain["total"]),
        {name: tuple(series) for name, series in plain["categories"].items()},
        plain["peak"],
        tuple(Phase(**phase) for phase in plain["phases"]),
    )
