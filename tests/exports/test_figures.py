"""Which figures of which reports are exported, and what is told of the rest."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pytest_gpumem.base.errors import ExportError
from pytest_gpumem.judging.gate.verdict import MetricVerdict, Outcome
from pytest_gpumem.reporting.exports.figures import figures_of
from tests.exports.values import CPU, H100, PEAK, TIMED, called, report, result, timed

INFINITE = replace(timed(), metrics=tuple(replace(one, value=math.inf) if one.of else one for one in timed().metrics))
"""A throughput that is no finite number, among figures that are."""


def test_every_metric_of_every_measurement_is_a_figure():
    found = figures_of({"a.json": TIMED}).figures
    assert [figure.metric for figure in found] == ["peak_allocated", "retained", "flops", "step_time", "throughput"]
    assert {figure.test for figure in found} == {"tests/test_a.py::test_train"}
    assert {(figure.measurement, figure.config) for figure in found} == {("train_step", "amp-bf16")}
    assert all(figure.environment == H100 for figure in found)
    assert {(figure.ended, figure.commit) for figure in found} == {("2026-11-21T16:20:05Z", "abc1234")}


def test_times_and_throughputs_come_with_their_intervals():
    found = {figure.metric: figure for figure in figures_of({"a.json": TIMED}).figures}
    assert found["step_time"].interval == (0.010, 0.015)
    # 100 samples in 15 ms and in 10 ms.
    assert found["throughput"].interval == (pytest.approx(100 / 0.015), pytest.approx(100 / 0.010))
    assert found["throughput"].of == "samples"
    assert found["peak_allocated"].interval is None


def test_tests_without_a_figure_are_counted():
    mixed = replace(
        report(result("test_a", called()), result("test_b", unmeasured="no CUDA device"), result("test_c")),
        not_run=(("tests/test_a.py", "test_d"),),
    )
    found = figures_of({"a.json": mixed})
    assert [figure.test for figure in found.figures] == ["tests/test_a.py::test_a"]
    assert found.summary == "1 figure of 1 test; 3 tests without a figure"


def test_times_that_something_disturbed_are_left_out_and_the_reason_is_told():
    found = figures_of({"a.json": report(result("test_a", timed(invalid="another process on the GPU")))})
    assert [figure.metric for figure in found.figures] == ["peak_allocated", "retained", "flops"]
    assert found.summary == "3 figures of 1 test; times of 1 measurement left out (another process on the GPU)"


def test_an_imbalance_is_exported_beside_times_that_something_disturbed():
    verdict = timed(invalid="another process on the GPU")
    verdict = replace(verdict, metrics=(*verdict.metrics, MetricVerdict("imbalance", Outcome.OK, 1.25)))
    found = figures_of({"a.json": report(result("test_a", verdict))})
    assert [(figure.metric, figure.value) for figure in found.figures][-1] == ("imbalance", 1.25)


def test_only_the_metrics_that_were_asked_for_are_exported():
    found = figures_of({"a.json": TIMED}, ["step_time", "flops"])
    assert [figure.metric for figure in found.figures] == ["flops", "step_time"]


def test_a_value_that_is_no_number_is_no_figure_and_is_told():
    found = figures_of({"a.json": report(result("test_a", INFINITE), result("test_b", called()))})
    assert [figure.metric for figure in found.figures] == [
        "peak_allocated",
        "retained",
        "flops",
        "step_time",
        "peak_allocated",
    ]
    assert found.summary == "5 figures of 2 tests; 1 value left out (the throughput of tests/test_a.py::test_a is inf)"
    # What nobody asked for is not missed.
    assert figures_of({"a.json": report(result("test_a", INFINITE))}, ["flops"]).summary == "1 figure of 1 test"


@pytest.mark.parametrize(
    ("reports", "metrics", "said"),
    [
        ({"a.json": report()}, [], "there is no figure in a.json"),
        ({"a.json": report(), "b.json": report()}, [], "there is no figure in a.json, b.json"),
        (
            {"a.json": report(result("test_a", unmeasured="no CUDA device"))},
            [],
            "there is no figure in a.json: 1 test has no figure (no CUDA device)",
        ),
        ({"a.json": report(result("test_a", called()))}, ["flops"], "there is no figure of flops in a.json"),
        (
            {"a.json": report(result("test_a", INFINITE))},
            ["throughput"],
            "there is no figure of throughput in a.json: the throughput of tests/test_a.py::test_a is inf",
        ),
    ],
)
def test_nothing_to_export_is_an_error(reports, metrics, said):
    with pytest.raises(ExportError) as refused:
        figures_of(reports, metrics)
    assert str(refused.value) == said


def test_the_same_figure_in_two_reports_is_an_error_that_names_both():
    one = report(result("test_a", called()))
    with pytest.raises(ExportError) as refused:
        figures_of({"a.json": one, "b.json": replace(one, ended="2026-11-22T16:20:05Z")})
    assert str(refused.value) == (
        "tests/test_a.py::test_a (call) on CPU (x86_64) is in a.json and in b.json: "
        "export one of them (gpumem merge makes one report of shards)"
    )


def test_the_same_test_on_two_devices_or_twice_in_a_test_is_not_the_same_figure():
    two = {
        "a.json": report(result("test_a", called(CPU), timed("one"), timed("two"))),
        "b.json": report(result("test_a", called(H100))),
    }
    assert [figure.value for figure in figures_of(two, ["peak_allocated"]).figures] == [PEAK] * 4


def test_over_time_the_same_figure_may_be_in_many_reports_but_not_in_one_second():
    one = report(result("test_a", called()))
    later = replace(one, ended="2026-11-22T16:20:05Z")
    found = figures_of({"a.json": one, "b.json": later}, over_time=True)
    assert len(found.figures) == 2
    assert found.summary == "2 figures of 2 tests"
    with pytest.raises(ExportError, match=r"is in a\.json and in b\.json, which ended in the same second"):
        figures_of({"a.json": one, "b.json": one}, over_time=True)
