"""The set-up of fixtures: the bytes that each owns, and what was lost in it. A test that uses such a fixture has no figures."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.devices.contract import DeviceUnavailable
from pytest_gpumem.measurement import MeasuringError
from pytest_gpumem.runtest.ownership import Ownership, fixtures_used
from pytest_gpumem.torch_support.garbage_collector import FrozenHeap
from pytest_gpumem.values.unknown_reads import NOTHING_READ, UnknownReads

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.devices.registry import Devices
    from pytest_gpumem.runtest.run import TestRun


_LOST_BY_IMPORT = pytest.StashKey[str]()
_READ_BY_IMPORT = pytest.StashKey[UnknownReads]()


def note_import(node: pytest.Collector, lost: str | None, reads: UnknownReads) -> None:
    """Note with the tests of a file what happened while it was imported; they have no figures if readings were lost.

    Args:
        node: The module, or the folder with a conftest.
        lost: What was lost, as a clause, as `Device.lost` gives it.
        reads: As `Device.take_reads` gives them.
    """
    if lost is not None:
        node.stash.setdefault(_LOST_BY_IMPORT, f"{lost} (while {node.nodeid or node.name} was collected)")
    node.stash[_READ_BY_IMPORT] = node.stash.get(_READ_BY_IMPORT, NOTHING_READ) + reads


@dataclass
class SharedFixtures:
    """Shared fixtures that are set up: in which readings were lost (`Device.lost`), and values read (`Device.take_reads`)."""

    _why: dict[pytest.FixtureDef[Any], str] = field(default_factory=dict)
    _within: list[str | None] = field(default_factory=lambda: [None])
    """Reasons for lost figures so far: of the test first, then of each shared fixture that is being set up."""
    _reads: dict[pytest.FixtureDef[Any], UnknownReads] = field(default_factory=dict)
    _reads_within: list[UnknownReads] = field(default_factory=lambda: [NOTHING_READ])
    """Uncomputed values read so far, in the same order."""

    def begin(self) -> None:
        """Begin with a new test."""
        self._within[0] = None
        self._reads_within[0] = NOTHING_READ

    @contextmanager
    def setting_up(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest, device: Device
    ) -> Iterator[None]:
        """Note what is lost while the fixture is set up: it is also lost to the fixture that asked for it."""
        before = device.lost()
        self._within.append(None)
        self._reads_within[-1] += device.take_reads()
        self._reads_within.append(NOTHING_READ)
        with _asked_for(request) as asked:
            try:
                yield
            finally:
                lost = self._within.pop() or device.lost()
                why = None if lost is None else f"{lost} (in fixture {fixturedef.argname})"
                # One that was there before is not set up within.
                why = why or next((self._why[one] for one in asked() if one in self._why), None)
                if why is not None:
                    self._why[fixturedef] = why
                self._within[-1] = self._within[-1] or before or lost
                reads = self._reads_within.pop() + device.take_reads()
                self._reads[fixturedef] = sum((self._reads[one] for one in asked() if one in self._reads), reads)

    def forget(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """Forget a fixture that has been torn down."""
        self._why.pop(fixturedef, None)
        self._reads.pop(fixturedef, None)

    def lost(self, item: pytest.Item) -> str | None:
        """Return why a test that was set up has no figures, as a clause; ``None`` where its fixtures are good."""
        fixtures = (self._why[fixturedef] for fixturedef in _used(item, self._why))
        files = (node.stash[_LOST_BY_IMPORT] for node in item.listchain() if _LOST_BY_IMPORT in node.stash)
        return next(itertools.chain(files, fixtures), self._within[0])

    def reads(self, item: pytest.Item, device: Device) -> UnknownReads:
        """Return the values that a test, its file and its fixtures have read so far."""
        self._reads_within[0] += device.take_reads()
        files = (node.stash[_READ_BY_IMPORT] for node in item.listchain() if _READ_BY_IMPORT in node.stash)
        fixtures = (self._reads[fixturedef] for fixturedef in _used(item, self._reads))
        return sum(itertools.chain(files, fixtures), self._reads_within[0])


def _used(item: pytest.Item, among: Mapping[pytest.FixtureDef[Any], object]) -> Iterable[pytest.FixtureDef[Any]]:
    """Return those that a test uses, by its arguments or asked for by name."""
    asked = _definitions(getattr(item, "_request", None)).values()
    return dict.fromkeys([*fixtures_used(item, among), *(one for one in asked if one in among)])


@contextmanager
def _asked_for(request: pytest.FixtureRequest) -> Iterator[Callable[[], list[pytest.FixtureDef[Any]]]]:
    """Yield a function that returns the fixtures asked for by name within. pytest has no hook for those that are set up."""
    names: list[str] = []
    original = request.getfixturevalue

    def getfixturevalue(argname: str) -> Any:
        names.append(argname)
        return original(argname)

    request.getfixturevalue = getfixturevalue  # type: ignore[method-assign]
    try:
        yield lambda: [one for name in names if (one := _definitions(request).get(name)) is not None]
    finally:
        del request.getfixturevalue


def _definitions(request: object) -> Mapping[str, pytest.FixtureDef[Any]]:
    """Return the fixtures that a test's request has led to so far, by name. pytest has no public way to ask."""
    definitions: Mapping[str, pytest.FixtureDef[Any]] = getattr(request, "_fixture_defs", {})
    return definitions


class FixtureSetup:
    """A plugin that notes the bytes of each fixture as it is set up, and whether readings were lost.

    Registered when measured tests were selected.
    """

    def __init__(self, devices: Devices, default_device: str, measured: Iterable[pytest.Item]) -> None:
        self._devices = devices
        self._default_device = default_device
        self._names = {name for item in measured for name in getattr(item, "fixturenames", ())}
        self._ownerships: dict[str, Ownership] = {}
        self._heap = FrozenHeap()
        self.shared = SharedFixtures()
        self._opened: Device | None = None
        """The device while a shared fixture is set up outside of any measured test."""
        self.run: TestRun | None = None
        """The measured test from its set-up to its teardown."""

    def begin(self, item: pytest.Item, device: Device) -> Ownership:
        """Prepare for the set-up of a measured test, and return the owners of bytes on its device."""
        ownership = self._ownership(device)
        ownership.clear_left_gradients(item)
        self._heap.begin(device)
        self.shared.begin()
        return ownership

    def close(self) -> None:
        """Unfreeze the heap."""
        self._heap.close()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        shared = fixturedef.scope != "function"
        if shared:
            self._heap.fixture_is_set_up(fixturedef)
        of_a_measured_test = fixturedef.argname in self._names and fixturedef.argname != "gpumem"
        device = self._opened if self.run is None else self.run.device
        if device is not None:
            node = request.node if self.run is None else self.run.item
            return (yield from self._set_up(device, fixturedef, request, node if of_a_measured_test else None))
        if not (shared and of_a_measured_test):
            return (yield)
        # First used by a test that is not measured.
        try:
            device = self._devices.get(self._default_device)
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
        with self.shared.setting_up(fixturedef, request, device):
            return (yield from set_up)

    def _noted(
        self, device: Device, fixturedef: pytest.FixtureDef[Any], node: pytest.Item | pytest.Collector
    ) -> Generator[None, object, object]:
        """Set the fixture up and note its bytes; if it cuts a recording short, the test has no figures, which is no error."""
        run = self.run
        was_set_up = False
        try:
            with self._ownership(device).setting_up(fixturedef, node) as done:
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
            self.shared.forget(fixturedef)
        for ownership in self._ownerships.values():
            ownership.forget(fixturedef)

    def _ownership(self, device: Device) -> Ownership:
        if device.name not in self._ownerships:
            others = tuple(Ownership(other) for other in device.others)
            self._ownerships[device.name] = Ownership(device, others)
        return self._ownerships[device.name]


def _as_it_is() -> Generator[None, object, object]:
    return (yield)
