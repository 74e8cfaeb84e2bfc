"""What follows from pairs of runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.facts.metrics import Tolerance
from pytest_gpumem.facts.values.composition import NOT_EXPLAINED, Composition, Explanation, Row
from pytest_gpumem.judging.gate.verdict import Outcome, TestVerdict
from pytest_gpumem.plugin.config.settings import DEFAULT_TOLERANCES
from pytest_gpumem.reporting.reports.explanation import explanation_blocks
from pytest_gpumem.tools.ab.verdicts import closest, compare_runs
from tests.ab.values import BASE, HEAD, measured, measurement, pair, unmeasured

DRIFT = (1.0, 1.02, 1.05, 1.01, 0.98)
"""How fast the machine is in each pair of runs, in which both sides run."""


def compared(pairs, tolerances=DEFAULT_TOLERANCES):
    return compare_runs(pairs, BASE, HEAD, 0.02, tolerances)


def timed(base, head, **others):
    """Pairs of runs of one test that takes so many seconds."""
    return [
        pair(
            measured("test_a", measurement(seconds=base * factor)),
            measured("test_a", measurement(seconds=head * factor, **others)),
        )
        for factor in DRIFT
    ]


def only_figure(report, metric):
    (row,) = report.rows
    return next(change for change in row.changes if change.metric == metric)


def test_a_step_that_takes_five_percent_longer_is_slower_though_the_machine_drifts():
    report = compared(timed(0.1, 0.105))
    figure = only_figure(report, "step_time")
    assert (figure.word, figure.outcome) == ("slower", Outcome.REGRESSED)
    assert figure.interval.ratio == pytest.approx(1.05, abs=0.002)
    assert (figure.old, figure.new) == (pytest.approx(0.101, rel=0.01), pytest.approx(0.106, rel=0.01))
    assert report.exit_status == 1


def test_samples_that_something_disturbed_leave_it_uncertain_with_the_reason():
    report = compared(timed(0.1, 0.105, invalid="another process used the CPU"))
    figure = only_figure(report, "step_time")
    assert (figure.outcome, figure.reason) == (Outcome.UNCERTAIN, "another process used the CPU")
    assert report.exit_status == 0


def test_memory_that_grows_has_regressed_and_time_has_no_part_in_it():
    report = compared(timed(0.1, 0.1, peak=12_000_000))
    figure = only_figure(report, "peak_allocated")
    assert (figure.outcome, figure.old, figure.new) == (Outcome.REGRESSED, 10_000_000, 12_000_000)
    assert only_figure(report, "step_time").outcome is Outcome.OK
    assert report.exit_status == 1


def test_memory_is_held_to_the_tolerance_that_the_project_sets():
    report = compared(timed(0.1, 0.1, peak=12_000_000), {"peak_allocated": Tolerance(0.5)})
    assert only_figure(report, "peak_allocated").outcome is Outcome.OK


def test_what_is_not_slower_says_what_slowdown_it_would_not_have_seen():
    pairs = [timed(0.1, 0.1 * ratio)[0] for ratio in (0.99, 1.01, 0.99, 1.01, 0.99, 1.01)]
    figure = only_figure(compare_runs(pairs, BASE, HEAD, 0.01, {}), "step_time")
    assert figure.word == "not slower"
    assert figure.reason == f"a slowdown of up to {100 * (figure.interval.high - 1):.1f} % would not have been seen"
    assert figure.interval.high > 1.01
    certain = only_figure(compare_runs(pairs, BASE, HEAD, 0.05, {}), "step_time")
    assert (certain.word, certain.reason) == ("not slower", None)


def test_the_change_of_a_time_has_the_sign_of_its_row():
    # Head takes longer in three of four pairs, and its median is the smaller one.
    pairs = [timed(base, head)[0] for base, head in ((0.10, 0.104), (0.13, 0.134), (0.16, 0.1), (0.07, 0.074))]
    figure = only_figure(compare_runs(pairs, BASE, HEAD, 0.01, {}), "step_time")
    assert figure.new / figure.old == pytest.approx(figure.ratio)


def test_a_slowdown_that_is_tolerated_is_none():
    report = compare_runs(timed(0.1, 0.105), BASE, HEAD, 0.1, {})
    assert only_figure(report, "step_time").word == "not slower"


@pytest.mark.parametrize(
    ("base", "head", "reason"),
    [
        (None, measured("test_a", measurement()), "it ran in head only"),
        (measured("test_a", measurement()), None, "it ran in base only"),
        (measured("test_a", measurement()), unmeasured("test_a", "it was skipped"), "it was skipped, in head"),
        (
            unmeasured("test_a", "no CUDA device"),
            unmeasured("test_a", "no CUDA device"),
            "no CUDA device, in base and in head",
        ),
        (
            unmeasured("test_a", "it was skipped"),
            unmeasured("test_a", "no CUDA device"),
            "it was skipped, in base; no CUDA device, in head",
        ),
        (
            measured("test_a", measurement()),
            TestVerdict("test_it.py", "test_a", relations=2),
            "it asserts relations but measures no figures, in head",
        ),
        (
            measured("test_a", measurement()),
            measured("test_a", measurement(batch="float32[8]")),
            "another workload: batch float32[8], was float32[4]",
        ),
        (
            measured("test_a", measurement(peak=22_000_000)),
            measured("test_a", measurement(peak=4_000_000, batch="float32[8]")),
            "another workload: batch float32[8], was float32[4]; peak 22.00 MB in base, 4.00 MB in head",
        ),
        (
            measured("test_a", measurement(slug="left")),
            measured("test_a", measurement(slug="right")),
            "it was measured on Left in base, on Right in head",
        ),
    ],
)
def test_what_cannot_be_compared_is_listed_with_its_reason(base, head, reason):
    report = compared([pair(base, head)] * 4)
    assert report.rows == ()
    (left_out,) = report.omitted_tests
    assert (left_out.title, left_out.reason, left_out.word) == ("test_it.py::test_a", reason, "not compared")
    assert report.exit_status == 2


def test_another_workload_that_needs_more_memory_has_regressed_and_is_not_timed():
    base = measured("test_a", measurement(seconds=0.1))
    head = measured("test_a", measurement(seconds=0.9, peak=20_000_000, batch="float32[8]", operators=9))
    report = compared([pair(base, head)] * 4)
    (row,) = report.rows
    assert [(figure.metric, figure.outcome) for figure in row.changes] == [("peak_allocated", Outcome.REGRESSED)]
    assert row.notes[0] == "another workload: batch float32[8], was float32[4]"
    assert report.exit_status == 1


def test_a_test_that_fails_in_head_alone_is_broken_and_does_not_end_well():
    fails = unmeasured("test_a", "it failed by itself", failed=True)
    report = compared([pair(measured("test_a", measurement()), fails)] * 4)
    assert report.omitted_tests[0].word == "broken"
    assert report.exit_status == 1


@pytest.mark.parametrize("base_fails", [True, False])
def test_a_flaky_test_is_not_broken_and_says_how_often_it_was_measured(base_fails):
    fails, works = unmeasured("test_a", "it failed by itself", failed=True), measured("test_a", measurement())
    once = pair(fails, works) if base_fails else pair(works, fails)
    report = compared([*[pair(works, works)] * 4, once])
    assert report.omitted_tests == ()
    assert report.rows[0].notes == (f"measured in 4 of 5 runs of {'base' if base_fails else 'head'}",)
    assert report.exit_status == 0


def test_a_measurement_that_only_one_side_takes_is_told_and_the_others_are_compared():
    base = measured("test_a", measurement(name="one"), measurement(name="two"))
    head = measured("test_a", measurement(name="one"), measurement(name="three"))
    report = compared([pair(base, head)] * 4)
    assert [row.title for row in report.rows] == ["test_it.py::test_a (one)"]
    assert [(one.title, one.reason) for one in report.omitted_tests] == [
        ("test_it.py::test_a (two)", "it is measured in base only"),
        ("test_it.py::test_a (three)", "it is measured in head only"),
    ]


def test_bytes_that_vary_on_one_side_are_noted_and_the_closest_runs_are_compared():
    pairs = [
        pair(measured("test_a", measurement(peak=peak)), measured("test_a", measurement(peak=14_000_000)))
        for peak in (10_000_000, 12_000_000, 10_000_000, 10_000_000)
    ]
    report = compared(pairs)
    figure = only_figure(report, "peak_allocated")
    assert (figure.old, figure.new, figure.outcome) == (12_000_000, 14_000_000, Outcome.REGRESSED)
    assert report.rows[0].notes == ("peak allocated differs between the runs of base: 10.00 MB to 12.00 MB",)


def test_an_imbalance_is_compared_by_the_closest_runs_and_its_variation_is_noted():
    pairs = [
        pair(measured("test_a", measurement(imbalance=base)), measured("test_a", measurement(imbalance=1.5)))
        for base in (1.0, 1.001, 1.001, 1.0)
    ]
    report = compared(pairs)
    figure = only_figure(report, "imbalance")
    assert (figure.old, figure.new, figure.outcome) == (1.001, 1.5, Outcome.REGRESSED)
    assert report.rows[0].notes == ("imbalance over ranks differs between the runs of base: by 0.001",)


def test_how_many_segments_were_reserved_is_chance_and_not_told():
    pairs = [
        pair(measured("test_a", measurement(peak_reserved=reserved)), measured("test_a", measurement(peak_reserved=80)))
        for reserved in (60, 80, 100, 80)
    ]
    report = compared(pairs)
    assert report.rows[0].notes == ()
    assert only_figure(report, "peak_reserved").outcome is Outcome.OK


def test_a_test_that_only_one_side_times_is_compared_by_its_bytes_and_says_so():
    base, head = measured("test_a", measurement()), measured("test_a", measurement(seconds=None))
    report = compared([pair(base, head)] * 4)
    assert [figure.metric for figure in report.rows[0].changes] == ["peak_allocated"]
    assert report.rows[0].notes == ("timed in base only",)


FIGURES = st.lists(st.integers(0, 20), min_size=1, max_size=4)


@given(FIGURES, FIGURES)
def test_the_closest_figures_are_within_both_ranges_and_equal_where_these_overlap(base, head):
    mine, theirs = closest(base, head)
    assert min(base) <= mine <= max(base)
    assert min(head) <= theirs <= max(head)
    gap = max(0, min(head) - max(base), min(base) - max(head))
    assert abs(mine - theirs) == gap


@given(FIGURES)
def test_figures_that_are_the_same_on_both_sides_never_differ(values):
    mine, theirs = closest(values, values)
    assert mine == theirs


def test_a_relation_that_holds_in_base_only_is_broken():
    base = TestVerdict("test_it.py", "test_a", relations=1)
    failed = unmeasured("test_a", "the test itself failed", failed=True)
    (one,) = compared([pair(base, failed)]).omitted_tests
    assert (one.word, one.reason) == (
        "broken",
        "it asserts relations but measures no figures, in base; the test itself failed, in head",
    )


def test_what_is_broken_says_the_exception_in_one_line():
    before, after = pair(measured("test_a", measurement()), unmeasured("test_a", "the test itself failed", failed=True))
    message = "AssertionError: memory grows: 1 kB a step\n\n  kept in: State.seen\n"
    (one,) = compared([(before, replace(after, errors={"test_it.py::test_a": message}))]).omitted_tests
    assert (
        one.reason == "the test itself failed (AssertionError: memory grows: 1 kB a step; kept in: State.seen), in head"
    )
    (one,) = compared([(before, replace(after, errors={"test_it.py::test_a": "x" * 1000}))]).omitted_tests
    assert one.reason == f"the test itself failed ({'x' * 400} ...), in head"


OTHER_PEAK = "the recorded run needed 12000000 bytes, the measured one 10000000"


@pytest.mark.parametrize(
    ("recorded", "notes", "reason"),
    [
        (Composition(12_000_000, (Row("input", 12_000_000),), notes=(OTHER_PEAK,)), (), OTHER_PEAK),
        (None, (f"{NOT_EXPLAINED}: RuntimeError: gone",), f"{NOT_EXPLAINED}: RuntimeError: gone"),
        (None, (), "it was not recorded"),
    ],
)
def test_a_base_without_a_composition_says_why(recorded, notes, reason):
    explanation = None if recorded is None else Explanation(recorded)
    base = replace(measurement(), explanation=explanation, notes=notes)
    now = Explanation(Composition(20_000_000, (Row("activation", 20_000_000),)))
    head = replace(measurement(peak=20_000_000), explanation=now)
    (row,) = compared([pair(measured("test_a", base), measured("test_a", head))]).rows
    (block,) = explanation_blocks(row.verdict, ["peak_allocated"], "si")
    assert block[-1] == f"note: base has no composition to compare with: {reason}"
