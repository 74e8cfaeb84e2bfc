"""The table at the end of a session: which rows and columns it has, and what stands beneath."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpumem.facts.values.times import Round, Sample, Times
from pytest_gpumem.judging.gate.baseline import Baseline, Budget, NoBaseline
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.reporting.reports.layout import columns, plain_lines
from pytest_gpumem.reporting.reports.summary import (
    MOST_FIGURES,
    STYLES,
    not_shown,
    notes,
    reasons,
    summary_table,
    to_be_shown,
)
from pytest_gpumem.reporting.reports.view import shown_measurements
from tests.reports.made_up import CALL, GB, H100, MB, literal_lines, new, ok, recorded, regressed, result, verdict_on


def table(results, units="si", *, everything=False) -> list[str]:
    """The lines of the table of all measurements."""
    return plain_lines(summary_table(shown_measurements(results), units, everything=everything))


def shown(results, *, gating) -> list[str]:
    """The tests that have something to say."""
    return [one.test.test for one in to_be_shown(shown_measurements(results), gating=gating)]


def test_a_row_a_measurement_and_a_column_a_metric():
    train = verdict_on(
        {"peak_allocated": 9 * GB, "peak_forward": 5 * GB, "step_time": 0.01231},
        {"peak_allocated": 8 * GB},
        "train_step",
        times=Times((Sample((Round(0.01231),)),)),
    )
    call = verdict_on({"peak_allocated": GB, "peak_reserved": 2 * GB}, {"peak_allocated": GB})
    assert table([result(train, call, test="test_gpt[fp32]"), ok("test_b")]) == literal_lines(
        """
        test                                  peak   change  reserved  step time     throughput  verdict
        a.py::test_gpt[fp32] (train_step)  9.00 GB  +12.5 %         -   12.31 ms  650 samples/s  regressed
        a.py::test_gpt[fp32] (call)        1.00 GB   +0.0 %   2.00 GB          -              -  new
        a.py::test_b                       1.00 GB   +0.0 %         -          -              -  ok
        """
    )


def test_counts_are_shown_where_they_changed_and_on_demand():
    then = {"peak_allocated": GB, "operators": 1236, "syncs": 0}
    same = [result(verdict_on(then, then))]
    assert table(same)[0].split() == ["test", "peak", "change", "verdict"]
    assert table(same, everything=True)[0].split() == ["test", "peak", "change", "operators", "syncs", "verdict"]
    changed = [*same, result(verdict_on(then | {"operators": 1284}, then), test="test_b")]
    assert table(changed) == literal_lines(
        """
        test             peak            change  operators  verdict
        a.py::test_a  1.00 GB            +0.0 %      1,236  ok
        a.py::test_b  1.00 GB  operators +3.9 %      1,284  regressed
        """
    )


@pytest.mark.parametrize(
    ("then", "now", "budget", "change"),
    [
        ({"retained": 0}, {"retained": 4 * MB}, None, "retained +4.00 MB"),
        ({"retained": 0, "syncs": 1}, {"retained": 4 * MB, "syncs": 9}, None, "retained +4.00 MB"),
        ({"retained": 0}, {"retained": 4 * MB, "peak_allocated": 2 * GB}, None, "+100.0 %"),
        ({}, {"cyclic_garbage": 4 * MB, "retained": 4 * MB}, Budget({"retained": MB}), "retained 4.00 MB"),
        ({"retained": 8 * MB}, {"retained": 0}, None, "retained -100.0 %"),
    ],
    ids=["bytes that stay", "the first that failed", "the peak", "a budget alone", "improved"],
)
def test_the_change_of_a_row_is_that_of_the_metric_that_decided(then, now, budget, change):
    baseline = {"peak_allocated": GB, **then} if then else None
    row = result(verdict_on({"peak_allocated": GB, **now}, baseline, budget=budget))
    assert table([row], everything=True)[1].split(" GB ", 1)[1].strip().startswith(change)


def test_binary_units_are_shown_on_demand():
    rows = [result(verdict_on({"peak_allocated": 2**30}, None))]
    assert table(rows, "iec")[1].split() == ["a.py::test_a", "1.00", "GiB", "recorded"]


def test_without_baselines_there_is_no_column_of_changes():
    assert table([recorded()]) == literal_lines(
        """
        test             peak  verdict
        a.py::test_a  1.00 GB  recorded
        """
    )


def test_leaks_and_cycles_have_a_column_only_when_there_are_any():
    clean = {"peak_allocated": GB, "retained": 0, "cyclic_garbage": 0}
    assert "retained" not in table([result(verdict_on(clean, None))])[0]
    assert "cycles" not in table([result(verdict_on(clean, None))])[0]
    rows = [result(verdict_on(clean, None)), result(verdict_on(clean | {"retained": 512}, None), test="test_b")]
    header, first, second = table(rows)
    assert "retained" in header
    assert "cycles" not in header
    assert first.split() == ["a.py::test_a", "1.00", "GB", "0", "B", "recorded"]
    assert second.split() == ["a.py::test_b", "1.00", "GB", "512", "B", "recorded"]


def test_tests_that_were_not_measured_have_no_row():
    unmeasured = result(test="test_b", unmeasured="no CUDA device")
    assert shown_measurements([unmeasured]) == []
    assert len(table([ok(1), unmeasured], everything=True)) == 2


# Which rows


def test_what_is_ok_has_nothing_to_say():
    assert shown([ok(1), regressed(2), ok(3)], gating=True) == ["test_002"]
    assert shown([ok(1), ok(2)], gating=False) == []


def test_what_was_only_recorded_is_of_interest_where_nothing_was_to_be_gated():
    assert shown([recorded(1), ok(2)], gating=False) == ["test_001"]
    assert shown([recorded(1), ok(2)], gating=True) == []


def test_improvements_and_what_could_not_be_compared_are_shown():
    improved = result(verdict_on({"peak_allocated": GB}, {"peak_allocated": 2 * GB}), test="improved")
    foreign = result(verdict_on({"peak_allocated": GB}, NoBaseline(("NVIDIA A100",))), test="foreign")
    assert shown([improved, new("new"), foreign, ok(1)], gating=True) == ["improved", "new", "foreign"]


def test_of_very_many_rows_that_only_have_figures_the_first_are_shown():
    rows = [new(number) for number in range(MOST_FIGURES + 5)]
    assert shown(rows, gating=False) == [f"test_{number:03}" for number in range(MOST_FIGURES)]


def test_no_row_in_which_something_was_found_is_ever_left_out():
    rows = [regressed(number) for number in range(2 * MOST_FIGURES)]
    assert len(shown(rows, gating=True)) == len(rows)


def test_what_is_left_out_is_counted_by_its_outcome():
    measured = shown_measurements([ok(1), ok(2), new(3), regressed(4)])
    assert not_shown(measured, measured[3:]) == ["... and 2 ok, 1 new (-v shows all)"]
    assert not_shown(measured, measured) == []


def test_every_outcome_has_a_style():
    assert set(STYLES) == set(Outcome)


# Which columns give way


def by_weight(results) -> list[str]:
    """The columns that may be left out, the first being the first to go."""
    titles = summary_table(shown_measurements(results), "si", everything=True).columns
    return [title for _, title in sorted((one.weight, one.title) for one in titles if one.weight is not None)]


def test_a_step_s_peak_and_verdict_never_give_way_and_its_time_late():
    then = {"peak_allocated": GB, "operators": 10, "step_time": 0.5}
    rows = [result(verdict_on(then, then, times=Times((Sample((Round(0.5),)),))))]
    assert by_weight(rows) == ["throughput", "operators", "step time", "change"]


def test_a_column_in_which_something_was_found_gives_way_last():
    then = {"peak_allocated": GB, "operators": 10, "retained": 5}
    assert by_weight([result(verdict_on(then, then))]) == ["operators", "retained", "change"]
    assert by_weight([result(verdict_on(then | {"operators": 20}, then))]) == ["retained", "change", "operators"]


# Reasons


def test_why_measurements_were_not_compared_is_said_once():
    rows = [new("test_a"), new("test_b"), result(verdict_on({"peak_allocated": GB}, NoBaseline(("NVIDIA A100",))))]
    assert reasons((one.verdict for one in rows), "si") == [
        "new: there is no baseline for NVIDIA H100 80GB HBM3 yet (2 measurements)",
        "foreign: there are baselines for NVIDIA A100, but this is NVIDIA H100 80GB HBM3",
    ]


def test_another_workload_is_told_with_both_peaks_if_a_single_test_has_it():
    other = replace(CALL, batch="int64[8]")
    larger, same = (Baseline(other, H100, {"peak_allocated": peak}, "2026-11-02") for peak in (22 * MB, 4 * MB))
    one, equal = (result(verdict_on({"peak_allocated": 4 * MB}, then)).verdict for then in (larger, same))
    why = "stale: batch none, was int64[8]"
    assert reasons([one], "si") == [f"{why}; peak 4.00 MB, baseline 22.00 MB"]
    assert reasons([equal], "si") == [why]
    assert reasons([one, one], "si") == [f"{why} (2 measurements)"]


def test_a_broken_budget_is_not_why_something_was_not_compared():
    absent = {"peak_allocated": GB, "retained": 0}
    budget = Budget({"peak_allocated": GB // 2})
    over = result(verdict_on(absent, NoBaseline(), budget=budget))
    alone = result(verdict_on({"peak_allocated": GB}, NoBaseline(), budget=budget), test="test_b")
    assert (over.verdict.outcome, alone.verdict.outcome) == (Outcome.OVER_BUDGET,) * 2
    why = "there is no baseline for NVIDIA H100 80GB HBM3 yet"
    told = [f"new: {why}", f"not compared: {why}"]
    assert reasons([over.verdict, alone.verdict], "si") == told


def test_why_times_were_not_compared_is_told_once_for_all_tests():
    now = {"peak_allocated": GB, "step_time": 0.5}
    times = Times((Sample((Round(0.5),)),))
    rows = [result(verdict_on(now, {"peak_allocated": GB}, times=times), test=f"test_{number}") for number in range(3)]
    (told,) = reasons((one.verdict for one in rows), "si")
    assert told.startswith("note: no baseline of time yet: --gpumem-update=")
    assert told.endswith(" (3 figures)")
    assert reasons((one.verdict for one in rows), "si", "new") == []
    failed = [replace(one.verdict, failure="Not compared") for one in rows]
    assert reasons(failed, "si") == [told.replace("note: ", "new: ")]


def test_a_note_is_told_with_its_test():
    said = result(verdict_on({"peak_allocated": GB}, None, notes=("not counted",)))
    differ = result(verdict_on({"peak_allocated": GB}, None, notes=("peaks differ",), settled=False), test="test_b")
    assert notes(shown_measurements([said, differ])) == [
        "note: a.py::test_a: not counted",
        "note: a.py::test_b: peaks differ",
    ]


def test_a_note_of_many_measurements_is_told_once():
    same = [
        result(verdict_on({"peak_allocated": GB}, None, notes=("not counted",)), test=f"test_{name}") for name in "abc"
    ]
    assert notes(shown_measurements(same[:2])) == ["note: a.py::test_a and 1 other: not counted"]
    assert notes(shown_measurements(same)) == ["note: a.py::test_a and 2 others: not counted"]


# Columns


def test_a_line_ends_where_its_text_does():
    assert all(line == line.rstrip() for line in columns(("a", ""), [("x", ""), ("y", "z")], left=(0, 1)))
