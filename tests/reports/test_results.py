"""What became of the measured tests of a session: collected from reports, counted in one line."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.values.plain import to_plain
from pytest_gpumem.judging.gate.verdict import MetricVerdict, Outcome, TestVerdict, Verdict
from pytest_gpumem.reporting.reports.results import (
    PROPERTY,
    Results,
    TestResult,
    accounting,
    nothing_gated,
    nothing_recorded,
)
from pytest_gpumem.reporting.reports.summary import reasons
from tests.pages import output

unhurried = settings(deadline=None)
H100 = Environment("nvidia-h100-80gb-hbm3", "NVIDIA H100 80GB HBM3", {"torch": "2.11.0"})
MEASUREMENT = Measurement("call", Workload("call"), H100, {"peak_allocated": 1})
LARGER = {"peak_allocated": 2}


def verdict_of(outcome: Outcome, test="test_a", reason=None, elsewhere=(), budget=None, allowed=None) -> TestVerdict:
    metric = MetricVerdict("peak_allocated", outcome, 1, allowed=allowed, budget=budget)
    return TestVerdict("a.py", test, (Verdict(MEASUREMENT, (metric,), None, reason, elsewhere),))


def unmeasured(why: str, test="test_a", failed_by_itself=False) -> TestVerdict:
    return TestVerdict("a.py", test, unmeasured=why, failed_by_itself=failed_by_itself)


def results(*verdicts: TestVerdict) -> list[TestResult]:
    return [TestResult(verdict, passed=True) for verdict in verdicts]


def report(verdict: TestVerdict | None, when="call", outcome="passed", nodeid="a.py::test_a", **more):
    properties = [("colour", "red")]
    if verdict is not None:
        properties.append((PROPERTY, json.dumps(to_plain(verdict))))
    return pytest.TestReport(
        nodeid, ("a.py", 1, "test_a"), {}, outcome, None, when, (), 0.0, user_properties=properties, **more
    )


def collected(*reports) -> list[TestResult]:
    together = Results()
    for one in reports:
        together.add(one)
    return together.all()


# Collecting

OK, REGRESSED, NEW = (verdict_of(outcome) for outcome in (Outcome.OK, Outcome.REGRESSED, Outcome.NEW))
FAILED = unmeasured("it failed by itself", failed_by_itself=True)


def whole(verdict: TestVerdict | None, outcome="passed", **more) -> list[pytest.TestReport]:
    """The reports of a test's three phases, of which the call has this outcome."""
    return [report(verdict, "setup"), report(verdict, "call", outcome, **more), report(verdict, "teardown")]


def test_a_test_that_ran_to_its_end_is_a_result_with_its_verdict():
    (result,) = collected(*whole(OK))
    assert result == TestResult(OK, passed=True)


def test_tests_that_are_not_measured_are_passed_over():
    assert collected(*whole(None)) == []


@pytest.mark.parametrize("phase", ["setup", "call", "teardown"])
def test_a_test_with_a_phase_that_failed_did_not_pass(phase):
    phases = ["setup", "teardown"] if phase == "setup" else ["setup", "call", "teardown"]
    (result,) = collected(*(report(OK, one, "failed" if one == phase else "passed") for one in phases))
    assert not result.passed


def test_a_test_that_did_not_get_to_its_teardown_did_not_pass():
    (result,) = collected(report(OK, "setup"), report(OK, "call"))
    assert not result.passed


def test_a_test_that_failed_as_expected_did_not_pass_and_did_not_fail_by_itself():
    (result,) = collected(*whole(FAILED, "skipped", wasxfail="reason"))
    assert not result.passed
    assert result.verdict == unmeasured("it failed as expected")


def test_a_test_that_was_expected_to_fail_and_did_not_is_none_that_passed():
    (result,) = collected(*whole(OK, wasxfail="reason"))
    assert not result.passed
    assert result.verdict == OK


def test_a_test_that_is_run_again_replaces_its_earlier_result():
    (result,) = collected(report(REGRESSED, "setup"), report(REGRESSED, "call", "rerun"), *whole(OK))
    assert result == TestResult(OK, passed=True)


BY_GATE = replace(REGRESSED, failure="Memory regressed")
TWICE = {
    "failed by itself, regressed": (FAILED, BY_GATE),
    "regressed, failed by itself": (BY_GATE, FAILED),
    "ok, regressed": (OK, BY_GATE),
    "regressed, ok": (BY_GATE, OK),
}


@pytest.mark.parametrize("worker", ["", "gw1"], ids=["one process", "two workers"])
@pytest.mark.parametrize("verdicts", TWICE.values(), ids=TWICE)
def test_a_test_that_runs_twice_keeps_its_worst_verdict(verdicts, worker):
    outcomes = ["passed" if verdict is OK else "failed" for verdict in verdicts]
    first, second = (whole(verdict, outcome) for verdict, outcome in zip(verdicts, outcomes, strict=True))
    for one in second:
        one.worker_id = worker
    (result,) = collected(*first, *second)
    assert result.verdict == BY_GATE
    assert (result.passed, result.failed, result.failed_in) == (False, True, "call")
    # `gpumem accept` must not accept what another run failed beside.
    assert result.failed_by_gate == (FAILED not in verdicts)


def test_a_test_that_runs_twice_improves_by_its_larger_peak():
    improved = verdict_of(Outcome.IMPROVED)
    assert collected(*whole(improved), *whole(OK)) == collected(*whole(OK), *whole(improved))
    (result,) = collected(*whole(improved), *whole(OK))
    assert result == TestResult(OK, passed=True)


@pytest.mark.parametrize("order", [1, -1])
def test_a_test_that_runs_twice_is_recorded_with_its_larger_peak(order):
    large = replace(NEW, verdicts=(replace(NEW.verdicts[0], measurement=replace(MEASUREMENT, metrics=LARGER)),))
    (result,) = collected(*(one for verdict in (NEW, large)[::order] for one in whole(verdict)))
    assert result.verdict == large


def test_a_run_that_is_repeated_and_whose_subtest_failed_is_failed():
    subtest = report(None, "call", "failed")
    subtest.context = "of a subtest"
    (result,) = collected(report(OK, "setup"), subtest, report(FAILED, "call", "rerun"), *whole(OK))
    assert (result.failed, result.passed) == (True, False)


def test_an_attempt_whose_call_a_plugin_keeps_to_itself_does_not_count():
    """As of the plugin flaky, which reports set-up and tear-down of an attempt that it repeats."""
    (result,) = collected(report(None, "setup"), report(FAILED, "teardown"), *whole(OK))
    assert result == TestResult(OK, passed=True)


def test_a_test_that_is_run_again_and_does_not_get_to_its_end_did_not_pass():
    (result,) = collected(*whole(OK), report(OK, "setup"), report(OK, "call"))
    assert not result.passed


def test_results_are_sorted_by_file_and_test_and_not_by_when_they_ran():
    verdicts = {
        "b.py::test_a": TestVerdict("b.py", "test_a", OK.verdicts),
        "a.py::test_b": TestVerdict("a.py", "test_b", OK.verdicts),
        "a.py::test_a": TestVerdict("a.py", "test_a", OK.verdicts),
    }
    found = collected(*(report(verdict, "call", nodeid=nodeid) for nodeid, verdict in verdicts.items()))
    assert [(one.verdict.file, one.verdict.test) for one in found] == [
        ("a.py", "test_a"),
        ("a.py", "test_b"),
        ("b.py", "test_a"),
    ]


# Tests that are not measured, and failures that have no verdict


def together(*reports) -> Results:
    found = Results()
    for one in reports:
        found.add(one)
    return found


def unmeasured_failures(*reports, measured=()) -> int:
    return together(*reports).unmeasured_failures(measured)


@pytest.mark.parametrize("phase", ["setup", "call", "teardown", "???"])
def test_a_test_that_is_not_measured_counts_once_in_whatever_phases_it_failed(phase):
    assert unmeasured_failures(report(None, phase, "failed")) == 1
    assert unmeasured_failures(report(None, phase, "failed"), report(None, "teardown", "failed")) == 1


@pytest.mark.parametrize(
    ("outcome", "more"),
    [
        ("skipped", {}),
        ("skipped", {"wasxfail": "reason"}),
        ("failed", {"wasxfail": "reason"}),
        ("rerun", {}),
    ],
)
def test_what_pytest_does_not_count_as_a_failure_does_not_count(outcome, more):
    assert unmeasured_failures(*whole(None, outcome, **more)) == 0


def test_each_failure_of_a_repeated_test_counts_except_reruns():
    again = [report(None, phase, worker_id="gw1") for phase in ("setup", "call", "teardown")]
    assert unmeasured_failures(report(None, "setup"), report(None, "call", "rerun"), *whole(None)) == 0
    for passed in (whole(None), again):
        assert unmeasured_failures(*whole(None, "failed"), *passed) == 1
        assert unmeasured_failures(*passed, *whole(None, "failed")) == 1


def test_a_measured_test_that_failed_is_none_of_the_others_even_without_a_result():
    assert unmeasured_failures(report(OK, "setup"), report(OK, "call", "failed")) == 0
    crashed = report(None, "???", "failed", "a.py::test_a@group")
    assert unmeasured_failures(crashed, measured=[("a.py", "test_a")]) == 0
    assert unmeasured_failures(crashed, measured=[("a.py", "test_b")]) == 1


def test_a_failure_without_a_verdict_is_that_of_the_measured_test_it_is_of():
    """As of a subtest, which reports before its test does, and of a worker that crashed in a tear-down."""
    passed = [report(OK, "setup"), report(None, "call", "failed"), report(OK, "call"), report(OK, "teardown")]
    passed[1].context = "of a subtest"
    assert collected(*passed) == [TestResult(OK, passed=False, failed=True, failed_in="subtest")]
    crashed = [report(OK, "call"), report(None, "???", "failed")]
    assert collected(*crashed) == [TestResult(OK, passed=False, failed=True, failed_in="worker")]


# Accounting


IN_PAGE = output("docs/concepts/verdicts.md", "gpumem: 12 gated")


def test_the_line_on_the_page_counts_such_tests():
    foreign = verdict_of(Outcome.FOREIGN, elsewhere=("NVIDIA A100-SXM4-80GB",))
    judged = [Outcome.OVER_BUDGET, Outcome.REGRESSED, *[Outcome.IMPROVED] * 2, *[Outcome.NEW] * 2]
    held = verdict_of(Outcome.NEW, budget=1)
    line = accounting(results(*[OK] * 7, *map(verdict_of, judged), held, foreign, FAILED))
    assert IN_PAGE.text == f"{line}\n"


def test_one_line_accounts_for_every_class_of_tests():
    line = accounting(
        results(
            *[OK] * 5,
            *[verdict_of(Outcome.OVER_BUDGET)] * 2,
            verdict_of(Outcome.REGRESSED),
            *[verdict_of(Outcome.IMPROVED)] * 2,
            verdict_of(Outcome.UNCERTAIN),
            *[verdict_of(Outcome.NEW)] * 3,
            verdict_of(Outcome.STALE),
            verdict_of(Outcome.FOREIGN, elsewhere=("NVIDIA A100",)),
            verdict_of(Outcome.FOREIGN, elsewhere=("NVIDIA B200", "NVIDIA A100")),
            unmeasured("no CUDA device"),
            unmeasured("it was skipped"),
            unmeasured("it was skipped"),
            verdict_of(Outcome.RECORDED),
            FAILED,
        )
    )
    assert line == (
        "gpumem: 11 gated, 2 over budget, 1 regressed, 2 improved, 1 uncertain, 3 new, "
        "1 stale (the baseline has another workload: --gpumem-update=all replaces it), "
        "2 foreign (NVIDIA A100, NVIDIA B200), 3 unmeasured (it was skipped; no CUDA device), "
        "1 recorded (no budget, and no --gpumem-baseline), 1 failed by itself"
    )


@pytest.mark.parametrize(
    ("passed", "others", "not_run", "update", "line"),
    [
        ([NEW] * 11, [], 0, "new", "11 recorded, new"),
        ([NEW] * 11, [NEW], 0, "new", "11 recorded, new; 1 not recorded, new"),
        ([], [NEW, NEW], 0, "new", "0 gated; 2 not recorded, new"),
        ([OK, NEW], [REGRESSED], 0, "new", "2 gated; 1 recorded, new; 1 regressed"),
        ([OK, NEW, REGRESSED], [], 0, "all", "2 gated; 1 accepted; 1 recorded, new"),
        ([NEW], [FAILED], 2, "new", "1 recorded, new; 1 failed by itself; 2 did not finish"),
        ([NEW], [unmeasured("it was skipped")], 0, "new", "1 recorded, new; 1 unmeasured (it was skipped)"),
        ([OK, REGRESSED], [], 0, "all", "2 gated, 1 accepted"),
        # No other mode adds baselines.
        ([NEW, NEW], [], 0, "improved", "0 gated, 2 new"),
        ([NEW, OK], [], 0, None, "1 gated, 1 new"),
    ],
)
def test_what_is_recorded_and_what_is_not_are_told_apart(passed, others, not_run, update, line):
    everything = [*results(*passed), *(TestResult(one, passed=False, failed=True) for one in others)]
    assert accounting(everything, not_run, update) == f"gpumem: {line}"


def test_a_test_that_measured_nothing_of_what_its_baseline_has_is_not_accepted():
    (gone,) = results(TestVerdict("a.py", "test_a", missing=("train_step",)))
    assert not gone.is_accepted_by("all")
    (fewer,) = results(replace(OK, missing=("train_step",)))
    assert fewer.is_accepted_by("all")


def test_nothing_is_accounted_for_as_nothing():
    assert accounting([]) == "gpumem: 0 gated"


def test_tests_that_failed_by_themselves_are_counted_without_their_reasons():
    assert accounting(results(FAILED, FAILED)) == "gpumem: 0 gated, 2 failed by themselves"


def test_of_many_reasons_two_are_told():
    line = accounting(results(*(unmeasured(f"reason {letter}") for letter in "cabd")))
    assert line == "gpumem: 0 gated, 4 unmeasured (reason a; reason b; ...)"


def test_of_a_long_reason_the_first_line_is_told():
    why = "`python x.py` ended with exit status 1:\nW1201 {}\nE1201"
    failed = results(*(unmeasured(why.format(number)) for number in range(2)))
    short = "`python x.py` ended with exit status 1"
    assert accounting(failed) == f"gpumem: 0 gated, 2 unmeasured ({short})"
    assert nothing_gated(failed) == f"nothing was gated: 2 tests unmeasured, {short}"
    assert nothing_recorded(failed) == f"nothing was recorded: 2 tests unmeasured, {short}"
    assert reasons([one.verdict for one in failed], "si") == [f"unmeasured: {short} (2 tests)"]
    assert failed[0].verdict.unmeasured == why.format(0)


def test_processes_that_were_not_measured_are_counted_by_test_and_named_by_notes():
    clause = "not seen: `python -I x.py` loads torch"
    alone = replace(unmeasured(f"call held no tensor; {clause}"), unmeasured_processes=(clause,))
    beside = replace(OK, unmeasured_processes=(clause, "not seen: `y`"))
    line = accounting(results(alone, beside, OK))
    assert line.endswith("1 unmeasured (call held no tensor), 2 with processes that were not measured (see the notes)")
    assert nothing_gated(results(alone)) == "nothing was gated: 1 test unmeasured, call held no tensor"
    assert reasons([alone], "si") == ["unmeasured: call held no tensor"]


@pytest.mark.parametrize("outcome", [Outcome.NEW, Outcome.FOREIGN])
def test_tests_without_a_baseline_that_have_a_budget_are_told_as_counted_twice(outcome):
    held, without = verdict_of(outcome, budget=1), verdict_of(outcome)
    assert accounting(results(held)) == f"gpumem: 1 gated, 1 {outcome.words} (also gated)"
    assert accounting(results(held, held)) == f"gpumem: 2 gated, 2 {outcome.words} (also gated)"
    assert accounting(results(held, held, without)) == f"gpumem: 2 gated, 3 {outcome.words} (2 also gated)"
    assert accounting(results(without, without)) == f"gpumem: 0 gated, 2 {outcome.words}"


ANY_VERDICT = (
    st.builds(
        verdict_of,
        st.sampled_from([outcome for outcome in Outcome if outcome is not Outcome.UNMEASURED]),
        budget=st.none() | st.just(1),
    )
    | st.builds(unmeasured, st.just("no CUDA device"))
    | st.builds(unmeasured, st.just("it failed by itself"), failed_by_itself=st.just(True))
)


@unhurried
@given(st.lists(ANY_VERDICT, max_size=12))
def test_every_test_is_counted_once(verdicts):
    line = re.sub(r" \([^)]*\)", "", accounting(results(*verdicts)))
    parts = [part.split(" ", 1) for part in line.removeprefix("gpumem: ").split(", ")]
    counts = {what.replace("themselves", "itself"): int(number) for number, what in parts}
    gated = counts.pop("gated")
    assert gated == sum(verdict.gated for verdict in verdicts)
    assert sum(counts.values()) + sum(verdict.outcome is Outcome.OK for verdict in verdicts) == len(verdicts)
    assert 0 not in counts.values()


# Nothing was gated


def test_a_session_that_gated_one_test_gated_something():
    compared = verdict_of(Outcome.OK, allowed=1)
    assert nothing_gated(results(unmeasured("no CUDA device"), compared)) is None


def test_a_budget_does_not_make_up_for_a_store_that_is_gone():
    sentence = nothing_gated(results(verdict_of(Outcome.NEW, budget=1, reason="there is no baseline")))
    assert sentence.startswith("no baseline was compared: 1 test new, there is no baseline")


def test_a_session_without_measured_tests_has_nothing_to_say():
    assert nothing_gated([]) is None


@pytest.mark.parametrize(
    ("verdicts", "told"),
    [
        ([unmeasured("no CUDA device")] * 12, "12 tests unmeasured, no CUDA device"),
        (
            [unmeasured("it was skipped"), *[unmeasured("no CUDA device")] * 2],
            "2 tests unmeasured, no CUDA device; 1 test unmeasured, it was skipped",
        ),
        ([verdict_of(Outcome.NEW, reason="why")], "1 test new, why (record one with --gpumem-update=new)"),
        ([verdict_of(Outcome.FOREIGN, reason="why")], "1 test foreign, why (record one with --gpumem-update=new)"),
        ([verdict_of(Outcome.STALE, reason="why")], "1 test stale, why"),
    ],
    ids=["unmeasured", "the most frequent reason first", "new", "foreign", "stale"],
)
def test_why_nothing_was_gated_is_told_with_reasons_and_the_command_that_records(verdicts, told):
    assert nothing_gated(results(*verdicts)) == f"nothing was gated: {told}"


@unhurried
@given(st.lists(ANY_VERDICT, min_size=1, max_size=8))
def test_either_something_was_gated_or_a_sentence_says_that_nothing_was(verdicts):
    sentence = nothing_gated(results(*verdicts))
    assert (sentence is None) == any(verdict.compared for verdict in verdicts)
