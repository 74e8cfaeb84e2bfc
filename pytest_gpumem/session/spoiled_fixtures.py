"""Fixtures in whose set-up something was lost, and files while they were imported: every test that uses one has no figures."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.session.ownership import fixtures_used

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pytest_gpumem.devices.contract import Device


_LOST_BY_IMPORT = pytest.StashKey[str]()


def spoil_tests_in(node: pytest.Collector, lost: str) -> None:
    """Note that something was lost while a file was imported.

    Args:
        node: The module, or the folder with a conftest.
        lost: What, as a clause, as `Device.lost` gives it.
    """
    node.stash.setdefault(_LOST_BY_IMPORT, f"{lost} (while {node.nodeid or node.name} was collected)")


@dataclass
class SpoiledFixtures:
    """Shared fixtures that are set up now, and whose set-up did what the device cannot answer for (`Device.lost`)."""

    _why: dict[pytest.FixtureDef[Any], str] = field(default_factory=dict)
    _within: list[str | None] = field(default_factory=lambda: [None])
    """What was lost so far: of the test first, then of each shared fixture that is being set up."""

    def begin(self) -> None:
        """A test begins."""
        self._within[0] = None

    @contextmanager
    def setting_up(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest, device: Device
    ) -> Iterator[None]:
        """Within, the fixture is set up. What is lost then is also lost to the fixture that asked for it."""
        before = device.lost()
        self._within.append(None)
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

    def forget(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """The fixture has been torn down."""
        self._why.pop(fixturedef, None)

    def lost(self, item: pytest.Item) -> str | None:
        """Why a test that was set up has no figures, as a clause; ``None`` where its fixtures are good."""
        used = [*fixtures_used(item, self._why), *_definitions(getattr(item, "_request", None)).values()]
        fixtures = (self._why[fixturedef] for fixturedef in used if fixturedef in self._why)
        files = (node.stash[_LOST_BY_IMPORT] for node in item.listchain() if _LOST_BY_IMPORT in node.stash)
        return next(itertools.chain(files, fixtures), self._within[0])


@contextmanager
def _asked_for(request: pytest.FixtureRequest) -> Iterator[Callable[[], list[pytest.FixtureDef[Any]]]]:
    """Yield what tells which fixtures were asked for by name within. pytest tells nobody of those that are there already."""
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
    """The fixtures that a test's request has led to so far, by name. pytest has no public way to ask."""
    definitions: Mapping[str, pytest.FixtureDef[Any]] = getattr(request, "_fixture_defs", {})
    return definitions
