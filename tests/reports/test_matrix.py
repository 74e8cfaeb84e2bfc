"""The table of a matrix: savings and costs against the first row, and which rows nothing beats."""

from __future__ import annotations

import pytest

from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.judging.gate.verdict import Cell, TestVerdict, Verdict
from pytest_gpumem.reporting.reports.matrix import MatrixRow, efficient, matrices, matrix_table
from pytest_gpumem.reporting.reports.results import TestResult

HERE = Environment("cpu-x86_64", "CPU")
MB = 10**6


def verdict_on(peak: int, name: str = "train_step", time: float | None = None) -> Verdict:
    metrics: dict[str, float] = {"peak_allocated": peak}
    if time is not None:
        metrics["step_time"] = time
    return Verdict(Measurement(name, Workload("train_step"), HERE, metrics), ())


def result(config: str, index: int, *verdicts: Verdict, matrix: str = "test_m", unmeasured: str | None = None):
    test = TestVerdict("t.py", f"test_m[{config}]", verdicts, unmeasured, cell=Cell(matrix, config, index))
    return TestResult(test, passed=True)


def test_rows_stand_in_the_order_of_the_marker_and_not_of_the_tests():
    results = [result("amp-bf16", 1, verdict_on(5)), result("fp32", 0, verdict_on(9))]
    assert matrices(results) == {"test_m": [MatrixRow("fp32", 9), MatrixRow("amp-bf16", 5)]}


def test_each_matrix_and_each_measurement_of_a_test_has_a_table():
    results = [
        result("fp32", 0, verdict_on(1, "small"), verdict_on(2, "large"), matrix="one"),
        result("fp32", 0, verdict_on(3), matrix="two"),
    ]
    assert matrices(results) == {
        "one (small)": [MatrixRow("fp32", 1)],
        "one (large)": [MatrixRow("fp32", 2)],
        "two": [MatrixRow("fp32", 3)],
    }


def test_a_config_without_figures_says_why():
    results = [result("fp32", 0, verdict_on(1)), result("tf32", 1, unmeasured="TF32 is a format of NVIDIA GPUs")]
    assert matrices(results)["test_m"][1] == MatrixRow("tf32", why_not="TF32 is a format of NVIDIA GPUs")
    assert matrix_table("test_m", matrices(results)["test_m"], "si")[2].endswith("TF32 is a format of NVIDIA GPUs")


def test_tests_outside_of_a_matrix_make_no_table():
    assert matrices([TestResult(TestVerdict("t.py", "test_a", (verdict_on(1),)), passed=True)]) == {}


ROWS = [
    MatrixRow("fp32", 100 * MB, 1.0),
    MatrixRow("amp-bf16", 80 * MB, 0.5),
    MatrixRow("amp-bf16,checkpoint=blocks", 40 * MB, 0.75),
    MatrixRow("fp32,checkpoint=blocks", 50 * MB, 1.25),
    MatrixRow("tf32", why_not="not here"),
]


def test_rows_that_no_other_beats_are_efficient():
    assert efficient(ROWS) == {1, 2}


def test_equal_rows_do_not_beat_one_another():
    assert efficient([MatrixRow("a", 1, 1.0), MatrixRow("b", 1, 1.0), MatrixRow("c", 2, 1.0)]) == {0, 1}


def test_without_times_the_smallest_is_efficient():
    assert efficient([MatrixRow("a", 3), MatrixRow("b", 2), MatrixRow("c", 4)]) == {1}


def test_the_table_compares_with_its_first_row():
    assert matrix_table("test_m", ROWS, "si") == [
        "test_m                           peak   saving  step time     cost   ROI",
        "fp32                        100.00 MB              1.00 s",
        "amp-bf16                     80.00 MB  +20.0 %  500.00 ms  -50.0 %  free  *",
        "amp-bf16,checkpoint=blocks   40.00 MB  +60.0 %  750.00 ms  -25.0 %  free  *",
        "fp32,checkpoint=blocks       50.00 MB  +50.0 %     1.25 s  +25.0 %   2.0",
        "tf32                                -        -          -        -     -  not here",
        "  saving and cost are relative to fp32; ROI is saving / cost, above 1.5 is recommended; * marks a Pareto-efficient config",
    ]


def test_where_the_first_row_has_no_figures_the_next_one_is_compared_with():
    rows = [MatrixRow("tf32", why_not="not here"), MatrixRow("fp32", 100 * MB, 1.0), MatrixRow("bf16", 50 * MB, 1.0)]
    lines = matrix_table("m", rows, "si")
    assert "+50.0 %" in lines[3]
    assert "relative to fp32" in lines[-1]


@pytest.mark.parametrize("rows", [[], [MatrixRow("tf32", why_not="not here")]])
def test_a_matrix_without_figures_compares_nothing(rows):
    assert not any("relative to" in line for line in matrix_table("m", rows, "si"))


def test_without_times_there_are_no_columns_for_them():
    assert matrix_table("m", [MatrixRow("fp32", 2 * MB), MatrixRow("bf16", 1 * MB)], "si")[0].split() == [
        "m",
        "peak",
        "saving",
    ]
