"""Everything that a session has to say: what makes it red, what is unused, and the way to plain values and back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.values.selection import Selection
from pytest_gpumem.judging.gate.baseline import Key
from pytest_gpumem.judging.gate.verdict import Location, MetricVerdict, Outcome, TestVerdict, Verdict
from pytest_gpumem.reporting.reports.results import TestResult
from pytest_gpumem.reporting.reports.session_report import SessionReport, StoreState, Terms

H100 = Environment("nvidia-h100-80gb-hbm3", "NVIDIA H100 80GB HBM3", {"torch": "2.11.0"})
MEASUREMENT = Measurement("call", Workload("call"), H100, {"peak_allocated": 1})
SLUG = H100.slug
GATE = Terms(baseline=True)


def result_of(outcome: Outcome, test: str = "test_a", *, failed: bool = False, compared: bool = True) -> TestResult:
    metric = MetricVerdict("peak_allocated", outcome, 1, allowed=1 if compared else None)
    failure = "GPU memory regressed: ..." if failed else None
    verdict = TestVerdict(
        "a.py", test, (Verdict(MEASUREMENT, (metric,)),), location=Location("a.py", 7), failure=failure
    )
    return TestResult(verdict, passed=not failed, failed=failed)


OK = result_of(Outcome.OK)
SOME_LEFT_OUT = Selection(collected=frozenset({("a.py", "test_a"), ("a.py", "test_b")}))
REPORT = SessionReport("2026-11-21T16:20:05Z", "0.1.0", "abc1234", GATE, (OK,))


def test_a_session_in_which_everything_was_compared_and_nothing_failed_passed():
    assert REPORT.passed
    assert REPORT.problems == ()
    assert REPORT.accounting == "gpumem: 1 gated"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"errors": ("baselines were not written: disk full",)}, "baselines were not written: disk full"),
        ({"ended_early": "KeyboardInterrupt"}, "the session ended early: KeyboardInterrupt"),
        ({"not_collected": ("b.py",)}, "b.py could not be collected"),
        ({"unmeasured_failures": 1}, "1 test that is not measured failed"),
        (
            {"merged": True, "results": (), "selection": SOME_LEFT_OUT},
            "nothing was gated: 2 measured tests were collected, and none was run in any shard",
        ),
        (
            {"results": (result_of(Outcome.NEW, compared=False),)},
            "nothing was gated: 1 test new, nothing to compare with (record one with --gpumem-update=new)",
        ),
        (
            {"results": (), "terms": Terms(baseline=True, strict=True)},
            "nothing was gated: no measured test was selected",
        ),
    ],
)
def test_what_speaks_against_a_session_beside_its_tests_is_told(changes, problem):
    red = replace(REPORT, **changes)
    assert red.problems == (problem,)
    assert not red.passed


def test_a_session_without_measured_tests_is_as_pytest_says_and_so_is_a_whole():
    assert replace(REPORT, results=(), selection=SOME_LEFT_OUT).passed
    assert replace(REPORT, results=(), merged=True).passed
    assert replace(REPORT, results=(), merged=True, selection=SOME_LEFT_OUT, terms=Terms()).passed


def test_a_test_that_failed_or_did_not_run_makes_it_red_and_a_skipped_one_does_not():
    assert not replace(REPORT, results=(OK, result_of(Outcome.REGRESSED, "test_b", failed=True))).passed
    assert not replace(REPORT, not_run=(("a.py", "test_b"),)).passed
    skipped = TestResult(TestVerdict("a.py", "test_b", unmeasured="it was skipped"), passed=False)
    assert replace(REPORT, results=(OK, skipped)).passed


def test_what_an_update_accepts_is_something_that_was_gated():
    fresh = result_of(Outcome.NEW, compared=False)
    assert replace(REPORT, results=(fresh,), terms=Terms(baseline=True, update="new")).passed


def test_a_session_that_was_not_asked_to_compare_owes_no_comparison():
    assert replace(REPORT, results=(result_of(Outcome.RECORDED, compared=False),), terms=Terms()).passed


def test_unused_is_what_no_test_has_in_files_that_were_collected_whole_or_are_gone():
    def key(file: str, test: str) -> tuple[str, Key]:
        return SLUG, Key(file, test, "call")

    stored = StoreState((key("a.py", "test_a"), key("a.py", "test_b"), key("b.py", "test_a"), key("c.py", "test_a")))
    selection = Selection(
        measured=frozenset(), collected=frozenset({("a.py", "test_a")}), collected_files=frozenset({"a.py"})
    )
    report = replace(REPORT, stored=replace(stored, gone=frozenset({"c.py"})), selection=selection)
    assert report.unused == [key("a.py", "test_b"), key("c.py", "test_a")]
