"""Gate a single test: compare its measurements with its budget and baselines, report the verdict, and fail the test if
necessary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

import pytest

from pytest_gpumem.base.errors import BackendError, HookError, StoreError
from pytest_gpumem.facts.metrics import METRICS, Tolerance
from pytest_gpumem.facts.values.rank import rank_in
from pytest_gpumem.judging.baselines.update import ACCEPTS
from pytest_gpumem.judging.changed_code.marks import without_callers
from pytest_gpumem.judging.gate.baseline import Baseline, NoBaseline
from pytest_gpumem.judging.gate.changes import with_changes
from pytest_gpumem.judging.gate.failing import failing_outcomes
from pytest_gpumem.judging.gate.judge import emulated_tolerances, judge
from pytest_gpumem.judging.gate.renaming import candidates_of
from pytest_gpumem.judging.gate.speed import idle_slowdown, idle_throughput
from pytest_gpumem.judging.gate.verdict import NOT_MARKED, WORSE, Outcome, TestVerdict
from pytest_gpumem.plugin.config.marker import sets_itself
from pytest_gpumem.plugin.config.settings import DEFAULT_TOLERANCES
from pytest_gpumem.plugin.runtest.commands import Commands
from pytest_gpumem.plugin.runtest.hook_results import checked_tolerance
from pytest_gpumem.plugin.runtest.recorded_verdict import fail, record_verdict
from pytest_gpumem.plugin.runtest.since_baseline import SinceBaselines
from pytest_gpumem.reporting.reports.failure import failure_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.judging.baselines.store import Store
    from pytest_gpumem.judging.baselines.unused import UnusedBaselines
    from pytest_gpumem.judging.gate.verdict import FormerTest, Verdict
    from pytest_gpumem.plugin.config.selection import MeasuredTest
    from pytest_gpumem.plugin.config.settings import Settings
    from pytest_gpumem.plugin.runtest.one_process import OneProcess


_SINCE = pytest.StashKey[SinceBaselines]()

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class JudgedMeasurement:
    """A measurement's verdict, and the baseline that the measurement was compared with."""

    verdict: Verdict
    baseline: Baseline | NoBaseline | None
    pids: tuple[int, ...] = ()
    """The pids of the measured processes, if these are other processes than the test's own."""

    @property
    def measurement(self) -> Measurement:
        return self.verdict.measurement

    def explained(self, measurement: Measurement) -> JudgedMeasurement:
        """Return this verdict with ``measurement``, the same measurement after it was explained."""
        return replace(self, verdict=replace(self.verdict, measurement=measurement))

    def with_notes(self, notes: Sequence[str]) -> JudgedMeasurement:
        """Return this verdict with further notes on the measurement."""
        return self.explained(replace(self.measurement, notes=(*self.measurement.notes, *notes)))

    def with_changes(self) -> JudgedMeasurement:
        """Return this verdict with the changes since the baseline: rows of the peak, and operators behind larger counts."""
        return replace(self, verdict=with_changes(self.verdict, self.baseline))


@dataclass(eq=False, repr=False)
class Judging:
    """The gate for one test.

    Example:
        A test measured ``train_step`` with a peak of 303.41 kB, and its baseline has 280.00 kB. The difference, 23.41 kB, is
        within the tolerance, 64 kB. So `judge` returns the outcome ``ok``, `failing` returns no outcome for this verdict,
        and `conclude` records the verdict and raises nothing.
    """

    config: pytest.Config
    settings: Settings
    store: Store
    item: pytest.Item
    measured: MeasuredTest
    ranks: OneProcess
    unused: UnusedBaselines | None = None
    """The baselines of deleted tests. They are searched for the test's former name, because the test may have been renamed."""
    slug: str = ""
    """The slug of the device whose baselines the test's figures are compared with. Empty until the test's device is open."""

    def judge(self, measurement: Measurement) -> JudgedMeasurement:
        """Return the verdict on a measurement."""
        baseline = self._baseline(measurement)
        verdict = judge(measurement, self.measured.budget, baseline, self._tolerances)
        if isinstance(baseline, NoBaseline):
            verdict = replace(verdict, candidates=self._candidates(measurement))
        return JudgedMeasurement(verdict, baseline)

    def _candidates(self, measurement: Measurement) -> tuple[FormerTest, ...]:
        """For a measurement without a baseline, return deleted tests with similar baselines.

        The test may be one of them under a new name.
        """
        unused = self.unused
        if unused is None:
            return ()
        key, baselines = self.measured.key(measurement.name), self._stored(lambda: unused.on(self.slug))
        candidates, commands = candidates_of(key, measurement, baselines, self._tolerances), self._commands
        return tuple(
            replace(
                test,
                accept=commands.accept_all(),
                prune=commands.prune_file(test.file if test.file == key.file else None),
            )
            for test in candidates
        )

    def verdict(self, judged: Sequence[JudgedMeasurement], relations: int = 0) -> TestVerdict:
        """Return the verdict on the test with the given measurements.

        ``relations`` is the number of assertions about several steps that the test passed, such as
        ``gpumem.assert_no_growth``.
        """
        measured = self.measured
        return TestVerdict(
            measured.file,
            measured.test,
            tuple(result.verdict for result in judged),
            relations=relations,
            cell=measured.cell,
            location=measured.location,
            named_device=measured.budget.device,
        )

    def missing(self, judged: Sequence[JudgedMeasurement]) -> tuple[str, ...]:
        """Return the names of the test's baselines for which the test took no measurement.

        A baseline is also returned if its measurement lacks some of its counts. The counts follow in brackets:
        ``train_step (FLOPs, syncs)``. ``judged`` are the test's measurements.
        """
        if not self.compares:
            return ()
        stored_names = self._stored(lambda: self.store.names(self.slug, self.measured.file, self.measured.test))
        by_name = {result.measurement.name: result for result in judged}
        missing = []
        for name in stored_names:
            if name in by_name:
                if uncounted := _uncounted(by_name[name]):
                    missing.append(f"{name} ({', '.join(uncounted)})")
            elif rank_in(name) == self.ranks.rank:
                # Another rank checks its own baselines, and a job with another number of ranks takes none of them.
                missing.append(name)
        return tuple(missing)

    def not_measured(self, why: str, present: Callable[[], Collection[str]]) -> TestVerdict:
        """Return the verdict on the test if its device is not available. If it has baselines for other, available devices,
        these baselines count as missing.

        Args:
            why: The reason, as a clause.
            present: Returns the slugs of the available devices.
        """
        verdict, measured = self.measured.not_measured(why), self.measured
        if not self.compares:
            return verdict
        stored = self._stored(lambda: self.store.keys(files={measured.file}))
        baselines = [
            (slug, key.name)
            for slug, key in stored
            if key.test == measured.test and rank_in(key.name) == self.ranks.rank
        ]
        slugs = present() if baselines else ()
        missing = [(slug, name) for slug, name in baselines if slug in slugs]
        return replace(
            verdict,
            missing=tuple(dict.fromkeys(name for _, name in missing)),
            missing_on=tuple(dict.fromkeys(slug for slug, _ in missing)),
        )

    def baselines(self) -> list[Baseline | NoBaseline]:
        """Return the test's entries in the store with which its figures are compared."""
        measured, slug = self.measured, self.slug
        return self._stored(
            lambda: [
                self.store.find(measured.key(name), slug)
                for name in self.store.names(slug, measured.file, measured.test)
            ]
        )

    def failing_by(self, judged: JudgedMeasurement) -> frozenset[Outcome]:
        """Return the outcomes by which a measurement fails the test."""
        return self.failing(self.verdict([judged]))

    def failing(self, verdict: TestVerdict) -> frozenset[Outcome]:
        """Return the outcomes by which the verdict fails the test."""
        return failing_outcomes(
            verdict,
            strict=self.settings.strict,
            accepts=ACCEPTS[self.settings.update],
            compares=self.settings.baseline,
        )

    def conclude(self, verdict: TestVerdict, memory: str = "Memory") -> None:
        """Record the verdict, and fail the test if the verdict requires this.

        Args:
            verdict: The verdict on the test.
            memory: The title for the device's memory in a failure, for example ``"GPU memory"``.
        """
        item = self.item
        verdict = self._with_changed_lines(verdict)
        agreed = self.ranks.agreed
        decide = partial(self._decided, memory=memory)
        if agreed is None:
            decided = decide(verdict)
        else:
            # Record this rank's verdict before waiting for the other ranks, because a rank may be lost.
            record_verdict(item, verdict)
            decided = agreed(verdict, decide)
        record_verdict(item, decided)
        if decided.failure is not None:
            fail(item, decided.failure)

    def _with_changed_lines(self, verdict: TestVerdict) -> TestVerdict:
        """If a metric became worse, mark the source lines changed since the baseline, and return the marked verdict."""
        verdicts = []
        for measurement_verdict in verdict.verdicts:
            if any(metric.outcome in WORSE for metric in measurement_verdict.metrics):
                key = self.measured.key(measurement_verdict.measurement.name)
                measurement_verdict = self._since.marked(measurement_verdict, key, self.slug)  # noqa: PLW2901
            is_explained = (
                measurement_verdict.measurement.explanation is not None
                or measurement_verdict.difference is not None
                or measurement_verdict.count_changes
            )
            # Under explain=always, keep each row's callers. `gpumem ab` needs them to mark the lines that differ between its
            # two versions of the code.
            keeps_callers = not is_explained or self.settings.explain == "always"
            verdicts.append(measurement_verdict if keeps_callers else without_callers(measurement_verdict))
        return replace(verdict, verdicts=tuple(verdicts))

    @property
    def _since(self) -> SinceBaselines:
        """The finder of changed lines, shared by all tests in the session."""
        stash = self.config.stash
        if _SINCE not in stash:
            stash[_SINCE] = SinceBaselines(self.config.rootpath, self.store.folder)
        return stash[_SINCE]

    def _decided(self, verdict: TestVerdict, memory: str) -> TestVerdict:
        """Return the verdict, with the text of the failure if the verdict fails the test."""
        failing = self.failing(verdict)
        idle = None
        if not verdict.unmeasured and self.settings.time is not False and self.measured.has_fixture:
            idle = self._idle([measurement_verdict.measurement for measurement_verdict in verdict.verdicts])
        if not failing:
            return verdict if idle is None else replace(verdict, failure=idle)
        commands, accept = self._commands, None
        if verdict.unmeasured == NOT_MARKED or verdict.missing_on:
            accept = commands.prune_test()
        elif idle is None:
            # If a limit has no effect, accepting new figures would not help, because the test fails regardless of its baseline.
            accept = commands.accept(verdict, failing)
        bisect = commands.bisect(verdict, failing)
        text = failure_text(verdict, failing, self.settings.units, accept, memory, bisect)
        text += "" if idle is None else f"\n\n{idle}"
        return replace(verdict, failure=text, accept=accept, bisect=bisect)

    @property
    def _commands(self) -> Commands:
        measured = self.measured
        return Commands(self.config, self.item, f"{measured.file}::{measured.test}", self.ranks.command)

    def _idle(self, measurements: list[Measurement]) -> str | None:
        """Return a sentence about a time limit without effect on ``measurements``; ``None`` if all time limits have an
        effect.
        """
        budget = self.measured.budget
        if budget.min_throughput is not None:
            idle = idle_throughput(budget.min_throughput, measurements)
            if idle is not None:
                return idle
        # Check max_slowdown only if the test's own marker sets it. A limit for a class or a pattern may be meant for other
        # tests.
        if budget.max_slowdown is not None and self.settings.baseline and sets_itself(self.item, "max_slowdown"):
            return idle_slowdown(budget.max_slowdown, measurements)
        return None

    def _baseline(self, measurement: Measurement) -> Baseline | NoBaseline | None:
        if not self.compares:
            return None
        entry = self._stored(lambda: self.store.find(self.measured.key(measurement.name), self.slug))
        if isinstance(entry, NoBaseline) and Outcome.FOREIGN in ACCEPTS[self.settings.update]:
            # This session records a new baseline, so it does not matter whether other devices have baselines.
            return NoBaseline()
        return entry

    @property
    def compares(self) -> bool:
        """True if this session compares measurements with the store."""
        return self.settings.baseline or self.settings.update is not None

    @staticmethod
    def _stored(read: Callable[[], _T]) -> _T:
        """Call ``read``, which reads the store, and return its result. If the store is broken, fail the test."""
        try:
            return read()
        except (StoreError, BackendError) as error:
            # The store was valid when the session began, so it has changed since then.
            pytest.fail(f"gpumem: {error}", pytrace=False)

    @cached_property
    def _tolerances(self) -> dict[str, Tolerance]:
        """The tolerance for each metric, from settings, marker and hooks. The hooks are called only once for a test."""
        item, budget = self.item, self.measured.budget
        tolerances = {**DEFAULT_TOLERANCES, **self.settings.tolerances}
        if budget.max_slowdown is not None:
            tolerances["step_time"] = Tolerance(relative=budget.max_slowdown)
        if budget.tolerance is not None:
            tolerances["peak_allocated"] = Tolerance(relative=budget.tolerance)
        if self.settings.against is not None:
            tolerances = emulated_tolerances(tolerances)
        hook = item.ihook.pytest_gpumem_tolerance
        if not hook.get_hookimpls():
            return tolerances
        try:
            return {
                name: checked_tolerance(hook(item=item, metric=name, tolerance=tolerance), name, tolerance, hook)
                for name, tolerance in tolerances.items()
            }
        except HookError as error:
            pytest.fail(f"gpumem: {error}", pytrace=False)


def _uncounted(judged: JudgedMeasurement) -> list[str]:
    """Return the titles of counts in the baseline but not in the measurement, if both have the same workload."""
    baseline, measurement = judged.baseline, judged.measurement
    if not isinstance(baseline, Baseline) or baseline.workload != measurement.workload:
        return []
    return [
        METRICS[name].title
        for name in baseline.metrics
        if METRICS[name].is_counted_by_operator and not METRICS[name].optional and name not in measurement.metrics
    ]
