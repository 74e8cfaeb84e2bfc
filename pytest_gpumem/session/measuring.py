"""Measures tests as pytest runs them. A plugin for the process that runs tests."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.devices.contract import DeviceUnavailable
from pytest_gpumem.explain.artifacts import Artifacts
from pytest_gpumem.explain.sites import Sites
from pytest_gpumem.gate.verdict import SKIPPED, WHY_FAILED
from pytest_gpumem.measurement import Environment, MeasuringError, Workload
from pytest_gpumem.reports.failure import measured_section
from pytest_gpumem.reports.results import PROPERTY
from pytest_gpumem.session.explaining import ExplainingTest
from pytest_gpumem.session.hook_results import HookError, checked_details
from pytest_gpumem.session.judging import (
    Judging,
    fail_again,
    failure_of,
    forget_failure,
    forget_properties,
    is_told,
    shorten_summary,
    tell,
)
from pytest_gpumem.session.ownership import Residency
from pytest_gpumem.session.spoiled_fixtures import SpoiledFixtures
from pytest_gpumem.session.test_run import TestRun
from pytest_gpumem.steps.prepared import MeasuringContext
from pytest_gpumem.timing.sampling import TimeBudget
from pytest_gpumem.torch_support.garbage_collector import FrozenHeap

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from typing import NoReturn

    from pytest_gpumem.baselines.store import Store
    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.devices.registry import Devices
    from pytest_gpumem.gate.verdict import FailedIn, TestVerdict
    from pytest_gpumem.session.selection import Measured
    from pytest_gpumem.session.settings import Settings

_RUN = pytest.StashKey["TestRun"]()
_UNAVAILABLE = pytest.StashKey[str]()
_JUDGING = pytest.StashKey[Judging]()
_TOLD = "gpumem_told"
"""The attribute of an exception that ends a test whose verdict is told."""


def run_of(item: pytest.Item) -> TestRun | None:
    """The run of the measured test that is being set up or called, which from now on measures itself.

    ``None`` when its device cannot be used here. Raises `MeasuringError` when it was not known to be measured.
    """
    run = item.stash.get(_RUN, None)
    if run is not None:
        run.measures_itself = True
    elif _UNAVAILABLE not in item.stash:
        raise MeasuringError(
            f"{item.nodeid} got the gpumem fixture through getfixturevalue() and so was not known to be measured; "
            "add gpumem to its arguments, or @pytest.mark.gpumem"
        )
    return run


def refuse(item: pytest.Item, why: str | None = None) -> NoReturn:
    """Skip the test that cannot be measured here; where the gate does not let that pass, fail it.

    ``why`` is a clause; without one it is that the device cannot be used.
    """
    run = item.stash.get(_RUN, None)
    reason = item.stash[_UNAVAILABLE] if why is None else why
    if run is None:
        judging = item.stash[_JUDGING]
        judging.conclude(judging.measured.not_measured(reason))
    else:
        run.judging.conclude(run.refused(reason), run.device.memory_title)
    refused = pytest.skip.Exception(f"gpumem: {reason}")
    vars(refused)[_TOLD] = True
    raise refused from None


def _forget(item: pytest.Item) -> None:
    """A test that is run again (reruns) begins as if it had not run."""
    if _RUN in item.stash:
        del item.stash[_RUN]
    if _UNAVAILABLE in item.stash:
        del item.stash[_UNAVAILABLE]
    forget_failure(item)
    forget_properties(item)


class Measuring:
    """A plugin that is registered when measured tests were selected."""

    def __init__(
        self,
        config: pytest.Config,
        settings: Settings,
        devices: Devices,
        store: Store,
        measured: Mapping[pytest.Item, Measured],
    ) -> None:
        self._config = config
        self._settings = settings
        self._devices = devices
        self._store = store
        self._measured = measured
        self._fixture_names = {name for item in measured for name in getattr(item, "fixturenames", ())}
        self._residencies: dict[str, Residency] = {}
        self._environments: dict[str, Environment] = {}
        self._heap = FrozenHeap()
        self._spoiled = SpoiledFixtures()
        self._open: TestRun | None = None
        self._opened: Device | None = None
        """The device while a shared fixture is set up outside of any measured test."""

    # Set-up

    # trylast makes a wrapper the innermost: pytest's own set up and tear down around it, whatever is raised here.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        measured = self._measured.get(item)
        if measured is None:
            return (yield)
        _forget(item)
        item.stash[_JUDGING] = self._judging(item, measured)
        try:
            self._begin(item, measured)
        except DeviceUnavailable as unavailable:
            item.stash[_UNAVAILABLE] = str(unavailable)
            tell(item, measured.not_measured(str(unavailable)))
            if measured.has_fixture and not self._settings.strict:
                refuse(item)
        try:
            return (yield)
        except BaseException as error:
            run = item.stash.get(_RUN, None)
            if run is not None:
                run.failed(error)
            _tell_ended(item, measured, run, error, "setup")
            raise

    def _begin(self, item: pytest.Item, measured: Measured) -> None:
        name = measured.budget.device or self._settings.device
        device = self._devices.get(name)
        device.open()
        try:
            self._residency(device).clear_left_gradients(item)
            self._heap.begin(device)
            self._spoiled.begin()
            time_budget = (
                None if self._settings.no_time or not device.tells_time else TimeBudget(self._settings.time_budget)
            )
            judging = self._judging(item, measured)
            explaining = ExplainingTest(self._config, self._settings, judging)
            context = MeasuringContext(
                device,
                time_budget,
                sites=None if self._settings.explain == "never" else self._sites,
                artifacts=Artifacts(self._settings.artifacts_folder, item.nodeid, device),
                over_time=bool(self._settings.report),
            )
            run = TestRun(judging, explaining, context, self._residency(device), self._environment(device))
        except BaseException:
            device.close()
            raise
        item.stash[_RUN] = self._open = run

    @cached_property
    def _sites(self) -> Sites:
        return Sites(self._config.rootpath)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        shared = fixturedef.scope != "function"
        if shared:
            self._heap.fixture_is_set_up(fixturedef)
        of_a_measured_test = fixturedef.argname in self._fixture_names and fixturedef.argname != "gpumem"
        device = self._opened if self._open is None else self._open.device
        if device is not None:
            node = request.node if self._open is None else self._open.item
            return (yield from self._set_up(device, fixturedef, request, node if of_a_measured_test else None))
        if not (shared and of_a_measured_test):
            return (yield)
        # First used by a test that is not measured.
        try:
            device = self._devices.get(self._settings.device)
            device.open()
        except DeviceUnavailable:
            return (yield)
        self._opened = device
        try:
            return (yield from self._set_up(device, fixturedef, request, request.node))
        finally:
            self._opened = None
            device.close()

    def _set_up(
        self,
        device: Device,
        fixturedef: pytest.FixtureDef[Any],
        request: pytest.FixtureRequest,
        node: pytest.Item | pytest.Collector | None,
    ) -> Generator[None, object, object]:
        """Set the fixture up for ``node``; its bytes are not noted where that is ``None``."""
        set_up = _as_it_is() if node is None else self._noted(device, fixturedef, node)
        if fixturedef.scope == "function":
            return (yield from set_up)
        with self._spoiled.setting_up(fixturedef, request, device):
            return (yield from set_up)

    def _noted(
        self, device: Device, fixturedef: pytest.FixtureDef[Any], node: pytest.Item | pytest.Collector
    ) -> Generator[None, object, object]:
        """Set the fixture up and note its bytes; a recording that it spoils is the test's loss and not an error."""
        run = self._open
        was_set_up = False
        try:
            with self._residency(device).setting_up(fixturedef, node) as done:
                value = yield
                done(value)
                was_set_up = True
        except MeasuringError as error:
            if not was_set_up:
                raise
            if run is not None:
                run.lost = f"{error} (in fixture {fixturedef.argname})"
        return value

    @pytest.hookimpl
    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        # pytest calls this more than once for a fixture, also for one that was never set up.
        if fixturedef.scope != "function" and fixturedef.cached_result is not None:
            self._heap.fixture_is_gone(fixturedef)
            self._spoiled.forget(fixturedef)
        for residency in self._residencies.values():
            residency.forget(fixturedef)

    # Call

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        measured = self._measured.get(item)
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
            run.failed(error)
            run.explain_call_out_of_memory(error)
            _tell_of_values(item, run, error)
            if run.judged:
                item.add_report_section("call", PROPERTY, measured_section(run.measurements, self._settings.units))
            _tell_ended(item, measured, run, error, "call")
            raise
        fail_again(item)
        if run.lost is None:
            run.lost = run.device.lost() or self._spoiled.lost(item)
        if run.lost is None and not run.judged and not run.relations:
            run.lost = "it has the gpumem fixture but measured nothing with it"
        if run.lost is None:
            run.explain_call()
        run.judging.conclude(run.verdict(), run.device.memory_title)
        return result

    def _call_unmeasured(self, item: pytest.Item, measured: Measured) -> Generator[None, object, object]:
        verdict = measured.not_measured(item.stash[_UNAVAILABLE])
        judging = self._judging(item, measured)
        if measured.has_fixture:
            # Only --gpumem-strict lets such a test come so far, and it fails before it begins.
            judging.conclude(verdict)
        result = yield
        judging.conclude(verdict)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        shorten_summary(item, call, report)
        measured = self._measured.get(item)
        if measured is not None and call.excinfo is not None and not is_told(item):
            # A hook of somebody else's ended it before ours saw anything of it.
            tell(item, _not_measured(measured, call.excinfo.value, "setup" if call.when == "setup" else "call"))
            report.user_properties = list(item.user_properties)
        return report

    # Teardown

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        run = item.stash.get(_RUN, None)
        if run is not None:
            del item.stash[_RUN]
            self._open = None
            run.release()
        return (yield)

    @pytest.hookimpl
    def pytest_unconfigure(self) -> None:
        # Ctrl-C comes without a teardown, and a profiler that runs when the interpreter ends can take it down.
        if self._open is not None:
            self._open.release()
            self._open = None
        self._heap.close()

    def _judging(self, item: pytest.Item, measured: Measured) -> Judging:
        return Judging(self._config, self._settings, self._store, item, measured)

    def _residency(self, device: Device) -> Residency:
        return self._residencies.setdefault(device.name, Residency(device))

    def _environment(self, device: Device) -> Environment:
        if device.name not in self._environments:
            environment = device.environment()
            hook = self._config.hook.pytest_gpumem_environment
            try:
                added = checked_details(hook(config=self._config, device=device), hook)
            except HookError as error:
                pytest.fail(f"gpumem: {error}", pytrace=False)
            details = {**environment.details, **added}
            self._environments[device.name] = Environment(environment.slug, environment.device, details)
        return self._environments[device.name]


def _tell_ended(
    item: pytest.Item, measured: Measured, run: TestRun | None, error: BaseException, when: FailedIn
) -> None:
    """Tell the verdict on a test that ``error`` ended, unless it is told: by the gate, or as the device cannot be used."""
    told = type(error) is pytest.skip.Exception and _TOLD in vars(error)
    if run is not None and not told and error is not failure_of(item):
        tell(item, _not_measured(measured, error, when))


def _not_measured(measured: Measured, error: BaseException, when: FailedIn) -> TestVerdict:
    """The verdict on a test that ``error`` ended in a phase."""
    if isinstance(error, pytest.skip.Exception):
        return measured.not_measured(SKIPPED)
    return measured.not_measured(WHY_FAILED[when], failed_by_itself=True)


def _tell_of_values(item: pytest.Item, run: TestRun, error: BaseException) -> None:
    """Say of a failed assertion that its values may not have been computed."""
    no_values = run.device.lacks("values")
    if no_values is not None and isinstance(error, AssertionError):
        item.add_report_section("call", "gpumem values", f"{no_values}: an assertion on others says nothing here")


def _as_it_is() -> Generator[None, object, object]:
    return (yield)


def _call_measured(run: TestRun) -> Generator[None, object, object]:
    """Measure the call of a test as a whole. Returns its result."""
    ended = False
    try:
        with run.tracked(whole_call=True) as figures:
            result = yield
            ended = True
        if not run.measures_itself:
            run.keep_figures(Workload("call"), figures())
    except MeasuringError as error:
        if not ended:
            raise
        run.lost = str(error)
    return result
