"""A comparison of two sides, test by test and metric by metric: what `gpumem ab` and `gpumem compare` tell. Frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pytest_gpumem.gate.baseline import Key
from pytest_gpumem.gate.speed import OUTCOMES
from pytest_gpumem.gate.verdict import COMPARED, Outcome, worst
from pytest_gpumem.metrics import METRICS, WHOLE

if TYPE_CHECKING:
    from pytest_gpumem.git import Revision
    from pytest_gpumem.timing.intervals import Interval

WORSE = 1
NOTHING_COMPARED = 2
Place = tuple[Key, str]
"""A measurement's key, and the slug of the device that it was taken on."""
Word = Literal["new", "gone", "unmeasured", "failed", "broken", "not compared"]
"""What is said of what is not compared."""
_SPEEDS = {outcome: word for word, outcome in OUTCOMES.items()}


@dataclass(frozen=True, slots=True)
class Change:
    """A metric of a test on both sides, in its unit; ``None`` where a side has none. ``allowed`` is the change tolerated."""

    metric: str
    old: float | None
    new: float | None
    outcome: Outcome = Outcome.RECORDED
    allowed: float | None = None
    reason: str | None = None
    interval: Interval | None = None
    """The ratio of new to old and its confidence interval, of a time that was taken in turns."""

    @property
    def word(self) -> str:
        """The verdict as a person reads it; empty where there is none."""
        if self.interval is not None:
            return _SPEEDS[self.outcome]
        return "" if self.outcome is Outcome.RECORDED else self.outcome.words

    @property
    def ratio(self) -> float | None:
        """New to old; ``None`` where that is not defined."""
        if self.interval is not None:
            return self.interval.ratio
        return self.new / self.old if self.old and self.new is not None else None

    @property
    def is_news(self) -> bool:
        """Whether a reader wants to know: bytes and counts that are others, and times beyond what they vary by."""
        if self.interval is not None or self.outcome not in (Outcome.OK, Outcome.RECORDED):
            return True
        if METRICS[self.metric].unit in WHOLE:
            return self.old != self.new
        tolerance = METRICS[self.metric].tolerance
        if tolerance is None or self.old is None or self.new is None or self.outcome is Outcome.OK:
            return False
        return abs(self.new - self.old) > tolerance.allowed(self.old)


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement that both sides have. ``reason`` is a sentence where they cannot be compared, ``notes`` are clauses.

    ``slug`` is the new side's device, ``old_slug`` the old one's where one of the two is emulated and the other is not.
    """

    key: Key
    slug: str
    title: str
    changes: tuple[Change, ...]
    reason: str | None = None
    notes: tuple[str, ...] = ()
    old_slug: str | None = None

    @property
    def outcome(self) -> Outcome:
        return worst(change.outcome for change in self.changes)

    @property
    def compared(self) -> bool:
        return any(change.outcome in COMPARED for change in self.changes)

    @property
    def news(self) -> tuple[Change, ...]:
        """The changes that a reader wants to know of."""
        return tuple(change for change in self.changes if change.is_news)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A test, or a measurement of it, that is not compared. ``reason`` is a clause, where one is known.

    ``place`` is that of a measurement which one side has only, with this ``peak`` in bytes.

    ``new`` and ``gone`` are on one side only. ``unmeasured`` gave no figures on the new side, ``failed`` and ``broken`` failed
    there and not on the old one.
    """

    title: str
    word: Word
    reason: str | None = None
    place: Place | None = None
    peak: float | None = None

    @property
    def is_worse(self) -> bool:
        return self.word in ("failed", "broken")


@dataclass(frozen=True, slots=True)
class Failure:
    """A test that failed, or did not run to its end, and why, as a clause. ``slugs`` are the devices it has figures of."""

    file: str
    test: str
    why: str
    slugs: frozenset[str] = frozenset()

    def is_that_of(self, other: Failure) -> bool:
        """Whether ``other`` is of the same test and, where both are known, of the same device."""
        if (self.file, self.test) != (other.file, other.test):
            return False
        return not self.slugs or not other.slugs or not self.slugs.isdisjoint(other.slugs)


@dataclass(frozen=True, slots=True)
class Compared:
    """Two sides, what was compared and what was not; each sorted by test.

    ``failed`` are all tests that failed on the new side and not on the old one, those that a row tells of included.
    """

    old: str | Revision
    new: str | Revision
    rows: tuple[Row, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    failed: tuple[Failure, ...] = ()
    pairs: int | None = None
    """The number of pairs of runs, of revisions that ran in turns; ``None`` where figures of two sides were read."""
    tolerance: float = 0.0
    """The slowdown that is tolerated of revisions that ran in turns, as a ratio."""

    @property
    def speeds(self) -> dict[Key, Change]:
        """What was said of the step times that were taken in turns."""
        return {row.key: change for row in self.rows for change in row.changes if change.interval is not None}

    @property
    def exit_status(self) -> int:
        """The command's: 0 where nothing is worse, or else `WORSE`, or `NOTHING_COMPARED`."""
        worse = any(row.outcome is Outcome.REGRESSED for row in self.rows) or any(one.is_worse for one in self.left_out)
        anything = any(row.compared for row in self.rows)
        # A test that runs in turns and breaks is a comparison; one that failed in a report has no figures to compare.
        if not anything and (self.pairs is None or not worse):
            return NOTHING_COMPARED
        return WORSE if worse else 0
