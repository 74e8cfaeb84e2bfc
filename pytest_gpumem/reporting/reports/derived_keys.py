"""The keys in a JSON report that are computed from its other keys. Frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from pytest_gpumem.facts.values.annotations import ADDED, Count, Range
from pytest_gpumem.facts.values.figures import MetricName
from pytest_gpumem.reporting.reports.ranks import peaks_by_rank

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpumem.judging.gate import causes
    from pytest_gpumem.reporting.reports.ranks import RankPeaks
    from pytest_gpumem.reporting.reports.session_report import SessionReport

FORMAT: Literal[1] = 1
"""The JSON format's version number. Its schema is ``report.schema.json``."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """A measurement's peaks on all ranks in a distributed job."""

    file: str
    """The test's file."""
    test: str
    """The test's id without its file."""
    name: str
    """The measurement's name without the rank."""
    world: Annotated[int, Range(2)]
    """The job's number of ranks."""
    peaks: tuple[tuple[int, int], ...]
    """`peak_allocated` of each rank, as ``[rank, bytes]``."""
    smallest: Count
    """The rank with the smallest peak."""
    largest: Count
    """The rank with the largest peak."""
    imbalance: float
    """The largest peak divided by the smallest."""


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a measurement's growth. A cause lists the parts that it explains."""

    test: str
    """The test's id."""
    name: str
    """The measurement."""
    metric: MetricName
    """The metric that grew."""
    device: str
    """The device's name for people."""
    amount: float
    """The size of this part, in the metric's unit."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of growth. Amounts are in the unit of their metric, for example bytes."""

    kind: Literal["line", "holder", "packages", "budget"]
    """``line`` (a line of code), ``holder`` (an object that keeps tensors alive), ``packages`` (other releases) or
    ``budget``."""
    lines: tuple[str, ...]
    """The lines of code; the line that explains most comes first. Empty if only the module is known. For a holder, the lines
    that made the tensors."""
    module: str
    """The module's path. If the line ran in several modules, a pattern or the first module."""
    category: str
    """The largest row's category."""
    operator: str
    """The largest row's operator."""
    tensors: str
    """The largest row's tensors. For a budget, its metric and limit."""
    reason: str
    """The reason for the growth; empty if unknown."""
    kept_in: str
    """The holder: ``Net.seen[...]``. Empty unless ``kind`` is ``holder``."""
    packages: tuple[str, ...]
    """The packages whose releases differ from the baseline's in each of the cause's tests, as clauses."""
    metric: MetricName
    """The metric in which ``total`` and ``largest`` are given."""
    total: float
    """The sum over the shares in this metric, in its unit."""
    largest: float
    """The largest share in this metric."""
    tests: tuple[str, ...]
    """The sorted ids of the tests that grew because of the cause."""
    shares: tuple[Share, ...]
    """The parts that the cause explains, one or several for each test."""


@dataclass(frozen=True, slots=True)
class DerivedKeys:
    """A JSON report's computed keys."""

    format: Literal[1]
    """This format's number: 1."""
    accounting: str
    """The line that accounts for every measured test."""
    passed: bool
    """True if the gate is green."""
    problems: tuple[str, ...]
    """Sentences with the reasons for a red session, other than its tests' results."""
    ranks: tuple[Ranks, ...]
    """For each measurement in a distributed job, its peaks on all ranks. Empty in other sessions."""
    causes: tuple[Cause, ...] = field(default=(), metadata=ADDED)
    """The causes of growth; the cause with the most tests comes first. Reports from older versions have no causes."""
    not_explained: tuple[Share, ...] = field(default=(), metadata=ADDED)
    """The growth that no cause explains. Together with the causes' shares, it adds up to each measurement's growth."""


def derived_keys(report: SessionReport) -> DerivedKeys:
    """Return a report's computed keys."""
    return DerivedKeys(
        FORMAT,
        report.accounting,
        report.passed,
        report.problems,
        tuple(map(_ranks, peaks_by_rank(report.results))),
        tuple(map(cause_of, report.causes.causes)),
        shares_of(report.causes.not_explained),
    )


def _ranks(row: RankPeaks) -> Ranks:
    (smallest, _), (largest, _) = row.smallest, row.largest
    return Ranks(row.file, row.test, row.name, row.world, row.peaks, smallest, largest, row.imbalance)


def cause_of(cause: causes.Cause) -> Cause:
    """Return a cause with the keys that JSON has."""
    return Cause(
        cause.kind,
        cause.lines,
        cause.module,
        cause.category,
        cause.operator,
        cause.tensors,
        cause.reason,
        cause.holder,
        cause.packages,
        cause.metric,
        cause.total,
        cause.largest.amount,
        cause.tests,
        shares_of(cause.shares),
    )


def shares_of(shares: Iterable[causes.Share]) -> tuple[Share, ...]:
    """Return shares with the keys that JSON has."""
    return tuple(
        Share(share.growth.test, share.growth.name, share.growth.metric, share.growth.device, share.amount)
        for share in shares
    )
