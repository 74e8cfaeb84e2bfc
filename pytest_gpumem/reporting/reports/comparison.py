"""Compare an old side with a new side, test by test and metric by metric.

A side is a git revision, a session's report, or the baselines in a store. For example, the old side is ``main`` and the new
side is the branch of a pull request.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from pytest_gpumem.facts.measurement import Measurement
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.composition import NOT_EXPLAINED
from pytest_gpumem.facts.values.option_words import EMULATED_SLUG
from pytest_gpumem.judging.gate.baseline import Baseline, Budget, Key, baseline_of
from pytest_gpumem.judging.gate.causes import Causes, causes_of
from pytest_gpumem.judging.gate.changes import with_changes
from pytest_gpumem.judging.gate.judge import emulated_tolerances, judge
from pytest_gpumem.judging.gate.speed import OUTCOMES
from pytest_gpumem.judging.gate.verdict import COMPARED, MetricVerdict, Outcome, TestVerdict, Verdict, worst
from pytest_gpumem.reporting.reports.view import rows_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from pytest_gpumem.base.git import Revision
    from pytest_gpumem.facts.metrics import Metric, Tolerance
    from pytest_gpumem.judging.times.intervals import Interval
    from pytest_gpumem.reporting.reports.session_report import SessionReport


WORSE = 1
NOTHING_COMPARED = 2
StoredKey = tuple[Key, str]
"""A measurement's key (file, test and name), and the slug of its device."""
Word = Literal["new", "gone", "unmeasured", "failed", "broken", "not compared"]
"""The reason why a test or measurement is not compared, in one or two words."""
_SPEEDS = {outcome: word for word, outcome in OUTCOMES.items()}


@dataclass(frozen=True, slots=True)
class ComparedChange:
    """A metric's old and new value, in the metric's unit. A value is ``None`` if its side lacks the metric.

    ``allowed`` is the tolerated change.
    """

    metric: str
    old: float | None
    new: float | None
    outcome: Outcome = Outcome.RECORDED
    allowed: float | None = None
    reason: str | None = None
    interval: Interval | None = None
    """The new time divided by the old time, with its confidence interval. ``None`` unless `gpumem ab` measured the step time of
    both revisions in turns.
    """

    @property
    def word(self) -> str:
        """The verdict on the change, such as ``regressed`` or ``slower``; empty if the change was not judged."""
        if self.interval is not None:
            return _SPEEDS[self.outcome]
        return "" if self.outcome is Outcome.RECORDED else self.outcome.words

    @property
    def ratio(self) -> float | None:
        """The new value divided by the old; ``None`` if a value is missing or the old value is 0."""
        if self.interval is not None:
            return self.interval.ratio
        return self.new / self.old if self.old and self.new is not None else None

    @property
    def is_shown(self) -> bool:
        """True if reports show the metric.

        Reports omit equal bytes, counts and ratios, and times within their tolerance. They show all times from `gpumem ab`.
        """
        if self.interval is not None or self.outcome not in (Outcome.OK, Outcome.RECORDED):
            return True
        if not METRICS[self.metric].is_timed:
            return self.old != self.new
        tolerance = METRICS[self.metric].tolerance
        if tolerance is None or self.old is None or self.new is None or self.outcome is Outcome.OK:
            return False
        return abs(self.new - self.old) > tolerance.allowed(self.old)


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """A measurement with figures on both sides.

    ``reason`` says why the two measurements cannot be compared, for example because of another workload. ``notes`` are clauses
    about the measurement. ``slug`` names the device of the new measurement. ``old_slug`` names the device of the
    old measurement if exactly one of the two devices is emulated; else it is ``None``.
    """

    key: Key
    slug: str
    title: str
    changes: tuple[ComparedChange, ...]
    reason: str | None = None
    notes: tuple[str, ...] = ()
    old_slug: str | None = None
    verdict: Verdict | None = None
    """The gate's verdict, with the changes in the peak's composition if both measurements have a composition."""

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
class OmittedTest:
    """A test or measurement without a comparison.

    The ``word`` is ``new`` or ``gone`` if the test exists on only one side, ``unmeasured`` if the new side has no figures for
    the test, ``failed`` or ``broken`` if the test failed only on the new side, and ``not compared`` in all other cases.
    ``reason`` is a clause with details. If only one side has a measurement, ``stored_key`` and ``peak`` (in bytes) describe it.
    """

    title: str
    word: Word
    reason: str | None = None
    stored_key: StoredKey | None = None
    peak: float | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed or unfinished test.

    ``why`` is a clause. ``slugs`` names the devices on which the test was measured; it is empty if the test has no figures.
    """

    file: str
    test: str
    why: str
    slugs: frozenset[str] = frozenset()

    def is_that_of(self, other: Failure) -> bool:
        """Return whether ``other`` is a failure of the same test. If both failures name devices, they must share a device."""
        if (self.file, self.test) != (other.file, other.test):
            return False
        return not self.slugs or not other.slugs or not self.slugs.isdisjoint(other.slugs)


@dataclass(frozen=True, slots=True)
class ChangedPackage:
    """A package whose release differs between the old and the new requirements.

    A release is ``None`` if the requirements do not install the package.
    """

    name: str
    old: str | None
    new: str | None
    requested: bool = False
    """True if the new requirements name the package; False if only another package depends on it."""
    url: str | None = None
    """The address from which the new release was installed; ``None`` for a release from a package index."""

    def __str__(self) -> str:
        return f"{self.name} {self.new or 'none'}, was {self.old or 'not installed'}"


@dataclass(frozen=True)
class ComparisonReport:
    """The result of comparing a new side with an old side, sorted by test.

    ``failed`` contains all tests that failed only on the new side. ``rows`` may also contain measurements from these tests.
    """

    old: str | Revision
    new: str | Revision
    rows: tuple[ComparedRow, ...] = ()
    omitted_tests: tuple[OmittedTest, ...] = ()
    failed: tuple[Failure, ...] = ()
    pairs: int | None = None
    """The number of runs of both revisions in `gpumem ab`; ``None`` if the figures come from reports or a store."""
    tolerance: float = 0.0
    """The tolerated slowdown in `gpumem ab`, as a share: 0.05 is 5 %."""
    packages: tuple[ChangedPackage, ...] = ()
    """The packages whose releases differ between the old and the new side."""

    @property
    def speeds(self) -> dict[Key, ComparedChange]:
        """The changes in step times from `gpumem ab`, by measurement."""
        return {row.key: change for row in self.rows for change in row.changes if change.interval is not None}

    @property
    def grown(self) -> list[TestVerdict]:
        """The gate's verdicts on the tests with a regressed measurement."""
        verdicts_by_test: dict[tuple[str, str], list[Verdict]] = {}
        for row in self.rows:
            if row.verdict is not None and row.outcome is Outcome.REGRESSED:
                verdicts_by_test.setdefault((row.key.file, row.key.test), []).append(row.verdict)
        return [TestVerdict(file, test, tuple(verdicts)) for (file, test), verdicts in verdicts_by_test.items()]

    @cached_property
    def causes(self) -> Causes:
        """The causes of growth from the old side to the new side."""
        return causes_of(self.grown, measured=len({(row.key.file, row.key.test) for row in self.rows}))

    @property
    def exit_status(self) -> int:
        """The command's exit status: `WORSE` if a test is worse, `NOTHING_COMPARED` if nothing was compared, otherwise 0."""
        is_worse = any(row.outcome is Outcome.REGRESSED for row in self.rows)
        is_worse |= any(omitted_test.word in ("failed", "broken") for omitted_test in self.omitted_tests)
        is_anything_compared = any(row.compared for row in self.rows)
        # In `gpumem ab`, a test that breaks only on the new revision is a result even if nothing was compared. `gpumem compare`
        # reads reports, in which a failed test has no figures. So `gpumem compare` has no result without a comparison.
        if not is_anything_compared and (self.pairs is None or not is_worse):
            return NOTHING_COMPARED
        return WORSE if is_worse else 0


@dataclass(frozen=True, slots=True)
class Side:
    """The figures and failures on the old or the new side of a comparison.

    ``unmeasured`` contains, by (file, test), the reason why a test has no figures. ``failures`` contains all failed tests, with
    and without figures. ``not_collected`` contains the files with collection errors.
    """

    name: str
    figures: Mapping[StoredKey, Measurement | Baseline]
    unmeasured: Mapping[tuple[str, str], tuple[Word, str]] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    not_collected: frozenset[str] = frozenset()

    def peak(self, stored_key: StoredKey) -> float | None:
        """Return a measurement's peak in bytes."""
        return self.figures[stored_key].metrics.get("peak_allocated")

    def reason_missing(self, key: Key) -> tuple[Word, str | None]:
        """Return the reason why this side lacks a measurement: a word, and a clause with details or ``None``."""
        if key.file in self.not_collected:
            return "failed", "the test's file could not be collected"
        return self.unmeasured.get((key.file, key.test), ("gone", None))


def compare_sides(old: Side, new: Side, tolerances: Mapping[str, Tolerance]) -> ComparisonReport:
    """Judge the figures in ``new`` as the gate judges a session, with the figures in ``old`` as baselines.

    A measurement on an emulated GPU may be compared with the same measurement on a real GPU.

    Args:
        old: The side whose figures are the baselines.
        new: The side whose figures are judged.
        tolerances: The tolerances by metric.
    """
    pairs = _pairs(old.figures.keys(), new.figures.keys())
    added = sorted(new.figures.keys() - {stored_key for _, stored_key in pairs})
    removed = sorted(old.figures.keys() - {stored_key for stored_key, _ in pairs})
    has_several_devices = len({slug for _, slug in (*(stored_key for _, stored_key in pairs), *added, *removed)}) > 1

    def title(stored_key: StoredKey) -> str:
        return f"{stored_key[0]} on {stored_key[1]}" if has_several_devices else str(stored_key[0])

    rows = []
    for earlier, stored_key in pairs:
        old_slug = earlier[1] if earlier != stored_key else None
        allowed = tolerances if old_slug is None else emulated_tolerances(tolerances)
        changes, verdict = changes_of(old.figures[earlier], new.figures[stored_key], allowed)
        rows.append(
            ComparedRow(*stored_key, title(stored_key), changes, verdict.reason, old_slug=old_slug, verdict=verdict)
        )
    failed = tuple(
        failure for failure in new.failures if not any(failure.is_that_of(earlier) for earlier in old.failures)
    )
    omitted_tests = [
        OmittedTest(title(stored_key), "new", None, stored_key, new.peak(stored_key)) for stored_key in added
    ]
    omitted_tests += [
        OmittedTest(title(stored_key), *new.reason_missing(stored_key[0]), stored_key, old.peak(stored_key))
        for stored_key in removed
    ]
    listed = {(row.key.file, row.key.test) for row in rows if row.outcome is Outcome.REGRESSED}
    listed |= {
        (row.stored_key[0].file, row.stored_key[0].test)
        for row in omitted_tests
        if row.stored_key and row.word == "failed"
    }
    omitted_tests += [
        OmittedTest(f"{failure.file}::{failure.test}", "failed", failure.why)
        for failure in failed
        if (failure.file, failure.test) not in listed
    ]
    return ComparisonReport(old.name, new.name, tuple(rows), tuple(omitted_tests), failed)


def _pairs(old: Collection[StoredKey], new: Collection[StoredKey]) -> list[tuple[StoredKey, StoredKey]]:
    """Return the pairs of an old and a new measurement to compare, sorted.

    Measurements with equal keys and devices are pairs. If a key has exactly one further measurement on each side, and only one
    of the two devices is emulated, these two measurements are also a pair.
    """
    pairs = [(stored_key, stored_key) for stored_key in old if stored_key in new]
    unpaired = [{stored_key for stored_key in side if (stored_key, stored_key) not in pairs} for side in (old, new)]
    for key in {key for key, _ in unpaired[0]}:
        earlier, later = ([stored_key for stored_key in side if stored_key[0] == key] for side in unpaired)
        if len(earlier) == len(later) == 1 and _is_emulated(earlier[0]) != _is_emulated(later[0]):
            pairs.append((earlier[0], later[0]))
    return sorted(pairs)


def _is_emulated(stored_key: StoredKey) -> bool:
    return stored_key[1].startswith(EMULATED_SLUG)


def side_of_report(name: str, report: SessionReport) -> Side:
    """Return the figures and failures in a session's report as a side of a comparison."""
    figures: dict[StoredKey, Measurement | Baseline] = {}
    unmeasured: dict[tuple[str, str], tuple[Word, str]] = {}
    failures: list[Failure] = []
    for row in rows_of(report):
        measurements = [measured.verdict.measurement for measured in row.measured]
        if row.status.fails:
            slugs = frozenset(measurement.environment.slug for measurement in measurements)
            failures.append(Failure(row.file, row.test, row.headline, slugs))
        why_unmeasured = None if row.result is None else row.result.verdict.unmeasured
        if row.result is None or why_unmeasured:
            unmeasured[row.file, row.test] = (
                ("failed" if row.status.fails else "unmeasured"),
                row.headline or why_unmeasured or "",
            )
        for measurement in measurements:
            figures[Key(row.file, row.test, measurement.name), measurement.environment.slug] = measurement
    failures.sort(key=lambda failure: (failure.file, failure.test))
    return Side(name, figures, unmeasured, tuple(failures), frozenset(report.not_collected))


def side_of_store(name: str, entries: Iterable[tuple[str, Key, Baseline]]) -> Side:
    """Return a store's baselines as a side of a comparison. Each baseline is given as (slug, key, entry)."""
    return Side(name, {(key, slug): entry for slug, key, entry in entries})


def changes_of(
    old: Measurement | Baseline, new: Measurement | Baseline, tolerances: Mapping[str, Tolerance]
) -> tuple[tuple[ComparedChange, ...], Verdict]:
    """Judge each metric of ``new`` with ``old`` as the baseline, and return the changes and the verdict."""
    # If the new side is a store, its times cannot be judged, because a baseline stores only medians, and no timed rounds.
    measurement = new if isinstance(new, Measurement) else Measurement("", new.workload, new.environment, new.metrics)
    if isinstance(old, Baseline):
        verdict = with_changes(judge(measurement, Budget(), old, tolerances), old)
    else:
        verdict = judged_by(old, "the old side", measurement, tolerances)
    verdict_by_metric = {metric.metric: metric for metric in verdict.metrics}
    changes = []
    for name, metric in METRICS.items():
        if name in old.metrics or name in new.metrics:
            old_value, new_value = (side.metrics.get(name, metric.value_if_absent) for side in (old, new))
            metric_verdict = verdict_by_metric.get(name) or MetricVerdict(name, Outcome.RECORDED, 0)
            lacking = _lacking(metric, old_value, new_value)
            # The gate's own reason would tell the user to record times. A report that already exists cannot get further times,
            # so give another reason.
            reason = (
                "not compared: the old side has no times"
                if metric_verdict.lacks_time
                else lacking or metric_verdict.reason
            )
            changes.append(
                ComparedChange(name, old_value, new_value, metric_verdict.outcome, metric_verdict.allowed, reason)
            )
    return tuple(changes), verdict


def judged_by(old: Measurement, side: str, new: Measurement, tolerances: Mapping[str, Tolerance]) -> Verdict:
    """Return the verdict on ``new`` with ``old`` as the baseline.

    If ``old`` lacks a composition, the explanation of ``new`` gets a note with the reason. Example: ``base has no composition
    to compare with: the recorded run needed 5 B, 1 B more than the measured one``.

    Args:
        old: The measurement to compare with.
        side: The name of ``old`` in the note, such as ``base``.
        new: The measurement to judge.
        tolerances: The tolerances by metric.
    """
    baseline = baseline_of(old, "", None)
    verdict = with_changes(judge(new, Budget(), baseline, tolerances), baseline)
    explanation = verdict.measurement.explanation
    if explanation is None or baseline.composition is not None:
        return verdict
    recorded = [] if old.explanation is None else old.explanation.peak.notes
    reasons = [*recorded, *(note for note in old.notes if note.startswith(NOT_EXPLAINED))] or ["it was not recorded"]
    note = f"{side} has no composition to compare with: {'; '.join(reasons)}"
    peak = replace(explanation.peak, notes=(*explanation.peak.notes, note))
    return replace(verdict, measurement=replace(verdict.measurement, explanation=replace(explanation, peak=peak)))


def _lacking(metric: Metric, old_value: float | None, new_value: float | None) -> str | None:
    """Return a clause with the name of the side that lacks a metric other than a time.

    The result is ``None`` if both sides have a value, if neither side has a value, or if the metric is never judged. Times are
    ignored, because the caller gives the reason for a missing time.
    """
    if metric.tolerance is None or metric.is_timed or (old_value is None) == (new_value is None):
        return None
    return f"not compared: the {'old' if old_value is None else 'new'} side has no value"
