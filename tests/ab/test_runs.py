"""What a run gave, from the lines that it wrote."""

from __future__ import annotations

import json

import pytest

from pytest_gpumem.base.errors import RunFailed
from pytest_gpumem.facts.values.plain import to_plain
from pytest_gpumem.tools.ab.runs import run_of
from tests.ab.values import measured, measurement, unmeasured


def line(verdict, when="call", outcome="passed", *, xfail=False, why=""):
    payload = json.dumps(to_plain(verdict)) if when != "teardown" else ""
    nodeid = f"{verdict.file}::{verdict.test}"
    return json.dumps(
        {"nodeid": nodeid, "when": when, "outcome": outcome, "xfail": xfail, "why": why, "verdict": payload}
    )


def end(status=0, outside_modules=()):
    return json.dumps({"status": status, "root": ".", "outside_modules": dict(outside_modules), "imported": ["torch"]})


def test_a_run_has_the_verdicts_of_its_tests_with_their_times():
    verdict = measured("test_a", measurement(seconds=0.25))
    run = run_of([line(verdict), line(verdict, "teardown"), end()], 0)
    assert run.tests == {("test_it.py", "test_a"): verdict}
    assert run.tests["test_it.py", "test_a"].verdicts[0].measurement.times.median == 0.25
    assert (run.root, run.measured, run.imported) == (".", 1, frozenset({"torch"}))


def test_tests_that_failed_are_in_a_run_and_do_not_count_as_measured():
    failed = unmeasured("test_a", "it failed by itself", failed=True)
    run = run_of([line(failed, outcome="failed", why="AssertionError: 1 kB"), line(failed, "teardown"), end(1)], 1)
    assert run.tests == {("test_it.py", "test_a"): failed}
    assert run.measured == 0
    assert run.errors == {"test_it.py::test_a": "AssertionError: 1 kB"}


def test_of_a_test_that_was_run_again_the_last_run_counts():
    first, second = unmeasured("test_a", "it failed by itself", failed=True), measured("test_a", measurement())
    run = run_of([line(first, outcome="rerun"), line(second), line(second, "teardown"), end()], 0)
    assert run.tests["test_it.py", "test_a"] == second


def test_a_test_that_fails_as_expected_did_not_fail_by_itself():
    failed = unmeasured("test_a", "it failed by itself", failed=True)
    run = run_of([line(failed, outcome="skipped", xfail=True), end()], 0)
    (verdict,) = run.tests.values()
    assert (verdict.failed_by_itself, verdict.unmeasured) == (False, "it failed as expected")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (2, "pytest could not collect the tests, or was interrupted (exit status 2)"),
        (4, "pytest did not understand its arguments or settings (exit status 4)"),
        (5, "pytest collected no tests (exit status 5)"),
        (7, "pytest ended with exit status 7 before the end of the session"),
        (-9, "pytest was ended by signal 9"),
    ],
)
def test_a_run_that_ended_early_says_how(status, said):
    with pytest.raises(RunFailed) as failed:
        run_of([line(measured("test_a", measurement())), end(status)], status)
    assert str(failed.value) == said


def test_a_run_whose_lines_are_cut_off_has_failed():
    whole = line(measured("test_a", measurement()))
    with pytest.raises(RunFailed, match="signal 9"):
        run_of([whole, whole[:40]], -9)


def test_code_of_another_checkout_is_told_with_what_mends_it():
    outside_modules = {"model": "/repo/model.py", **{f"other_{number}": "/repo/o.py" for number in range(4)}}
    with pytest.raises(RunFailed) as failed:
        run_of([end(0, outside_modules)], 0)
    text = str(failed.value)
    assert (
        "they imported model from /repo/model.py, other_0 from /repo/o.py, other_1 from /repo/o.py and 2 more" in text
    )
    assert "--setup 'pip install -e .'" in text
    assert "PYTHONPATH" in text


def test_figures_of_another_version_that_cannot_be_read_are_told_as_such():
    nodeid = "test_it.py::test_a"
    told = {
        "nodeid": nodeid,
        "when": "call",
        "outcome": "passed",
        "xfail": False,
        "why": "",
        "verdict": '{"file": "test_it.py"}',
    }
    with pytest.raises(RunFailed, match="the tests used another version of pytest-gpumem"):
        run_of([json.dumps(told), end()], 0)
