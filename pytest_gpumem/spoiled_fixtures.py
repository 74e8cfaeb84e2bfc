"""Fixtures in whose set-up something was lost: every test that uses one has no figures, whichever had it set up."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_gpumem.residency import fixtures_used

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from pytest_gpumem.devices.contract import Device


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
    def setting_up(self, fixturedef: pytest.FixtureDef[Any], device: Device) -> Iterator[None]:
        """Within, the fixture is set up. What is lost then is also lost to the fixture that asked for it."""
        before = device.lost()
        self._within.append(None)
        try:
            yield
        finally:
            lost = self._within.pop() or device.lost()
            if lost is not None:
                self._why[fixturedef] = f"{lost} (in fixture {fixturedef.argname})"
            self._within[-1] = self._within[-1] or before or lost

    def forget(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """The fixture has been torn down."""
        self._why.pop(fixturedef, None)

    def lost(self, item: pytest.Item) -> str | None:
        """Why a test that was set up has no figures, as a clause; ``None`` where its fixtures are good."""
        of_fixtures = [self._why[fixturedef] for fixturedef in fixtures_used(item, self._why)]
        return next(iter(of_fixtures), self._within[0])
