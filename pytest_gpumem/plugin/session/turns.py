"""Plugins for a worker that shares a GPU with other workers (``--gpumem-pack``).

Each test waits until its memory can be reserved.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from _pytest.runner import runtestprotocol

from pytest_gpumem.plugin.session.packing import Packed

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from pytest_gpumem.measuring.devices.memory_ledger import Reservation, SharedMemory
    from pytest_gpumem.plugin.session.packing import GpuShare


class Turns:
    """A plugin that lets each test wait until enough GPU memory is free, and limits the test to its reserved memory.

    If a test exceeds its reserved memory, the test runs again with the whole GPU (by `Repeating`, or by a plugin for
    reruns). For example, 4.08 GB are reserved for a test that now needs 5 GB. The test raises an out-of-memory error and is
    repeated with the whole GPU, so its report shows the 5 GB.
    """

    def __init__(self, shares: Mapping[pytest.Item, GpuShare], not_shared: frozenset[str]) -> None:
        self._shares = shares
        self._not_shared = not_shared
        self._reservation: Reservation | None = None
        self._running: GpuShare | None = None
        self._refusals = 0
        self._repeated: set[str] = set()

    def packed(self) -> Packed:
        """Return how this worker's tests have shared the GPU so far."""
        alone = [(share.why_alone, item.nodeid) for item, share in self._shares.items() if share.why_alone is not None]
        return Packed(len(self._shares) - len(alone), tuple(alone), frozenset(self._repeated), self._not_shared)

    def has_run_out(self) -> bool:
        """Return whether the running test has exceeded its reserved memory.

        An error which the test caught counts as well.
        """
        if self._reservation is None or self._reservation.needed is None:
            return False
        with suppress(RuntimeError):  # after an illegal memory access, all calls to the device fail
            return self._memory().refusals() > self._refusals
        return False

    def may_run_out(self, item: pytest.Item) -> bool:
        """Return whether a test may exceed its reserved memory, because it does not have the whole GPU."""
        share = self._shares.get(item)
        return share is not None and share.needed is not None

    # With tryfirst, this wrapper is the outermost. So a plugin's time limit for tests does not include the time spent
    # waiting.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        share = self._shares.get(item)
        if share is None:
            return (yield)
        memory = share.memory
        with memory.ledger.reserved(share.needed, memory.now) as reservation:
            self._reservation, self._running = reservation, share
            with suppress(RuntimeError):  # after an illegal memory access, which the test itself reports
                self._refusals = memory.refusals()
                memory.limit(reservation.limit)
            try:
                return (yield)
            finally:
                self._reservation = self._running = None
                with suppress(RuntimeError):  # after an illegal memory access, no memory can be freed
                    memory.limit(None)
                    memory.release()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._reservation is not None and self.has_run_out():
            self._repeated.add(item.nodeid)
            memory = self._memory()
            memory.release()
            self._reservation.take_all()
            memory.limit(None)

    def pytest_sessionfinish(self) -> None:
        for memory in {id(share.memory): share.memory for share in self._shares.values()}.values():
            with suppress(OSError):
                memory.ledger.leave()

    def _memory(self) -> SharedMemory:
        assert self._running is not None, "a test runs"
        return self._running.memory


class Repeating:
    """A plugin that repeats a test after the test has exceeded its reserved memory. Only the second run is reported."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not self._turns.may_run_out(item) or _is_left_to_other_plugins(item):
            return None
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if self._turns.has_run_out():
            _forget(item)
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
        for report in reports:
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


def _is_left_to_other_plugins(item: pytest.Item) -> bool:
    """Return whether `Repeating` must not repeat a test: a debugger needs the first failure, or pytest-rerunfailures repeats
    the test.
    """
    option = item.config.getoption
    if option("usepdb", False) or option("force_reruns", None) or item.get_closest_marker("flaky") is not None:
        return True
    reruns: object = option("reruns", None)
    if reruns is None:
        with suppress(ValueError, KeyError):  # The setting exists only with pytest-rerunfailures.
            reruns = item.config.getini("reruns")
    return str(reruns or 0) != "0"


def _forget(item: pytest.Item) -> None:
    """Remove what the first run left: report sections, and the errors which pytest stored for shared fixtures.

    The attributes are private in pytest. If a pytest version lacks such an attribute, the second run raises the stored
    error again.
    """
    getattr(item, "_report_sections", []).clear()
    definitions_by_name = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    for fixturedef in (fixturedef for definitions in definitions_by_name.values() for fixturedef in definitions):
        cached_result = getattr(fixturedef, "cached_result", None)
        if cached_result is not None and cached_result[2] is not None:
            fixturedef.cached_result = None
            # Remove the finalizers from the failed set-up, because pytest 9 expects none before a new set-up.
            getattr(fixturedef, "_finalizers", []).clear()
