"""Peaks of the ranks of a distributed job side by side, and their imbalance: what every format of reports shows. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.units import format_bytes
from pytest_gpumem.values.rank import rank_in, without_rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.reports.results import TestResult
    from pytest_gpumem.units import UnitSystem

MOST_COLUMNS = 8
"""Ranks that have a column each; of more, the smallest, the median and the largest peak are shown."""


@dataclass(frozen=True, slots=True)
class RankPeaks:
    """The peaks of one measurement on all ranks that took it."""

    file: str
    test: str
    name: str
    """The measurement's, without the rank."""
    world: int
    peaks: tuple[tuple[int, int], ...]
    """Rank and peak in bytes, by rank."""
    several: bool = False
    """True if its test has other measurements, too."""

    @property
    def title(self) -> str:
        return f"{self.file}::{self.test}{f' ({self.name})' if self.several else ''}"

    @property
    def smallest(self) -> tuple[int, int]:
        """Rank and bytes of the smallest peak; of equal ones the lowest rank."""
        return min(self.peaks, key=lambda one: one[1])

    @property
    def largest(self) -> tuple[int, int]:
        """Rank and bytes of the largest peak; of equal ones the lowest rank."""
        return max(self.peaks, key=lambda one: one[1])

    @property
    def imbalance(self) -> float:
        """The largest peak over the smallest; 1 where all are equal."""
        smallest = self.smallest[1]
        return self.largest[1] / smallest if smallest > 0 else 1.0


def peaks_by_rank(results: Iterable[TestResult]) -> list[RankPeaks]:
    """Return the peaks of each measurement that ranks took, in the order of the results."""
    found: list[RankPeaks] = []
    for result in results:
        test = result.verdict
        by_name: dict[tuple[str, int, str], list[tuple[int, int]]] = {}
        for one in test.verdicts if not test.unmeasured else ():
            measurement = one.measurement
            rank = rank_in(measurement.name)
            if rank is not None:
                key = without_rank(measurement.name), rank.world, measurement.environment.device
                by_name.setdefault(key, []).append((rank.number, measurement.peak_allocated))
        found += [
            RankPeaks(test.file, test.test, name, world, tuple(sorted(peaks)), len(by_name) > 1)
            for (name, world, _), peaks in by_name.items()
        ]
    return found


def rank_cells(rows: Sequence[RankPeaks], units: UnitSystem) -> tuple[list[str], list[list[str]]]:
    """Return the titles of the columns, and the cells of each row, the test first and the imbalance last."""
    most = max((number + 1 for row in rows for number, _ in row.peaks), default=0)
    if most <= MOST_COLUMNS:
        header = [f"rank {number}" for number in range(most)]
        cells = [[_of(row, number, units) for number in range(most)] for row in rows]
    else:
        header = ["smallest", "median", "largest"]
        cells = [[format_bytes(peak, units) for peak in _spread(row)] for row in rows]
    return ["test", *header, "imbalance"], [
        [row.title, *line, imbalance_text(row)] for row, line in zip(rows, cells, strict=True)
    ]


def imbalance_text(row: RankPeaks) -> str:
    """Return ``"1.20 (rank 3 over rank 0)"``, the largest peak over the smallest; ``"1.00"`` where they hardly differ."""
    text = f"{row.imbalance:.2f}"
    return text if text == "1.00" else f"{text} (rank {row.largest[0]} over rank {row.smallest[0]})"


def _of(row: RankPeaks, number: int, units: UnitSystem) -> str:
    peak = dict(row.peaks).get(number)
    return "-" if peak is None else format_bytes(peak, units)


def _spread(row: RankPeaks) -> tuple[int, int, int]:
    ordered = sorted(peak for _, peak in row.peaks)
    return ordered[0], ordered[len(ordered) // 2], ordered[-1]
