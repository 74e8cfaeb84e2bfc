"""New tests beside unused baselines: which of them were renamed, and which of these have grown."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.facts.measurement import Measurement, Workload
from pytest_gpumem.facts.values.selection import Selection
from pytest_gpumem.judging.gate.baseline import Baseline, Key
from pytest_gpumem.judging.gate.renaming import MOST_CANDIDATES, candidates_of
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.plugin.config.settings import DEFAULT_TOLERANCES
from pytest_gpumem.reporting.reports.merging import merge_reports
from pytest_gpumem.reporting.reports.renamed import with_renamings
from pytest_gpumem.reporting.reports.session_report import Terms
from tests.reports.test_merging import A100, H100, measured, shard, skipped

MB = 10**6


def entry(peak, workload=None):
    return Baseline(workload or Workload("call"), H100, {"peak_allocated": peak}, "2026-11-02")


def new(test, peak, unused, file="a.py", device=H100):
    """A test without a baseline, beside ``unused`` peaks by name of the test in the same file."""
    result = measured(Outcome.NEW, (file, test), peak=peak, device=device)
    (verdict,) = result.verdict.verdicts
    old = [(Key("a.py", name, "call"), entry(then)) for name, then in unused.items()]
    found = candidates_of(Key(file, test, "call"), verdict.measurement, old, DEFAULT_TOLERANCES)
    found = tuple(replace(one, accept="pytest a.py", prune="gpumem prune a.py") for one in found)
    return replace(result, verdict=replace(result.verdict, verdicts=(replace(verdict, candidates=found),)))


def renamings(*results, collected=()):
    """The old name of each new test, and whether it has grown."""
    return {
        one.verdict.test: (one.renamed.test, one.renamed.grown is not None)
        for one in with_renamings(results, collected)
        if one.renamed is not None
    }


def test_a_renamed_test_that_did_not_change_is_alike_and_a_larger_one_has_grown():
    assert renamings(new("test_b", MB, {"test_a": MB})) == {"test_b": ("test_a", False)}
    assert renamings(new("test_b", 4 * MB, {"test_a": MB})) == {"test_b": ("test_a", True)}
    assert renamings(new("test_b", MB, {"test_a": 4 * MB})) == {"test_b": ("test_a", False)}
    assert renamings(new("test_b", MB, {})) == {}


def test_a_baseline_that_a_renamed_test_fits_is_not_held_against_a_new_one():
    unused = {"test_a": MB}
    assert renamings(new("test_aa", 9 * MB, unused), new("test_b", MB, unused)) == {"test_b": ("test_a", False)}


def test_a_large_baseline_hides_no_growth_of_a_small_one():
    unused = {"test_small": MB, "test_large": 9 * MB}
    small, large = new("test_little", 4 * MB, unused), new("test_big", 9 * MB, unused)
    assert renamings(small, large) == {"test_big": ("test_large", False), "test_little": ("test_small", True)}


def test_of_several_candidates_the_one_with_the_nearest_name_is_compared():
    unused = {"test_block": MB, "test_mlp": 9 * MB}
    assert renamings(new("test_own_block", 4 * MB, unused)) == {"test_own_block": ("test_block", True)}
    assert renamings(new("test_own_mlp", 4 * MB, unused)) == {"test_own_mlp": ("test_mlp", False)}


PEAKS = st.lists(st.integers(1, 3), min_size=1, max_size=6)


@given(PEAKS, st.data())
def test_however_unchanged_tests_are_renamed_none_has_grown(peaks, data):
    unused = {f"test_{number}": peak * MB for number, peak in enumerate(peaks)}
    names = data.draw(st.permutations([f"test_{letter}" for letter in "abcdef"[: len(peaks)]]))
    results = [new(name, peak, unused) for name, peak in zip(names, unused.values(), strict=True)]
    # More of them are new indeed.
    found = renamings(*results, new("test_z", 9 * MB, unused))
    assert {name: grown for name, (_, grown) in found.items()} == dict.fromkeys(names, False)
    assert len({old for old, _ in found.values()}) == len(peaks)


def test_nothing_is_said_while_a_test_of_the_file_did_not_run():
    grown = new("test_b", 4 * MB, {"test_a": MB})
    assert renamings(grown, collected=[("a.py", "test_b"), ("a.py", "test_c")]) == {}
    assert renamings(grown, skipped(("a.py", "test_c")), collected=[("a.py", "test_b"), ("a.py", "test_c")])


def test_devices_are_looked_at_each_by_itself():
    unused = {"test_a": MB}
    results = [new("test_b", 4 * MB, unused), new("test_b", 4 * MB, unused, device=A100)]
    assert [one.renamed.test for one in with_renamings(results, ())] == ["test_a", "test_a"]


@pytest.mark.parametrize(
    ("old", "workload"),
    [
        (Key("a.py", "test_a", "train_step"), Workload("call")),
        (Key("a.py", "test_a", "call"), Workload("load")),
        (Key("a.py", "test_a", "call"), Workload("call", batch="int64[8]")),
        (Key("a.py", "test_a", "call"), Workload("call", "amp-bf16")),
        (Key("b.py", "test_a", "call"), Workload("call")),
    ],
    ids=["another name", "another step", "another batch", "another config", "another file"],
)
def test_only_a_baseline_of_the_same_step_and_batch_is_a_candidate(old, workload):
    measurement = Measurement("call", Workload("call"), H100, {"peak_allocated": 4 * MB})
    key = Key("a.py", "test_b", "call")
    assert candidates_of(key, measurement, [(old, entry(MB, workload))], DEFAULT_TOLERANCES) == ()


def test_a_test_that_moved_to_another_file_under_its_name_is_a_candidate():
    (one,) = candidates_of(
        Key("b.py", "test_a", "call"),
        Measurement("call", Workload("call"), H100, {"peak_allocated": 4 * MB}),
        [(Key("a.py", "test_a", "call"), entry(MB))],
        DEFAULT_TOLERANCES,
    )
    assert (one.file, one.metrics[0].outcome) == ("a.py", Outcome.REGRESSED)


def test_a_renamed_job_whose_ranks_are_no_longer_balanced_has_grown():
    peaks = {"peak_allocated": MB}
    old = replace(entry(MB), metrics={**peaks, "imbalance": 1.0})
    job = Measurement("call", Workload("call"), H100, {**peaks, "imbalance": 1.25})
    key, old_key = (Key("a.py", name, "call") for name in ("test_b", "test_a"))
    (candidate,) = candidates_of(key, job, [(old_key, old)], DEFAULT_TOLERANCES)
    assert [(metric.metric, metric.outcome) for metric in candidate.metrics] == [("imbalance", Outcome.REGRESSED)]


def test_the_candidates_with_the_nearest_names_are_kept():
    many = [(Key("a.py", f"test_{number:03}", "call"), entry(MB)) for number in range(100)]
    measurement = Measurement("call", Workload("call"), H100, {"peak_allocated": MB})
    found = candidates_of(Key("a.py", "test_077x", "call"), measurement, many, DEFAULT_TOLERANCES)
    assert (len(found), found[0].test) == (MOST_CANDIDATES, "test_077")


def test_a_report_is_red_by_a_renamed_test_that_grew_unless_everything_is_accepted():
    grown = with_renamings([new("test_b", 4 * MB, {"test_a": MB}), measured(test=("a.py", "test_c"))], ())
    report = shard(*grown)
    assert not report.passed
    (problem,) = report.problems
    assert problem == (
        "a.py::test_b: renamed? It has no baseline, and an unused baseline (a.py::test_a) has the same step, batch and "
        "device: peak allocated went from 1.00 MB to 4.00 MB (+300.0 %). Accept it with `pytest a.py`; if they are different "
        "tests, remove the unused baseline with `gpumem prune a.py`"
    )
    accepting = replace(report, terms=Terms(baseline=True, update="all"))
    assert accepting.passed
    assert len(accepting.warnings) == 1


def test_shards_of_one_file_are_looked_at_together():
    unused = {"test_small": MB, "test_large": 9 * MB}
    results = new("test_little", 4 * MB, unused), new("test_big", 9 * MB, unused), measured(test=("a.py", "test_c"))
    collected = frozenset((one.verdict.file, one.verdict.test) for one in results)
    parts = [shard(one, selection=Selection(measured=frozenset(), collected=collected)) for one in results]
    assert all(not with_renamings(part.results, collected)[0].renamed for part in parts)
    whole = merge_reports(parts)
    assert [one.renamed.test for one in whole.results if one.renamed] == ["test_large", "test_small"]
    assert not whole.passed
    assert merge_reports([merge_reports(parts[:1]), merge_reports(parts[1:])]).problems == whole.problems
