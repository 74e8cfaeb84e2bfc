"""A measured test ends as pytest reports it: an error or a skip is no regression, whoever keeps or turns the exception."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Project

TESTS = """
import asyncio
import os
import unittest

BROKEN = bool(os.environ.get("BROKEN"))


def work():
    tensor = torch.ones(250_000)
    doubled = tensor * 2
    if BROKEN:
        raise RuntimeError("a bug in the library")
    return doubled.sum()


@pytest.mark.gpumem
def test_function():
    work()


@pytest.mark.gpumem
class TestCase(unittest.TestCase):
    def test_body(self):
        work()

    def test_cleanup(self):
        self.addCleanup(work)
        torch.ones(250_000)

    def test_body_and_cleanup(self):
        self.addCleanup(work)
        work()

    def test_subtest(self):
        with self.subTest(number=1):
            work()
        torch.ones(10)


@pytest.mark.gpumem
class TestSetUp(unittest.TestCase):
    def setUp(self):
        work()

    def test_set_up(self):
        torch.ones(250_000)


@pytest.mark.gpumem
class TestTearDown(unittest.TestCase):
    def tearDown(self):
        work()

    def test_tear_down(self):
        torch.ones(250_000)


@pytest.mark.gpumem
class TestAsynchronous(unittest.IsolatedAsyncioTestCase):
    async def test_asynchronous(self):
        await asyncio.sleep(0)
        work()


@pytest.mark.anyio
@pytest.mark.gpumem
async def test_anyio():
    work()


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.mark.gpumem
def test_part(subtests):
    with subtests.test():
        work()
"""
NAMES = [
    "test_anyio",
    "test_asynchronous",
    "test_body",
    "test_body_and_cleanup",
    "test_cleanup",
    "test_function",
    "test_part",
    "test_set_up",
    "test_subtest",
    "test_tear_down",
]
RECORD = ("--gpumem-update=new",)
COMPARE = ("--gpumem-baseline", "--gpumem-report=report.json")


def endings(project: Project) -> dict[str, str | None]:
    """The name of each test of the last report with the reason why it was not measured."""
    report = json.loads((project.path / "report.json").read_text(encoding="utf-8"))
    verdicts = [result["verdict"] for result in report["results"]]
    return {
        verdict["test"].rpartition("::")[2]: ("failed: " if verdict["failed_by_itself"] else "")
        + str(verdict["unmeasured"])
        for verdict in verdicts
    }


@pytest.fixture
def recorded(project: Project) -> Project:
    project.plugins.append("anyio.pytest_plugin")
    project.write(TESTS)
    project.run(*RECORD).assert_outcomes(passed=len(NAMES))
    return project


@pytest.mark.parametrize("strict", [False, True], ids=["baseline", "strict"])
def test_a_test_that_raises_has_failed_by_itself(recorded, monkeypatch, strict):
    monkeypatch.setenv("BROKEN", "1")
    result = recorded.run(*COMPARE, *(["--gpumem-strict"] if strict else []))
    subtests = {"test_subtest", "test_part"}
    assert endings(recorded) == {
        name: f"failed: {'a subtest failed' if name in subtests else 'the test itself failed'}" for name in NAMES
    }
    result.stdout.fnmatch_lines(["gpumem: 0 gated, 10 failed by themselves"])
    result.stdout.no_fnmatch_line("*regressed*")
    result.stdout.no_fnmatch_line("*required by --gpumem-strict*")


ENDINGS = """
import unittest

REASON = "it is too large"


def work():
    return torch.ones(250_000).sum()


@pytest.mark.gpumem
class TestCase(unittest.TestCase):
    def test_skips(self):
        work()
        self.skipTest(REASON)

    @unittest.skip(REASON)
    def test_is_skipped(self): ...

    @unittest.expectedFailure
    def test_is_expected_to_fail(self):
        work()
        raise RuntimeError("as expected")

    @unittest.expectedFailure
    def test_passes_unexpectedly(self):
        work()

    def test_skips_and_is_torn_down_wrongly(self):
        self.addCleanup(self.fail, "left")
        self.skipTest(REASON)


@pytest.mark.gpumem
def test_skips_as_unittest_does():
    work()
    raise unittest.SkipTest(REASON)


@pytest.mark.gpumem
def test_skips_in_its_call():
    work()
    pytest.skip(REASON)


@pytest.mark.gpumem
@pytest.mark.xfail(strict=True)
def test_passes_unexpectedly_and_strictly():
    work()


@pytest.mark.gpumem
@pytest.mark.xfail(raises=ValueError)
def test_raises_another_error():
    raise TypeError


@pytest.mark.gpumem
@pytest.mark.xfail(raises=ValueError)
def test_raises_as_expected():
    raise ValueError
"""


def test_skips_and_expected_failures_are_read_as_pytest_reports_them(project):
    project.write(ENDINGS)
    result = project.run(*COMPARE, "--gpumem-update=new")
    skipped, failed, expected = "it was skipped", "failed: the test itself failed", "it failed as expected"
    assert endings(project) == {
        "test_skips": skipped,
        "test_is_skipped": skipped,
        "test_is_expected_to_fail": expected,
        "test_passes_unexpectedly": failed,
        "test_skips_and_is_torn_down_wrongly": skipped,
        "test_skips_as_unittest_does": skipped,
        "test_skips_in_its_call": skipped,
        "test_passes_unexpectedly_and_strictly": "None",
        "test_raises_another_error": failed,
        "test_raises_as_expected": expected,
    }
    result.assert_outcomes(skipped=5, xfailed=2, failed=3, errors=1)
    assert project.stored() == {}


LET_GO = """
import unittest
import weakref

MADE = []


def raises():
    tensor = torch.ones(250_000)
    MADE.append(weakref.ref(tensor))
    raise RuntimeError("a bug in the library")


class Outer(unittest.TestCase):
    @pytest.mark.gpumem
    def test_a_body(self):
        raises()

    @pytest.mark.gpumem
    def test_body_and_cleanups(self):
        # pytest reports two errors of a test, and keeps the others with the item.
        for _ in range(3):
            self.addCleanup(raises)
        raises()


@pytest.mark.gpumem
def test_function():
    raises()


def number():
    '''
    >>> raises()
    1
    '''


@pytest.mark.gpumem
def test_nothing_is_kept():
    assert len(MADE) == 7
    assert [reference() for reference in MADE] == [None] * 7
    torch.ones(250_000)
"""


def test_errors_that_a_failed_test_leaves_keep_no_tensors_for_the_next_one(project):
    project.write(LET_GO)
    project.write(
        "def pytest_collection_modifyitems(items):\n"
        "    items.sort(key=lambda item: 'nothing' in item.name)\n"
        "    for item in items:\n"
        "        item.add_marker(pytest.mark.gpumem)\n",
        "conftest.py",
    )
    project.run("--doctest-modules").assert_outcomes(failed=4, passed=1, errors=1)
