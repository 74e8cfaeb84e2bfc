"""Record each fixture's bytes during its set-up, and whether the device's readings became invalid (were lost).

If readings were lost in a fixture, all tests with this fixture have no figures. For example, a fixture on an emulated GPU
may convert an uncomputed value to an integer and allocate this number of bytes. The right number is unknown, and so is the
memory of each test with this fixture.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.base.errors import DeviceUnavailable, MeasuringError
from pytest_gpumem.facts.values.unknown_reads import NOTHING_READ, UnknownReads
from pytest_gpumem.plugin.runtest.ownership import Ownership, fixtures_used
from pytest_gpumem.torch_support.garbage_collector import FrozenHeap

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping

    from pytest_gpumem.measuring.devices.contract import Device
    from pytest_gpumem.measuring.devices.registry import Devices
    from pytest_gpumem.plugin.runtest.run import TestRun


_LOST_BY_IMPORT = pytest.StashKey[str]()
_READ_BY_IMPORT = pytest.StashKey[UnknownReads]()


def note_import(node: pytest.Collector, lost: str | None, reads: UnknownReads) -> None:
    """Store in a collector's stash whether readings were lost, and which uncomputed values were read, while its file was
    imported.

    If readings were lost, the tests in ``node`` have no figures.

    Args:
        node: The module, or the folder with a conftest.
        lost: The reason why readings were lost, as a clause from `Device.lost`; ``None`` if no readings were lost.
        reads: The uncomputed values read during the import, from `Device.take_reads`.
    """
    if lost is not None:
        node.stash.setdefault(_LOST_BY_IMPORT, f"{lost} (while {node.nodeid or node.name} was collected)")
    node.stash[_READ_BY_IMPORT] = node.stash.get(_READ_BY_IMPORT, NOTHING_READ) + reads


@dataclass
class SharedFixtures:
    """The live shared fixtures, each with its lost readings (`Device.lost`) and the uncomputed values that it read
    (`Device.take_reads`).

    If readings were lost in a fixture, all fixtures and tests that use this fixture are affected as well. For example, if
    the set-up of a session fixture ``model`` lost readings, all tests with ``model`` have no figures, until pytest tears
    ``model`` down.
    """

    _reasons: dict[pytest.FixtureDef[Any], str] = field(default_factory=dict)
    """The reason why readings were lost, for each affected fixture."""
    _reason_stack: list[str | None] = field(default_factory=lambda: [None])
    """The reasons why readings were lost so far: the first entry is for the test, and each shared fixture in its set-up has
    a further entry, the innermost last."""
    _reads: dict[pytest.FixtureDef[Any], UnknownReads] = field(default_factory=dict)
    """The uncomputed values read by each fixture."""
    _reads_stack: list[UnknownReads] = field(default_factory=lambda: [NOTHING_READ])
    """The uncomputed values read so far, with an entry for each entry in ``_reason_stack``."""

    def begin(self) -> None:
        """Reset the entries for the test before a new test begins."""
        self._reason_stack[0] = None
        self._reads_stack[0] = NOTHING_READ

    @contextmanager
    def setting_up(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest, device: Device
    ) -> Iterator[None]:
        """Record lost readings while the fixture is set up, for this fixture and for the requesting fixture or test."""
        lost_before = device.lost()
        self._reason_stack.append(None)
        self._reads_stack[-1] += device.take_reads()
        self._reads_stack.append(NOTHING_READ)
        with _requested_fixtures(request) as requested:
            try:
                yield
            finally:
                lost = self._reason_stack.pop() or device.lost()
                reason = None if lost is None else f"{lost} (in fixture {fixturedef.argname})"
                # If a requested fixture already existed, it was not set up here, so use its stored reason.
                reason = reason or next((self._reasons[used] for used in requested() if used in self._reasons), None)
                if reason is not None:
                    self._reasons[fixturedef] = reason
                self._reason_stack[-1] = self._reason_stack[-1] or lost_before or lost
                reads = self._reads_stack.pop() + device.take_reads()
                self._reads[fixturedef] = sum((self._reads[used] for used in requested() if used in self._reads), reads)

    def forget(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """Remove a fixture's entries after its teardown."""
        self._reasons.pop(fixturedef, None)
        self._reads.pop(fixturedef, None)

    def lost(self, item: pytest.Item) -> str | None:
        """Return the reason why a test has no figures after its set-up, as a clause; ``None`` if no readings were lost."""
        fixtures = (self._reasons[fixturedef] for fixturedef in _used(item, self._reasons))
        files = (node.stash[_LOST_BY_IMPORT] for node in item.listchain() if _LOST_BY_IMPORT in node.stash)
        return next(itertools.chain(files, fixtures), self._reason_stack[0])

    def reads(self, item: pytest.Item, device: Device) -> UnknownReads:
        """Return the uncomputed values read so far by a test, its file and its fixtures."""
        self._reads_stack[0] += device.take_reads()
        files = (node.stash[_READ_BY_IMPORT] for node in item.listchain() if _READ_BY_IMPORT in node.stash)
        fixtures = (self._reads[fixturedef] for fixturedef in _used(item, self._reads))
        return sum(itertools.chain(files, fixtures), self._reads_stack[0])


def _used(item: pytest.Item, among: Mapping[pytest.FixtureDef[Any], object]) -> Iterable[pytest.FixtureDef[Any]]:
    """Return the fixtures in ``among`` that a test requests, by arguments or by ``request.getfixturevalue``."""
    if not among:
        return ()
    requested = _definitions(getattr(item, "_request", None)).values()
    return dict.fromkeys([*fixtures_used(item, among), *(fixture for fixture in requested if fixture in among)])


@contextmanager
def _requested_fixtures(request: pytest.FixtureRequest) -> Iterator[Callable[[], list[pytest.FixtureDef[Any]]]]:
    """Yield a function for the fixtures which were requested by ``getfixturevalue`` within the ``with`` block.

    ``getfixturevalue`` is replaced, because pytest calls no hook for a fixture that already exists.
    """
    names: list[str] = []
    original = request.getfixturevalue

    def getfixturevalue(argname: str) -> Any:
        names.append(argname)
        return original(argname)

    request.getfixturevalue = getfixturevalue  # type: ignore[method-assign]
    try:
        yield lambda: [fixture for name in names if (fixture := _definitions(request).get(name)) is not None]
    finally:
        del request.getfixturevalue


def _definitions(request: object) -> Mapping[str, pytest.FixtureDef[Any]]:
    """Return the fixtures used so far by a pytest request, by name. pytest has no public name for this mapping."""
    definitions: Mapping[str, pytest.FixtureDef[Any]] = getattr(request, "_fixture_defs", {})
    return definitions


class FixtureSetup:
    """A plugin that records each fixture's bytes during its set-up, and whether readings were lost.

    The session registers this plugin if measured tests were selected.
    """

    def __init__(self, devices: Devices, default_device: str, measured: Iterable[pytest.Item]) -> None:
        self._devices = devices
        self._default_device = default_device
        self._names = {name for item in measured for name in getattr(item, "fixturenames", ())}
        self._ownerships: dict[str, Ownership] = {}
        self._heap = FrozenHeap()
        self.shared = SharedFixtures()
        self._opened: Device | None = None
        """The device while a shared fixture is set up outside of a measured test; otherwise ``None``."""
        self.run: TestRun | None = None
        """The running measured test, from its set-up to its teardown; otherwise ``None``."""

    def begin(self, item: pytest.Item, device: Device) -> Ownership:
        """Return the `Ownership` for the device of a measured test, after removing what earlier tests left behind.

        For example, gradients that earlier tests left on a shared model are cleared.
        """
        ownership = self._ownership(device)
        ownership.clear_left_gradients(item)
        self._heap.begin(device)
        self.shared.begin()
        return ownership

    def close(self) -> None:
        """Unfreeze the objects that `FrozenHeap` has hidden from garbage collections."""
        self._heap.close()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        is_shared = fixturedef.scope != "function"
        if is_shared:
            self._heap.fixture_is_set_up(fixturedef)
        serves_measured_test = fixturedef.argname in self._names and fixturedef.argname != "gpumem"
        device = self._opened if self.run is None else self.run.device
        if device is not None:
            node = request.node if self.run is None else self.run.item
            return (yield from self._set_up(device, fixturedef, request, node if serves_measured_test else None))
        if not (is_shared and serves_measured_test):
            return (yield)
        # A test that is not measured uses this shared fixture first, so open the device only for the set-up.
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
        """Set up the fixture, and record its bytes for the test or collector ``node``.

        Record nothing if ``node`` is ``None``.
        """
        set_up = _plain_set_up() if node is None else self._recorded_set_up(device, fixturedef, node)
        if fixturedef.scope == "function":
            return (yield from set_up)
        with self.shared.setting_up(fixturedef, request, device):
            return (yield from set_up)

    def _recorded_set_up(
        self, device: Device, fixturedef: pytest.FixtureDef[Any], node: pytest.Item | pytest.Collector
    ) -> Generator[None, object, object]:
        """Set up the fixture and record its bytes.

        If the fixture's code interrupts the device's recording, for example with a profiler of its own, the test gets no
        figures, but does not fail.
        """
        run = self.run
        was_set_up = False
        try:
            with self._ownership(device).setting_up(fixturedef, node) as record:
                value = yield
                record(value)
                was_set_up = True
        except MeasuringError as error:
            if not was_set_up:
                raise
            if run is not None:
                run.lost = f"{error} (in fixture {fixturedef.argname})"
        return value

    @pytest.hookimpl
    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        # pytest may call this hook several times for a fixture, or for a fixture that was never set up.
        if fixturedef.scope != "function" and fixturedef.cached_result is not None:
            self._heap.fixture_is_gone(fixturedef)
            self.shared.forget(fixturedef)
        for ownership in self._ownerships.values():
            ownership.forget(fixturedef)

    def _ownership(self, device: Device) -> Ownership:
        if device.name not in self._ownerships:
            other_gpus = tuple(Ownership(other) for other in device.others)
            self._ownerships[device.name] = Ownership(device, other_gpus)
        return self._ownerships[device.name]


def _plain_set_up() -> Generator[None, object, object]:
    return (yield)
