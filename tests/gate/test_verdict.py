"""Verdicts: which outcome stands for several, what counts as gated, and the way through JSON."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.metrics import METRICS, WHOLE
from pytest_gpumem.facts.values.composition import Composition, Explanation, Row
from pytest_gpumem.facts.values.interference import Slowdown
from pytest_gpumem.facts.values.plain import from_plain, to_plain
from pytest_gpumem.facts.values.step_peaks import StepPeaks
from pytest_gpumem.facts.values.times import Round, Sample, Times
from pytest_gpumem.judging.gate.difference import Change, Difference
from pytest_gpumem.judging.gate.verdict import Cell, MetricVerdict, Origin, Outcome, TestVerdict, Verdict, worst

unhurried = settings(deadline=None)
CPU = Environment("cpu-x86_64", "CPU (x86_64)", {"torch": "2.13.0"})


def verdict_of(*metrics: MetricVerdict) -> Verdict:
    return Verdict(Measurement("call", Workload("call"), CPU, {"peak_allocated": 1}), metrics)


# The metric that decided


def test_the_metric_that_decided_heads_the_failure_or_there_is_none():
    ok = MetricVerdict("peak_allocated", Outcome.OK, 1)
    kept, over = (MetricVerdict("retained", one, 1) for one in (Outcome.REGRESSED, Outcome.OVER_BUDGET))
    slower, growing = (MetricVerdict(name, Outcome.REGRESSED, 1) for name in ("step_time", "growth"))
    assert verdict_of(ok).deciding is None
    assert verdict_of(ok, MetricVerdict("retained", Outcome.STALE, 1)).deciding is None
    assert verdict_of(ok, slower, kept).deciding is kept
    assert verdict_of(kept, growing).deciding is growing
    assert verdict_of(growing, over).deciding is over


# Order


def test_the_worst_outcome_stands_for_several():
    order = [
        Outcome.RECORDED,
        Outcome.OK,
        Outcome.IMPROVED,
        Outcome.NEW,
        Outcome.FOREIGN,
        Outcome.STALE,
        Outcome.UNMEASURED,
        Outcome.UNCERTAIN,
        Outcome.MISSING,
        Outcome.REGRESSED,
        Outcome.OVER_BUDGET,
    ]
    assert order == list(Outcome)
    for number, outcome in enumerate(order, start=1):
        assert worst(reversed(order[:number])) is outcome


def test_of_no_outcomes_the_worst_is_that_something_was_recorded():
    assert worst([]) is Outcome.RECORDED


def test_an_outcome_is_written_as_a_person_would():
    assert Outcome.OVER_BUDGET.words == "over budget"
    assert Outcome.OK.words == "ok"


def test_a_test_is_as_bad_as_its_worst_measurement():
    fine = verdict_of(MetricVerdict("peak_allocated", Outcome.OK, 1))
    bad = verdict_of(MetricVerdict("peak_allocated", Outcome.OK, 1), MetricVerdict("retained", Outcome.REGRESSED, 1))
    assert TestVerdict("a.py", "test_a", (fine, bad, fine)).outcome is Outcome.REGRESSED


def test_a_test_that_was_not_measured_is_unmeasured():
    assert TestVerdict("a.py", "test_a", unmeasured="no CUDA device").outcome is Outcome.UNMEASURED


# Gated

COMPARED = {Outcome.OK, Outcome.IMPROVED, Outcome.REGRESSED, Outcome.OVER_BUDGET, Outcome.UNCERTAIN}


def test_only_what_was_compared_is_gated():
    assert {outcome for outcome in Outcome if MetricVerdict("peak_allocated", outcome, 1).gated} == set(COMPARED)


@pytest.mark.parametrize("outcome", [Outcome.NEW, Outcome.STALE, Outcome.FOREIGN])
def test_what_was_held_to_a_budget_is_gated_without_a_baseline(outcome):
    assert MetricVerdict("peak_allocated", outcome, 1, budget=0).gated


def test_one_gated_metric_makes_a_test_gated():
    new = verdict_of(MetricVerdict("retained", Outcome.NEW, 1))
    ok = verdict_of(MetricVerdict("retained", Outcome.NEW, 1), MetricVerdict("peak_allocated", Outcome.OK, 1))
    assert not TestVerdict("a.py", "test_a", (new,)).gated
    assert TestVerdict("a.py", "test_a", (new, ok)).gated


def test_a_test_that_was_not_measured_is_never_gated():
    ok = verdict_of(MetricVerdict("peak_allocated", Outcome.OK, 1))
    assert not TestVerdict("a.py", "test_a", unmeasured="no CUDA device").gated
    assert not TestVerdict("a.py", "test_a", (ok,), unmeasured="it failed by itself").gated


def test_a_test_without_verdicts_is_not_gated():
    assert not TestVerdict("a.py", "test_a").gated


def test_a_test_that_only_asserted_relations_is_ok_and_gated():
    verdict = TestVerdict("a.py", "test_a", relations=1)
    assert (verdict.outcome, verdict.gated, verdict.compared) == (Outcome.OK, True, False)


def test_relations_make_a_measured_test_gated_and_leave_its_outcome():
    new = verdict_of(MetricVerdict("peak_allocated", Outcome.NEW, 1))
    verdict = TestVerdict("a.py", "test_a", (new,), relations=1)
    assert (verdict.outcome, verdict.gated) == (Outcome.NEW, True)


def test_relations_of_a_test_that_did_not_get_to_its_end_do_not_count():
    verdict = TestVerdict("a.py", "test_a", unmeasured="it failed by itself", relations=1)
    assert (verdict.outcome, verdict.gated) == (Outcome.UNMEASURED, False)


def test_the_verdict_on_a_metric_is_found_by_name():
    retained = MetricVerdict("retained", Outcome.OK, 1)
    verdict = verdict_of(MetricVerdict("peak_allocated", Outcome.OK, 1), retained)
    assert verdict.of("retained") is retained
    assert verdict.of("peak_reserved") is None


# Through JSON, and between processes

TEXTS = st.text(max_size=10)
ROW = Row("activation", 10**9, "h.*", "model.py:88", "lib.py:3", "mul", "float32[8]")
# Each of these has a property of its own: in tests/values, and in test_difference.py.
EXPLANATION = Explanation(Composition(2 * 10**9, (ROW,)), Composition(5, ()), Composition(7, ()), ("a -> a",), 2**60)
DIFFERENCE = Difference(3, 2**53, (Change(ROW, ROW, "4 -> 8 tensors"), Change(None, ROW, "")))
TIMES = Times((Sample((Round(0.1, 1e9, "hot"), Round(0.2)), 3, "it was hot", Slowdown(1.2, 1.1)),), {"forward": 0.1})
INTEGERS = st.integers(0, 2**63 - 1)
NUMBERS = INTEGERS | st.floats(0, allow_nan=False, allow_infinity=False)
FIGURES = {name: INTEGERS if metric.unit in WHOLE else NUMBERS for name, metric in METRICS.items()}
SECONDS = st.floats(1e-9, 1e6)
PEAKS = st.lists(st.integers(0, 2**60), max_size=3).map(tuple)
MEASUREMENTS = st.builds(
    Measurement,
    name=TEXTS,
    workload=st.builds(Workload, TEXTS, st.none() | TEXTS, st.none() | INTEGERS, st.none() | TEXTS),
    environment=st.builds(Environment, TEXTS, TEXTS, st.dictionaries(TEXTS, TEXTS | INTEGERS, max_size=3)),
    metrics=st.fixed_dictionaries(
        {"peak_allocated": INTEGERS},
        optional={name: numbers for name, numbers in FIGURES.items() if name != "peak_allocated"},
    ),
    settled=st.booleans(),
    step_peaks=st.builds(StepPeaks, PEAKS, PEAKS, st.integers(0, 9)),
    step_peaks_by_device=st.dictionaries(TEXTS, st.builds(StepPeaks, PEAKS), max_size=2),
    notes=st.lists(TEXTS, max_size=2).map(tuple),
    recomputed=st.none() | INTEGERS,
    explanation=st.sampled_from([None, EXPLANATION]),
    times=st.sampled_from([None, TIMES]),
    work=st.dictionaries(st.sampled_from(["samples", "tokens", "items"]), st.floats(0, 1e9), max_size=3),
)
METRIC_VERDICTS = st.sampled_from(list(METRICS)).flatmap(
    lambda name: st.builds(
        MetricVerdict,
        metric=st.just(name),
        outcome=st.sampled_from(Outcome),
        value=FIGURES[name],
        baseline=st.none() | FIGURES[name],
        allowed=st.none() | NUMBERS,
        budget=st.none() | FIGURES[name],
        reason=st.none() | TEXTS,
        interval=st.none() | st.tuples(SECONDS, SECONDS),
        of=st.none() | st.sampled_from(["samples", "steps"]),
    )
)
VERDICTS = st.builds(
    Verdict,
    measurement=MEASUREMENTS,
    metrics=st.lists(METRIC_VERDICTS, max_size=3).map(tuple),
    origin=st.none() | st.builds(Origin, TEXTS, TEXTS, TEXTS, st.none() | TEXTS, st.none() | TEXTS),
    reason=st.none() | TEXTS,
    elsewhere=st.lists(TEXTS, max_size=2).map(tuple),
    difference=st.sampled_from([None, DIFFERENCE]),
)
TEST_VERDICTS = st.builds(
    TestVerdict,
    file=TEXTS,
    test=TEXTS,
    verdicts=st.lists(VERDICTS, max_size=2).map(tuple),
    unmeasured=st.none() | TEXTS,
    failed_by_itself=st.booleans(),
    relations=st.integers(0, 3),
    cell=st.none() | st.builds(Cell, TEXTS, TEXTS, INTEGERS),
)


@settings(unhurried, max_examples=60)
@given(TEST_VERDICTS)
def test_a_verdict_comes_back_from_json_as_it_was(verdict):
    back = from_plain(TestVerdict, json.loads(json.dumps(to_plain(verdict))))
    assert back == verdict
    assert (back.outcome, back.gated) == (verdict.outcome, verdict.gated)
    assert json.dumps(to_plain(back)) == json.dumps(to_plain(verdict))


@settings(unhurried, max_examples=60)
@given(MEASUREMENTS)
def test_a_measurement_comes_back_from_another_process_as_it_was(measurement):
    assert pickle.loads(pickle.dumps(measurement)) == measurement


def test_the_largest_rows_of_an_explanation_go_with_a_measurement():
    many = Composition(1000, tuple(Row("activation", 10, f"m{number}") for number in range(100)))
    measurement = Measurement("call", Workload("call"), CPU, {"peak_allocated": 1000}, explanation=Explanation(many))
    back = pickle.loads(pickle.dumps(measurement))
    assert back.explanation == Explanation(many.kept())
    assert back.explanation.peak.total == 1000
