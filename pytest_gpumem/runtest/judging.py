"""The gate of one test: compares measurements with budget and baselines, reports the verdict, and fails the test."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import pytest

from pytest_gpumem.baselines.errors import BackendError, StoreError
from pytest_gpumem.baselines.update import ACCEPTS
from pytest_gpumem.changed_code.marks import without_callers
from pytest_gpumem.config.command_line import COMMAND, Command
from pytest_gpumem.config.marker import sets_itself
from pytest_gpumem.config.options import ARGUMENT
from pytest_gpumem.config.settings import DEFAULT_TOLERANCES, options_given
from pytest_gpumem.gate.baseline import Baseline, NoBaseline
from pytest_gpumem.gate.judge import failing_outcomes, judge, tolerances_of_emulated, with_differences
from pytest_gpumem.gate.renaming import candidates_of
from pytest_gpumem.gate.speed import idle_slowdown, idle_throughput
from pytest_gpumem.gate.verdict import NOT_MARKED, SKIPPED, WHY_FAILED, WORSE, Outcome, TestVerdict
from pytest_gpumem.metrics import METRICS, RealMetric, Tolerance
from pytest_gpumem.reports.escaping import visible
from pytest_gpumem.reports.failure import accept_command, bisect_command, failure_text, prune_command, update_command
from pytest_gpumem.reports.results import PROPERTY
from pytest_gpumem.runtest.hook_results import HookError, checked_tolerance
from pytest_gpumem.runtest.since_baseline import SinceBaselines
from pytest_gpumem.timing.comparison import is_undecided
from pytest_gpumem.torch_support.static_access import reads_any
from pytest_gpumem.values.plain import to_plain
from pytest_gpumem.values.rank import rank_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pytest_gpumem.baselines.store import Store
    from pytest_gpumem.baselines.unused import UnusedBaselines
    from pytest_gpumem.config.selection import MeasuredTest
    from pytest_gpumem.config.settings import Settings
    from pytest_gpumem.gate.verdict import FailedIn, FormerTest, Verdict
    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.runtest.one_process import OneProcess


NOT_TIMED = (
    "it was not timed: its baseline has no time to compare with; --gpumem-update=new adds one, --gpumem-time shows it"
)
_TIMES = frozenset(
    {*(name for name, metric in METRICS.items() if isinstance(metric, RealMetric)), "times", "costs", "roi"}
)
"""Attributes of a `Measurement` that are times, or made of them."""

_SINCE = pytest.StashKey[SinceBaselines]()

_T = TypeVar("_T")
_FAILURE = pytest.StashKey[BaseException]()
"""The gate's failure of a test."""


def _shorten_summary(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Shorten the gate's own failure to its first line in pytest's summary and JUnit's message.

    Under CI pytest's summary does not cut messages, and the whole failure would be printed twice.
    """
    if call.excinfo is None or call.excinfo.value is not item.stash.get(_FAILURE, None):
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = str(call.excinfo.value).partition("\n")[0]


def complete_report(
    item: pytest.Item, measured: MeasuredTest, call: pytest.CallInfo[None], report: pytest.TestReport
) -> None:
    """Shorten the gate's own failure in the report of a test, and give one that ended before the gate its verdict.

    Another plugin's hook may have ended it before the gate's hooks ran.
    """
    _shorten_summary(item, call, report)
    if call.excinfo is not None and not _has_verdict(item):
        record_verdict(item, not_measured(measured, call.excinfo.value, "setup" if call.when == "setup" else "call"))
        report.user_properties = list(item.user_properties)


def not_measured(measured: MeasuredTest, error: BaseException, when: FailedIn) -> TestVerdict:
    """Return the verdict on a test that ``error`` ended in a phase."""
    if isinstance(error, pytest.skip.Exception):
        return measured.not_measured(SKIPPED)
    return measured.not_measured(WHY_FAILED[when], failed_by_itself=True)


def errors_kept_by(item: pytest.Item) -> list[BaseException]:
    """Return errors and skips in a ``unittest.TestCase`` test: unittest hands them to the item and raises nothing.

    pytest puts one error into each report, in this order: the call's first, then the tear-down's.
    """
    return [excinfo.value for excinfo in getattr(item, "_excinfo", None) or ()]


def failure_of(item: pytest.Item) -> BaseException | None:
    """Return the gate's failure of the test, if it has failed it."""
    return item.stash.get(_FAILURE, None)


def fail_again(item: pytest.Item) -> None:
    """Raise the gate's failure of the test where the test has caught it."""
    failure = failure_of(item)
    if failure is not None:
        raise failure


def forget_verdict(item: pytest.Item) -> None:
    """Forget how an earlier run of the test ended: the gate's failure, and the verdict."""
    if _FAILURE in item.stash:
        del item.stash[_FAILURE]
    _forget_properties(item)


def _forget_properties(item: pytest.Item) -> None:
    item.user_properties[:] = [
        entry for entry in item.user_properties if entry[0] != PROPERTY and not entry[0].startswith(f"{PROPERTY}.")
    ]


def record_verdict(item: pytest.Item, verdict: TestVerdict) -> None:
    """Put a verdict into the test's ``user_properties``.

    - ``gpumem``: the verdict on the test as JSON, with the keys of ``verdict`` in the JSON report. Its explanations have their
      largest rows only.
    - ``gpumem.<measurement>.<metric>``: the value alone: bytes, a count, seconds or items/s. Invisible characters in the
      measurement's name are written as in Python.

    A failing verdict is the test's own failure, so ``xfail``, ``--last-failed``, ``--maxfail`` and reruns treat it like any
    other. A test that a plugin reruns has the result of its last run. A test that runs several times otherwise
    (``--keep-duplicates``, ``--dist each``) has its worst result. A test that fails by itself has its measurements so far in
    the report section ``gpumem``, and the memory at an out-of-memory error in ``gpumem out of memory``.
    """
    _forget_properties(item)
    item.user_properties.append((PROPERTY, json.dumps(to_plain(verdict), sort_keys=True)))
    for one in verdict.verdicts:
        # pytest writes values so that XML can hold them, but not names.
        name = visible(one.measurement.name)
        for metric in one.metrics:
            item.user_properties.append((f"{PROPERTY}.{name}.{metric.metric}", metric.value))


def _has_verdict(item: pytest.Item) -> bool:
    return any(name == PROPERTY for name, _ in item.user_properties)


@dataclass(frozen=True, slots=True)
class Judged:
    """A measurement's verdict, and the baseline that it was held against."""

    verdict: Verdict
    baseline: Baseline | NoBaseline | None

    @property
    def measurement(self) -> Measurement:
        return self.verdict.measurement

    def explained(self, measurement: Measurement) -> Judged:
        """Return the same verdict on ``measurement``, which is the one that was judged with its explanation."""
        return replace(self, verdict=with_differences(self.verdict, measurement, self.baseline))


@dataclass(eq=False, repr=False)
class Judging:
    """The gate of one test."""

    config: pytest.Config
    settings: Settings
    store: Store
    item: pytest.Item
    measured: MeasuredTest
    ranks: OneProcess
    unused: UnusedBaselines | None = None
    """The baselines of deleted tests. Its test may be one of them under a new name."""

    def judge(self, measurement: Measurement) -> Judged:
        """Return the verdict on a measurement of the test."""
        baseline = self._baseline(measurement)
        verdict = judge(measurement, self.measured.budget, baseline, self._tolerances)
        if isinstance(baseline, NoBaseline):
            verdict = replace(verdict, candidates=self._candidates(measurement))
        return Judged(verdict, baseline)

    def _candidates(self, measurement: Measurement) -> tuple[FormerTest, ...]:
        """Return the possible former names of the test, for a measurement without a baseline."""
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
        """Return the command by which unused baselines are removed: those of a test file, or, for a deleted file, all."""
        names = [] if file is None else [self._path_from_here(file)]
        return prune_command(*names, options=options_given(self.config))

    def verdict(self, judged: Sequence[Judged], relations: int = 0) -> TestVerdict:
        """Return the verdict on a test with these measurements and so many asserted ``relations``."""
        measured = self.measured
        return TestVerdict(
            measured.file,
            measured.test,
            tuple(one.verdict for one in judged),
            relations=relations,
            cell=measured.cell,
            location=measured.location,
            named_device=measured.budget.device,
        )

    def missing(self, judged: Sequence[Judged], slug: str) -> tuple[str, ...]:
        """Name the measurements, and counts of them, that were not taken and have baselines for the device called ``slug``.

        Of a test that came to the end of its call.
        """
        if not self._compares:
            return ()
        compared = self.settings.compared_slug(slug)
        stored = self._stored(lambda: self.store.names(compared, self.measured.file, self.measured.test))
        taken = {one.measurement.name: one for one in judged}
        missing = []
        for name in stored:
            if rank_in(name) != self.ranks.rank:
                continue  # of a job of another size, or of another rank, which looks itself
            if name not in taken:
                missing.append(name)
            elif uncounted := _uncounted(taken[name]):
                missing.append(f"{name} ({', '.join(uncounted)})")
        return tuple(missing)

    def not_measured(self, why: str, present: Callable[[], Collection[str]]) -> TestVerdict:
        """Return the verdict on the test if its device is absent. Its baselines on present devices are missing.

        Args:
            why: The reason, as a clause.
            present: Returns the slugs of the present devices.
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
        """Return the test's entries in the store that figures of the device called ``slug`` are compared with."""
        compared, measured = self.settings.compared_slug(slug), self.measured
        return self._stored(
            lambda: [
                self.store.find(measured.key(name), compared)
                for name in self.store.names(compared, measured.file, measured.test)
            ]
        )

    def should_time(self, slug: str) -> bool:
        """Return whether the steps of the test are timed.

        A gate has no use for times where the baselines of the device called ``slug`` have none, unless a budget limits them,
        the test or a hook reads them, or what is not compared fails. What reads them is found in the project's own
        functions; a test that has such a baseline passed without times, or on a machine that was too busy to keep them.
        Ranks time the same steps, whatever each has in the store.
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
            or any(isinstance(one, Baseline) and one.runs is not None for one in stored)
            or any(reads_any(one, _TIMES, str(self.config.rootpath)) for one in self._functions())
        )

    def _functions(self) -> list[object]:
        """Return the functions of the test and of the fixtures that it names."""
        definitions = getattr(getattr(self.item, "_fixtureinfo", None), "name2fixturedefs", {})
        fixtures = [one.func for several in definitions.values() for one in several]
        return [getattr(self.item, "function", None), *fixtures]

    def should_time_again(self, judged: Judged, *, decides_only: bool = False) -> bool:
        """Return whether to time a step once more: its speed has changed, or its times cannot become a baseline.

        A third time where one of two samples shows a slowdown and the other is uncertain. ``decides_only``: only where the
        test fails otherwise.
        """
        times = judged.measurement.times
        assert times is not None, "only asked for what was timed"
        if len(times.samples) > 1:
            return _is_undecided(judged)
        reconsidered = {
            "step_time": {Outcome.REGRESSED, Outcome.IMPROVED, Outcome.UNCERTAIN} if self._compares else set(),
            "throughput": {Outcome.OVER_BUDGET, Outcome.UNCERTAIN},
        }
        metrics = judged.verdict.metrics
        changed = {one.outcome for one in metrics if one.outcome in reconsidered.get(one.metric, ())}
        if decides_only:
            return not changed.isdisjoint(self.failing(self.verdict([judged])))
        return bool(changed) or (self.settings.update is not None and times.best.invalid is not None)

    def failing(self, verdict: TestVerdict) -> frozenset[Outcome]:
        """Return the outcomes for which the test must fail."""
        return failing_outcomes(
            verdict,
            strict=self.settings.strict,
            accepts=ACCEPTS[self.settings.update],
            compares=self.settings.baseline,
        )

    def conclude(self, verdict: TestVerdict, memory: str = "Memory") -> None:
        """Record the verdict, and fail the test if it must fail: as `pytest.fail` does, so that it is the test's own failure.

        ``memory`` is what a failure calls that of the device that measured.
        """
        item = self.item
        verdict = self._with_changed_lines(verdict)
        record_verdict(item, verdict)
        decided = self.ranks.agreed(verdict, lambda whole: self._decided(whole, memory))
        record_verdict(item, decided)
        if decided.failure is not None:
            item.stash[_FAILURE] = failure = pytest.fail.Exception(decided.failure, pytrace=False)
            raise failure from None

    def _with_changed_lines(self, verdict: TestVerdict) -> TestVerdict:
        """Return the verdict, which says of what is worse which lines have changed since the baseline."""
        verdicts = []
        for one in verdict.verdicts:
            if any(metric.outcome in WORSE for metric in one.metrics):
                slug = self.settings.compared_slug(one.measurement.environment.slug)
                one = self._since.marked(one, self.measured.key(one.measurement.name), slug)  # noqa: PLW2901
            explained = one.measurement.explanation is not None or one.difference is not None or one.count_changes
            # What runs both versions of the code asks for all explanations, and finds the lines that differ by itself.
            verdicts.append(without_callers(one) if explained and self.settings.explain != "always" else one)
        return replace(verdict, verdicts=tuple(verdicts))

    @property
    def _since(self) -> SinceBaselines:
        """The lines that have changed since the baselines of this session."""
        stash = self.config.stash
        if _SINCE not in stash:
            stash[_SINCE] = SinceBaselines(self.config.rootpath, self.store.folder)
        return stash[_SINCE]

    def _decided(self, verdict: TestVerdict, memory: str) -> TestVerdict:
        """Return the verdict with the text of its failure, if the test must fail."""
        failing = self.failing(verdict)
        idle = None
        if not verdict.unmeasured and self.settings.time is not False and self.measured.has_fixture:
            idle = self._idle([one.measurement for one in verdict.verdicts])
        if failing:
            nodeid = self._path_from_here(verdict.nodeid)
            options = options_given(self.config)
            argument = self.item.stash.get(ARGUMENT, None)
            words, rest = self.item.stash.get(COMMAND, None) or Command((*self.ranks.command, argument or nodeid))
            if verdict.unmeasured == NOT_MARKED or verdict.missing_on:
                accept: str | None = prune_command(nodeid, options=options)
            else:
                # A limit without an effect fails the test whatever its baseline is.
                accept = (
                    accept_command(verdict, failing, words=words, options=options, rest=rest) if idle is None else None
                )
            bisect = bisect_command(verdict, failing, nodeid, [*options, *([argument] if argument else [])])
            text = failure_text(verdict, failing, self.settings.units, accept, memory, bisect)
            text += "" if idle is None else f"\n\n{idle}"
            return replace(verdict, failure=text, accept=accept, bisect=bisect)
        return verdict if idle is None else replace(verdict, failure=idle)

    def _accept_all(self) -> str:
        """Return the command by which all figures of the test are accepted, under its new name."""
        argument = self.item.stash.get(ARGUMENT, None) or self._path_from_here(
            f"{self.measured.file}::{self.measured.test}"
        )
        words, rest = self.item.stash.get(COMMAND, None) or Command((*self.ranks.command, argument))
        return update_command("all", words, options_given(self.config), rest)

    def _idle(self, measurements: list[Measurement]) -> str | None:
        """Return which limit on times has no effect in a test that measured ``measurements``, as a sentence."""
        budget = self.measured.budget
        if budget.min_throughput is not None:
            idle = idle_throughput(budget.min_throughput, measurements)
            if idle is not None:
                return idle
        # Only a test's own max_slowdown must have an effect; one from a class or a pattern may be unused.
        if budget.max_slowdown is not None and self.settings.baseline and sets_itself(self.item, "max_slowdown"):
            return idle_slowdown(budget.max_slowdown, measurements)
        return None

    def _baseline(self, measurement: Measurement) -> Baseline | NoBaseline | None:
        if not self._compares:
            return None
        slug = self.settings.compared_slug(measurement.environment.slug)
        found = self._stored(lambda: self.store.find(self.measured.key(measurement.name), slug))
        if isinstance(found, NoBaseline) and Outcome.FOREIGN in ACCEPTS[self.settings.update]:
            # It is recorded here and now, whichever devices others are of.
            return NoBaseline()
        return found

    @property
    def _compares(self) -> bool:
        """True if this session reads the store."""
        return self.settings.baseline or self.settings.update is not None

    @staticmethod
    def _stored(read: Callable[[], _T]) -> _T:
        """Return what ``read`` gives of the store, and fail the test where that cannot be understood."""
        try:
            return read()
        except (StoreError, BackendError) as error:
            # The session has read the whole store at its start, so it was changed since.
            pytest.fail(f"gpumem: {error}", pytrace=False)

    @cached_property
    def _tolerances(self) -> dict[str, Tolerance]:
        """Tolerances by metric. Users' hooks are called once a test."""
        item, budget = self.item, self.measured.budget
        tolerances = {**DEFAULT_TOLERANCES, **self.settings.tolerances}
        if budget.max_slowdown is not None:
            tolerances["step_time"] = Tolerance(relative=budget.max_slowdown)
        if budget.tolerance is not None:
            tolerances["peak_allocated"] = Tolerance(relative=budget.tolerance)
        if self.settings.against is not None:
            tolerances = tolerances_of_emulated(tolerances)
        hook = item.ihook.pytest_gpumem_tolerance
        try:
            return {
                name: checked_tolerance(hook(item=item, metric=name, tolerance=tolerance), name, tolerance, hook)
                for name, tolerance in tolerances.items()
            }
        except HookError as error:
            pytest.fail(f"gpumem: {error}", pytrace=False)

    def _path_from_here(self, nodeid: str) -> str:
        """Return the id of a test as it can be typed in the folder in which pytest was started."""
        file, colons, test = nodeid.partition("::")
        path = os.path.relpath(self.config.rootpath / file, self.config.invocation_params.dir)
        return f"{path}{colons}{test}"


def _uncounted(judged: Judged) -> list[str]:
    """Return the titles of the counts that the baseline of the same work has and the measurement has not."""
    baseline, measurement = judged.baseline, judged.measurement
    if not isinstance(baseline, Baseline) or baseline.workload != measurement.workload:
        return []
    return [
        METRICS[name].title
        for name in baseline.metrics
        if METRICS[name].made_of_operators and not METRICS[name].optional and name not in measurement.metrics
    ]


def _is_undecided(judged: Judged) -> bool:
    """Return whether one more sample of a step's time may decide."""
    verdict, baseline = judged.verdict.of("step_time"), judged.baseline
    if verdict is None or not verdict.allowed or not verdict.baseline or not isinstance(baseline, Baseline):
        return False
    times = judged.measurement.times
    assert times is not None, "only asked for what was timed"
    assert baseline.runs is not None, "times are judged by those of the baseline"
    return is_undecided(times.samples, baseline.runs, verdict.allowed / verdict.baseline)
