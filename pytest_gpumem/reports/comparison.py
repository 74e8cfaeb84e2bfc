"""A comparison of two sides, test by test and metric by metric: of revisions, reports, or states of the store."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from pytest_gpumem.gate.baseline import Baseline, Budget, Key, baseline_of
from pytest_gpumem.gate.judge import judge, tolerances_of_emulated
from pytest_gpumem.gate.speed import OUTCOMES
from pytest_gpumem.gate.verdict import COMPARED, MetricVerdict, Outcome, Verdict, worst
from pytest_gpumem.measurement import Measurement
from pytest_gpumem.metrics import METRICS, WHOLE
from pytest_gpumem.reports.view import rows_of
from pytest_gpumem.values.composition import NOT_EXPLAINED
from pytest_gpumem.values.option_words import EMULATED_SLUG

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from pytest_gpumem.git import Revision
    from pytest_gpumem.metrics import Metric, Tolerance
    from pytest_gpumem.reports.session_report import SessionReport
    from pytest_gpumem.timing.intervals import Interval


WORSE = 1
NOTHING_COMPARED = 2
StoredKey = tuple[Key, str]
"""A measurement's key, and the slug of the device that it was taken on."""
Word = Literal["new", "gone", "unmeasured", "failed", "broken", "not compared"]
"""The reason why something is not compared."""
_SPEEDS = {outcome: word for word, outcome in OUTCOMES.items()}


@dataclass(frozen=True, slots=True)
class ComparedChange:
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
        """The verdict in words; empty where there is none."""
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
    def is_shown(self) -> bool:
        """True if it is shown: bytes and counts that differ, and times that differ by more than the tolerance."""
        if self.interval is not None or self.outcome not in (Outcome.OK, Outcome.RECORDED):
            return True
        if METRICS[self.metric].unit in WHOLE:
            return self.old != self.new
        tolerance = METRICS[self.metric].tolerance
        if tolerance is None or self.old is None or self.new is None or self.outcome is Outcome.OK:
            return False
        return abs(self.new - self.old) > tolerance.allowed(self.old)


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """A measurement that both sides have. ``reason`` is a sentence where they cannot be compared, ``notes`` are clauses.

    ``slug`` is the new side's device, ``old_slug`` the old one's where one of the two is emulated and the other is not.
    """

    key: Key
    slug: str
    title: str
    changes: tuple[ComparedChange, ...]
    reason: str | None = None
    notes: tuple[str, ...] = ()
    old_slug: str | None = None
    verdict: Verdict | None = None
    """The gate's verdict, with what changed in the composition of the peak where both sides know it."""

    @property
    def outcome(self) -> Outcome:
        return worst(change.outcome for change in self.changes)

    @property
    def compared(self) -> bool:
        return any(change.outcome in COMPARED for change in self.changes)

    @property
    def shown_changes(self) -> tuple[ComparedChange, ...]:
        return tuple(change for change in self.changes if change.is_shown)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A test, or a measurement of it, that is not compared. ``reason`` is a clause, where one is known.

    ``stored_key`` is that of a measurement which one side has only, with this ``peak`` in bytes.

    ``new`` and ``gone`` are on one side only. ``unmeasured`` gave no figures on the new side, ``failed`` and ``broken`` failed
    there and not on the old one.
    """

    title: str
    word: Word
    reason: str | None = None
    stored_key: StoredKey | None = None
    peak: float | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A test that failed or did not finish, and why, as a clause. ``slugs`` are the devices that it has figures of."""

    file: str
    test: str
    why: str
    slugs: frozenset[str] = frozenset()

    def is_that_of(self, other: Failure) -> bool:
        """Return whether ``other`` is of the same test and, where both are known, of the same device."""
        if (self.file, self.test) != (other.file, other.test):
            return False
        return not self.slugs or not other.slugs or not self.slugs.isdisjoint(other.slugs)


@dataclass(frozen=True, slots=True)
class ChangedPackage:
    """A package of which two sets of requirements hold different releases; ``None`` where a side lacks it."""

    name: str
    old: str | None
    new: str | None
    requested: bool = False
    """True if the new side's requirements name it; else it was brought along."""
    url: str | None = None
    """The address that the new one was installed from, where it was not an index."""

    def __str__(self) -> str:
        return f"{self.name} {self.new or 'none'}, was {self.old or 'not installed'}"


@dataclass(frozen=True, slots=True)
class Compared:
    """The comparison of two sides, sorted by test.

    ``failed`` are all tests that failed on the new side and not on the old one, also those with a row.
    """

    old: str | Revision
    new: str | Revision
    rows: tuple[ComparedRow, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    failed: tuple[Failure, ...] = ()
    pairs: int | None = None
    """The number of pairs of runs, of revisions that ran in turns; ``None`` where figures of two sides were read."""
    tolerance: float = 0.0
    """The tolerated slowdown of revisions that ran in turns, as a ratio."""
    packages: tuple[ChangedPackage, ...] = ()
    """The packages that differ between two sets of requirements."""

    @property
    def speeds(self) -> dict[Key, ComparedChange]:
        """The changes of step times that were taken in turns."""
        return {row.key: change for row in self.rows for change in row.changes if change.interval is not None}

    @property
    def exit_status(self) -> int:
        """The exit status of the command: 0 where nothing is worse, or else `WORSE`, or `NOTHING_COMPARED`."""
        worse = any(row.outcome is Outcome.REGRESSED for row in self.rows)
        worse |= any(one.word in ("failed", "broken") for one in self.left_out)
        anything = any(row.compared for row in self.rows)
        # A test that runs in turns and breaks is a comparison; one that failed in a report has no figures to compare.
        if not anything and (self.pairs is None or not worse):
            return NOTHING_COMPARED
        return WORSE if worse else 0


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two sides.

    ``unmeasured`` says, by file and test, why tests have no figures. ``failures`` are those of its tests, with figures or
    without; ``not_collected`` the files that could not be collected.
    """

    name: str
    figures: Mapping[StoredKey, Measurement | Baseline]
    unmeasured: Mapping[tuple[str, str], tuple[Word, str]] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    not_collected: frozenset[str] = frozenset()

    def peak(self, stored_key: StoredKey) -> float | None:
        """Return the peak of one of its measurements, in bytes."""
        return self.figures[stored_key].metrics.get("peak_allocated")

    def why_gone(self, key: Key) -> tuple[Word, str | None]:
        """Return why it lacks a measurement, in a word, and as a clause if more is known."""
        if key.file in self.not_collected:
            return "failed", "its file could not be collected"
        return self.unmeasured.get((key.file, key.test), ("gone", None))


def compared(old: Side, new: Side, tolerances: Mapping[str, Tolerance]) -> Compared:
    """Judge ``new`` as the gate judges a session, with ``old`` for its baselines.

    A measurement on an emulated GPU and one on a real GPU are a pair, too.
    """
    pairs = _pairs(old.figures.keys(), new.figures.keys())
    added = sorted(new.figures.keys() - {stored_key for _, stored_key in pairs})
    gone = sorted(old.figures.keys() - {stored_key for stored_key, _ in pairs})
    several = len({slug for _, slug in (*(stored_key for _, stored_key in pairs), *added, *gone)}) > 1

    def title(stored_key: StoredKey) -> str:
        return f"{stored_key[0]} on {stored_key[1]}" if several else str(stored_key[0])

    rows = []
    for earlier, stored_key in pairs:
        old_slug = earlier[1] if earlier != stored_key else None
        allowed = tolerances if old_slug is None else tolerances_of_emulated(tolerances)
        changes, verdict = changes_of(old.figures[earlier], new.figures[stored_key], allowed)
        rows.append(
            ComparedRow(*stored_key, title(stored_key), changes, verdict.reason, old_slug=old_slug, verdict=verdict)
        )
    failed = tuple(one for one in new.failures if not any(one.is_that_of(earlier) for earlier in old.failures))
    left_out = [LeftOut(title(stored_key), "new", None, stored_key, new.peak(stored_key)) for stored_key in added]
    left_out += [
        LeftOut(title(stored_key), *new.why_gone(stored_key[0]), stored_key, old.peak(stored_key))
        for stored_key in gone
    ]
    listed = {(row.key.file, row.key.test) for row in rows if row.outcome is Outcome.REGRESSED}
    listed |= {
        (one.stored_key[0].file, one.stored_key[0].test) for one in left_out if one.stored_key and one.word == "failed"
    }
    left_out += [
        LeftOut(f"{one.file}::{one.test}", "failed", one.why) for one in failed if (one.file, one.test) not in listed
    ]
    return Compared(old.name, new.name, tuple(rows), tuple(left_out), failed)


def _pairs(old: Collection[StoredKey], new: Collection[StoredKey]) -> list[tuple[StoredKey, StoredKey]]:
    """Return the places to compare, sorted: of the same device, or the only ones left if one of them is emulated."""
    pairs = [(stored_key, stored_key) for stored_key in old if stored_key in new]
    left = [{stored_key for stored_key in side if (stored_key, stored_key) not in pairs} for side in (old, new)]
    for key in {key for key, _ in left[0]}:
        earlier, later = ([stored_key for stored_key in side if stored_key[0] == key] for side in left)
        if len(earlier) == len(later) == 1 and _is_emulated(earlier[0]) != _is_emulated(later[0]):
            pairs.append((earlier[0], later[0]))
    return sorted(pairs)


def _is_emulated(stored_key: StoredKey) -> bool:
    return stored_key[1].startswith(EMULATED_SLUG)


def side_of_report(name: str, report: SessionReport) -> Side:
    """Return the side of a session's report."""
    figures: dict[StoredKey, Measurement | Baseline] = {}
    unmeasured: dict[tuple[str, str], tuple[Word, str]] = {}
    failures: list[Failure] = []
    for row in rows_of(report):
        measurements = [one.verdict.measurement for one in row.measured]
        if row.status.fails:
            slugs = frozenset(one.environment.slug for one in measurements)
            failures.append(Failure(row.file, row.test, row.headline, slugs))
        why_not = None if row.result is None else row.result.verdict.unmeasured
        if row.result is None or why_not:
            unmeasured[row.file, row.test] = (
                ("failed" if row.status.fails else "unmeasured"),
                row.headline or why_not or "",
            )
        for one in measurements:
            figures[Key(row.file, row.test, one.name), one.environment.slug] = one
    failures.sort(key=lambda one: (one.file, one.test))
    return Side(name, figures, unmeasured, tuple(failures), frozenset(report.not_collected))


def side_of_store(name: str, entries: Iterable[tuple[str, Key, Baseline]]) -> Side:
    """Return the side of a store's baselines, given as (slug, key, entry)."""
    return Side(name, {(key, slug): entry for slug, key, entry in entries})


def changes_of(
    old: Measurement | Baseline, new: Measurement | Baseline, tolerances: Mapping[str, Tolerance]
) -> tuple[tuple[ComparedChange, ...], Verdict]:
    """Judge each metric of ``new`` with ``old`` for its baseline, and return the changes and the verdict."""
    # A baseline has medians of runs and no rounds, so that its times are shown and not judged.
    measurement = new if isinstance(new, Measurement) else Measurement("", new.workload, new.environment, new.metrics)
    if isinstance(old, Baseline):
        verdict = judge(measurement, Budget(), old, tolerances)
    else:
        verdict = judged_by(old, "the old side", measurement, tolerances)
    judged = {one.metric: one for one in verdict.metrics}
    changes = []
    for name, metric in METRICS.items():
        if name in old.metrics or name in new.metrics:
            then, now = (one.metrics.get(name, metric.where_absent) for one in (old, new))
            one = judged.get(name) or MetricVerdict(name, Outcome.RECORDED, 0)
            lacking = _lacking(metric, then, now)
            # Of a report there is none to be recorded.
            reason = "not compared: the old side has no times" if one.lacks_time else lacking or one.reason
            changes.append(ComparedChange(name, then, now, one.outcome, one.allowed, reason))
    return tuple(changes), verdict


def judged_by(old: Measurement, side: str, new: Measurement, tolerances: Mapping[str, Tolerance]) -> Verdict:
    """Return the verdict on ``new`` with ``old`` for its baseline.

    If ``old`` has no composition of its peak, the explanation of ``new`` has a note with the reason. Example: ``base has no
    composition to compare with: the recorded run needed 5 B, 1 B more than the measured one``.

    Args:
        old: The earlier measurement.
        side: What the note calls it: ``base``.
        new: The measurement that is judged.
        tolerances: The tolerances, by metric.
    """
    baseline = baseline_of(old, "", None)
    verdict = judge(new, Budget(), baseline, tolerances)
    explanation = verdict.measurement.explanation
    if explanation is None or baseline.composition is not None:
        return verdict
    recorded = [] if old.explanation is None else old.explanation.peak.notes
    reasons = [*recorded, *(note for note in old.notes if note.startswith(NOT_EXPLAINED))] or ["it was not recorded"]
    note = f"{side} has no composition to compare with: {'; '.join(reasons)}"
    peak = replace(explanation.peak, notes=(*explanation.peak.notes, note))
    return replace(verdict, measurement=replace(verdict.measurement, explanation=replace(explanation, peak=peak)))


def _lacking(metric: Metric, then: float | None, now: float | None) -> str | None:
    """Return which side lacks a metric that would be judged, as a clause; ``None`` where none does. Times have their own."""
    if metric.tolerance is None or metric.unit not in WHOLE or (then is None) == (now is None):
        return None
    return f"not compared: the {'old' if then is None else 'new'} side has none"
