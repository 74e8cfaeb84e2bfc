"""The verdict on a test that several ranks ran, and the peaks of ranks side by side."""

from __future__ import annotations

from dataclasses import replace

from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.values.rank import Rank, name_on
from pytest_gpumem.judging.gate.rank_verdicts import RankEnd, verdict_of_all
from pytest_gpumem.judging.gate.verdict import MetricVerdict, Outcome, TestVerdict, Verdict
from pytest_gpumem.plugin.session.rank_session import differing_text
from pytest_gpumem.reporting.reports.ranks import imbalance_text, peaks_by_rank, rank_cells
from pytest_gpumem.reporting.reports.results import TestResult

NOTHING = TestVerdict("test_it.py", "test_step")
MB = 1_000_000


def judged(number: int, peak: int = MB, outcome: Outcome = Outcome.OK, names=("measure",), world: int = 2) -> RankEnd:
    verdicts = tuple(
        Verdict(
            Measurement(
                name_on(Rank(number, world), name),
                Workload("measure"),
                Environment("cpu", "CPU"),
                {"peak_allocated": peak},
            ),
            (MetricVerdict("peak_allocated", outcome, peak),),
        )
        for name in names
    )
    return RankEnd("judged", replace(NOTHING, verdicts=verdicts))


def names_of(verdict: TestVerdict) -> list[str]:
    return [one.measurement.name for one in verdict.verdicts]


def test_the_verdict_is_that_of_the_worst_rank():
    whole = verdict_of_all([judged(0), judged(1, outcome=Outcome.REGRESSED)], NOTHING)
    assert whole is not None
    assert whole.outcome is Outcome.REGRESSED
    assert whole.failure is None  # which the gate finds
    assert names_of(whole) == ["measure rank 0 of 2", "measure rank 1 of 2"]


def test_measurements_of_one_name_stand_together():
    whole = verdict_of_all([judged(0, names=("a", "b")), judged(1, names=("b", "c"))], NOTHING)
    assert whole is not None
    assert names_of(whole) == ["a rank 0 of 2", "b rank 0 of 2", "b rank 1 of 2", "c rank 1 of 2"]


def test_a_rank_that_measured_nothing_leaves_the_test_unmeasured():
    without = RankEnd("judged", replace(NOTHING, unmeasured="no CUDA device"))
    whole = verdict_of_all([judged(0), without], NOTHING)
    assert whole is not None
    assert whole.unmeasured == "on rank 1 of 2: no CUDA device"
    assert (verdict_of_all([without, without], NOTHING) or whole).unmeasured == "no CUDA device"


def test_what_ranks_are_missing_is_missing():
    ends = [judged(0), judged(1)]
    lacking = replace(ends[1], verdict=replace(ends[1].verdict, missing=("old rank 1 of 2",)))
    whole = verdict_of_all([ends[0], lacking], NOTHING)
    assert whole is not None
    assert whole.missing == ("old rank 1 of 2",)
    assert whole.outcome is Outcome.MISSING


def test_a_rank_that_failed_by_itself_is_named_with_its_text():
    raised = RankEnd("raised", why="ValueError: boom", when="call", text="E  ValueError: boom")
    followed = RankEnd("followed", why="rank 1 of 3 has ended the test")
    whole = verdict_of_all([followed, raised, judged(2, world=3)], NOTHING)
    assert whole is not None
    assert whole.failed_by_itself
    assert whole.failure == (
        "rank 1 of 3 failed by itself in its call: ValueError: boom\n  ranks 0 and 2: not judged, because another rank failed\n\nE  ValueError: boom"
    )
    assert whole.unmeasured == "rank 1 of 3 failed by itself in its call: ValueError: boom"


def test_all_ranks_that_failed_are_named():
    first, second = (RankEnd("raised", why=f"ValueError: {number}", when="set-up", text="E") for number in (1, 2))
    whole = verdict_of_all([first, second], NOTHING)
    assert whole is not None
    assert whole.failure == (
        "rank 0 of 2 failed by itself in its set-up: ValueError: 1\n  rank 1 failed, too: ValueError: 2\n\nE"
    )


def test_a_test_is_skipped_on_all_ranks_or_fails():
    skipped = RankEnd("skipped", why="no batch here")
    assert verdict_of_all([skipped, skipped], NOTHING) is None
    whole = verdict_of_all([judged(0), skipped], NOTHING)
    assert whole is not None
    assert str(whole.failure).startswith("rank 1 of 2 skipped the test, and the others ran it: no batch here")


def result(*ends: RankEnd) -> TestResult:
    whole = verdict_of_all(ends, NOTHING)
    assert whole is not None
    return TestResult(whole, passed=True)


def test_the_imbalance_is_the_largest_peak_over_the_smallest():
    (row,) = peaks_by_rank([result(judged(0, 2 * MB), judged(1, 3 * MB))])
    assert (row.peaks, row.smallest, row.largest, row.imbalance) == (
        ((0, 2 * MB), (1, 3 * MB)),
        (0, 2 * MB),
        (1, 3 * MB),
        1.5,
    )
    header, cells = rank_cells([row], "si")
    assert header == ["test", "rank 0", "rank 1", "imbalance"]
    assert cells == [["test_it.py::test_step", "2.00 MB", "3.00 MB", "1.50 (rank 1 over rank 0)"]]


def test_ranks_that_hardly_differ_have_no_imbalance():
    (row,) = peaks_by_rank([result(judged(0, MB), judged(1, MB + 8))])
    assert imbalance_text(row) == "1.00"


def test_of_many_ranks_the_spread_is_shown():
    (row,) = peaks_by_rank([result(*(judged(number, (number + 1) * MB, world=9) for number in range(9)))])
    header, cells = rank_cells([row], "si")
    assert header == ["test", "smallest", "median", "largest", "imbalance"]
    assert cells[0][1:] == ["1.00 MB", "5.00 MB", "9.00 MB", "9.00 (rank 8 over rank 0)"]


def test_measurements_without_ranks_have_no_row():
    alone = judged(0)
    assert alone.verdict is not None
    one = replace(alone.verdict.verdicts[0].measurement, name="measure")
    verdict = replace(NOTHING, verdicts=(replace(alone.verdict.verdicts[0], measurement=one),))
    assert peaks_by_rank([TestResult(verdict, passed=True)]) == []


def test_ranks_that_select_other_tests_are_told_apart():
    first = [f"test_it.py::test_{name}" for name in "abc"]
    assert differing_text(Rank(1, 2), first, [first[0], first[2], "test_it.py::test_d"], ["test_b.py"], []) == (
        "rank 1 of 2 selected other tests than rank 0: it lacks test_it.py::test_b and has test_it.py::test_d as well; it could "
        "not collect test_b.py. Every rank has to select the same tests; move code that differs between ranks into the tests"
    )
    assert "in another order" in differing_text(Rank(1, 2), first, first[::-1], [], [])
    assert "has test_it.py::test_c as well; rank 0 could not collect test_c.py. Every rank" in differing_text(
        Rank(1, 2), first[:2], first, [], ["test_c.py"]
    )
