"""Measures tests as pytest runs them, and fails those that the gate does not let pass. For the process that runs tests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.baselines.store import StoreError
from pytest_gpumem.baselines.update import ACCEPTS
from pytest_gpumem.devices.contract import DeviceUnavailable
from pytest_gpumem.gate.judge import failing_outcomes, judge
from pytest_gpumem.gate.verdict import TestVerdict
from pytest_gpumem.measurement import Environment, Measurement, MeasuringError, Workload
from pytest_gpumem.metrics import Tolerance
from pytest_gpumem.reports.failure import failure_text, measured_section
from pytest_gpumem.residency import Residency
from pytest_gpumem.results import PROPERTY
from pytest_gpumem.settings import DEFAULT_TOLERANCES, options_given
from pytest_gpumem.test_run import TestRun

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from typing import NoReturn

    from pytest_gpumem.baselines.entry import Absent, Entry
    from pytest_gpumem.baselines.store import Store
    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.devices.registry import Devices
    from pytest_gpumem.gate.budget import Budget
    from pytest_gpumem.selection import Measured
    from pytest_gpumem.settings import Settings

_RUN = pytest.StashKey["TestRun"]()
_UNAVAILABLE = pytest.StashKey[str]()


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


def refuse(item: pytest.Item) -> NoReturn:
    """Skip the test whose device cannot be used here."""
    pytest.skip(f"gpumem: {item.stash[_UNAVAILABLE]}")


def _forget(item: pytest.Item) -> None:
    """A test that is run again (reruns) begins as if it had not run."""
    if _RUN in item.stash:
        del item.stash[_RUN]
    if _UNAVAILABLE in item.stash:
        del item.stash[_UNAVAILABLE]
    _forget_properties(item)


def _forget_properties(item: pytest.Item) -> None:
    mine = (PROPERTY, f"{PROPERTY}.")
    item.user_properties[:] = [
        entry for entry in item.user_properties if entry[0] != mine[0] and not entry[0].startswith(mine[1])
    ]


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
        self._open: TestRun | None = None

    # Set-up

    # trylast makes a wrapper the innermost: pytest's own set up and tear down around it, whatever is raised here.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        measured = self._measured.get(item)
        if measured is None:
            return (yield)
        _forget(item)
        try:
            self._begin(item, measured)
        except DeviceUnavailable as unavailable:
            item.stash[_UNAVAILABLE] = str(unavailable)
            self._tell(item, TestVerdict(measured.file, measured.test, unmeasured=str(unavailable)))
            if measured.has_fixture and not self._settings.strict:
                refuse(item)
        try:
            return (yield)
        except BaseException as error:
            if item.stash.get(_RUN, None) is not None:
                self._tell(item, _not_measured(measured, error))
            raise

    def _begin(self, item: pytest.Item, measured: Measured) -> None:
        name = measured.budget.device or self._settings.device
        device = self._devices.get(name)
        device.open()
        try:
            self._residency(device).clear_left_gradients(item)
            device.settle()
            run = TestRun(
                item,
                device,
                self._residency(device),
                self._environment(device),
                timed=not self._settings.no_time,
                seen=lambda measurement: self._config.hook.pytest_gpumem_measurement(
                    item=item, measurement=measurement
                ),
            )
        except BaseException:
            device.close()
            raise
        run.measures_itself = measured.has_fixture
        item.stash[_RUN] = self._open = run

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        if fixturedef.argname not in self._fixture_names or fixturedef.argname == "gpumem":
            return (yield)
        if self._open is not None:
            return (yield from self._noted(self._open.device, fixturedef))
        if fixturedef.scope == "function":
            return (yield)
        # Shared with a measured test, but first used by one that is not measured.
        try:
            device = self._devices.get(self._settings.device)
            device.open()
        except DeviceUnavailable:
            return (yield)
        try:
            return (yield from self._noted(device, fixturedef))
        finally:
            device.close()

    def _noted(self, device: Device, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        residency = self._residency(device)
        with residency.setting_up(fixturedef, self._open.item if self._open is not None else None) as done:
            value = yield
            done(value)
        return value

    @pytest.hookimpl
    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
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
            run.begin_call()
            if run.measures_itself:
                result, lost = (yield), None
            else:
                result, lost = yield from _call_measured(run)
        except BaseException as error:
            run.failed(error)
            self._tell(item, _not_measured(measured, error))
            if run.measurements:
                item.add_report_section("call", PROPERTY, measured_section(run.measurements, self._settings.units))
            raise
        if lost is None and not run.measurements:
            lost = "it has the gpumem fixture but measured nothing with it"
        self._judge(item, self._verdict(item, measured, run, lost))
        return result

    def _call_unmeasured(self, item: pytest.Item, measured: Measured) -> Generator[None, object, object]:
        verdict = TestVerdict(measured.file, measured.test, unmeasured=item.stash[_UNAVAILABLE])
        if measured.has_fixture:
            # Only --gpumem-strict lets such a test come so far, and it fails before it begins.
            self._judge(item, verdict)
        result = yield
        self._judge(item, verdict)
        return result

    def _verdict(self, item: pytest.Item, measured: Measured, run: TestRun, unmeasured: str | None) -> TestVerdict:
        if unmeasured is not None:
            return TestVerdict(measured.file, measured.test, unmeasured=unmeasured)
        tolerances = self._tolerances(item, measured.budget)
        return TestVerdict(
            measured.file,
            measured.test,
            tuple(judge(one, measured.budget, self._baseline(measured, one), tolerances) for one in run.measurements),
        )

    def _judge(self, item: pytest.Item, verdict: TestVerdict) -> None:
        """Tell the verdict, and fail the test if it must fail: with `pytest.fail`, so that it is the test's own failure."""
        self._tell(item, verdict)
        failing = failing_outcomes(
            verdict,
            strict=self._settings.strict,
            accepts=ACCEPTS[self._settings.update],
            compares=self._settings.baseline,
        )
        if failing:
            text = failure_text(
                verdict,
                failing,
                self._settings.units,
                path=self._path_from_here(item),
                options=options_given(self._config),
            )
            pytest.fail(text, pytrace=False)

    def _baseline(self, measured: Measured, measurement: Measurement) -> Entry | Absent | None:
        if not self._settings.baseline and self._settings.update is None:
            return None
        try:
            return self._store.find(measured.key(measurement.name), measurement.environment.slug)
        except StoreError as error:
            # The session has read the whole store at its start, so that somebody has changed it since.
            pytest.fail(f"gpumem: {error}", pytrace=False)

    def _tolerances(self, item: pytest.Item, budget: Budget) -> dict[str, Tolerance]:
        tolerances = {**DEFAULT_TOLERANCES, **self._settings.tolerances}
        if budget.max_growth is not None:
            tolerances["peak_allocated"] = Tolerance(relative=budget.max_growth)
        hook = item.ihook.pytest_gpumem_tolerance
        return {
            name: hook(item=item, metric=name, tolerance=tolerance) or tolerance
            for name, tolerance in tolerances.items()
        }

    def _tell(self, item: pytest.Item, verdict: TestVerdict) -> None:
        """Put a verdict into the test's properties: one for machines that continue, one a metric for those that only read."""
        _forget_properties(item)
        item.user_properties.append((PROPERTY, json.dumps(verdict.to_plain(), sort_keys=True)))
        for one in verdict.verdicts:
            for metric in one.metrics:
                name = f"{PROPERTY}.{one.measurement.name}.{metric.metric}"
                item.user_properties.append((name, metric.value))

    def _path_from_here(self, item: pytest.Item) -> str:
        """The test's id as it can be typed in the folder in which pytest was started."""
        import os

        file, _, test = item.nodeid.partition("::")
        path = os.path.relpath(self._config.rootpath / file, self._config.invocation_params.dir)
        return f"{path}::{self._measured[item].test if test else ''}"

    # Teardown

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        run = item.stash.get(_RUN, None)
        if run is not None:
            del item.stash[_RUN]
            self._open = None
            run.release()
        return (yield)

    def _residency(self, device: Device) -> Residency:
        return self._residencies.setdefault(device.name, Residency(device))

    def _environment(self, device: Device) -> Environment:
        if device.name not in self._environments:
            environment = device.environment()
            additions = self._config.hook.pytest_gpumem_environment(config=self._config, device=device)
            details = dict(environment.details)
            for addition in additions:
                details.update(addition)
            self._environments[device.name] = Environment(environment.slug, environment.device, details)
        return self._environments[device.name]


def _not_measured(measured: Measured, error: BaseException) -> TestVerdict:
    """The verdict on a test that did not get to its end because of ``error``."""
    if isinstance(error, pytest.skip.Exception):
        return TestVerdict(measured.file, measured.test, unmeasured="it was skipped")
    return TestVerdict(measured.file, measured.test, unmeasured="it failed by itself", failed_by_itself=True)


def _call_measured(run: TestRun) -> Generator[None, object, tuple[object, str | None]]:
    """Measure the call of a test as a whole. Returns its result, and why it could not be measured if so."""
    ended = False
    try:
        with run.tracked() as figures:
            result = yield
            ended = True
    except MeasuringError as error:
        if not ended:
            raise
        return result, str(error)
    if not run.measures_itself:
        run.record(Workload("call"), figures().memory_metrics())
    return result, None
