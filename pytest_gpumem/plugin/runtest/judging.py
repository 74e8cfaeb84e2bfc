"""Gate a single test: compare its measurements with its budget and baselines, report the verdict, and fail the test if
necessary.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

import pytest

from pytest_gpumem.base.errors import BackendError, HookError, MeasuringError, StoreError
from pytest_gpumem.facts.metrics import METRICS, Tolerance
from pytest_gpumem.facts.values.plain import to_plain
from pytest_gpumem.facts.values.rank import rank_in
from pytest_gpumem.judging.baselines.update import ACCEPTS
from pytest_gpumem.judging.changed_code.marks import without_callers
from pytest_gpumem.judging.gate.baseline import Baseline, NoBaseline
from pytest_gpumem.judging.gate.changes import with_changes
from pytest_gpumem.judging.gate.failing import failing_outcomes
from pytest_gpumem.judging.gate.judge import emulated_tolerances, judge
from pytest_gpumem.judging.gate.renaming import candidates_of
from pytest_gpumem.judging.gate.speed import idle_slowdown, idle_throughput
from pytest_gpumem.judging.gate.verdict import NOT_MARKED, SKIPPED, WHY_FAILED, WORSE, Outcome, TestVerdict
from pytest_gpumem.judging.times.comparison import is_undecided
from pytest_gpumem.plugin.config.command_line import COMMAND, Command
from pytest_gpumem.plugin.config.marker import sets_itself
from pytest_gpumem.plugin.config.options import ARGUMENT
from pytest_gpumem.plugin.config.settings import DEFAULT_TOLERANCES, options_to_repeat
from pytest_gpumem.plugin.runtest.hook_results import checked_tolerance
from pytest_gpumem.plugin.runtest.since_baseline import SinceBaselines
from pytest_gpumem.reporting.reports.escaping import visible
from pytest_gpumem.reporting.reports.failure import (
    accept_command,
    bisect_command,
    failure_text,
    prune_command,
    update_command,
)
from pytest_gpumem.reporting.reports.results import PROPERTY
from pytest_gpumem.torch_support.static_access import reads_any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.judging.baselines.store import Store
    from pytest_gpumem.judging.baselines.unused import UnusedBaselines
    from pytest_gpumem.judging.gate.verdict import FailedIn, FormerTest, Verdict
    from pytest_gpumem.plugin.config.selection import MeasuredTest
    from pytest_gpumem.plugin.config.settings import Settings
    from pytest_gpumem.plugin.runtest.one_process import OneProcess


NOT_TIMED = (
    "it was not timed: its baseline has no time to compare with; --gpumem-update=new adds one, --gpumem-time shows it"
)
_TIMES = frozenset({*(name for name, metric in METRICS.items() if metric.is_timed), "times", "costs", "roi"})
"""The attributes and methods of a `Measurement` for times, or for values computed from times."""

_SINCE = pytest.StashKey[SinceBaselines]()

_T = TypeVar("_T")
_FAILURE = pytest.StashKey[BaseException]()
"""The key for the exception with which the gate failed a test."""


def _shorten_summary(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """If the gate failed the test, shorten the message for pytest's summary and for JUnit to the failure's first line.

    In CI, pytest's summary shows messages in full, so the whole failure would be printed twice.
    """
    if call.excinfo is None or call.excinfo.value is not item.stash.get(_FAILURE, None):
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = str(call.excinfo.value).partition("\n")[0]


def complete_report(
    item: pytest.Item, measured: MeasuredTest, call: pytest.CallInfo[None], report: pytest.TestReport
) -> None:
    """Shorten the gate's failure in a test's report. If the test ended before the gate judged it, record a verdict.

    This can happen if another plugin's hook ends the test before this plugin's hooks run.
    """
    _shorten_summary(item, call, report)
    if call.excinfo is not None and not _has_verdict(item):
        record_verdict(item, not_measured(measured, call.excinfo.value, "setup" if call.when == "setup" else "call"))
        report.user_properties = list(item.user_properties)


def not_measured(measured: MeasuredTest, error: BaseException, when: FailedIn) -> TestVerdict:
    """Return the verdict on a test after it ended with ``error`` in the phase ``when``."""
    if isinstance(error, pytest.skip.Exception):
        return measured.not_measured(SKIPPED)
    why = str(error) if isinstance(error, MeasuringError) else WHY_FAILED[when]
    return measured.not_measured(why, failed_by_itself=True)


def unittest_errors(item: pytest.Item) -> list[BaseException]:
    """Return the errors and skips in a ``unittest.TestCase`` test. unittest does not raise them, but stores them in the
    item.

    pytest puts the first error into the call's report, and the next error into the teardown's report.
    """
    return [excinfo.value for excinfo in getattr(item, "_excinfo", None) or ()]


def failure_of(item: pytest.Item) -> BaseException | None:
    """Return the exception with which the gate failed the test; ``None`` if the gate did not fail it."""
    return item.stash.get(_FAILURE, None)


def raise_failure_again(item: pytest.Item) -> None:
    """Raise the gate's failure again, because the test's code may have caught it."""
    failure = failure_of(item)
    if failure is not None:
        raise failure


def forget_verdict(item: pytest.Item) -> None:
    """Remove the gate's failure and the verdict from an earlier run of the same test."""
    if _FAILURE in item.stash:
        del item.stash[_FAILURE]
    _forget_properties(item)


def _forget_properties(item: pytest.Item) -> None:
    item.user_properties[:] = [
        (name, value)
        for name, value in item.user_properties
        if name != PROPERTY and not name.startswith(f"{PROPERTY}.")
    ]


def record_verdict(item: pytest.Item, verdict: TestVerdict) -> None:
    """Store a verdict in the test's ``user_properties``.

    - ``gpumem``: the verdict on the test as JSON, with the same keys as ``verdict`` in the JSON report. Only the largest
      rows of explanations are included.
    - ``gpumem.<measurement>.<metric>``: a number, in bytes, calls, seconds or items/s, or a ratio. For example,
      ``gpumem.train_step.peak_allocated`` is 303410. Invisible characters in the measurement's name are written as in Python.

    If the verdict fails the test, ``xfail``, ``--last-failed``, ``--maxfail`` and reruns treat this failure like an error
    in the test. If a plugin reruns a test, the last run counts. If a test runs several times for another reason
    (``--keep-duplicates``, ``--dist each``), its worst result counts. If a test's own code fails, the report section
    ``gpumem`` shows the measurements before the error. After an out-of-memory error, the section ``gpumem out of memory``
    shows what was allocated.
    """
    _forget_properties(item)
    item.user_properties.append((PROPERTY, json.dumps(to_plain(verdict), sort_keys=True)))
    for measurement_verdict in verdict.verdicts:
        # Escape the name, because pytest escapes only values for XML.
        name = visible(measurement_verdict.measurement.name)
        for metric in measurement_verdict.metrics:
            item.user_properties.append((f"{PROPERTY}.{name}.{metric.metric}", metric.value))


def _has_verdict(item: pytest.Item) -> bool:
    return any(name == PROPERTY for name, _ in item.user_properties)


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
        slug = self.settings.compared_slug(measurement.environment.slug)
        key, baselines = self.measured.key(measurement.name), self._stored(lambda: unused.on(slug))
        candidates = candidates_of(key, measurement, baselines, self._tolerances)
        return tuple(
            replace(test, accept=self._accept_all(), prune=self._prune(test.file if test.file == key.file else None))
            for test in candidates
        )

    def _prune(self, file: str | None) -> str:
        """Return the command for removing the unused baselines of a test file, or of all test files if ``file`` is
        ``None``.
        """
        names = [] if file is None else [self._path_from_here(file)]
        return prune_command(*names, options=options_to_repeat(self.config))

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

    def missing(self, judged: Sequence[JudgedMeasurement], slug: str) -> tuple[str, ...]:
        """Return the names of the test's baselines for which the test took no measurement.

        A baseline is also returned if its measurement lacks some of its counts. The counts follow in brackets:
        ``train_step (FLOPs, syncs)``.

        Args:
            judged: The test's measurements.
            slug: The device's slug.
        """
        if not self._compares:
            return ()
        compared = self.settings.compared_slug(slug)
        stored_names = self._stored(lambda: self.store.names(compared, self.measured.file, self.measured.test))
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
        if not self._compares:
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

    def _stored_for(self, slug: str) -> list[Baseline | NoBaseline]:
        """Return the test's entries in the store with which figures from the device ``slug`` are compared."""
        compared, measured = self.settings.compared_slug(slug), self.measured
        return self._stored(
            lambda: [
                self.store.find(measured.key(name), compared)
                for name in self.store.names(compared, measured.file, measured.test)
            ]
        )

    def should_time(self, slug: str) -> bool:
        """Return whether the steps of the test are timed on the device ``slug``.

        A gate times no steps if the test's baselines have no times. There are exceptions: a budget limits the time, the
        code of the test or of its fixtures reads times, a hook receives all measurements, or strict mode fails tests
        without a comparison. A baseline has no times if it was recorded without timing, or on a machine that was too busy.
        Ranks time every step, because all ranks have to time the same steps although their baselines may differ.
        """
        settings, budget = self.settings, self.measured.budget
        if settings.time is not None:
            return settings.time
        stored = self._stored_for(slug)
        return (
            not settings.baseline
            or settings.strict
            or settings.update is not None
            or self.ranks.rank is not None
            or bool(self.config.hook.pytest_gpumem_measurement.get_hookimpls())
            or budget.max_slowdown is not None
            or budget.min_throughput is not None
            or not stored
            or any(isinstance(entry, Baseline) and entry.runs is not None for entry in stored)
            or any(reads_any(function, _TIMES, str(self.config.rootpath)) for function in self._functions())
        )

    def _functions(self) -> list[object]:
        """Return the test's function and the functions of its fixtures."""
        definitions_by_name = getattr(getattr(self.item, "_fixtureinfo", None), "name2fixturedefs", {})
        fixtures = [fixturedef.func for definitions in definitions_by_name.values() for fixturedef in definitions]
        return [getattr(self.item, "function", None), *fixtures]

    def should_time_again(self, judged: JudgedMeasurement, *, decides_only: bool = False) -> bool:
        """Return whether to take another sample of a step's time.

        A second sample is taken if the step became slower or faster, or if the first sample cannot be stored in a baseline.
        A third sample is taken if one sample shows a slowdown and the other is uncertain.

        Args:
            judged: The measurement with its times.
            decides_only: Whether to take a second sample only if the test would otherwise fail.
        """
        times = judged.measurement.times
        assert times is not None, "the caller asks about timed steps only"
        if len(times.samples) > 1:
            return _is_undecided(judged)
        reconsidered = {
            "step_time": {Outcome.REGRESSED, Outcome.IMPROVED, Outcome.UNCERTAIN} if self._compares else set(),
            "throughput": {Outcome.OVER_BUDGET, Outcome.UNCERTAIN},
        }
        metrics = judged.verdict.metrics
        changed = {metric.outcome for metric in metrics if metric.outcome in reconsidered.get(metric.metric, ())}
        if decides_only:
            return not changed.isdisjoint(self.failing(self.verdict([judged])))
        return bool(changed) or (self.settings.update is not None and times.best.invalid is not None)

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

        The exception is the same as from `pytest.fail`, so pytest treats the failure like any other.

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
            item.stash[_FAILURE] = failure = pytest.fail.Exception(decided.failure, pytrace=False)
            raise failure from None

    def _with_changed_lines(self, verdict: TestVerdict) -> TestVerdict:
        """If a metric became worse, mark the source lines changed since the baseline, and return the marked verdict."""
        verdicts = []
        for measurement_verdict in verdict.verdicts:
            if any(metric.outcome in WORSE for metric in measurement_verdict.metrics):
                slug = self.settings.compared_slug(measurement_verdict.measurement.environment.slug)
                key = self.measured.key(measurement_verdict.measurement.name)
                measurement_verdict = self._since.marked(measurement_verdict, key, slug)  # noqa: PLW2901
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
        if failing:
            nodeid = self._path_from_here(verdict.nodeid)
            options = options_to_repeat(self.config)
            argument = self.item.stash.get(ARGUMENT, None)
            words, rest = self.item.stash.get(COMMAND, None) or Command((*self.ranks.command, argument or nodeid))
            if verdict.unmeasured == NOT_MARKED or verdict.missing_on:
                accept: str | None = prune_command(nodeid, options=options)
            else:
                # If a limit has no effect, accepting new figures would not help, because the test fails regardless of its
                # baseline.
                accept = (
                    accept_command(verdict, failing, words=words, options=options, rest=rest) if idle is None else None
                )
            bisect = bisect_command(verdict, failing, nodeid, [*options, *([argument] if argument else [])])
            text = failure_text(verdict, failing, self.settings.units, accept, memory, bisect)
            text += "" if idle is None else f"\n\n{idle}"
            return replace(verdict, failure=text, accept=accept, bisect=bisect)
        return verdict if idle is None else replace(verdict, failure=idle)

    def _accept_all(self) -> str:
        """Return the command for accepting all figures of the test under its current name."""
        argument = self.item.stash.get(ARGUMENT, None) or self._path_from_here(
            f"{self.measured.file}::{self.measured.test}"
        )
        words, rest = self.item.stash.get(COMMAND, None) or Command((*self.ranks.command, argument))
        return update_command("all", words, options_to_repeat(self.config), rest)

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
        if not self._compares:
            return None
        slug = self.settings.compared_slug(measurement.environment.slug)
        entry = self._stored(lambda: self.store.find(self.measured.key(measurement.name), slug))
        if isinstance(entry, NoBaseline) and Outcome.FOREIGN in ACCEPTS[self.settings.update]:
            # This session records a new baseline, so it does not matter whether other devices have baselines.
            return NoBaseline()
        return entry

    @property
    def _compares(self) -> bool:
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

    def _path_from_here(self, nodeid: str) -> str:
        """Return a test's id relative to the folder in which pytest was started, so the user can type the id there."""
        file, colons, test = nodeid.partition("::")
        path = os.path.relpath(self.config.rootpath / file, self.config.invocation_params.dir)
        return f"{path}{colons}{test}"


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


def _is_undecided(judged: JudgedMeasurement) -> bool:
    """Return whether another sample of the step's time may decide an uncertain verdict."""
    verdict, baseline = judged.verdict.of("step_time"), judged.baseline
    if verdict is None or not verdict.allowed or not verdict.baseline or not isinstance(baseline, Baseline):
        return False
    times = judged.measurement.times
    assert times is not None, "the caller asks about timed steps only"
    assert baseline.runs is not None, "a judged step time has a baseline with times"
    return is_undecided(times.samples, baseline.runs, verdict.allowed / verdict.baseline)
