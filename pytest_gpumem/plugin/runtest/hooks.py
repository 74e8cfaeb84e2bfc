"""The plugin that measures tests during pytest's set-up, call and teardown."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.base.errors import DeviceUnavailable, HookError, MeasuringError
from pytest_gpumem.facts.values.option_words import EMULATED
from pytest_gpumem.judging.gate.verdict import WHY_FAILED
from pytest_gpumem.measuring.explain.artifacts import Artifacts
from pytest_gpumem.measuring.explain.sites import Sites
from pytest_gpumem.measuring.measure.context import MeasuringContext
from pytest_gpumem.measuring.timing.sampling import TimeBudget
from pytest_gpumem.plugin.runtest.child_processes import OtherProcesses
from pytest_gpumem.plugin.runtest.explaining import Explainer, ExplainPolicy
from pytest_gpumem.plugin.runtest.gpu_use import gpu_uses, report_full_gpu
from pytest_gpumem.plugin.runtest.hook_results import environment_of
from pytest_gpumem.plugin.runtest.judging import Judging
from pytest_gpumem.plugin.runtest.measurements import Measurements
from pytest_gpumem.plugin.runtest.own_memory import OwnMemory
from pytest_gpumem.plugin.runtest.recorded_verdict import (
    complete_report,
    failure_of,
    forget_verdict,
    raise_failure_again,
    record_verdict,
    unittest_errors,
    verdict_after,
)
from pytest_gpumem.plugin.runtest.repeated_call import RepeatedCall, explain_call
from pytest_gpumem.plugin.runtest.run import TestRun
from pytest_gpumem.plugin.runtest.shown_traceback import end_at_call
from pytest_gpumem.plugin.runtest.single_run import measured_call
from pytest_gpumem.plugin.runtest.time_policy import TimePolicy
from pytest_gpumem.reporting.reports.failure import measured_section
from pytest_gpumem.reporting.reports.results import PROPERTY

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from typing import NoReturn

    from pytest_gpumem.facts.measurement import Environment
    from pytest_gpumem.judging.baselines.store import Store
    from pytest_gpumem.judging.baselines.unused import UnusedBaselines
    from pytest_gpumem.judging.gate.verdict import FailedIn, TestVerdict
    from pytest_gpumem.measuring.devices.contract import Device
    from pytest_gpumem.measuring.devices.registry import Devices
    from pytest_gpumem.plugin.config.selection import MeasuredTest
    from pytest_gpumem.plugin.config.settings import Settings
    from pytest_gpumem.plugin.runtest.child_processes import SessionProcesses
    from pytest_gpumem.plugin.runtest.fixture_setup import FixtureSetup
    from pytest_gpumem.plugin.runtest.one_process import OneProcess

_RUN = pytest.StashKey["TestRun"]()
_NO_DEVICE = pytest.StashKey[tuple[str, "TestVerdict"]]()
"""The stash key for two values if a test's device is not available: the reason, as a clause, and the test's verdict."""
_JUDGING = pytest.StashKey[Judging]()
_VERDICT_RECORDED = "gpumem_verdict_recorded"
"""An attribute of a skip exception. It is set if the test's verdict is already recorded."""


def run_of(item: pytest.Item) -> TestRun | None:
    """Return the `TestRun` of a test during its set-up or call. After this call, only the fixture ``gpumem`` measures in
    the test, and the test's call as a whole is not measured.

    Returns:
        The run; ``None`` if this machine does not have the test's device.

    Raises:
        MeasuringError: The test requested the fixture by ``getfixturevalue()``, so it was not selected as a measured test.
    """
    run = item.stash.get(_RUN, None)
    if run is not None:
        run.measures_itself = True
    elif _NO_DEVICE not in item.stash:
        raise MeasuringError(
            f"{item.nodeid} requested the gpumem fixture only by getfixturevalue(), so the session did not expect to measure "
            "it; add gpumem to its arguments, or @pytest.mark.gpumem"
        )
    return run


def refuse(item: pytest.Item, why: str | None = None) -> NoReturn:
    """Skip a test, because this machine cannot measure it. If a gate does not allow the skip, fail the test.

    Args:
        item: The test.
        why: The reason, as a clause. The default is the reason why the test's device is not available.
    """
    run = item.stash.get(_RUN, None)
    reason = item.stash[_NO_DEVICE][0] if why is None else why
    if run is None:
        item.stash[_JUDGING].conclude(replace(item.stash[_NO_DEVICE][1], unmeasured=reason))
    else:
        run.judging.conclude(run.refused(reason), run.device.memory_title)
    refused = pytest.skip.Exception(f"gpumem: {reason}")
    vars(refused)[_VERDICT_RECORDED] = True
    raise refused from None


def _forget(item: pytest.Item) -> None:
    """Remove what an earlier run of the same test stored, if a plugin reruns the test."""
    if _RUN in item.stash:
        del item.stash[_RUN]
    if _NO_DEVICE in item.stash:
        del item.stash[_NO_DEVICE]
    forget_verdict(item)


@dataclass(eq=False, repr=False)
class Measuring:
    """The plugin that measures tests. The session registers this plugin if measured tests were selected."""

    config: pytest.Config
    settings: Settings
    devices: Devices
    store: Store
    measured: Mapping[pytest.Item, MeasuredTest]
    fixtures: FixtureSetup
    ranks: OneProcess
    unused: UnusedBaselines | None = None
    processes: SessionProcesses | None = None
    _environments: dict[str, Environment] = field(default_factory=dict, init=False)

    # Set-up

    # With trylast, this wrapper is the innermost. So other plugins' set-up and teardown still run if this wrapper raises an
    # error.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        measured = self.measured.get(item)
        if measured is None:
            return (yield)
        _forget(item)
        judging = Judging(self.config, self.settings, self.store, item, measured, self.ranks, self.unused)
        item.stash[_JUDGING] = judging
        try:
            self._begin(judging)
        except DeviceUnavailable as unavailable:
            verdict = judging.not_measured(why := str(unavailable), self.devices.slugs)
            item.stash[_NO_DEVICE] = why, verdict
            # Do not raise the gate's failure yet, because the test may skip itself or fail by itself first.
            record_verdict(item, measured.not_measured(why))
            if measured.has_fixture and not judging.failing(verdict):
                refuse(item)
        try:
            return (yield)
        except BaseException as error:
            run = item.stash.get(_RUN, None)
            if run is not None:
                run.failed(error)
                self._report_missing_values(item, run.device, error, "setup")
                report_full_gpu(item, run.device, run.gpu_uses, error, "setup", self.settings.units)
            _record_end(item, measured, run, error, "setup")
            raise

    def _begin(self, judging: Judging) -> None:
        settings, item = self.settings, judging.item
        device = self.devices.get(judging.measured.budget.device or settings.device)
        if device.lock is not None:
            device.lock.tell = self._tell_now
        try:
            if self.processes is not None:
                self.processes.publish(device)
            device.open()
        except RuntimeError as error:
            report_full_gpu(item, device, gpu_uses(device), error, "setup", settings.units)
            raise
        for gpu in device.everywhere:
            gpu.consensus = self.ranks.consensus
        try:
            ownership = self.fixtures.begin(item, device)
            environment = self._environment(device)
            judging.slug = settings.compared_slug(environment.slug)
            time_policy = TimePolicy(judging)
            times = device.tells_time and time_policy.should_time()
            context = MeasuringContext(
                device,
                TimeBudget(settings.time_budget) if times else None,
                sites=None if settings.explain == "never" else self._sites,
                artifacts=Artifacts(settings.artifacts_folder if self._writes else None, item.nodeid, device),
                over_time=bool(settings.report),
                end_step=None if self.processes is None else partial(self.processes.end_step, device),
            )
            policy = ExplainPolicy(self.config, settings, judging)
            # On an emulated GPU, the test's file may have read uncomputed values, even if the test runs on another device.
            lacks_values = device.lacks("values") is not None or settings.device.startswith(EMULATED)
            reads = partial(self.fixtures.shared.reads, item, device) if lacks_values else None
            run = TestRun(
                judging,
                Explainer(policy, context, judging),
                time_policy,
                context,
                OwnMemory(item, context, ownership),
                Measurements(settings, context, environment, self.ranks.rank, reads),
                OtherProcesses(device, self.processes, self.ranks.rank),
            )
            run.gpu_uses = gpu_uses(device)
        except BaseException:
            device.close()
            raise
        item.stash[_RUN] = self.fixtures.run = run

    def _tell_now(self, sentence: str) -> None:
        """Write a line to the terminal at once, although pytest captures output while a test runs.

        This also works under pytest-xdist.
        """
        capture: Any = self.config.pluginmanager.get_plugin("capturemanager")
        with nullcontext() if capture is None else capture.global_and_fixture_disabled():
            sys.stderr.write(f"\ngpumem: {sentence}\n")
            sys.stderr.flush()

    @property
    def _writes(self) -> bool:
        """True if this process writes files. Among several ranks, only the first does."""
        return self.ranks.rank is None or self.ranks.rank.is_first

    @cached_property
    def _sites(self) -> Sites:
        return Sites(self.config.rootpath)

    # Call

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        measured = self.measured.get(item)
        if measured is None:
            return (yield)
        run = item.stash.get(_RUN, None)
        if run is None:
            return (yield from self._call_unmeasured(item, measured))
        try:
            try:
                run.begin_call()
            except MeasuringError as error:
                run.lost = str(error)
            if run.measures_itself or run.lost is not None:
                result = yield
            else:
                result = yield from _call_measured(run)
        except BaseException as error:
            self._call_has_failed(run, error)
            raise
        finally:
            run.is_called = False
        errors = unittest_errors(item)
        if errors:
            self._call_has_failed(run, *errors)
        else:
            self._judge_call(run)
        return result

    def _judge_call(self, run: TestRun) -> None:
        """Judge a test after its call has ended without an error. Fail the test if its verdict requires this."""
        item, judging = run.item, run.judging
        raise_failure_again(item)
        judged = run.measurements.judged
        if run.has_failed_subtest and not judged:
            judging.conclude(judging.measured.not_measured(WHY_FAILED["subtest"], failed_by_itself=True))
            return
        if run.lost is None:
            run.lost = self._lost(item, run.device)
        if run.lost is None and not judged and not run.relations:
            run.lost = "it has the gpumem fixture but measured nothing with it"
        if run.lost is None and not run.measures_itself:
            explain_call(run)
        judging.conclude(run.verdict(), run.device.memory_title)

    def _call_has_failed(self, run: TestRun, error: BaseException, *later_errors: BaseException) -> None:
        """After a failed call, add the test's measurements so far to its report, and record that ``error`` ended the test."""
        item = run.item
        run.failed(error, *later_errors)
        if not run.measures_itself and run.memory.call_begin is not None:
            run.explainer.explain_out_of_memory(error, RepeatedCall(run.memory).subject)
        report_full_gpu(item, run.device, run.gpu_uses, error, "call", self.settings.units)
        self._report_missing_values(item, run.device, error, "call")
        if measurements := [judged.measurement for judged in run.measurements.judged]:
            item.add_report_section("call", PROPERTY, measured_section(measurements, self.settings.units))
        _record_end(item, run.judging.measured, run, error, "call")

    def _lost(self, item: pytest.Item, device: Device) -> str | None:
        """Return the reason why the test's readings are invalid, as a clause; ``None`` if they are valid."""
        return device.lost() or self.fixtures.shared.lost(item)

    def _report_missing_values(self, item: pytest.Item, device: Device, error: BaseException, when: FailedIn) -> None:
        """Add to the test's report a list of the uncomputed values that it read, because they may have caused the error."""
        no_values = device.lacks("values")
        if no_values is None or not isinstance(error, (Exception, pytest.fail.Exception)):
            return
        lost, reads = self._lost(item, device), self.fixtures.shared.reads(item, device).notes()
        clauses = [*([lost] if lost else []), *reads]
        if clauses:
            text = f"before this error: {'; '.join(clauses)}. The error may come from these reads and not from the code"
            item.add_report_section(when, "gpumem values", text)
        elif isinstance(error, AssertionError):
            text = f"{no_values}, so an assertion about a larger tensor proves nothing here"
            item.add_report_section(when, "gpumem values", text)

    def _call_unmeasured(self, item: pytest.Item, measured: MeasuredTest) -> Generator[None, object, object]:
        judging, (_, verdict) = item.stash[_JUDGING], item.stash[_NO_DEVICE]
        if measured.has_fixture:
            # The set-up skips a test whose device is not available, unless the gate fails the test. So fail this test.
            judging.conclude(verdict)
        result = yield
        judging.conclude(verdict)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        if call.excinfo is not None and not item.config.getoption("fulltrace"):
            end_at_call(call.excinfo)
        report = yield
        measured = self.measured.get(item)
        run = item.stash.get(_RUN, None)
        if run is not None and run.is_called:
            # This is a subtest's report. Its error is not stored, because the test continues and may take measurements.
            run.has_failed_subtest |= report.failed
        elif measured is not None:
            complete_report(item, measured, call, report)
        return report

    # Teardown

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        run = item.stash.get(_RUN, None)
        if run is not None:
            del item.stash[_RUN]
            self.fixtures.run = None
            run.release()
        return (yield)

    @pytest.hookimpl
    def pytest_unconfigure(self) -> None:
        # After Ctrl-C, pytest skips the teardown. So stop the test's profiler here, because a profiler that is still running
        # when the interpreter exits can crash the process.
        if self.fixtures.run is not None:
            self.fixtures.run.release()
            self.fixtures.run = None
        self.fixtures.close()
        if self.processes is not None:
            self.processes.close()

    def _environment(self, device: Device) -> Environment:
        if device.name not in self._environments:
            try:
                self._environments[device.name] = environment_of(device, self.config)
            except HookError as error:
                pytest.fail(f"gpumem: {error}", pytrace=False)
        return self._environments[device.name]


def _record_end(
    item: pytest.Item, measured: MeasuredTest, run: TestRun | None, error: BaseException, when: FailedIn
) -> None:
    """Record the verdict on a test after it ended with ``error``.

    Do nothing if the gate has recorded a verdict, or if the device is not available.
    """
    is_recorded = type(error) is pytest.skip.Exception and _VERDICT_RECORDED in vars(error)
    if run is not None and not is_recorded and error is not failure_of(item):
        record_verdict(item, verdict_after(measured, error, when))


def _call_measured(run: TestRun) -> Generator[None, object, object]:
    """Measure a test's call as a whole, and return the result of the call."""
    has_ended = False
    try:
        with measured_call(run) as keep:
            result = yield
            has_ended = True
        if not run.measures_itself and not run.has_failed_subtest and not unittest_errors(run.item):
            keep()
    except MeasuringError as error:
        if not has_ended:
            raise
        run.lost = str(error)
    return result
