"""Fixtures that make the figures of all their tests worthless, whichever test had them set up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_gpumem.facts.values.unknown_reads import NOTHING_READ, UnknownReads
from pytest_gpumem.plugin.runtest.fixture_setup import SharedFixtures, note_import


class Device:
    """One that lost something, and read something, as often as it is told."""

    def __init__(self):
        self.clause = None
        self.reads = NOTHING_READ

    def take_reads(self):
        reads, self.reads = self.reads, NOTHING_READ
        return reads

    def lost(self):
        clause, self.clause = self.clause, None
        return clause


class Request:
    """A test's request, which leads to fixtures by name."""

    def __init__(self, **definitions):
        self._fixture_defs = definitions

    def getfixturevalue(self, argname):
        return argname


def fixture(name: str):
    # Not the class: by identity, as pytest's definitions are compared.
    return type("Fixture", (), {"argname": name, "argnames": ()})()


def test_using(*fixtures):
    names = {one.argname: [one] for one in fixtures}
    info = SimpleNamespace(name2fixturedefs=names)
    return SimpleNamespace(_fixtureinfo=info, _request=None, listchain=list)


test_using.__test__ = False


def set_up(invalid, device, one, request=None, clause=None, asks=None):
    request = request or Request()
    with invalid.setting_up(one, request, device):
        device.clause = clause
        if asks is not None:
            request.getfixturevalue(asks)


def test_every_test_that_uses_one_is_told_and_no_other_until_it_is_gone():
    invalid, device, bad, good = SharedFixtures(), Device(), fixture("bad"), fixture("good")
    set_up(invalid, device, bad, clause="a value is read")
    set_up(invalid, device, good)
    for _ in range(2):
        invalid.begin()
        assert invalid.lost(test_using(bad)) == "a value is read (in fixture bad)"
        assert invalid.lost(test_using(good)) is None
    invalid.forget(bad)
    assert invalid.lost(test_using(bad)) is None


def test_one_that_asks_for_one_that_is_there_already_is_spoiled_as_well():
    invalid, device, bad, by_way = SharedFixtures(), Device(), fixture("bad"), fixture("by_way")
    set_up(invalid, device, bad, clause="a value is read")
    request = Request(bad=bad)
    set_up(invalid, device, by_way, request, asks="bad")
    invalid.begin()
    assert invalid.lost(test_using(by_way)) == "a value is read (in fixture bad)"
    assert "getfixturevalue" not in vars(request)


def test_what_was_lost_before_a_fixture_was_asked_for_is_lost_to_the_test_alone():
    invalid, device, good = SharedFixtures(), Device(), fixture("good")
    invalid.begin()
    device.clause = "a value is read"
    set_up(invalid, device, good)
    assert invalid.lost(test_using(good)) == "a value is read"
    invalid.begin()
    assert invalid.lost(test_using(good)) is None


def test_what_was_lost_while_a_file_was_imported_is_lost_to_its_tests_alone():
    module = SimpleNamespace(stash=pytest.Stash(), nodeid="tests/test_it.py", name="test_it.py")
    other = SimpleNamespace(stash=pytest.Stash(), nodeid="tests/test_other.py", name="test_other.py")
    note_import(module, "a value is read", NOTHING_READ)
    note_import(module, "another value is read", UnknownReads({"test_it.py:2": 1}))
    inside, outside = test_using(), test_using()
    inside.listchain, outside.listchain = lambda: [module], lambda: [other]
    invalid = SharedFixtures()
    assert invalid.lost(inside) == "a value is read (while tests/test_it.py was collected)"
    assert invalid.lost(outside) is None
    assert invalid.reads(inside, Device()) == UnknownReads({"test_it.py:2": 1})
    assert invalid.reads(outside, Device()) == NOTHING_READ


def test_what_a_shared_fixture_read_is_noted_with_the_tests_that_use_it_alone():
    shared, device, reading, asking, other = (
        SharedFixtures(),
        Device(),
        fixture("reading"),
        fixture("asking"),
        fixture("other"),
    )
    line, tests_line = UnknownReads({"conftest.py:3": 1}), UnknownReads(other={"test_it.py:9": 2})
    with shared.setting_up(reading, Request(), device):
        device.reads = line
    request = Request(reading=reading)
    set_up(shared, device, asking, request, asks="reading")
    device.reads = tests_line
    set_up(shared, device, other)
    assert shared.reads(test_using(other), device) == tests_line
    for one in (reading, asking):
        shared.begin()
        assert shared.reads(test_using(one), device) == line
        assert shared.reads(test_using(other), device) == NOTHING_READ
    shared.forget(reading)
    assert shared.reads(test_using(reading), device) == NOTHING_READ
