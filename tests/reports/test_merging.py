"""Merging shards: the same bytes in whatever order, nothing lost, and a verdict on the whole only."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.base.errors import MergeError
from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.values.selection import Selection
from pytest_gpumem.judging.gate.baseline import Key
from pytest_gpumem.judging.gate.verdict import Cell, MetricVerdict, Outcome, TestVerdict, Verdict
from pytest_gpumem.reporting.reports.json_report import from_json, to_json
from pytest_gpumem.reporting.reports.matrix import matrices
from pytest_gpumem.reporting.reports.merging import (
    merge_reports,
    repeated_tests,
    run_twice,
    unaccounted_baselines,
    unselected_tests,
)
from pytest_gpumem.reporting.reports.results import TestResult
from pytest_gpumem.reporting.reports.session_report import SessionReport, StoreState, Terms
from pytest_gpumem.reporting.reports.view import shown_measurements
from tests.hostile import TEXTS

H100 = Environment("h100", "NVIDIA H100", {"torch": "2.11.0"})
A100 = Environment("a100", "NVIDIA A100", {"torch": "2.11.0"})
GATE = Terms(baseline=True)
TEST = ("a.py", "test_a")


def measured(
    outcome: Outcome = Outcome.OK,
    test: tuple[str, str] = TEST,
    *,
    peak: int = 1,
    failed: bool = False,
    passed: bool | None = None,
    device: Environment = H100,
) -> TestResult:
    allowed = None if outcome in (Outcome.NEW, Outcome.RECORDED) else 1.0
    metric = MetricVerdict("peak_allocated", outcome, peak, allowed=allowed)
    measurement = Measurement("call", Workload("call"), device, {"peak_allocated": peak})
    verdict = TestVerdict(*test, (Verdict(measurement, (metric,)),), failure="why" if failed else None)
    return TestResult(verdict, not failed if passed is None else passed, failed)


def skipped(test: tuple[str, str] = TEST, why: str = "it was skipped", *, failed: bool = False) -> TestResult:
    return TestResult(TestVerdict(*test, unmeasured=why), passed=False, failed=failed)


def shard(*results: TestResult, **changes) -> SessionReport:
    ran = frozenset((one.verdict.file, one.verdict.test) for one in results)
    selection = Selection(measured=ran, collected=ran)
    report = SessionReport("2026-11-21T16:20:05Z", "0.1.0", "abc123456", GATE, results, selection=selection)
    return replace(report, **changes)


# The same bytes in any order

NAMES = st.sampled_from(["a", "b", TEXTS["newlines"], TEXTS["surrogates"], "x; y", "y; x"])
FILES = st.sampled_from(["a.py", "b.py", "c.py"])
TESTS = st.tuples(FILES, NAMES)
RESULTS = st.one_of(
    st.builds(
        measured,
        st.sampled_from(Outcome),
        TESTS,
        peak=st.integers(0, 2),
        failed=st.booleans(),
        passed=st.sampled_from([None, False]),
        device=st.sampled_from([H100, A100]),
    ),
    st.builds(skipped, TESTS, NAMES, failed=st.booleans()),
)
KEYS = st.tuples(st.sampled_from(["h100", "a100"]), st.builds(Key, FILES, NAMES, st.just("call")))
SHARDS = st.builds(
    SessionReport,
    ended=st.sampled_from(["2026-11-21T16:20:05Z", "2026-11-21T16:20:06Z"]),
    version=st.just("0.1.0"),
    commit=st.sampled_from([None, "abc1234", "abc12345"]),
    terms=st.just(GATE),
    # Of one session a test has one result on a device.
    results=st.lists(RESULTS, max_size=4).map(lambda found: merge_reports([shard(*found)]).results),
    not_run=st.lists(TESTS, max_size=2).map(lambda tests: tuple(sorted(set(tests)))),
    selection=st.builds(
        Selection,
        measured=st.frozensets(TESTS, max_size=3),
        files=st.frozensets(FILES),
        budgets_without_effect=st.lists(NAMES, max_size=2).map(lambda texts: tuple(sorted(set(texts)))),
        collected=st.frozensets(TESTS, max_size=3),
        collected_files=st.frozensets(FILES),
        uncollected=st.frozensets(TESTS, max_size=3),
    ),
    stored=st.builds(
        StoreState,
        baselines=st.lists(KEYS, max_size=3).map(lambda keys: tuple(sorted(set(keys)))),
        gone=st.frozensets(FILES, max_size=2),
    ),
    closing_lines=st.lists(NAMES, max_size=2).map(tuple),
    errors=st.lists(NAMES, max_size=2).map(tuple),
    ended_early=st.one_of(st.none(), NAMES),
    not_collected=st.lists(FILES, max_size=2).map(lambda files: tuple(sorted(set(files)))),
    unmeasured_failures=st.integers(0, 2),
)
unhurried = settings(deadline=None, max_examples=60)


@unhurried
@given(st.lists(SHARDS, min_size=1, max_size=4), st.randoms())
def test_shards_in_any_order_give_the_same_bytes(shards, random):
    first = to_json(merge_reports(shards))
    random.shuffle(shards)
    assert to_json(merge_reports(shards)) == first


@unhurried
@given(st.lists(SHARDS, min_size=2, max_size=4), st.integers(1, 3))
def test_merging_what_was_merged_gives_the_same_bytes_as_merging_all_at_once(shards, cut):
    cut = min(cut, len(shards) - 1)
    halves = [from_json(to_json(merge_reports(part)), "a.json") for part in (shards[:cut], shards[cut:])]
    assert to_json(merge_reports(halves)) == to_json(merge_reports(shards))


@unhurried
@given(st.lists(SHARDS, min_size=1, max_size=3))
def test_the_whole_is_red_when_a_test_of_any_shard_failed(shards):
    failed = {one.verdict.nodeid for part in shards for one in part.results if one.failed}
    whole = merge_reports(shards)
    assert {one.verdict.nodeid for one in whole.results if one.failed} == failed
    assert not (failed and whole.passed)


# One test in several shards


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        (measured(Outcome.REGRESSED, failed=True), measured()),
        (measured(Outcome.OK, failed=True), measured(Outcome.REGRESSED)),
        (measured(Outcome.UNCERTAIN), measured(Outcome.OK)),
        (measured(Outcome.OK, passed=False), measured(Outcome.OK)),
        (measured(), skipped()),
        (skipped(failed=True), skipped()),
    ],
)
def test_of_a_test_in_two_shards_the_result_that_speaks_most_against_it_counts(worse, better):
    shards = [shard(better), shard(worse)]
    assert merge_reports(shards).results == (worse,)
    assert repeated_tests(shards) == [TEST]


def test_a_test_that_was_measured_on_two_devices_keeps_both_results():
    here, there = measured(device=H100), measured(Outcome.REGRESSED, failed=True, device=A100)
    whole = merge_reports([shard(here), shard(there)])
    assert whole.results == (there, here)
    assert not whole.passed


def test_results_of_several_devices_are_told_apart():
    config = Cell("a.py::test_a", "fp32", 0)
    results = [
        replace(one, verdict=replace(one.verdict, cell=config))
        for one in (measured(device=H100), measured(device=A100))
    ]
    whole = merge_reports([shard(one) for one in results])
    assert [one.title for one in shown_measurements(whole.results)] == [
        "a.py::test_a on NVIDIA A100",
        "a.py::test_a on NVIDIA H100",
    ]
    assert list(matrices(whole.results)) == ["a.py::test_a on NVIDIA A100", "a.py::test_a on NVIDIA H100"]
    (alone,) = shown_measurements(merge_reports([shard(results[0])]).results)
    assert alone.title == "a.py::test_a"


def test_a_failure_where_nothing_was_measured_is_not_settled_by_another_shard():
    strict = skipped(failed=True)
    whole = merge_reports([shard(strict), shard(measured())])
    assert whole.results == (strict, measured())
    assert not whole.passed


# What is missing, and what only the whole can tell


def test_a_test_that_ran_in_another_shard_is_not_missing():
    crashed = shard(not_run=(TEST, ("a.py", "test_b")))
    assert merge_reports([crashed, shard(measured())]).not_run == (("a.py", "test_b"),)


def test_nothing_was_gated_only_if_no_shard_compared_anything():
    fresh = shard(measured(Outcome.NEW, ("a.py", "test_b")))
    assert fresh.nothing_gated
    assert merge_reports([fresh, fresh]).nothing_gated == fresh.nothing_gated
    whole = merge_reports([fresh, shard(measured())])
    assert whole.nothing_gated is None
    assert whole.passed


def test_a_device_on_which_nothing_was_compared_is_red_in_the_whole():
    fresh = measured(Outcome.NEW, ("a.py", "test_b"), device=A100)
    whole = merge_reports([shard(fresh), shard(measured())])
    assert whole.nothing_gated is None
    (problem,) = whole.problems
    assert problem.startswith(f"on {A100.device} nothing was gated: 1 test new")
    assert not whole.passed
    assert merge_reports([shard(fresh), shard(measured(device=A100))]).passed


def test_a_shard_that_measured_nothing_is_red_unless_another_measured_its_tests():
    lost = shard(skipped(("a.py", "test_b"), "no CUDA device"))
    whole = merge_reports([lost, shard(measured())])
    assert whole.problems == ("in one shard nothing was gated: 1 test unmeasured, no CUDA device",)
    assert not whole.passed
    assert not merge_reports([whole, shard(measured(test=("a.py", "test_c")))]).passed
    assert merge_reports([lost, shard(measured(test=("a.py", "test_b")))]).passed
    assert merge_reports([shard(skipped(("a.py", "test_b"))), shard(measured())]).passed
    among_others = shard(skipped(("a.py", "test_b"), "no CUDA device"), measured())
    assert merge_reports([among_others]).passed


def test_a_whole_without_measured_tests_gated_nothing_though_each_shard_may():
    left_out = shard(selection=Selection(collected=frozenset({TEST})))
    assert left_out.passed
    for whole in (merge_reports([left_out]), merge_reports([left_out, left_out])):
        assert whole.problems == ("nothing was gated: 1 measured test was collected, and none was run in any shard",)
        assert not from_json(to_json(whole), "whole.json").passed
        assert merge_reports([whole, shard(measured())]).passed


def test_tests_that_are_not_measured_and_failed_in_any_shard_make_the_whole_red():
    whole = merge_reports([shard(measured(), unmeasured_failures=1), shard(unmeasured_failures=2), shard()])
    assert whole.problems == ("3 tests that are not measured failed",)
    assert not whole.passed


def test_the_same_tests_in_the_same_environment_seem_to_be_the_same_shard():
    first, again, other = shard(measured()), shard(measured(peak=2), ended="later"), shard(measured(test=("b.py", "b")))
    assert run_twice([first, other, again]) == (0, 2)
    assert run_twice([first, shard(measured(device=A100)), other]) is None
    assert run_twice([shard(), shard()]) is None


def test_a_baseline_is_unused_only_if_no_shard_collected_its_test():
    keys = tuple(("h100", Key("a.py", test, "call")) for test in ("test_a", "test_b", "test_gone"))

    def part(test: str) -> SessionReport:
        known = Selection(collected=frozenset({("a.py", test)}), collected_files=frozenset({"a.py"}))
        return shard(selection=known, stored=StoreState(keys))

    assert len(part("test_a").unused) == 2
    assert merge_reports([part("test_a"), part("test_b")]).unused == [keys[2]]


def test_a_file_that_one_shard_has_is_not_gone():
    key = ("h100", Key("a.py", "test_a", "call"))
    absent, there = shard(stored=StoreState((key,), frozenset({"a.py"}))), shard(stored=StoreState((key,)))
    assert merge_reports([absent]).unused == [key]
    assert merge_reports([absent, there, absent]).unused == []


def test_tests_that_every_shard_left_to_the_others_are_found():
    def part(test: str) -> SessionReport:
        everything = frozenset(("a.py", name) for name in ("test_a", "test_b", "test_c"))
        return shard(selection=Selection(measured=frozenset({("a.py", test)}), collected=everything))

    assert unselected_tests(merge_reports([part("test_a"), part("test_b")])) == [("a.py", "test_c")]
    assert unselected_tests(merge_reports([part("test_a"), part("test_b"), part("test_c")])) == []


def of_folder(name: str, device: Environment = H100, *, skips: bool = False) -> SessionReport:
    """A shard that ran the only test of ``name``, and so knows the baselines on its device; if it ``skips``, of none."""
    test = (f"{name}.py", "test_it")
    keys = tuple((device.slug, Key(f"{one}.py", "test_it", "call")) for one in "abc")
    if skips:
        return shard(skipped(test))
    return shard(measured(test=test, device=device), stored=StoreState(keys))


def test_baselines_that_no_report_accounts_for_are_found_by_device():
    a, b, c = map(of_folder, "abc")
    assert unaccounted_baselines([a, a, b]) == [("h100", Key("c.py", "test_it", "call"))]
    assert unaccounted_baselines([a, b, c]) == unaccounted_baselines([a, b, of_folder("c", skips=True)]) == []
    on_both = [a, b, c, *(of_folder(name, A100) for name in "ab")]
    assert unaccounted_baselines(on_both) == [("a100", Key("c.py", "test_it", "call"))]
    assert (
        unaccounted_baselines([merge_reports([a, b]), c])
        == unaccounted_baselines([merge_reports([a, c]), merge_reports([b])])
        == []
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"not_run": (("c.py", "test_it"),)},
        {"selection": Selection(collected=frozenset({("c.py", "test_it")}))},
        {"selection": Selection(collected_files=frozenset({"c.py"}))},
        {"not_collected": ("c.py",)},
    ],
    ids=["not finished", "deselected", "gone from its file", "not collected"],
)
def test_a_baseline_is_accounted_for_however_its_test_ended(changes):
    assert unaccounted_baselines([of_folder("a"), of_folder("b"), replace(of_folder("b"), **changes)]) == []


def test_a_file_that_is_gone_and_a_script_are_left_by_no_shard():
    a, b = map(of_folder, "ab")
    assert unaccounted_baselines([a, b, shard(stored=replace(a.stored, gone=frozenset({"c.py"})))]) == []
    script = StoreState((("h100", Key("train.py", "run", "loop")),))
    assert unaccounted_baselines([shard(measured(), stored=script)]) == []


@pytest.mark.parametrize("key", [Key("c.py", "check_it", "call"), Key("c.py", "check_it[a]", "loop")], ids=str)
def test_a_test_with_any_name_is_accounted_for_as_each_test_is(key):
    assert unaccounted_baselines([shard(measured(), stored=StoreState((("h100", key),)))]) == [("h100", key)]


def test_a_loop_in_a_test_whose_name_python_functions_allows_is_no_script():
    key = ("h100", Key("c.py", "check_it", "loop"))
    for functions, lost in ((("test",), []), (("check_*",), [key]), (("test", "check"), [key])):
        one = shard(measured(), stored=StoreState((key,), functions=functions))
        again = from_json(to_json(one), "shard.json")
        assert again.stored.functions == functions
        assert unaccounted_baselines([again]) == unaccounted_baselines([merge_reports([again])]) == lost
    mixed = [shard(measured(), stored=StoreState((key,), functions=(name,))) for name in ("test", "check")]
    assert merge_reports(mixed).stored.functions == ("check", "test")


def test_a_budget_that_holds_a_test_of_one_shard_is_not_idle():
    idle, holding = (
        shard(selection=Selection(budgets_without_effect=("b", "a"))),
        shard(selection=Selection(budgets_without_effect=("b",))),
    )
    assert merge_reports([idle, holding]).selection.budgets_without_effect == ("b",)


def test_whatever_went_wrong_in_a_shard_went_wrong_in_the_whole():
    parts = [
        shard(measured(), errors=("disk full",), closing_lines=("store: 1 written",)),
        shard(errors=("disk full",), ended_early="KeyboardInterrupt", closing_lines=("store: 1 written",)),
        shard(not_collected=("b.py",), ended_early="stopping after 1 failures"),
    ]
    whole = merge_reports(parts)
    assert whole.problems == (
        "disk full",
        "the session ended early: KeyboardInterrupt; stopping after 1 failures",
        "b.py could not be collected",
    )
    assert whole.closing_lines == ("store: 1 written", "store: 1 written")
    assert whole.shards == 3


# Reports of different sessions


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"version": "0.2.0"}, "a.json comes from pytest-gpumem 0.1.0, b.json from 0.2.0"),
        ({"terms": Terms()}, "a.json was run with baseline = true, b.json with baseline = false"),
        ({"terms": replace(GATE, update="new")}, "a.json was run with update = none, b.json with update = new"),
        ({"terms": replace(GATE, units="iec")}, "a.json was run with units = si, b.json with units = iec"),
        ({"commit": "def123456"}, "b.json comes from commit def123456, a.json from abc123456"),
    ],
)
def test_shards_of_different_sessions_are_refused_with_what_differs(changes, problem):
    parts = [shard(measured()), shard(**changes)]
    with pytest.raises(MergeError) as refused:
        merge_reports(parts, ["a.json", "b.json"])
    assert str(refused.value).startswith(problem)
    with pytest.raises(MergeError):
        merge_reports(parts[::-1], ["b.json", "a.json"])


def test_a_commit_may_be_unknown_and_abbreviated_to_another_length():
    assert merge_reports([shard(commit=None), shard(commit="abc123456789"), shard()]).commit == "abc123456789"


def test_nothing_is_no_whole():
    with pytest.raises(MergeError, match="nothing to merge"):
        merge_reports([])
