"""The judge: every outcome, the borders of tolerances, and for which outcomes a test fails."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from pytest_gpumem.base.units import parse_ratio
from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.metrics import METRICS, Tolerance
from pytest_gpumem.facts.values.composition import Composition, Explanation, Row
from pytest_gpumem.facts.values.step_peaks import StepPeaks
from pytest_gpumem.facts.values.times import Round, Sample, Times
from pytest_gpumem.facts.values.unknown_reads import UnknownReads
from pytest_gpumem.judging.baselines.update import ACCEPTS
from pytest_gpumem.judging.gate.baseline import Baseline, Budget, NoBaseline, baseline_of
from pytest_gpumem.judging.gate.changes import with_changes
from pytest_gpumem.judging.gate.difference import difference
from pytest_gpumem.judging.gate.failing import failing_outcomes
from pytest_gpumem.judging.gate.judge import emulated_tolerances, judge
from pytest_gpumem.judging.gate.notes import MOSTLY_WORKSPACES
from pytest_gpumem.judging.gate.verdict import MetricVerdict, Origin, Outcome, TestVerdict, Verdict
from pytest_gpumem.plugin.config.settings import DEFAULT_TOLERANCES
from pytest_gpumem.reporting.reports.failure import failure_text
from pytest_gpumem.reporting.reports.values import texts_of

unhurried = settings(deadline=None)
GB = 10**9
H100 = Environment("nvidia-h100-80gb-hbm3", "NVIDIA H100 80GB HBM3", {"torch": "2.11.0", "allocator": "default"})
TRAIN = Workload("train_step", "fp32", 1000, "int64[4, 256]")


def measured(environment=H100, workload=TRAIN, settled=True, notes=(), **metrics) -> Measurement:
    return Measurement("train_step", workload, environment, metrics, settled, notes)


def stored(environment=H100, workload=TRAIN, **metrics) -> Baseline:
    return Baseline(workload, environment, metrics, "2026-11-02", "abc1234")


def judged(measurement, baseline=None, **budget: float) -> Verdict:
    """The verdict with the default tolerances; ``budget`` is the most of each metric."""
    return with_changes(judge(measurement, Budget(budget), baseline, DEFAULT_TOLERANCES), baseline)


def outcome_of(measurement, budget=None, baseline=None, tolerances=DEFAULT_TOLERANCES, metric="peak_allocated"):
    return judge(measurement, budget or Budget(), baseline, tolerances).of(metric).outcome


# Nothing to judge by


def test_what_nobody_compares_and_nothing_limits_is_recorded():
    verdict = judged(measured(peak_allocated=GB))
    assert verdict.outcome is Outcome.RECORDED
    assert not verdict.gated
    assert (verdict.reason, verdict.origin, verdict.elsewhere) == (None, None, ())


def test_a_metric_without_a_tolerance_is_recorded_beside_its_baseline():
    verdict = judged(measured(peak_forward=2 * GB), stored(peak_forward=GB))
    assert verdict.metrics == (MetricVerdict("peak_forward", Outcome.RECORDED, 2 * GB, GB),)
    assert not verdict.gated


def test_every_metric_gets_a_verdict_in_the_order_of_the_table_of_metrics():
    values = dict.fromkeys(reversed(METRICS), 1)
    now = replace(measured(**values), times=Times((Sample((Round(1.0),)),)), work={"samples": 1})
    verdict = judged(now, stored(**values))
    assert [metric.metric for metric in verdict.metrics] == list(METRICS)


# Budgets


@pytest.mark.parametrize(("value", "outcome"), [(GB - 1, Outcome.OK), (GB, Outcome.OK), (GB + 1, Outcome.OVER_BUDGET)])
def test_a_budget_may_be_used_up_to_its_last_byte(value, outcome):
    verdict = judge(measured(peak_allocated=value), Budget({"peak_allocated": GB}), None, DEFAULT_TOLERANCES)
    assert verdict.metrics == (MetricVerdict("peak_allocated", outcome, value, budget=GB),)
    assert verdict.gated


@pytest.mark.parametrize("metric", ["peak_allocated", "peak_reserved", "retained"])
def test_each_budget_is_its_own_metrics(metric):
    values = {"peak_allocated": 6, "peak_reserved": 6, "retained": 6}
    verdict = judge(measured(**values), Budget({metric: 5}), None, DEFAULT_TOLERANCES)
    assert {one.metric: one.outcome for one in verdict.metrics if one.outcome is not Outcome.RECORDED} == {
        metric: Outcome.OVER_BUDGET
    }


def test_a_budget_of_a_metric_that_the_measurement_lacks_is_told_and_gates_nothing():
    now = measured(peak_allocated=6)
    verdict = judge(now, Budget({"peak_allocated": 8, "peak_reserved": GB}), None, DEFAULT_TOLERANCES)
    assert verdict.measurement.notes == (
        "max_reserved = 1.00 GB has no effect: there is no peak_reserved on NVIDIA H100 80GB HBM3",
    )
    assert [one.metric for one in verdict.metrics] == ["peak_allocated"]
    assert judge(now, Budget({"peak_allocated": 8}), None, DEFAULT_TOLERANCES).measurement.notes == ()


def test_a_budget_of_zero_bytes_is_a_budget():
    assert outcome_of(measured(retained=1), Budget({"retained": 0}), metric="retained") is Outcome.OVER_BUDGET
    assert outcome_of(measured(retained=0), Budget({"retained": 0}), metric="retained") is Outcome.OK


# Baselines


@pytest.mark.parametrize(
    ("beyond", "larger", "smaller"), [(1, Outcome.REGRESSED, Outcome.IMPROVED), (0, Outcome.OK, Outcome.OK)]
)
@pytest.mark.parametrize(("peak", "tolerated"), [(8 * GB, 40_000_000), (3_000_000, 64_000)])
def test_the_default_tolerance_of_a_peak_is_half_a_percent_or_64_kilobytes(peak, tolerated, beyond, larger, smaller):
    baseline, change = stored(peak_allocated=peak), tolerated + beyond
    assert outcome_of(measured(peak_allocated=peak + change), baseline=baseline) is larger
    assert outcome_of(measured(peak_allocated=peak - change), baseline=baseline) is smaller


@pytest.mark.parametrize(("now", "outcome"), [(0, Outcome.OK), (64_000, Outcome.OK), (64_001, Outcome.REGRESSED)])
def test_a_baseline_of_zero_has_the_absolute_tolerance(now, outcome):
    assert outcome_of(measured(retained=now), baseline=stored(retained=0), metric="retained") is outcome


def test_a_relative_tolerance_of_a_baseline_of_zero_is_no_byte():
    tolerances = {"retained": Tolerance(0.5)}
    now = measured(retained=1)
    assert outcome_of(now, baseline=stored(retained=0), tolerances=tolerances, metric="retained") is Outcome.REGRESSED


def test_a_compared_metric_names_its_baseline_the_origin_and_the_tolerance():
    baseline = replace(stored(peak_allocated=8 * GB), reason="flash attention off until #12")
    verdict = judged(measured(peak_allocated=9 * GB), baseline)
    assert verdict.metrics == (MetricVerdict("peak_allocated", Outcome.REGRESSED, 9 * GB, 8 * GB, 40_000_000),)
    assert verdict.origin == Origin("2026-11-02", H100.device, "2.11.0", "abc1234", "flash attention off until #12")
    assert verdict.gated


@unhurried
@given(
    tenths=st.integers(0, 1000).map(lambda tenths: f"{tenths / 10} %"),
    thousands=st.integers(0, 10**8),
    change=st.integers(-5, 5),
    better=st.booleans(),
)
def test_exactly_the_tolerated_change_is_ok_and_a_byte_more_is_not(tenths, thousands, change, better):
    # A tenth of a percent of a multiple of 1000 bytes is whole, so that there is no rounding to argue about.
    baseline = thousands * 1000
    allowed = round(float(tenths.removesuffix(" %")) * 10) * thousands
    assume(allowed + change >= 0)
    tolerances = {"peak_allocated": Tolerance(parse_ratio(tenths))}
    now = measured(peak_allocated=baseline - (allowed + change) if better else baseline + allowed + change)
    outcome = outcome_of(now, baseline=stored(peak_allocated=baseline), tolerances=tolerances)
    beyond = Outcome.IMPROVED if better else Outcome.REGRESSED
    assert outcome is (beyond if change > 0 else Outcome.OK)


@unhurried
@given(
    value=st.integers(0, 2**50),
    earlier=st.integers(0, 2**50),
    relative=st.floats(0, 1),
    absolute=st.integers(0, 2**30),
)
@example(value=0, earlier=8796093022209, relative=0.9999999999999999, absolute=0)
def test_a_change_beyond_the_tolerance_has_a_direction_and_one_within_has_none(value, earlier, relative, absolute):
    tolerances = {"peak_allocated": Tolerance(relative, absolute)}
    outcome = outcome_of(measured(peak_allocated=value), baseline=stored(peak_allocated=earlier), tolerances=tolerances)
    change, allowed = abs(value - earlier), max(relative * earlier, absolute)
    # Closer to the border than this it is rounding that decides.
    if change > allowed and not math.isclose(change, allowed, rel_tol=1e-12):
        assert outcome is (Outcome.REGRESSED if value > earlier else Outcome.IMPROVED)
    else:
        assert outcome is Outcome.OK


def test_a_metric_that_the_baseline_lacks_is_new_and_the_rest_is_compared():
    verdict = judged(measured(peak_allocated=GB, retained=0), stored(peak_allocated=GB))
    assert verdict.of("peak_allocated").outcome is Outcome.OK
    reason = "not compared: the baseline (2026-11-02, torch 2.11.0) has no retained; --gpumem-update=new adds it"
    assert verdict.of("retained") == MetricVerdict("retained", Outcome.NEW, 0, reason=reason)


def test_a_metric_that_may_not_be_added_to_the_baseline_says_what_replaces_that():
    earlier = stored(on(torch="2.10.0"), peak_allocated=GB)
    verdict = judged(measured(peak_allocated=GB, syncs=1), earlier)
    assert verdict.of("syncs").reason == (
        "not compared: the baseline (2026-11-02, torch 2.10.0) has no syncs; "
        "--gpumem-update=all replaces the baseline, because it was recorded in another environment"
    )


def test_what_the_baseline_has_and_the_measurement_lacks_is_noted():
    earlier = stored(peak_allocated=GB, flops=5, launches=3, step_time=0.1, peak_forward=GB)
    verdict = judged(measured(peak_allocated=2 * GB), earlier)
    assert verdict.measurement.notes == (
        "not compared: FLOPs, which the baseline has, could not be measured",
        "not compared: kernel launches, which the baseline has, could not be measured",
    )
    assert judged(measured(peak_allocated=GB)).measurement.notes == ()


def test_what_is_not_compared_between_an_emulated_gpu_and_a_real_one_is_noted():
    now = measured(peak_allocated=GB, launches=3)
    verdict = judge(now, Budget(), stored(peak_allocated=GB, launches=5), emulated_tolerances(DEFAULT_TOLERANCES))
    assert verdict.of("launches").outcome is Outcome.RECORDED
    assert verdict.measurement.notes == (
        "not compared: kernel launches of an emulated GPU, which cannot be compared with a real GPU's",
    )


# Budget and baseline together


@pytest.mark.parametrize(
    ("now", "outcome"),
    [(7 * GB, Outcome.IMPROVED), (8 * GB, Outcome.OK), (9 * GB, Outcome.REGRESSED), (11 * GB, Outcome.OVER_BUDGET)],
)
def test_a_metric_is_held_to_its_budget_first_and_then_to_its_baseline(now, outcome):
    verdict = judged(measured(peak_allocated=now), stored(peak_allocated=8 * GB), peak_allocated=10 * GB)
    metric = verdict.of("peak_allocated")
    assert (metric.outcome, metric.baseline, metric.budget) == (outcome, 8 * GB, 10 * GB)


def test_a_budget_holds_where_there_is_no_baseline_or_a_stale_one():
    stale = stored(workload=replace(TRAIN, parameters=999), peak_allocated=GB)
    for baseline in (NoBaseline(), stale):
        assert judged(measured(peak_allocated=2), baseline, peak_allocated=1).outcome is Outcome.OVER_BUDGET
    within = judged(measured(peak_allocated=1), NoBaseline(), peak_allocated=1)
    assert (within.outcome, within.gated) == (Outcome.NEW, True)


# What cannot be compared


def test_a_measurement_without_a_baseline_is_new_and_says_so():
    verdict = judged(measured(peak_allocated=GB, peak_forward=GB), NoBaseline())
    assert [metric.outcome for metric in verdict.metrics] == [Outcome.NEW, Outcome.RECORDED]
    assert verdict.reason == "there is no baseline for NVIDIA H100 80GB HBM3 yet"
    assert not verdict.gated


def test_a_measurement_with_baselines_on_other_devices_is_foreign_and_names_them():
    elsewhere = ("NVIDIA A100", "NVIDIA B200")
    verdict = judged(measured(peak_allocated=GB), NoBaseline(elsewhere))
    assert verdict.outcome is Outcome.FOREIGN
    assert verdict.reason == "there are baselines for NVIDIA A100, NVIDIA B200, but this is NVIDIA H100 80GB HBM3"
    assert verdict.elsewhere == elsewhere
    assert not verdict.gated


@pytest.mark.parametrize(
    ("earlier", "sentence"),
    [
        ({"batch": "int64[8, 256]"}, "batch int64[4, 256], was int64[8, 256]"),
        ({"parameters": 790_000}, "parameters 1.00 k, were 790.00 k"),
        ({"parameters": 1001}, "parameters 1,000, were 1,001"),
        ({"config": "amp-bf16"}, "config fp32, was amp-bf16"),
        ({"step": "infer_step"}, "step train_step, was infer_step"),
        ({"batch": None}, "batch int64[4, 256], was none"),
        ({"parameters": 999, "batch": "int64[8]"}, "parameters 1.00 k, were 999; batch int64[4, 256], was int64[8]"),
    ],
)
def test_another_workload_that_did_not_grow_is_stale_with_a_sentence(earlier, sentence):
    then = stored(workload=replace(TRAIN, **earlier), peak_allocated=GB, operators=5)
    verdict = judged(measured(peak_allocated=GB, operators=9), then)
    assert {metric.outcome for metric in verdict.metrics} == {Outcome.STALE}
    assert verdict.reason == sentence
    assert not verdict.gated
    assert verdict.origin is not None


LARGER = Workload("train_step", "fp32", 4000, "int64[4, 256]")


def test_another_workload_that_grew_has_regressed_for_what_changed_in_it():
    now = measured(workload=LARGER, peak_allocated=1.006 * GB, retained=0, operators=9)
    earlier = stored(peak_allocated=GB, retained=0, operators=5)
    verdict = judged(now, earlier)
    assert {metric.metric: metric.outcome for metric in verdict.metrics} == {
        "peak_allocated": Outcome.REGRESSED,
        "retained": Outcome.STALE,
        "operators": Outcome.STALE,
    }
    assert verdict.of("peak_allocated").baseline == GB
    assert verdict.reason == "parameters 4.00 k, were 1.00 k"
    assert verdict.gated


@pytest.mark.parametrize(
    "metric", [name for name, metric in METRICS.items() if metric.unit == "bytes" and metric.tolerance]
)
def test_no_metric_in_bytes_hides_behind_another_workload(metric):
    now, earlier = measured(workload=LARGER, **{metric: 9 * GB}), stored(**{metric: GB})
    assert outcome_of(now, baseline=earlier, metric=metric) is Outcome.REGRESSED


def test_another_workload_without_growth_is_stale_and_no_improvement():
    for peak in (1.005 * GB, GB // 2):
        now = measured(workload=LARGER, peak_allocated=peak)
        assert outcome_of(now, baseline=stored(peak_allocated=GB)) is Outcome.STALE


def test_what_grew_with_another_workload_is_told():
    now = replace(measured(workload=LARGER, peak_allocated=2 * GB), explanation=Explanation(NOW))
    then = replace(stored(peak_allocated=GB), composition=THEN)
    assert judged(now, then).difference == difference(THEN, NOW)


# Imbalance over ranks

JOB, PROCESS = Workload("launch"), Workload("process")


@pytest.mark.parametrize(
    ("now", "outcome"),
    [(1.0, Outcome.IMPROVED), (1.24, Outcome.OK), (1.275, Outcome.OK), (1.276, Outcome.REGRESSED)],
)
def test_imbalance_may_grow_by_two_percent(now, outcome):
    earlier = stored(workload=JOB, peak_allocated=GB, imbalance=1.25)
    assert outcome_of(measured(workload=JOB, imbalance=now), baseline=earlier, metric="imbalance") is outcome


@settings(deadline=None)
@given(st.lists(st.integers(6_500_000, 80 * GB), min_size=2, max_size=4), st.data())
def test_ranks_whose_peaks_are_ok_have_an_imbalance_that_is_ok(peaks, data):
    tolerance = METRICS["peak_allocated"].tolerance
    changes = [int(tolerance.allowed(peak)) for peak in peaks]
    current = [peak + data.draw(st.integers(-most, most)) for peak, most in zip(peaks, changes, strict=True)]
    before, now = (float(f"{max(ranks) / min(ranks):.4g}") for ranks in (peaks, current))
    one = measured(workload=JOB, peak_allocated=GB, imbalance=now)
    earlier = stored(workload=JOB, peak_allocated=GB, imbalance=before)
    assert outcome_of(one, baseline=earlier, metric="imbalance") is Outcome.OK


def test_a_job_with_an_older_baseline_is_new_in_its_imbalance_and_passes_a_gate():
    now = measured(workload=JOB, peak_allocated=GB, imbalance=1.5)
    verdict = judged(now, stored(workload=JOB, peak_allocated=GB))
    assert [metric.outcome for metric in verdict.metrics] == [Outcome.OK, Outcome.NEW]
    assert verdict.of("imbalance").reason.endswith("has no imbalance over ranks; --gpumem-update=new adds it")
    test = TestVerdict("test_it.py", "test_job", (verdict,))
    assert not failing_outcomes(test, strict=False, compares=True, accepts=frozenset())


def test_a_job_that_no_longer_has_ranks_says_that_its_imbalance_is_not_compared():
    now = measured(workload=JOB, peak_allocated=GB)
    verdict = judged(now, stored(workload=JOB, peak_allocated=GB, imbalance=1.5))
    assert verdict.measurement.notes == (
        "not compared: imbalance over ranks, which the baseline has, could not be measured",
    )


def test_a_budget_limits_the_imbalance_of_a_job_and_says_where_it_limits_nothing():
    job = judged(measured(workload=JOB, peak_allocated=GB, imbalance=1.21), imbalance=1.2)
    assert job.of("imbalance") == MetricVerdict("imbalance", Outcome.OVER_BUDGET, 1.21, budget=1.2)
    process = judged(measured(workload=PROCESS, peak_allocated=GB), imbalance=1.2)
    assert process.measurement.notes == ()
    assert judged(measured(peak_allocated=GB), imbalance=1.2).measurement.notes == (
        "max_imbalance = 1.20 has no effect: only a launched job with at least two ranks has imbalance",
    )


# Growth per step


@pytest.mark.parametrize(
    ("now", "outcome"),
    [(1024, Outcome.OK), (1025, Outcome.REGRESSED)],
    ids=["some scalars", "more"],
)
@pytest.mark.parametrize("earlier", [{}, {"growth": 0}], ids=["an older baseline", "a baseline without growth"])
def test_a_step_that_keeps_more_than_some_scalars_has_regressed(now, outcome, earlier):
    assert outcome_of(measured(growth=now), baseline=stored(**earlier), metric="growth") is outcome


def test_growth_that_was_accepted_is_ok_and_more_of_it_is_not():
    assert outcome_of(measured(growth=GB), baseline=stored(growth=GB), metric="growth") is Outcome.OK
    assert outcome_of(measured(growth=GB + 1025), baseline=stored(growth=GB), metric="growth") is Outcome.REGRESSED
    assert outcome_of(measured(growth=0), baseline=stored(growth=GB), metric="growth") is Outcome.IMPROVED


def test_some_scalars_a_step_are_no_reason_for_a_peak_that_does_not_settle():
    now = measured(settled=False, notes=("it moved",), peak_allocated=1.2 * GB, growth=4)
    assert outcome_of(now, baseline=stored(peak_allocated=GB)) is Outcome.UNCERTAIN


def test_a_peak_that_grows_with_every_step_is_not_doubted_for_not_settling():
    now = measured(settled=False, notes=("it grew",), peak_allocated=1.2 * GB, growth=GB // 50)
    assert outcome_of(now, baseline=stored(peak_allocated=GB)) is Outcome.REGRESSED


# Doubt


def on(**details) -> Environment:
    return Environment(H100.slug, H100.device, details)


def test_a_peak_that_grew_on_another_cpu_is_uncertain_up_to_what_that_explains():
    here, earlier = on(cpu_capability="AVX512"), stored(on(cpu_capability="AVX2"), peak_allocated=GB)
    assert outcome_of(measured(here, peak_allocated=1.41 * GB), baseline=earlier) is Outcome.REGRESSED
    metric = judged(measured(here, peak_allocated=1.3 * GB), earlier).of("peak_allocated")
    assert metric.outcome is Outcome.UNCERTAIN
    assert metric.reason == "cpu_capability was AVX2, now AVX512, which can change bytes without a code change"
    assert metric.gated


def test_a_lower_peak_on_another_cpu_improved_perhaps_because_of_the_cpu():
    here, earlier = on(cpu_capability="AVX2"), stored(on(cpu_capability="AVX512"), peak_allocated=GB)
    metric = judged(measured(here, peak_allocated=0.9 * GB), earlier).of("peak_allocated")
    assert metric.outcome is Outcome.IMPROVED
    assert metric.reason == "cpu_capability was AVX512, now AVX2, which can change bytes without a code change"
    same = judged(measured(on(cpu_capability="AVX512"), peak_allocated=0.9 * GB), earlier).of("peak_allocated")
    assert (same.outcome, same.reason) == (Outcome.IMPROVED, None)


def test_under_another_allocator_growth_of_reserved_memory_alone_is_uncertain():
    now = measured(on(allocator="expandable_segments:True"), peak_allocated=2 * GB, peak_reserved=1.3 * GB)
    verdict = judged(now, stored(on(allocator="default"), peak_allocated=GB, peak_reserved=GB))
    assert verdict.of("peak_allocated").outcome is Outcome.REGRESSED
    assert verdict.of("peak_reserved").outcome is Outcome.UNCERTAIN
    assert verdict.outcome is Outcome.REGRESSED


@pytest.mark.parametrize(
    ("metric", "now", "here", "there"),
    [
        ("peak_allocated", 9 * GB, "none", "9.20.0"),
        ("peak_allocated", 0.1 * GB, "9.20.0", "none"),
        ("peak_reserved", 9 * GB, "9.21.0", "9.20.0"),
    ],
)
def test_no_change_of_a_peak_means_anything_where_another_cudnn_planned(metric, now, here, there):
    earlier = stored(on(emulated_cudnn=there), **{metric: GB})
    found = judged(measured(on(emulated_cudnn=here), **{metric: now}), earlier).of(metric)
    assert found.outcome is Outcome.UNCERTAIN
    assert found.reason.startswith(f"emulated_cudnn was {there}, now {here}, which can change bytes ")


def test_another_workload_that_needs_less_is_stale_also_where_another_cudnn_planned():
    now = measured(on(emulated_cudnn="none"), Workload("call", batch="int64[8]"), peak_allocated=GB // 2)
    assert outcome_of(now, baseline=stored(on(emulated_cudnn="9.20.0"), peak_allocated=GB)) is Outcome.STALE


@pytest.mark.parametrize(
    ("here", "there", "now", "outcome"),
    [
        ({"emulated_cudnn": "none"}, {"emulated_cudnn": "none"}, 2 * GB, Outcome.REGRESSED),
        ({"emulated_cudnn": "9.20.0"}, {}, 2 * GB, Outcome.REGRESSED),
        ({}, {"emulated_cudnn": "9.20.0"}, GB / 2, Outcome.IMPROVED),
        ({"emulated_cudnn": "none"}, {"emulated_cudnn": "9.20.0"}, GB, Outcome.OK),
    ],
)
def test_a_cudnn_that_is_the_same_or_on_one_side_only_excuses_nothing(here, there, now, outcome):
    baseline = stored(environment=on(**there), peak_allocated=GB)
    assert outcome_of(measured(environment=on(**here), peak_allocated=now), baseline=baseline) is outcome


def test_other_metrics_are_compared_whichever_cudnn_it_was():
    baseline = stored(environment=on(cudnn="9.20.0"), retained=0)
    now = measured(environment=on(cudnn="none"), retained=10**6)
    assert outcome_of(now, baseline=baseline, metric="retained") is Outcome.REGRESSED


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ({"cpu_capability": "AVX2"}, {"cpu_capability": "AVX2"}),
        ({"cpu_capability": "AVX2"}, {}),
        ({}, {"torch": "1"}),
        ({"torch": "2.13.0"}, {"torch": "2.11.0"}),
    ],
)
def test_growth_is_not_excused_by_what_is_the_same_or_unknown_nor_by_a_newer_torch(here, there):
    now = measured(environment=on(**here), peak_allocated=2 * GB)
    assert outcome_of(now, baseline=stored(environment=on(**there), peak_allocated=GB)) is Outcome.REGRESSED


def test_a_peak_that_did_not_settle_is_uncertain_when_it_grew():
    note = "peaks of 6 warm-up steps moved from 1 to 6 bytes"
    now = measured(settled=False, notes=(note,), peak_allocated=1.2 * GB)
    metric = judged(now, stored(peak_allocated=GB)).of("peak_allocated")
    assert metric.outcome is Outcome.UNCERTAIN
    assert metric.reason == f"the step's peak did not settle: {note}"


def of_steps(*peaks: int, first: tuple[int, ...] = ()) -> Measurement:
    """A measurement whose steps had these peaks in GB, after some first ones that build state."""
    allocated = tuple(int(peak * GB) for peak in (*first, *peaks))
    alike = len({*peaks}) == 1
    return replace(
        measured(settled=alike, peak_allocated=int(max(peaks) * GB)),
        step_peaks=StepPeaks(allocated, left_out=len(first)),
    )


def stored_steps(*peaks: float) -> Baseline:
    return replace(
        stored(peak_allocated=int(max(peaks) * GB)),
        step_peaks=tuple(int(peak * GB) for peak in peaks) if len({*peaks}) > 1 else (),
    )


@pytest.mark.parametrize(
    ("then", "now", "outcome"),
    [
        pytest.param((1, 1, 1), (1, 1.1, 1), Outcome.REGRESSED, id="a spike that is new"),
        pytest.param((1, 1.1, 1), (1.1, 1, 1.1), Outcome.OK, id="a spike at another step"),
        pytest.param((1, 3, 2), (1.1, 3.3, 2.2), Outcome.REGRESSED, id="each step needs more, in the same order"),
        pytest.param((1, 3, 2), (1, 3.3, 2), Outcome.REGRESSED, id="the highest step needs more, in the same order"),
        pytest.param((1, 3, 2), (3.3, 1, 2), Outcome.UNCERTAIN, id="in another order"),
        pytest.param((1, 3, 2), (5.1, 1, 2), Outcome.REGRESSED, id="by more than the steps differed"),
        pytest.param((2, 3, 2), (3.1, 3.2, 3.1), Outcome.REGRESSED, id="the lowest is above the highest of before"),
        pytest.param((1, 3, 2), (3.3, 3.2, 2), Outcome.REGRESSED, id="each needs more, and another is the highest"),
        pytest.param((1, 3, 2), (2, 1, 2.5), Outcome.OK, id="less in another order"),
        pytest.param((1, 3, 2), (1, 2.5, 2), Outcome.IMPROVED, id="less in the same order"),
        pytest.param((1, 3, 2), (1, 1, 1), Outcome.IMPROVED, id="steps that are alike now"),
        pytest.param((1, 3, 2), (1, 3, 2, 3.3), Outcome.UNCERTAIN, id="a higher one in more steps than before"),
        pytest.param((1, 3, 2), (1, 3.3), Outcome.REGRESSED, id="a higher one in fewer steps than before"),
        pytest.param((1, 3, 2), (1, 3, 2), Outcome.OK, id="the same"),
    ],
)
def test_of_steps_that_differ_the_highest_is_judged_where_it_is_no_chance(then, now, outcome):
    assert outcome_of(of_steps(*now), baseline=stored_steps(*then)) is outcome


def test_how_steps_differ_is_told_with_the_verdict():
    verdict = judged(of_steps(1, 3.3, 2), stored_steps(1, 3, 2))
    assert verdict.of("peak_allocated").reason == (
        "peaks differ from step to step: between 1.00 GB and 3.30 GB in 3 steps, median 2.00 GB; "
        "in the baseline between 1.00 GB and 3.00 GB in 3 steps, median 2.00 GB"
    )
    spike = judged(of_steps(1, 3, 1), stored_steps(1, 1))
    assert spike.of("peak_allocated").reason.endswith(
        " in 3 steps, median 1.00 GB; in the baseline all steps have the same peak"
    )
    chance = judged(of_steps(3.3, 1, 2), stored_steps(1, 3, 2))
    assert chance.of("peak_allocated").reason.endswith(
        ": this may be chance, unless a fixed seed makes each step equal in every run"
    )


@pytest.mark.parametrize("metric", ["peak_allocated", "peak_reserved"])
def test_a_budget_holds_the_first_steps_too(metric):
    measurement = of_steps(1, 1, 1, first=(1, 4))
    peaks = replace(measurement.step_peaks, reserved=measurement.step_peaks.allocated)
    measurement = replace(measurement, metrics={"peak_allocated": GB, metric: GB}, step_peaks=peaks)
    earlier = stored(**measurement.metrics)
    found = judge(measurement, Budget({metric: 2 * GB}), earlier, DEFAULT_TOLERANCES).of(metric)
    assert (found.outcome, found.value) == (Outcome.OVER_BUDGET, 4 * GB)
    within = judge(measurement, Budget({metric: 4 * GB}), earlier, DEFAULT_TOLERANCES).of(metric)
    assert (within.outcome, within.value) == (Outcome.OK, GB)


def test_a_leak_is_a_leak_also_when_the_peak_did_not_settle():
    now = measured(settled=False, notes=("it moved",), retained=GB)
    assert outcome_of(now, baseline=stored(retained=0), metric="retained") is Outcome.REGRESSED


@pytest.mark.parametrize(("now", "outcome"), [(GB, Outcome.OK), (GB // 2, Outcome.IMPROVED)])
def test_doubt_is_only_about_changes_for_the_worse(now, outcome):
    measurement = measured(environment=on(cpu_capability="AVX512"), settled=False, peak_allocated=now)
    baseline = stored(environment=on(cpu_capability="AVX2"), peak_allocated=GB)
    assert outcome_of(measurement, baseline=baseline) is outcome


# Counts


COUNTS = ("flops", "operators", "syncs", "launches")


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("more", "outcome"), [(1, Outcome.REGRESSED), (0, Outcome.OK), (-1, Outcome.IMPROVED)])
def test_a_count_may_not_grow_by_one_and_has_improved_by_one_less(count, more, outcome):
    measurement = measured(peak_allocated=1, **{count: 10**9 + more})
    assert outcome_of(measurement, baseline=stored(peak_allocated=1, **{count: 10**9}), metric=count) is outcome


def test_the_first_sync_is_one_too_many():
    measurement, baseline = measured(peak_allocated=1, syncs=1), stored(peak_allocated=1, syncs=0)
    assert outcome_of(measurement, baseline=baseline, metric="syncs") is Outcome.REGRESSED


@pytest.mark.parametrize("count", ["flops", "launches"])
def test_a_count_that_grew_by_however_much_under_another_torch_is_uncertain(count):
    here, there = on(torch="2.14.0"), on(torch="2.13.0")
    measurement = measured(here, peak_allocated=GB, **{count: 5})
    verdict = judged(measurement, stored(there, peak_allocated=GB, **{count: 0}))
    assert verdict.of(count).outcome is Outcome.UNCERTAIN
    assert verdict.of(count).reason == "torch was 2.13.0, now 2.14.0, which can change counts without a code change"


def test_a_count_of_a_step_whose_peak_did_not_settle_is_judged():
    measurement = measured(settled=False, notes=("it moved",), peak_allocated=1.2 * GB, operators=5)
    verdict = judged(measurement, stored(peak_allocated=GB, operators=4))
    outcomes = {one.metric: one.outcome for one in verdict.metrics}
    assert outcomes == {"peak_allocated": Outcome.UNCERTAIN, "operators": Outcome.REGRESSED}


@pytest.mark.parametrize(("lowest", "outcome"), [(4, Outcome.UNCERTAIN), (5, Outcome.REGRESSED)])
def test_of_a_count_that_varied_the_smallest_is_held_against_the_baseline(lowest, outcome):
    now = replace(measured(peak_allocated=1.2 * GB, operators=1042), lowest_counts={"operators": lowest})
    verdict = judged(now, stored(peak_allocated=GB, operators=4))
    assert verdict.of("operators").outcome is outcome
    assert verdict.of("peak_allocated").outcome is Outcome.REGRESSED
    if outcome is Outcome.UNCERTAIN:
        assert verdict.of("operators").reason == "operators between 4 and 1,042 from step to step"


def test_a_budget_knows_no_doubt():
    now = measured(settled=False, peak_allocated=2 * GB)
    assert outcome_of(now, Budget({"peak_allocated": GB}), stored(peak_allocated=GB)) is Outcome.OVER_BUDGET


# What grew

THEN = Composition(GB, (Row("parameter", GB, "wte"),))
NOW = Composition(2 * GB, (Row("parameter", GB, "wte"), Row("activation", GB, "h", "model.py:88")))


def test_where_both_sides_have_a_composition_a_verdict_says_what_changed():
    now = replace(measured(peak_allocated=2 * GB), explanation=Explanation(NOW))
    then = replace(stored(peak_allocated=GB), composition=THEN)
    verdict = judged(now, then)
    assert verdict.difference == difference(THEN, NOW)
    assert [change.row for change in verdict.difference.changes] == [NOW.rows[0]]


@pytest.mark.parametrize(
    ("budget", "peak"),
    [(Budget(), GB), (Budget(), 2 * GB), (Budget({"peak_allocated": 1}), 2 * GB)],
    ids=["the same", "grown", "over budget"],
)
def test_a_composition_changes_no_outcome(budget, peak):
    plain, then = measured(peak_allocated=peak), stored(peak_allocated=GB)
    composed = judge(
        replace(plain, explanation=Explanation(NOW)), budget, replace(then, composition=THEN), DEFAULT_TOLERANCES
    )
    assert composed.metrics == judge(plain, budget, then, DEFAULT_TOLERANCES).metrics


@pytest.mark.parametrize(
    ("baseline", "now"),
    [
        (None, NOW),
        (NoBaseline(), NOW),
        (NoBaseline(("NVIDIA A100",)), NOW),
        (stored(peak_allocated=GB), NOW),
        (replace(stored(peak_allocated=GB), composition=THEN), None),
    ],
    ids=["nobody compares", "new", "foreign", "not recorded then", "not recorded now"],
)
def test_without_two_compositions_to_compare_nothing_is_said_to_have_grown(baseline, now):
    measurement = replace(measured(peak_allocated=2 * GB), explanation=now and Explanation(now))
    assert judged(measurement, baseline).difference is None


# For which outcomes a test fails


def verdict_with(*outcomes: Outcome) -> TestVerdict:
    """A test with one measurement that has a metric of each outcome."""
    metrics = tuple(MetricVerdict(name, outcome, 1) for name, outcome in zip(METRICS, outcomes, strict=False))
    return TestVerdict("tests/test_gpt.py", "test_a", (Verdict(measured(peak_allocated=1), metrics),))


NOT_MEASURED = TestVerdict("tests/test_gpt.py", "test_a", unmeasured="no CUDA device")
NOTHING = frozenset()
SEEN = [outcome for outcome in Outcome if outcome not in (Outcome.UNMEASURED, Outcome.MISSING)]
"""Those of metrics."""


def failing(
    verdict: TestVerdict, *, strict: bool = False, compares: bool = True, accepts=NOTHING
) -> frozenset[Outcome]:
    return failing_outcomes(verdict, strict=strict, compares=compares, accepts=accepts)


def failing_alone(*, strict: bool, compares: bool) -> set[Outcome]:
    """The outcomes with which a test fails that has only one."""
    return set().union(*(failing(verdict_with(outcome), strict=strict, compares=compares) for outcome in SEEN))


def test_with_the_gate_a_test_fails_when_it_regressed_or_is_over_budget():
    assert failing_alone(strict=False, compares=True) == {Outcome.REGRESSED, Outcome.OVER_BUDGET}


@pytest.mark.parametrize("unmeasured", [None, "another profiler was active"])
def test_a_test_fails_that_does_not_take_a_measurement_any_more(unmeasured):
    verdict = replace(verdict_with(Outcome.OK), missing=("eval",), unmeasured=unmeasured)
    assert failing(verdict) == {Outcome.MISSING}
    assert failing(verdict, compares=False) == NOTHING


def test_an_update_mends_what_is_missing_unless_nothing_was_measured():
    accepts = ACCEPTS["all"]
    renamed = replace(verdict_with(Outcome.OK), missing=("eval",))
    assert failing(renamed, accepts=accepts) == NOTHING
    relations = TestVerdict("tests/test_gpt.py", "test_a", relations=1, missing=("eval",))
    assert failing(relations, accepts=accepts) == {Outcome.MISSING}
    spoiled = replace(NOT_MEASURED, missing=("eval",))
    assert failing(spoiled, accepts=accepts) == {Outcome.MISSING}


def test_without_the_gate_a_test_fails_only_when_it_is_over_budget():
    assert failing_alone(strict=False, compares=False) == {Outcome.OVER_BUDGET}


@pytest.mark.parametrize("compares", [True, False])
def test_strictly_a_test_fails_on_everything_but_ok_and_improved(compares):
    assert failing_alone(strict=True, compares=compares) == set(SEEN) - {Outcome.OK, Outcome.IMPROVED}


def test_strictly_a_metric_that_is_only_recorded_beside_a_gated_one_is_fine():
    verdict = verdict_with(Outcome.OK, Outcome.RECORDED)
    assert failing(verdict, strict=True) == NOTHING


def test_strictly_a_test_fails_in_which_an_uncomputed_value_decided_a_branch():
    sure = verdict_with(Outcome.OK)
    measurement = replace(sure.verdicts[0].measurement, notes=UnknownReads({"train.py:88": 1}).notes())
    verdict = replace(sure, verdicts=(replace(sure.verdicts[0], measurement=measurement),))
    assert failing(verdict, strict=True) == {Outcome.UNCERTAIN}
    assert failing(verdict) == NOTHING
    assert failure_text(verdict, frozenset({Outcome.UNCERTAIN}), "si").startswith(
        "Not certain (required by --gpumem-strict): an uncomputed value decided a branch at train.py:88\n"
    )
    for harmless in (UnknownReads(other={"train.py:88": 1}), UnknownReads(routed={"balanced": "moe.py:72"})):
        logged = replace(measurement, notes=harmless.notes())
        verdict = replace(sure, verdicts=(replace(sure.verdicts[0], measurement=logged),))
        assert failing(verdict, strict=True) == NOTHING


def test_strictly_a_test_that_was_not_measured_fails():
    assert failing(NOT_MEASURED, strict=True) == {Outcome.UNMEASURED}


@pytest.mark.parametrize("compares", [True, False])
def test_otherwise_a_test_that_was_not_measured_does_not_fail(compares):
    assert failing(NOT_MEASURED, compares=compares) == NOTHING


def test_strictly_a_test_without_any_measurement_fails():
    verdict = TestVerdict("tests/test_gpt.py", "test_a")
    assert failing(verdict, strict=True)


@unhurried
@given(
    outcomes=st.lists(st.sampled_from(SEEN), min_size=1, max_size=5),
    strict=st.booleans(),
    compares=st.booleans(),
    accepts=st.frozensets(st.sampled_from(SEEN)),
)
def test_what_an_update_accepts_never_fails_and_takes_nothing_else_with_it(outcomes, strict, compares, accepts):
    verdict = verdict_with(*outcomes)
    without = failing(verdict, strict=strict, compares=compares)
    assert failing(verdict, strict=strict, compares=compares, accepts=accepts) == without - accepts


def test_every_outcome_of_any_measurement_of_a_test_counts():
    fine, bad = verdict_with(Outcome.OK).verdicts, verdict_with(Outcome.REGRESSED).verdicts
    verdict = TestVerdict("tests/test_gpt.py", "test_a", (*fine, *bad, *fine))
    assert failing(verdict) == {Outcome.REGRESSED}


# Several GPUs


def on_gpus(**peaks) -> Measurement:
    """A measurement of a process that sees several GPUs: the peak of each, and what it keeps (0)."""
    by_device = {f"cuda:{name[1:]}": {"peak_allocated": peak, "retained": 0} for name, peak in peaks.items()}
    return replace(measured(peak_allocated=max(peaks.values()), retained=0), by_device=by_device)


def stored_on(**peaks) -> Baseline:
    return baseline_of(on_gpus(**peaks), "2026-11-02", None)


def on_gpus_verdict(now, baseline, budget=None) -> MetricVerdict:
    found = judge(now, budget or Budget(), baseline, DEFAULT_TOLERANCES).of("peak_allocated")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("now", "then", "outcome", "gpu"),
    [
        ({"g0": 3 * GB, "g1": 2 * GB}, {"g0": 3 * GB, "g1": 2 * GB}, Outcome.OK, "cuda:0"),
        ({"g0": 3 * GB, "g1": 4 * GB}, {"g0": 3 * GB, "g1": 2 * GB}, Outcome.REGRESSED, "cuda:1"),
        # The largest peak stays as it is, or even falls.
        ({"g0": 3 * GB, "g1": int(2.5 * GB)}, {"g0": 3 * GB, "g1": 2 * GB}, Outcome.REGRESSED, "cuda:1"),
        ({"g0": int(2.6 * GB), "g1": int(2.5 * GB)}, {"g0": 3 * GB, "g1": 2 * GB}, Outcome.REGRESSED, "cuda:1"),
        ({"g0": 2 * GB, "g1": 2 * GB}, {"g0": 3 * GB, "g1": 2 * GB}, Outcome.IMPROVED, "cuda:0"),
        # The two have changed places, one is new, one is gone.
        ({"g0": 2 * GB, "g1": 3 * GB}, {"g0": 3 * GB, "g1": 2 * GB}, Outcome.REGRESSED, "cuda:1"),
        ({"g1": 3 * GB}, {"g0": 3 * GB, "g1": 2 * GB}, Outcome.REGRESSED, "cuda:1"),
        ({"g0": 3 * GB, "g1": 2 * GB}, {"g0": 3 * GB}, Outcome.REGRESSED, "cuda:1"),
        ({"g0": 3 * GB}, {"g0": 3 * GB, "g1": 2 * GB}, Outcome.OK, "cuda:0"),
        # Of one GPU each, whichever it is.
        ({"g1": 3 * GB}, {"g0": 3 * GB}, Outcome.OK, None),
        ({"g1": 4 * GB}, {"g0": 3 * GB}, Outcome.REGRESSED, None),
    ],
)
def test_a_peak_has_regressed_where_that_of_any_gpu_has_and_the_gpu_is_named(now, then, outcome, gpu):
    found = on_gpus_verdict(on_gpus(**now), stored_on(**then))
    assert (found.outcome, found.gpu) == (outcome, gpu)


@given(
    now=st.lists(st.integers(1, 4).map(lambda n: n * GB), min_size=2, max_size=3),
    then=st.lists(st.integers(1, 4).map(lambda n: n * GB), min_size=2, max_size=3),
)
@unhurried
def test_what_grew_on_any_gpu_is_never_green(now, then):
    gpus = [{f"g{n}": peak for n, peak in enumerate(peaks)} for peaks in (now, then)]
    grew = {f"cuda:{name[1:]}" for name, peak in gpus[0].items() if peak > gpus[1].get(name, 0)}
    found = on_gpus_verdict(on_gpus(**gpus[0]), stored_on(**gpus[1]))
    assert (found.outcome is Outcome.REGRESSED) == bool(grew)
    assert found.outcome is not Outcome.REGRESSED or found.gpu in grew


def test_a_baseline_of_an_older_version_is_that_of_the_largest_gpu_alone():
    grown = on_gpus_verdict(on_gpus(g0=2 * GB, g1=4 * GB), stored(peak_allocated=4 * GB))
    assert (grown.outcome, grown.gpu, grown.baseline) == (Outcome.REGRESSED, "cuda:0", 0)
    assert grown.reason == "the baseline has no bytes on cuda:0"
    little = on_gpus_verdict(on_gpus(g0=1000, g1=4 * GB), stored(peak_allocated=4 * GB))
    assert (little.outcome, little.gpu) == (Outcome.OK, "cuda:1")


def test_without_bytes_of_single_gpus_the_largest_of_the_baseline_counts():
    assert on_gpus_verdict(measured(peak_allocated=3 * GB), stored_on(g0=3 * GB, g1=2 * GB)).outcome is Outcome.OK
    worse = on_gpus_verdict(measured(peak_allocated=4 * GB), stored_on(g0=3 * GB, g1=2 * GB))
    assert (worse.outcome, worse.gpu) == (Outcome.REGRESSED, None)


@pytest.mark.parametrize(
    ("lowest", "outcome", "smaller"),
    [(2 * GB, Outcome.UNCERTAIN, True), (2.2 * GB, Outcome.REGRESSED, True), (2.2 * GB, Outcome.REGRESSED, False)],
)
def test_the_steps_of_each_gpu_are_held_against_its_own_of_before(lowest, outcome, smaller):
    here = 3 * GB if smaller else 2 * GB
    most = int(2.5 * GB)
    now = replace(
        on_gpus(g0=here, g1=most),
        settled=False,
        # On each GPU another step may have the highest peak, so that no step has both.
        step_peaks_by_device={"cuda:0": StepPeaks((here, here)), "cuda:1": StepPeaks((most, int(lowest)))},
    )
    earlier = replace(stored_on(g0=here, g1=2.1 * GB), step_peaks_by_device={"cuda:1": (int(1.5 * GB), int(2.1 * GB))})
    found = on_gpus_verdict(now, earlier)
    assert (found.outcome, found.gpu) == (outcome, "cuda:1")


def test_a_budget_holds_for_each_gpu_and_the_worst_is_named():
    found = on_gpus_verdict(on_gpus(g0=3 * GB, g1=5 * GB, g2=4 * GB), None, Budget({"peak_allocated": 3 * GB}))
    assert (found.outcome, found.gpu, found.value) == (Outcome.OVER_BUDGET, "cuda:1", 5 * GB)
    fits = on_gpus_verdict(on_gpus(g0=3 * GB, g1=2 * GB), None, Budget({"peak_allocated": 3 * GB}))
    assert (fits.outcome, fits.gpu, fits.value) == (Outcome.OK, "cuda:0", 3 * GB)


@pytest.mark.parametrize(
    ("held", "outcome", "value"),
    [
        ({}, Outcome.OVER_BUDGET, 6 * GB),
        ({"cuda:0": 5 * GB}, Outcome.OK, 6 * GB),
        ({"cuda:0": 5 * GB + 1}, Outcome.OVER_BUDGET, 5 * GB + 1),
    ],
)
def test_a_budget_limits_the_bytes_that_processes_held_at_the_same_time(held, outcome, value):
    measurement = replace(measured(peak_allocated=6 * GB), simultaneous=held, step_peaks=StepPeaks((6 * GB,)))
    found = judge(measurement, Budget({"peak_allocated": 5 * GB}), None, DEFAULT_TOLERANCES)
    peak = found.of("peak_allocated")
    assert (peak.outcome, peak.value) == (outcome, value)
    is_over = bool(held) and outcome is Outcome.OVER_BUDGET
    assert peak.at_same_time == is_over
    notes = [
        f"{gpu}: at the same time, the processes held at most 5.00 GB. The budget limits these bytes"
        for gpu in ({} if is_over else held)
    ]
    assert list(found.measurement.notes) == notes


def test_bytes_held_at_the_same_time_have_their_own_row_without_the_baselines_sum():
    held = replace(measured(peak_allocated=6 * GB), simultaneous={"cuda:0": 5 * GB})
    baseline = baseline_of(held, "2026-11-02", None)
    verdict = judge(held, Budget({"peak_allocated": 4 * GB}), baseline, DEFAULT_TOLERANCES)
    row = texts_of(verdict.of("peak_allocated"), "si")
    assert (row.title, row.baseline, row.value, row.change) == ("peak allocated at the same time", "", "5.00 GB", "")
    text = failure_text(TestVerdict("a.py", "test_a", (verdict,)), frozenset({Outcome.OVER_BUDGET}), "si")
    assert text.startswith("Memory over budget: peak at the same time 5.00 GB, budget 4.00 GB")


def test_a_baseline_is_compared_with_the_sum_of_the_processes_peaks():
    held = replace(measured(peak_allocated=6 * GB), simultaneous={"cuda:0": 5 * GB})
    later = replace(held, simultaneous={"cuda:0": 6 * GB})
    assert baseline_of(held, "2026-11-02", None) == baseline_of(later, "2026-11-02", None)
    assert outcome_of(later, baseline=baseline_of(held, "2026-11-02", None)) is Outcome.OK
    grown = replace(held, metrics={"peak_allocated": 7 * GB})
    assert outcome_of(grown, baseline=baseline_of(held, "2026-11-02", None)) is Outcome.REGRESSED


def test_a_budget_limits_the_simultaneous_bytes_on_each_gpu():
    now = replace(on_gpus(g0=6 * GB, g1=4 * GB), simultaneous={"cuda:0": 3 * GB})
    budget = Budget({"peak_allocated": 4 * GB})
    assert on_gpus_verdict(now, None, budget).outcome is Outcome.OK
    for worse, gpu, value in (
        (replace(now, simultaneous={"cuda:0": 5 * GB}), "cuda:0", 5 * GB),
        (replace(on_gpus(g0=6 * GB, g1=5 * GB), simultaneous={"cuda:0": 3 * GB}), "cuda:1", 5 * GB),
    ):
        found = on_gpus_verdict(worse, None, budget)
        assert (found.outcome, found.gpu, found.value) == (Outcome.OVER_BUDGET, gpu, value)
        assert found.at_same_time == (gpu in worse.simultaneous and value == worse.simultaneous[gpu])


def test_a_composition_is_compared_with_that_of_the_same_gpu_only():
    rows = Composition(3 * GB, (Row("activation", nbytes=3 * GB, count=1),))
    earlier = replace(stored_on(g0=3 * GB, g1=2 * GB), composition=rows)
    now = on_gpus(g0=4 * GB, g1=3 * GB)
    for gpu, compared in (("cuda:0", True), ("cuda:1", False)):
        explained = replace(now, explanation=Explanation(rows, gpu=gpu))
        assert (judged(explained, earlier).difference is not None) is compared


# Workspaces

MB = 10**6
OLDER = {"torch": "2.13.0", "allocator": "default"}
NEWER = {"torch": "2.15.0", "allocator": "default"}


def judged_over_releases(now: tuple[int, int], then: tuple[int, int], torch=(NEWER, OLDER)) -> Verdict:
    """The verdict on a peak and its workspaces now, against those of a baseline, under two releases of torch."""
    here, there = (replace(H100, details=details) for details in torch)
    measurement = replace(measured(here, peak_allocated=now[0]), workspaces=now[1])
    baseline = replace(stored(there, peak_allocated=then[0]), workspaces=then[1])
    return judged(measurement, baseline)


@pytest.mark.parametrize(
    ("now", "then", "outcome", "beside"),
    [
        pytest.param(
            (267 * MB, 67 * MB), (234 * MB, 34 * MB), Outcome.REGRESSED, "is unchanged", id="the release's growth"
        ),
        pytest.param(
            (277 * MB, 67 * MB),
            (234 * MB, 34 * MB),
            Outcome.REGRESSED,
            "went from 200.00 MB to 210.00 MB (+10.00 MB)",
            id="both",
        ),
        pytest.param(
            (234 * MB, 34 * MB), (267 * MB, 67 * MB), Outcome.IMPROVED, "is unchanged", id="the release's saving"
        ),
        pytest.param(
            (254 * MB, 34 * MB),
            (267 * MB, 67 * MB),
            Outcome.IMPROVED,
            "went from 200.00 MB to 220.00 MB (+20.00 MB)",
            id="hidden growth",
        ),
        pytest.param(
            (234 * MB + 4, 34 * MB),
            (267 * MB, 67 * MB),
            Outcome.IMPROVED,
            "went from 200.00 MB to 200.00 MB (+4 B)",
            id="a few bytes",
        ),
        pytest.param((267 * MB, 67 * MB), (200 * MB, 0), Outcome.REGRESSED, "is unchanged", id="none before"),
    ],
)
def test_a_note_says_which_part_of_a_change_is_of_another_release_of_torch(now, then, outcome, beside):
    verdict = judged_over_releases(now, then)
    assert verdict.outcome is outcome
    (note,) = verdict.measurement.notes
    assert "with torch 2.15.0, and took" in note
    assert note.endswith(f"the torch release causes this part of the change; the rest of the peak {beside}")


@pytest.mark.parametrize(
    ("now", "then", "torch"),
    [
        pytest.param((267 * MB, 67 * MB), (267 * MB, 67 * MB), (NEWER, OLDER), id="the same workspaces"),
        pytest.param((267 * MB, 67 * MB), (234 * MB, 34 * MB), (NEWER, NEWER), id="the same release"),
        pytest.param((267 * MB, 67 * MB), (234 * MB, None), (NEWER, OLDER), id="not known"),
    ],
)
def test_of_workspaces_that_no_release_changed_no_note_is_made(now, then, torch):
    assert judged_over_releases(now, then, torch).measurement.notes == ()


def test_a_tolerance_is_of_what_exceeds_the_workspaces_of_either_side():
    (peak,) = judged_over_releases((80 * MB, 34 * MB), (80 * MB, 67 * MB)).metrics
    assert peak.allowed == pytest.approx(0.005 * 13 * MB)


@pytest.mark.parametrize(("workspaces", "notes"), [(67 * MB, (MOSTLY_WORKSPACES,)), (50 * MB, ())])
def test_a_measurement_that_is_mostly_workspaces_says_so(workspaces, notes):
    measurement = replace(measured(peak_allocated=100 * MB), workspaces=workspaces)
    assert judged(measurement).measurement.notes == notes


# Reserved bytes

MIB = 2**20


@pytest.mark.parametrize(
    ("base", "unused", "grown", "outcome"),
    [
        pytest.param(50 * MB, (0, 0), 2 * MIB, Outcome.OK, id="one segment"),
        pytest.param(50 * MB, (0, 0), 2 * MIB + 1, Outcome.REGRESSED, id="a load of 50 MB that takes more"),
        pytest.param(50 * MB, (7 * MIB, 7 * MIB), 3 * MIB, Outcome.REGRESSED, id="the same room"),
        pytest.param(50 * MB, (7 * MIB, 0), 22 * MIB, Outcome.OK, id="room now"),
        pytest.param(50 * MB, (0, 7 * MIB), 22 * MIB, Outcome.OK, id="room then"),
        pytest.param(50 * MB, (0, 7 * MIB), 22 * MIB + 1, Outcome.REGRESSED, id="more than the room explains"),
        pytest.param(50 * MB, (0, 200 * MIB), 40 * MIB, Outcome.OK, id="two segments"),
        pytest.param(50 * MB, (0, 200 * MIB), 40 * MIB + 1, Outcome.REGRESSED, id="more than two segments"),
        pytest.param(50 * MB, (0, None), 40 * MIB, Outcome.OK, id="not known"),
        pytest.param(GB, (0, 0), 20 * MB, Outcome.OK, id="two percent of a large step"),
    ],
)
def test_reserved_bytes_may_vary_by_the_room_that_a_step_found(base, unused, grown, outcome):
    now, then = unused
    measurement = replace(measured(peak_allocated=base, peak_reserved=base + grown), unused_before=now)
    baseline = replace(stored(peak_allocated=base, peak_reserved=base), unused_before=then)
    assert outcome_of(measurement, baseline=baseline, metric="peak_reserved") is outcome
