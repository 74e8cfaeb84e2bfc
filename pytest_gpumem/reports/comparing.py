"""What changed between two sets of figures: sessions' reports, or the store at two points in time. Judged by the gate. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpumem.gate.baseline import Baseline, Key, baseline_of
from pytest_gpumem.gate.budget import Budget
from pytest_gpumem.gate.emulated import tolerances_of_emulated
from pytest_gpumem.gate.judge import judge
from pytest_gpumem.gate.verdict import COMPARED, Outcome, worst
from pytest_gpumem.measurement import Measurement
from pytest_gpumem.metrics import METRICS, WHOLE
from pytest_gpumem.values.device_names import EMULATED_SLUG

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from pytest_gpumem.gate.verdict import MetricVerdict, TestVerdict
    from pytest_gpumem.metrics import Tolerance
    from pytest_gpumem.reports.session_report import SessionReport

Place = tuple[Key, str]
"""A measurement's key, and the slug of the device that it was taken on."""

_NOT_RUN = "it did not run to its end"


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """Why a test gave no figures, as a clause. ``failed`` tells whether it failed."""

    why: str
    failed: bool = False


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
class Side:
    """One of the two. ``name`` is what a person calls it; ``unmeasured`` are its tests without figures, by file and test.

    ``failures`` are those of its tests, with figures or without; ``not_collected`` the files that could not be collected.
    """

    name: str
    figures: Mapping[Place, Measurement | Baseline]
    unmeasured: Mapping[tuple[str, str], Unmeasured] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    not_collected: frozenset[str] = frozenset()

    def missing(self, file: str, test: str) -> Unmeasured | None:
        """Why it has no figures of a test; ``None`` where it does not know the test."""
        if file in self.not_collected:
            return Unmeasured("its file could not be collected", failed=True)
        return self.unmeasured.get((file, test))


@dataclass(frozen=True, slots=True)
class Change:
    """A metric of a test on both sides, in its unit; ``None`` where a side has none. ``allowed`` is the change tolerated."""

    metric: str
    old: float | None
    new: float | None
    outcome: Outcome = Outcome.RECORDED
    allowed: float | None = None
    reason: str | None = None

    @property
    def is_news(self) -> bool:
        """Whether a reader wants to know: bytes and counts that are others, and times beyond what they vary by."""
        if self.outcome not in (Outcome.OK, Outcome.RECORDED):
            return True
        if METRICS[self.metric].unit in WHOLE:
            return self.old != self.new
        tolerance = METRICS[self.metric].tolerance
        if tolerance is None or self.old is None or self.new is None or self.outcome is Outcome.OK:
            return False
        return abs(self.new - self.old) > tolerance.allowed(self.old)


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement that both sides have. ``reason`` is a sentence where they cannot be compared.

    ``slug`` is the new side's device, ``old_slug`` the old one's where one of the two is emulated and the other is not.
    """

    key: Key
    slug: str
    changes: tuple[Change, ...]
    reason: str | None = None
    old_slug: str | None = None

    @property
    def outcome(self) -> Outcome:
        return worst(change.outcome for change in self.changes)

    @property
    def compared(self) -> bool:
        return any(change.outcome in COMPARED for change in self.changes)


@dataclass(frozen=True, slots=True)
class OneSided:
    """A measurement that one side has only: ``peak`` in bytes, and why the other has none, if it says so."""

    key: Key
    slug: str
    peak: float | None
    missing: Unmeasured | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """``rows`` are on both sides, ``added`` on the new one only, ``gone`` on the old one only; each sorted.

    ``failed`` are the tests that failed on the new side and not on the old one, whatever their figures say.
    """

    old: str
    new: str
    rows: tuple[Row, ...]
    added: tuple[OneSided, ...]
    gone: tuple[OneSided, ...]
    failed: tuple[Failure, ...] = ()

    @property
    def untold(self) -> tuple[Failure, ...]:
        """Those of ``failed`` that no row tells: neither regressed, nor gone because they failed."""
        told = {(row.key.file, row.key.test) for row in self.rows if row.outcome is Outcome.REGRESSED}
        told |= {(one.key.file, one.key.test) for one in self.gone if one.missing is not None and one.missing.failed}
        return tuple(one for one in self.failed if (one.file, one.test) not in told)

    @property
    def anything(self) -> bool:
        """Whether any figure was held against one of the other side."""
        return any(row.compared for row in self.rows)

    @property
    def worse(self) -> bool:
        """Whether anything regressed, failed on the new side only, or lost its figures because it failed there."""
        broken = any(one.missing is not None and one.missing.failed for one in self.gone)
        return broken or bool(self.failed) or any(row.outcome is Outcome.REGRESSED for row in self.rows)


def compared(old: Side, new: Side, tolerances: Mapping[str, Tolerance]) -> Compared:
    """``new`` judged as the gate judges a session, with ``old`` for its baselines.

    What one side has of an emulated GPU and the other of a real one is a pair, too.
    """
    pairs = _pairs(old.figures.keys(), new.figures.keys())
    return Compared(
        old.name,
        new.name,
        tuple(_row(earlier, place, old, new, tolerances) for earlier, place in pairs),
        tuple(_one_sided(place, new, old) for place in sorted(new.figures.keys() - {place for _, place in pairs})),
        tuple(_one_sided(place, old, new) for place in sorted(old.figures.keys() - {place for place, _ in pairs})),
        tuple(one for one in new.failures if not any(one.is_that_of(earlier) for earlier in old.failures)),
    )


def _pairs(old: Collection[Place], new: Collection[Place]) -> list[tuple[Place, Place]]:
    """The places that are held against each other, sorted: of the same device, or the only ones left, one of them emulated."""
    pairs = [(place, place) for place in old if place in new]
    left = [{place for place in side if (place, place) not in pairs} for side in (old, new)]
    for key in {key for key, _ in left[0]}:
        earlier, later = ([place for place in side if place[0] == key] for side in left)
        if len(earlier) == len(later) == 1 and _is_emulated(earlier[0]) != _is_emulated(later[0]):
            pairs.append((earlier[0], later[0]))
    return sorted(pairs)


def _is_emulated(place: Place) -> bool:
    return place[1].startswith(EMULATED_SLUG)


def side_of_report(name: str, report: SessionReport) -> Side:
    """What a session measured."""
    figures: dict[Place, Measurement | Baseline] = {}
    unmeasured: dict[tuple[str, str], Unmeasured] = {}
    failures: list[Failure] = []
    for result in report.results:
        test = result.verdict
        if result.failed:
            slugs = frozenset(one.measurement.environment.slug for one in test.verdicts)
            failures.append(Failure(test.file, test.test, _why_failed(test), slugs))
        if test.unmeasured:
            unmeasured[test.file, test.test] = Unmeasured(test.unmeasured, result.failed)
            continue
        for one in test.verdicts:
            place = Key(test.file, test.test, one.measurement.name), one.measurement.environment.slug
            figures[place] = one.measurement
    unmeasured |= {test: Unmeasured(_NOT_RUN, failed=True) for test in report.not_run}
    failures += [Failure(*test, _NOT_RUN) for test in report.not_run]
    failures.sort(key=lambda one: (one.file, one.test))
    return Side(name, figures, unmeasured, tuple(failures), frozenset(report.not_collected))


def side_of_store(name: str, entries: Iterable[tuple[str, Key, Baseline]]) -> Side:
    """The baselines of a store, as (slug, key, entry)."""
    return Side(name, {(key, slug): entry for slug, key, entry in entries})


def _why_failed(test: TestVerdict) -> str:
    if test.failure:
        return test.failure.strip().partition("\n")[0]
    if test.unmeasured:
        return test.unmeasured
    return "it failed by itself" if test.failed_by_itself else "its tear-down failed"


def _row(earlier: Place, place: Place, old_side: Side, new_side: Side, tolerances: Mapping[str, Tolerance]) -> Row:
    old, new = old_side.figures[earlier], new_side.figures[place]
    baseline = old if isinstance(old, Baseline) else baseline_of(old, "", None)
    # A baseline has medians of runs and no rounds, so that its times are not judged but told.
    measurement = (
        new if isinstance(new, Measurement) else Measurement(place[0].name, new.workload, new.environment, new.metrics)
    )
    old_slug = earlier[1] if earlier != place else None
    allowed = tolerances if old_slug is None else tolerances_of_emulated(tolerances)
    verdict = judge(measurement, Budget(), baseline, allowed)
    judged = {metric.metric: metric for metric in verdict.metrics}
    changes = tuple(
        _change(name, _value(name, old), _value(name, measurement), judged.get(name))
        for name in METRICS
        if name in old.metrics or name in measurement.metrics
    )
    return Row(place[0], place[1], changes, verdict.reason, old_slug)


def _value(name: str, of: Measurement | Baseline) -> float | None:
    return of.metrics.get(name, METRICS[name].where_absent)


def _change(name: str, old: float | None, new: float | None, judged: MetricVerdict | None) -> Change:
    if judged is None:
        return Change(name, old, new)
    return Change(name, old, new, judged.outcome, judged.allowed, judged.reason)


def _one_sided(place: Place, side: Side, other: Side) -> OneSided:
    key, slug = place
    peak = side.figures[place].metrics.get("peak_allocated")
    return OneSided(key, slug, peak, other.missing(key.file, key.test))
