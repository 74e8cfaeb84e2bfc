"""Tests that run out of what is reserved for them, on a device that only counts refusals: who runs them once more, and how."""

from __future__ import annotations

import pytest

from tests.support.processes import LEFT_OUT

CONFTEST = """
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_gpumem.plugin.session.packing import GpuShare
from pytest_gpumem.plugin.session.turns import Repeating, Turns

WANTED = {wanted}


class Reservation:
    def __init__(self, wanted):
        self.needed = self.limit = wanted

    def take_all(self):
        self.needed = self.limit = None


class Memory:
    count, most, broken = 0, None, False

    @property
    def ledger(self):
        return SimpleNamespace(reserved=self.reserved, leave=self.leave)

    def leave(self):
        with Path("left").open("a") as file:
            file.write("left\\n")

    @contextmanager
    def reserved(self, wanted, now):
        self.reservation = Reservation(wanted)
        yield self.reservation

    def now(self):
        pass

    def limit(self, most):
        self.check()
        self.most = most

    def release(self):
        self.check()

    def refusals(self):
        self.check()
        return self.count

    def check(self):
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def take(self, wanted):
        if self.most is not None and wanted > self.most:
            self.count += 1
            raise MemoryError
        assert self.reservation.limit is None or wanted <= self.reservation.limit, "others may have it"


MEMORY = Memory()


@pytest.fixture(scope="session")
def memory():
    return MEMORY


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    turns = Turns({{item: GpuShare(MEMORY, WANTED) for item in items if "shares" in item.name}}, frozenset())
    config.pluginmanager.register(turns)
    config.pluginmanager.register(Repeating(turns))


def pytest_runtest_logstart(nodeid):
    print("started", nodeid)
"""
GROWS = """
def test_shares(memory):
    memory.take(9)
"""


@pytest.fixture
def session(pytester):
    def run(source, *arguments, wanted=5):
        pytester.makeconftest(CONFTEST.format(wanted=wanted))
        pytester.makepyfile(source)
        return pytester.runpytest_inprocess(*LEFT_OUT, *arguments)

    return run


def test_a_test_that_runs_out_runs_once_more_and_only_that_is_reported(session):
    session(GROWS).assert_outcomes(passed=1)


def test_a_session_leaves_the_ledger_once_at_its_end(session, pytester):
    session(GROWS + GROWS.replace("shares", "shares_too")).assert_outcomes(passed=2)
    assert (pytester.path / "left").read_text() == "left\n"


RERUNS = {"an option": ["--reruns=1"], "forced": ["--force-reruns=1"], "a setting": ["-o", "reruns=1"]}


@pytest.mark.parametrize("arguments", RERUNS.values(), ids=RERUNS)
def test_a_plugin_for_reruns_runs_it_again_and_tells_so(session, arguments):
    pytest.importorskip("pytest_rerunfailures", reason="pytest-rerunfailures is not installed")
    result = session(GROWS, *arguments)
    assert result.parseoutcomes() == {"passed": 1, "rerun": 1}


def test_no_reruns_on_the_command_line_leave_none_of_the_settings(session):
    pytest.importorskip("pytest_rerunfailures", reason="pytest-rerunfailures is not installed")
    result = session(GROWS, "-o", "reruns=1", "--reruns=0")
    assert result.parseoutcomes() == {"passed": 1}


OTHER_PROTOCOL = """
def pytest_runtest_protocol(item):
    print("another's", item.name)
"""


@pytest.mark.parametrize("wanted", [5, None])
def test_the_protocol_of_tests_that_cannot_run_out_is_left_to_other_plugins(session, pytester, wanted):
    pytester.makepyfile(other=OTHER_PROTOCOL)
    pytester.syspathinsert()
    result = session("def test_shares(): pass\ndef test_takes_none(): pass", "-s", "-p", "other", wanted=wanted)
    result.assert_outcomes(passed=2)
    assert "another's test_takes_none" in result.stdout.str()
    assert ("another's test_shares" in result.stdout.str()) is (wanted is None)


@pytest.mark.parametrize("scope", ["function", "class", "module", "session"])
def test_a_fixture_that_ran_out_is_set_up_once_more(session, scope):
    result = session(
        f"""
        import pytest

        SET_UP, TORN_DOWN = [], []

        @pytest.fixture(scope="session")
        def stays():
            SET_UP.append("stays")
            return 1

        @pytest.fixture(scope="{scope}")
        def large(memory, stays):
            memory.take(9)
            SET_UP.append("large")
            yield
            TORN_DOWN.append("large")

        def test_shares(large):
            pass

        def test_shares_too(large):
            pass

        def test_after(stays):
            times = 2 if "{scope}" in ("function", "class") else 1
            assert (SET_UP.count("stays"), SET_UP.count("large")) == (1, times)
        """
    )
    result.assert_outcomes(passed=3)


def test_after_an_illegal_access_each_test_fails_by_itself(session):
    result = session(
        """
        def test_shares(memory):
            memory.broken = True
            memory.check()

        def test_shares_too(memory):
            memory.check()

        def test_takes_none():
            pass
        """
    )
    result.assert_outcomes(failed=2, passed=1)
    assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()
