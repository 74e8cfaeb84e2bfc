"""A baseline, and what accepting a measurement makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.values.composition import Composition, Explanation, Row
from pytest_gpumem.facts.values.interference import Slowdown
from pytest_gpumem.facts.values.times import Round, Sample, Times
from pytest_gpumem.judging.gate.baseline import Baseline, Key, NoBaseline, baseline_of
from pytest_gpumem.judging.times.comparison import Runs

ENVIRONMENT = Environment("cpu-x86_64", "CPU (x86_64)", {"torch": "2.13.0"})
WORKLOAD = Workload("train_step", "fp32", 1000, "int64[4, 256]")


def entry(workload=WORKLOAD, environment=ENVIRONMENT, recorded="2026-11-02", commit="abc1234", **metrics) -> Baseline:
    return Baseline(workload, environment, metrics, recorded, commit)


def test_a_key_reads_as_a_test_id_with_the_name_of_the_measurement():
    key = Key("tests/test_gpt.py", "TestTrain::test_step[fp32]", "train_step")
    assert str(key) == "tests/test_gpt.py::TestTrain::test_step[fp32] (train_step)"


def test_keys_sort_by_file_then_test_then_name():
    keys = [Key("b", "a", "a"), Key("a", "b", "a"), Key("a", "a", "b"), Key("a", "a", "a")]
    assert sorted(keys) == [Key("a", "a", "a"), Key("a", "a", "b"), Key("a", "b", "a"), Key("b", "a", "a")]


def test_an_accepted_measurement_keeps_its_bytes_and_four_digits_of_its_times():
    metrics = {"peak_allocated": 8_120_345_678, "step_time": 0.0123456789, "throughput": 1234.5678}
    measurement = Measurement("train_step", WORKLOAD, ENVIRONMENT, metrics, settled=False, notes=("a note",))
    accepted = baseline_of(measurement, "2026-11-02", "abc1234")
    assert accepted == entry(peak_allocated=8_120_345_678, step_time=0.01235, throughput=1235.0)
    assert isinstance(accepted.metrics["peak_allocated"], int)


def test_a_measurement_outside_of_a_repository_is_accepted_without_a_commit():
    measurement = Measurement("call", Workload("call"), ENVIRONMENT, {"peak_allocated": 1})
    assert baseline_of(measurement, "2026-11-02", None).commit is None


def test_an_entry_with_other_times_date_and_commit_says_the_same():
    earlier = entry(peak_allocated=5, step_time=0.5)
    assert entry(peak_allocated=5, step_time=0.6, recorded="2027-01-01", commit=None).is_equivalent(earlier)


def test_an_accepted_measurement_keeps_its_counts_as_whole_numbers():
    metrics = {"peak_allocated": 5, "flops": 123_456_789_012, "operators": 1284, "syncs": 0}
    accepted = baseline_of(Measurement("train_step", WORKLOAD, ENVIRONMENT, metrics), "2026-11-02", None)
    assert accepted.metrics == metrics
    assert all(isinstance(value, int) for value in accepted.metrics.values())


@pytest.mark.parametrize("metric", ["peak_allocated", "flops", "operators", "syncs", "launches"])
def test_an_entry_with_one_more_of_a_metric_or_a_metric_more_says_something_else(metric):
    earlier = entry(**{metric: 7})
    assert not entry(**{metric: 8}).is_equivalent(earlier)
    assert not entry(**{metric: 7}, retained=0).is_equivalent(earlier)


def test_an_entry_of_another_workload_says_something_else():
    other = replace(WORKLOAD, parameters=1001)
    assert not entry(workload=other, peak_allocated=5).is_equivalent(entry(peak_allocated=5))


def test_under_another_release_of_torch_bytes_say_the_same_and_counts_something_else():
    # Bytes do not depend on it. Counts may: as long as it is another release, more of them are only doubted.
    later = Environment("cpu-x86_64", "CPU (x86_64)", {"torch": "2.14.0"})
    assert entry(environment=later, peak_allocated=5).is_equivalent(entry(peak_allocated=5))
    assert not entry(environment=later, peak_allocated=5, syncs=0).is_equivalent(entry(peak_allocated=5, syncs=0))


@pytest.mark.parametrize("detail", ["cpu_capability", "allocator", "emulated_cudnn"])
def test_an_entry_from_where_the_same_bytes_mean_something_else_says_something_else(detail):
    # What moves a metric by itself is a reason to doubt its growth: once accepted elsewhere, it must be no reason any more.
    here, there = (Environment("gpu", "GPU", {detail: value}) for value in ("new", "old"))
    metrics = {"peak_allocated": 5, "peak_reserved": 5}
    assert not entry(environment=here, **metrics).is_equivalent(entry(environment=there, **metrics))


def test_what_is_absent_is_absent_everywhere_unless_told():
    assert NoBaseline() == NoBaseline(other_devices=())


# Compositions

ROWS = tuple(Row("activation", 11 if number < 90 else 1, module=f"m{number}") for number in range(100))
PEAK = Composition(1000, ROWS)


def explained(explanation: Explanation | None, peak: int = 1000) -> Baseline:
    measurement = Measurement("call", Workload("call"), ENVIRONMENT, {"peak_allocated": peak}, explanation=explanation)
    return baseline_of(measurement, "2026-11-02", None)


def test_an_accepted_measurement_keeps_the_largest_rows_of_its_peak():
    assert explained(Explanation(PEAK)).composition == PEAK.kept()
    assert len(PEAK.kept().rows) < len(PEAK.rows)


def test_what_was_retained_is_no_part_of_a_baseline():
    kept = explained(Explanation(PEAK, retained=Composition(10, ROWS[:1]), cycles=("a -> a",))).composition
    assert kept == PEAK.kept()


def test_a_measurement_that_was_not_explained_has_no_composition():
    assert explained(None).composition is None


@pytest.mark.parametrize("total", [999, 1001])
def test_the_composition_of_another_peak_is_not_kept(total):
    assert explained(Explanation(replace(PEAK, total=total))).composition is None


def test_a_composition_is_news_only_where_there_is_none():
    without = entry(peak_allocated=5)
    one = replace(without, composition=Composition(5, (Row("input", 5, site="a.py:1"),)))
    other = replace(without, composition=Composition(5, (Row("input", 5, site="a.py:2"),)))
    assert not one.is_equivalent(without)
    assert without.is_equivalent(one)
    assert one.is_equivalent(other), "a line moved, and no byte"


@pytest.mark.parametrize("lacking", ["workspaces", "unused_before"])
def test_an_entry_that_tells_what_an_older_version_did_not_says_something_else(lacking):
    without = entry(peak_allocated=5)
    one, other = (replace(without, **{lacking: nbytes}) for nbytes in (0, 1))
    assert not one.is_equivalent(without)
    assert without.is_equivalent(one)
    assert one.is_equivalent(other)


# Times


def runs_of(*samples: Sample) -> Runs | None:
    """The runs that accepting a measurement with these samples makes."""
    times = Times(samples) if samples else None
    measurement = Measurement("train_step", WORKLOAD, ENVIRONMENT, {"peak_allocated": 1}, times=times)
    return baseline_of(measurement, "2026-11-02", None).runs


def sample_of(seconds: float, pace: float | None = None, invalid: str | None = None) -> Sample:
    return Sample((Round(seconds, pace),), 1, invalid, None if invalid is None else Slowdown(4.0))


def test_an_accepted_measurement_is_the_first_run_of_its_baseline():
    assert runs_of(sample_of(0.0123456789, 2e9)) == Runs((0.012346,), (24_691_000.0,))
    assert runs_of(sample_of(0.5)) == Runs((0.5,))


def test_a_sample_that_something_disturbed_makes_no_run():
    assert runs_of(sample_of(0.5, invalid="the GPU was throttled")) is None
    assert runs_of() is None


def test_of_two_samples_the_faster_one_makes_the_run_if_it_is_valid():
    assert runs_of(sample_of(0.6), sample_of(0.7)) == runs_of(sample_of(0.7), sample_of(0.6)) == Runs((0.6,))
    assert runs_of(sample_of(0.6), sample_of(0.7, invalid="the GPU was throttled")) == Runs((0.6,))


def test_the_slower_sample_makes_no_run_where_the_one_that_is_believed_was_disturbed():
    disturbed = sample_of(0.4, invalid="the GPU was throttled")
    assert runs_of(disturbed, sample_of(0.6)) is runs_of(sample_of(0.6), disturbed) is None
