"""Plugins for a worker whose tests share a GPU: each test has its bytes reserved while it runs."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from _pytest.runner import runtestprotocol

from pytest_gpumem.session.packing import Packed

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from pytest_gpumem.devices.memory_ledger import Reservation, SharedMemory
    from pytest_gpumem.session.packing import GpuShare


class Turns:
    """A plugin that has each test wait until its part of the GPU is free, and holds it to that.

    A test that runs out of what was reserved for it is given the whole GPU when it runs again (`Repeating`, or a plugin for
    reruns).
    """

    def __init__(self, shares: Mapping[pytest.Item, GpuShare], not_shared: frozenset[str]) -> None:
        self._shares = shares
        self._not_shared = not_shared
        self._reservation: Reservation | None = None
        self._running: GpuShare | None = None
        self._refusals = 0
        self._repeated: set[str] = set()

    def packed(self) -> Packed:
        """Return how the tests were packed until now."""
        alone = [(share.alone, item.nodeid) for item, share in self._shares.items() if share.alone is not None]
        return Packed(len(self._shares) - len(alone), tuple(alone), frozenset(self._repeated), self._not_shared)

    def has_run_out(self) -> bool:
        """Return whether the test that runs has run out of what was reserved for it, whoever caught the error."""
        if self._reservation is None or self._reservation.wanted is None:
            return False
        with suppress(RuntimeError):  # after an illegal access a device tells nothing
            return self._memory().refusals() > self._refusals
        return False

    def may_run_out(self, item: pytest.Item) -> bool:
        """Return whether a test has less than the whole GPU, so that it may run out of what is reserved for it."""
        share = self._shares.get(item)
        return share is not None and share.wanted is not None

    # The outermost: a plugin's time limit for a test does not count the seconds that it waits.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        share = self._shares.get(item)
        if share is None:
            return (yield)
        memory = share.memory
        with memory.ledger.reserved(share.wanted, memory.now) as reservation:
            self._reservation, self._running = reservation, share
            with suppress(RuntimeError):  # likewise, and the test will say so itself
                self._refusals = memory.refusals()
                memory.limit(reservation.limit)
            try:
                return (yield)
            finally:
                self._reservation = self._running = None
                with suppress(RuntimeError):  # after an illegal access nothing can be freed
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
        assert self._running is not None, "only asked while a test runs"
        return self._running.memory


class Repeating:
    """Runs a test that ran out of what was reserved for it once more; only that run is reported."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not self._turns.may_run_out(item) or _is_left_to_others(item):
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


def _is_left_to_others(item: pytest.Item) -> bool:
    """Return whether a debugger is to see the test's first failure, or pytest-rerunfailures runs it again."""
    option = item.config.getoption
    if option("usepdb", False) or option("force_reruns", None) or item.get_closest_marker("flaky") is not None:
        return True
    reruns: object = option("reruns", None)
    if reruns is None:
        with suppress(ValueError, KeyError):  # without that plugin there is no such setting
            reruns = item.config.getini("reruns")
    return str(reruns or 0) != "0"


def _forget(item: pytest.Item) -> None:
    """Forget what the run that is not reported has told, and the errors that pytest keeps of fixtures of wider scopes.

    Private names of pytest: where a version lacks one, the repeat meets the kept error, and is reported with it.
    """
    getattr(item, "_report_sections", []).clear()
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    for definition in (one for several in definitions.values() for one in several):
        kept = getattr(definition, "cached_result", None)
        if kept is not None and kept[2] is not None:
            definition.cached_result = None
            # What it had registered until it failed has no fixture to finish; pytest 9 expects none.
            getattr(definition, "_finalizers", []).clear()
