"""Compare the peaks on a distributed job's ranks, for every report format. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import format_bytes, format_factor
from pytest_gpumem.facts.values.rank import rank_in, without_rank
from pytest_gpumem.reporting.reports.layout import LEAST_NAME, Column, Span, Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.base.units import UnitSystem
    from pytest_gpumem.reporting.reports.results import TestResult

MOST_COLUMNS = 8
"""A table has a column for each rank up to this number of ranks, else for the smallest, median and largest peak."""


@dataclass(frozen=True, slots=True)
class RankPeaks:
    """A measurement's peaks on all ranks."""

    file: str
    test: str
    name: str
    """The measurement's name without the rank."""
    world: int
    peaks: tuple[tuple[int, int], ...]
    """Pairs of a rank and its peak in bytes, sorted by rank."""
    several: bool = False
    """True if the test has several measurements, so the title includes the measurement's name."""

    @property
    def title(self) -> str:
        return f"{self.file}::{self.test}{f' ({self.name})' if self.several else ''}"

    @property
    def smallest(self) -> tuple[int, int]:
        """The rank with the smallest peak, and the peak in bytes. For equal peaks, the lowest rank."""
        return min(self.peaks, key=lambda rank_and_peak: rank_and_peak[1])

    @property
    def largest(self) -> tuple[int, int]:
        """The rank with the largest peak, and the peak in bytes. For equal peaks, the lowest rank."""
        return max(self.peaks, key=lambda rank_and_peak: rank_and_peak[1])

    @property
    def imbalance(self) -> float:
        """The largest peak divided by the smallest; 1 if all are equal."""
        smallest = self.smallest[1]
        return self.largest[1] / smallest if smallest > 0 else 1.0


def peaks_by_rank(results: Iterable[TestResult]) -> list[RankPeaks]:
    """Return the peaks on all ranks for each measurement in a distributed job, in the order of ``results``."""
    rows: list[RankPeaks] = []
    for result in results:
        test = result.verdict
        by_name: dict[tuple[str, int, str], list[tuple[int, int]]] = {}
        for verdict in test.verdicts if not test.unmeasured else ():
            measurement = verdict.measurement
            rank = rank_in(measurement.name)
            if rank is not None:
                key = without_rank(measurement.name), rank.world, measurement.environment.device
                by_name.setdefault(key, []).append((rank.number, measurement.peak_allocated))
        rows += [
            RankPeaks(test.file, test.test, name, world, tuple(sorted(peaks)), len(by_name) > 1)
            for (name, world, _), peaks in by_name.items()
        ]
    return rows


def rank_cells(rows: Sequence[RankPeaks], units: UnitSystem) -> tuple[list[str], list[list[str]]]:
    """Return the column titles, and the cells of each row, which begin with the test and end with the imbalance."""
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


def rank_table(rows: Sequence[RankPeaks], units: UnitSystem) -> Table:
    """Return a table with the peaks on all ranks. A narrow terminal omits the columns with peaks."""
    header, lines = rank_cells(rows, units)
    columns = (
        Column("peaks of ranks", left=True, least=LEAST_NAME),
        *(Column(name, weight=1) for name in header[1:-1]),
        Column(header[-1], left=True),
    )
    return Table(columns, tuple(tuple(map(Span, line)) for line in lines))


def imbalance_text(row: RankPeaks) -> str:
    """Return the largest peak divided by the smallest: ``"1.20 (rank 3 over rank 0)"``, or ``"1.00"`` for equal peaks."""
    text = format_factor(row.imbalance)
    return text if text == "1.00" else f"{text} (rank {row.largest[0]} over rank {row.smallest[0]})"


def _of(row: RankPeaks, number: int, units: UnitSystem) -> str:
    peak = dict(row.peaks).get(number)
    return "-" if peak is None else format_bytes(peak, units)


def _spread(row: RankPeaks) -> tuple[int, int, int]:
    ordered = sorted(peak for _, peak in row.peaks)
    return ordered[0], ordered[len(ordered) // 2], ordered[-1]
