"""The values of a comparison of two revisions: what was compared, what was not, and what follows. Frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.gate.verdict import Outcome, worst

if TYPE_CHECKING:
    from pytest_gpumem.timing.intervals import Interval

REGRESSED = 1
NOTHING_COMPARED = 2

STEP_TIME = "step_time"


@dataclass(frozen=True, slots=True)
class Revision:
    """A revision as it was named, and the full hash of its commit."""

    name: str
    commit: str

    @property
    def short(self) -> str:
        return self.commit[:7]

    def __str__(self) -> str:
        return self.short if self.commit.startswith(self.name) else f"{self.name} ({self.short})"


@dataclass(frozen=True, slots=True)
class Figure:
    """One metric on both sides, in its unit. ``word`` is the verdict as a person reads it."""

    metric: str
    outcome: Outcome
    word: str
    base: float
    head: float
    interval: Interval | None = None
    """Of a time: the ratio of head to base, and its confidence interval."""
    allowed: float | None = None
    """The change that was tolerated, in the metric's unit."""
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement that both sides have."""

    file: str
    test: str
    name: str
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()
    only_one: bool = True
    """Whether it is its test's only measurement."""

    @property
    def title(self) -> str:
        title = f"{self.file}::{self.test}"
        return title if self.only_one else f"{title} ({self.name})"

    @property
    def outcome(self) -> Outcome:
        return worst(figure.outcome for figure in self.figures)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What could not be compared, and why, as a clause. ``broke``: it is measured in base, and fails in head."""

    title: str
    reason: str
    broke: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """A comparison of two revisions. ``tolerance`` is the slowdown that is tolerated, as a ratio."""

    base: Revision
    head: Revision
    pairs: int
    tolerance: float
    rows: tuple[Row, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    @property
    def speeds(self) -> dict[tuple[str, str, str], Figure]:
        """What was said of the step times, by file, test and name of the measurement."""
        return {
            (row.file, row.test, row.name): figure
            for row in self.rows
            for figure in row.figures
            if figure.metric == STEP_TIME
        }

    @property
    def exit_status(self) -> int:
        if any(row.outcome is Outcome.REGRESSED for row in self.rows) or any(one.broke for one in self.left_out):
            return REGRESSED
        return 0 if self.rows else NOTHING_COMPARED
