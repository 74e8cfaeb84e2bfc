"""The table at the end of a session: which rows and columns it has, and where it stops."""

from __future__ import annotations

import textwrap

from pytest_gpumem.baselines.entry import Absent, Entry
from pytest_gpumem.gate.budget import Budget
from pytest_gpumem.gate.judge import judge
from pytest_gpumem.gate.verdict import TestVerdict
from pytest_gpumem.measurement import Environment, Measurement, Workload
from pytest_gpumem.reports.columns import columns
from pytest_gpumem.reports.summary import MOST_ROWS, table
from pytest_gpumem.results import TestResult
from pytest_gpumem.settings import DEFAULT_TOLERANCES
from pytest_gpumem.timing.samples import Round, Sample, Times

GB = 10**9
H100 = Environment("nvidia-h100-80gb-hbm3", "NVIDIA H100 80GB HBM3", {"torch": "2.11.0"})
CALL = Workload("call")


def verdict_on(now: dict, earlier: dict | Absent | None, name="call", budget=None, times=None, runs=None):
    baseline = Entry(CALL, H100, earlier, "2026-11-02", runs=runs) if isinstance(earlier, dict) else earlier
    measurement = Measurement(name, CALL, H100, now, times=times, work={"samples": 8})
    return judge(measurement, budget or Budget(), baseline, DEFAULT_TOLERANCES)


def result(*verdicts, test="test_a", file="a.py") -> TestResult:
    return TestResult(TestVerdict(file, test, verdicts), passed=True)


def ok(number: int) -> TestResult:
    return result(verdict_on({"peak_allocated": GB}, {"peak_allocated": GB}), test=f"test_{number:03}")


def regressed(number: int) -> TestResult:
    return result(verdict_on({"peak_allocated": 2 * GB}, {"peak_allocated": GB}), test=f"test_{number:03}")


def literal(text: str) -> list[str]:
    return textwrap.dedent(text).strip("\n").splitlines()


def test_a_row_a_measurement_and_a_column_a_metric():
    rows = [
        result(
            verdict_on(
                {"peak_allocated": 9 * GB, "peak_forward": 5 * GB, "peak_backward": 9 * GB, "peak_optimizer": 8 * GB}
                | {"step_time": 0.01231},
                {"peak_allocated": 8 * GB},
                "train_step",
                times=Times((Sample((Round(0.01231),)),)),
            ),
            test="test_train[fp32]",
        ),
        result(verdict_on({"peak_allocated": GB, "peak_reserved": 2 * GB}, {"peak_allocated": GB}), test="test_call"),
    ]
    assert table(rows, "si", everything=False) == literal(
        """
        test                       peak   change  forward  backward  optimizer  reserved  step time     throughput  verdict
        a.py::test_train[fp32]  9.00 GB  +12.5 %  5.00 GB   9.00 GB    8.00 GB         -   12.31 ms  650 samples/s  regressed
        a.py::test_call         1.00 GB   +0.0 %        -         -          -   2.00 GB          -              -  new
        recorded: time is not compared: the baseline has no times
        new: the baseline has no such metric
        """
    )


def test_counts_are_shown_where_they_changed_and_on_demand():
    then = {"peak_allocated": GB, "operators": 1236, "syncs": 0}
    same = [result(verdict_on(then, then))]
    assert table(same, "si", everything=False)[0].split() == ["test", "peak", "change", "verdict"]
    assert table(same, "si", everything=True)[0].split() == ["test", "peak", "change", "operators", "syncs", "verdict"]
    changed = [*same, result(verdict_on(then | {"operators": 1284}, then), test="test_b")]
    assert table(changed, "si", everything=False) == literal(
        """
        test             peak  change  operators  verdict
        a.py::test_a  1.00 GB  +0.0 %      1,236  ok
        a.py::test_b  1.00 GB  +0.0 %      1,284  regressed
        """
    )


def test_binary_units_are_shown_on_demand():
    rows = [result(verdict_on({"peak_allocated": 2**30}, None))]
    assert table(rows, "iec", everything=False)[1].split() == ["a.py::test_a", "1.00", "GiB", "recorded"]


def test_without_baselines_there_is_no_column_of_changes():
    rows = [result(verdict_on({"peak_allocated": GB}, None))]
    assert table(rows, "si", everything=False) == literal(
        """
        test             peak  verdict
        a.py::test_a  1.00 GB  recorded
        """
    )


def test_leaks_and_cycles_have_a_column_only_when_there_are_any():
    clean = {"peak_allocated": GB, "retained": 0, "cyclic_garbage": 0}
    assert "retained" not in table([result(verdict_on(clean, None))], "si", everything=False)[0]
    assert "cycles" not in table([result(verdict_on(clean, None))], "si", everything=False)[0]
    rows = [result(verdict_on(clean, None)), result(verdict_on(clean | {"retained": 512}, None), test="test_b")]
    header, first, second = table(rows, "si", everything=False)
    assert "retained" in header
    assert "cycles" not in header
    assert first.split() == ["a.py::test_a", "1.00", "GB", "0", "B", "recorded"]
    assert second.split() == ["a.py::test_b", "1.00", "GB", "512", "B", "recorded"]


def test_several_measurements_of_a_test_are_told_apart_by_name():
    row = result(
        verdict_on({"peak_allocated": GB}, None, "plain"), verdict_on({"peak_allocated": GB}, None, "checkpointed")
    )
    lines = table([row], "si", everything=False)
    assert [line.rpartition("1.00 GB")[0].strip() for line in lines[1:]] == [
        "a.py::test_a (plain)",
        "a.py::test_a (checkpointed)",
    ]


def test_tests_that_were_not_measured_have_no_row():
    unmeasured = TestResult(TestVerdict("a.py", "test_b", unmeasured="no CUDA device"), passed=True)
    assert table([unmeasured], "si", everything=True) == []
    assert len(table([ok(1), unmeasured], "si", everything=True)) == 2


def test_no_measured_test_is_no_table():
    assert table([], "si", everything=False) == []


def test_a_long_name_is_not_cut_off():
    name = "test_" + "x" * 300
    lines = table([result(verdict_on({"peak_allocated": GB}, None), test=name)], "si", everything=False)
    assert lines[1].startswith(f"a.py::{name} ")


def test_brackets_in_a_name_are_shown_as_they_are():
    lines = table([result(verdict_on({"peak_allocated": GB}, None), test="test_a[bold]")], "si", everything=False)
    assert lines[1].startswith("a.py::test_a[bold] ")


# Limits


def test_as_many_rows_as_fit_are_shown_whatever_their_verdict():
    lines = table([ok(number) for number in range(MOST_ROWS)], "si", everything=False)
    assert len(lines) == 1 + MOST_ROWS


def test_of_more_rows_only_those_with_something_to_say_are_shown():
    rows = [ok(number) for number in range(MOST_ROWS)] + [regressed(MOST_ROWS), regressed(MOST_ROWS + 1)]
    lines = table(rows, "si", everything=False)
    assert [line.split()[0] for line in lines] == ["test", "a.py::test_060", "a.py::test_061", "..."]
    assert lines[-1] == f"... and {MOST_ROWS} more that are ok or recorded (-v shows them)"


def test_everything_is_shown_on_demand():
    rows = [ok(number) for number in range(MOST_ROWS)] + [regressed(MOST_ROWS)]
    assert len(table(rows, "si", everything=True)) == 1 + len(rows)


def test_many_rows_of_which_none_has_something_to_say_are_no_table():
    assert table([ok(number) for number in range(MOST_ROWS + 1)], "si", everything=False) == []


def test_no_row_with_something_to_say_is_ever_left_out():
    rows = [regressed(number) for number in range(2 * MOST_ROWS)]
    assert len(table(rows, "si", everything=False)) == 1 + len(rows)


# Reasons


def test_why_measurements_were_not_compared_is_said_once_below():
    rows = [
        result(verdict_on({"peak_allocated": GB}, Absent()), test="test_a"),
        result(verdict_on({"peak_allocated": GB}, Absent()), test="test_b"),
        result(verdict_on({"peak_allocated": GB}, Absent(("NVIDIA A100",))), test="test_c"),
    ]
    assert table(rows, "si", everything=False)[4:] == [
        "new: there is no baseline for NVIDIA H100 80GB HBM3 yet (2 times)",
        "foreign: there are baselines for NVIDIA A100, this is NVIDIA H100 80GB HBM3",
    ]


# Columns


def test_numbers_are_aligned_right_and_names_left():
    assert columns(("name", "count"), [("a", "1"), ("long name", "1000")]) == [
        "name       count",
        "a              1",
        "long name   1000",
    ]


def test_a_line_ends_where_its_text_does():
    assert all(line == line.rstrip() for line in columns(("a", ""), [("x", ""), ("y", "z")], left=(0, 1)))


def test_why_times_were_not_compared_is_told_once_for_all_tests():
    now = {"peak_allocated": GB, "step_time": 0.5}
    times = Times((Sample((Round(0.5),)),))
    rows = [result(verdict_on(now, {"peak_allocated": GB}, times=times), test=f"test_{number}") for number in range(3)]
    assert table(rows, "si", everything=False)[-1] == (
        "recorded: time is not compared: the baseline has no times (3 times)"
    )
