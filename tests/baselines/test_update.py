"""Which measurements an update writes: what is missing, what got better, or everything."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies

from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.values.composition import Composition, Explanation, Row
from pytest_gpumem.facts.values.interference import Slowdown
from pytest_gpumem.facts.values.option_words import UPDATE_MODES
from pytest_gpumem.facts.values.times import Round, Sample, Times
from pytest_gpumem.judging.baselines.update import ACCEPTS, entries_to_write, times_left_out
from pytest_gpumem.judging.gate.baseline import Baseline, Budget, Key, NoBaseline, baseline_of
from pytest_gpumem.judging.gate.judge import judge
from pytest_gpumem.judging.gate.verdict import Outcome, Verdict
from pytest_gpumem.judging.times.comparison import MOST_RUNS, Runs
from pytest_gpumem.plugin.config.settings import DEFAULT_TOLERANCES

CPU = Environment("cpu-x86_64", "CPU (x86_64)", {"torch": "2.13.0"})
KEY = Key("tests/test_gpt.py", "test_a", "call")
GB = 10**9


def judged(measurement, stored, reason=None) -> tuple[Verdict, Baseline]:
    entry = baseline_of(measurement, "2026-12-24", "new1234", reason)
    return judge(measurement, Budget(), stored, DEFAULT_TOLERANCES), entry


def update(mode, stored, measurement, reason=None) -> Baseline | None:
    """What an update writes of a measurement, when it is told why."""
    return entries_to_write(mode, {KEY: judged(measurement, stored, reason)}, {KEY: stored}).get(KEY)


def written(mode, stored, workload=None, peak=None, environment=CPU, reason=None, **metrics) -> Baseline | None:
    """What an update writes for a test that now measures ``metrics``; ``peak`` is its composition."""
    explanation = None if peak is None else Explanation(peak)
    measurement = Measurement("call", workload or Workload("call"), environment, metrics, explanation=explanation)
    return update(mode, stored, measurement, reason)


def planned_by(cudnn: str) -> Environment:
    return Environment("emulated-h100-80gb", "H100 (emulated)", {"torch": "2.13.0", "emulated_cudnn": cudnn})


def stored_entry(**metrics) -> Baseline:
    return Baseline(Workload("call"), CPU, metrics, "2026-11-02", "old1234")


def of(total: int, site: str = "model.py:1") -> Composition:
    return Composition(total, (Row("activation", total, site=site),))


def composed(total: int, **metrics) -> Baseline:
    return replace(stored_entry(peak_allocated=total, **metrics), composition=of(total))


@pytest.mark.parametrize("absent", [NoBaseline(), NoBaseline(("NVIDIA A100",))], ids=["nowhere", "elsewhere"])
def test_what_is_missing_is_added_unless_only_improvements_are_wanted(absent):
    for mode in ("new", "all"):
        entry = written(mode, absent, peak=of(GB), peak_allocated=GB)
        assert (entry.metrics, entry.composition) == ({"peak_allocated": GB}, of(GB))
    assert written("improved", absent, peak_allocated=GB) is None


@pytest.mark.parametrize("now", [GB // 2, 2 * GB])
def test_what_is_stored_stays_when_only_the_new_is_wanted(now):
    assert written("new", stored_entry(peak_allocated=GB), peak_allocated=now) is None


@pytest.mark.parametrize("now", [GB // 2, GB + 1])
def test_everything_that_differs_is_accepted_on_demand(now):
    entry = written("all", stored_entry(peak_allocated=GB), peak_allocated=now)
    assert (entry.metrics["peak_allocated"], entry.recorded, entry.commit) == (now, "2026-12-24", "new1234")


def of_gpus(*peaks: int) -> Measurement:
    by_device = {f"cuda:{n}": {"peak_allocated": peak, "retained": 7} for n, peak in enumerate(peaks)}
    metrics = {"peak_allocated": max(peaks), "retained": 7}
    return Measurement("call", Workload("call"), CPU, metrics, by_device=by_device)


def written_of_gpus(mode, then, now) -> Baseline | None:
    return update(mode, baseline_of(of_gpus(*then), "2026-11-02", "old1234"), of_gpus(*now))


def test_the_bytes_of_a_smaller_gpu_are_accepted_too():
    assert written_of_gpus("all", (3 * GB, GB), (3 * GB, GB)) is None
    entry = written_of_gpus("all", (3 * GB, GB), (3 * GB, 2 * GB))
    assert entry.by_device["cuda:1"] == {"peak_allocated": 2 * GB, "retained": 7}
    assert written_of_gpus("new", (3 * GB, GB), (3 * GB, 2 * GB)) is None


def test_a_lowered_peak_goes_with_those_of_all_gpus():
    entry = written_of_gpus("improved", (3 * GB, GB), (2 * GB, GB // 2))
    assert {gpu: here["peak_allocated"] for gpu, here in entry.by_device.items()} == {
        "cuda:0": 2 * GB,
        "cuda:1": GB // 2,
    }
    assert entry.by_device["cuda:0"]["retained"] == 7
    # The largest is lower, and another one has grown.
    assert written_of_gpus("improved", (3 * GB, GB), (2 * GB, 2 * GB)) is None


def test_a_count_of_0_is_accepted_where_the_entry_has_none():
    entry = written("all", stored_entry(peak_allocated=1000), peak_allocated=1000, syncs=0)
    assert entry is not None
    assert entry.metrics["syncs"] == 0


def test_what_says_the_same_is_not_written_again():
    stored = stored_entry(peak_allocated=GB, step_time=0.5)
    assert written("all", stored, peak_allocated=GB, step_time=0.6) is None


def test_another_workload_is_accepted_with_everything_and_otherwise_left_alone():
    stored, other = stored_entry(peak_allocated=GB), Workload("call", batch="int64[8]")
    assert written("all", stored, other, peak_allocated=GB).workload == other
    assert written("improved", stored, other, peak_allocated=GB // 2) is None
    assert written("new", stored, other, peak_allocated=GB // 2, syncs=2) is None


def test_what_got_better_is_lowered():
    entry = written("improved", stored_entry(peak_allocated=GB), peak_allocated=GB // 2)
    assert (entry.metrics["peak_allocated"], entry.recorded, entry.commit) == (GB // 2, "2026-12-24", "new1234")


@pytest.mark.parametrize("now", [GB - 10**6, 2 * GB], ids=["within the tolerance", "worse"])
def test_what_did_not_get_better_beyond_the_tolerance_is_not_lowered(now):
    assert written("improved", stored_entry(peak_allocated=GB), peak_allocated=now) is None


def test_improving_never_raises_a_metric_beside_the_one_that_got_better():
    stored = stored_entry(peak_allocated=GB, retained=10**6)
    entry = written("improved", stored, peak_allocated=GB // 2, retained=10**6 + 5)
    assert entry.metrics == {"peak_allocated": GB // 2, "retained": 10**6}


def test_improving_keeps_stored_metrics_that_were_not_measured_this_time():
    stored = stored_entry(peak_allocated=GB, step_time=0.5)
    entry = written("improved", stored, peak_allocated=GB // 2)
    assert entry.metrics == {"peak_allocated": GB // 2, "step_time": 0.5}


def test_improving_adds_a_metric_that_the_stored_entry_has_not():
    entry = written("improved", stored_entry(peak_allocated=GB), peak_allocated=GB // 2, retained=0)
    assert entry.metrics == {"peak_allocated": GB // 2, "retained": 0}


def test_improving_writes_no_growth_where_the_entry_has_none():
    # By not having it the entry says that nothing grew. What is allowed for beside that is not to become the baseline.
    entry = written("improved", stored_entry(peak_allocated=GB), peak_allocated=GB // 2, growth=8)
    assert entry.metrics == {"peak_allocated": GB // 2}


@pytest.mark.parametrize(("cudnn", "launches"), [("9.20.0", 90), ("none", None)], ids=["the same", "another"])
def test_improving_leaves_an_entry_alone_whose_peak_another_cudnn_planned(cudnn, launches):
    # Else the peak that is kept would be taken for one of the cuDNN of now, and everything up to it for no growth.
    stored = replace(stored_entry(peak_allocated=GB, launches=100), environment=planned_by("9.20.0"))
    entry = written("improved", stored, environment=planned_by(cudnn), peak_allocated=GB, launches=90)
    assert (None if entry is None else entry.metrics["launches"]) == launches


def on_cpu(**details: str) -> Environment:
    return Environment(CPU.slug, CPU.device, {"torch": "2.13.0", "cpu_capability": "AVX2", **details})


AVX512, NEXT_TORCH = on_cpu(cpu_capability="AVX512"), on_cpu(torch="2.14.0")


def stored_on(environment: Environment, **metrics) -> Baseline:
    return replace(stored_entry(**metrics), environment=environment)


def test_improving_keeps_the_environment_of_a_peak_that_may_depend_on_it():
    stored = stored_on(on_cpu(), peak_allocated=GB, retained=10**8)
    entry = written("improved", stored, environment=AVX512, peak_allocated=GB + 10**8, retained=0)
    assert (entry.environment, entry.metrics) == (on_cpu(), {"peak_allocated": GB, "retained": 0})


def test_improving_writes_nothing_if_a_release_moved_counts_up_and_down():
    stored = stored_on(on_cpu(), peak_allocated=GB, flops=100, operators=10)
    assert written("improved", stored, environment=NEXT_TORCH, peak_allocated=GB, flops=90, operators=12) is None


def test_improving_takes_the_new_environment_if_all_figures_fit_it():
    stored = stored_on(on_cpu(), peak_allocated=GB, flops=100, operators=10)
    entry = written("improved", stored, environment=NEXT_TORCH, peak_allocated=GB, flops=90, operators=10)
    assert (entry.environment, entry.metrics["flops"]) == (NEXT_TORCH, 90)


def test_improving_in_the_old_environment_adds_no_count_from_another_release():
    stored = stored_on(on_cpu(), peak_allocated=GB, retained=10**8, flops=100)
    entry = written("improved", stored, environment=NEXT_TORCH, peak_allocated=GB, retained=0, flops=101, syncs=3)
    assert (entry.environment, entry.metrics) == (on_cpu(), {"peak_allocated": GB, "retained": 0, "flops": 100})


def test_improving_the_peak_keeps_the_room_recorded_with_reserved_bytes():
    then = Measurement("call", Workload("call"), CPU, {"peak_allocated": GB, "peak_reserved": GB}, unused_before=0)
    room = 60 * 2**20
    now = replace(then, metrics={"peak_allocated": GB // 2, "peak_reserved": GB + room // 2}, unused_before=room)
    stored = baseline_of(then, "2026-11-02", "old1234")
    assert judged(now, stored)[0].of("peak_reserved").outcome is Outcome.OK
    entry = update("improved", stored, now)
    assert entry.unused_before == 0
    assert judged(now, entry)[0].of("peak_reserved").outcome is Outcome.OK


FIGURES = {"peak_allocated": (10**8, GB, GB + 10**8), "retained": (0, 10**8), "flops": (90, 100), "operators": (9, 10)}
ANY_FIGURES = strategies.fixed_dictionaries({name: strategies.sampled_from(values) for name, values in FIGURES.items()})


@given(
    stored=ANY_FIGURES,
    now=ANY_FIGURES,
    torch=strategies.sampled_from(["2.13.0", "2.14.0"]),
    capability=strategies.sampled_from(["AVX2", "AVX512"]),
    mode=strategies.sampled_from(UPDATE_MODES),
)
def test_no_update_turns_unchanged_code_red(stored, now, torch, capability, mode):
    entry = stored_on(on_cpu(), **stored)
    measurement = Measurement(
        "call", Workload("call"), on_cpu(torch=torch, cpu_capability=capability), {**now, "syncs": 2}
    )
    updated = update(mode, entry, measurement)
    if updated is not None:
        red = {one.metric for one in judged(measurement, entry)[0].metrics if one.outcome is Outcome.REGRESSED}
        still = {one.metric for one in judged(measurement, updated)[0].metrics if one.outcome is Outcome.REGRESSED}
        assert still <= red


# Metrics that a stored entry lacks


def test_what_an_entry_lacks_is_added_and_all_else_of_it_stays():
    stored = stored_entry(peak_allocated=GB, step_time=0.5)
    entry = written("new", stored, peak_allocated=GB - 5, retained=7, flops=100, syncs=2, step_time=0.4)
    assert entry == replace(stored, metrics={**stored.metrics, "retained": 7, "flops": 100, "syncs": 2})


def test_an_imbalance_that_an_entry_lacks_is_added_without_another_change():
    stored = stored_entry(peak_allocated=GB)
    entry = written("new", stored, peak_allocated=GB, imbalance=1.667)
    assert entry == replace(stored, metrics={"peak_allocated": GB, "imbalance": 1.667})
    assert written("all", entry, peak_allocated=GB, imbalance=1.667) is None


def test_an_imbalance_is_lowered_beside_a_regression_and_is_no_time():
    stored = stored_entry(peak_allocated=GB, imbalance=1.5)
    entry = written("improved", stored, peak_allocated=2 * GB, imbalance=1.25)
    assert entry.metrics == {"peak_allocated": GB, "imbalance": 1.25}
    assert written("all", stored, peak_allocated=2 * GB).metrics == {"peak_allocated": 2 * GB}


def test_what_an_entry_lacks_is_added_beside_a_regression_which_stays():
    entry = written("new", stored_entry(peak_allocated=GB), peak_allocated=2 * GB, syncs=2)
    assert entry.metrics == {"peak_allocated": GB, "syncs": 2}


def test_counts_of_another_release_of_torch_are_not_added_to_an_entry_of_this_one():
    stored = replace(stored_entry(peak_allocated=GB), environment=Environment(CPU.slug, CPU.device, {"torch": "2.6.0"}))
    assert written("new", stored, peak_allocated=GB, syncs=2) is None
    entry = written("all", stored, peak_allocated=GB, syncs=2)
    assert (entry.metrics["syncs"], entry.environment) == (2, CPU)


def test_of_what_is_no_longer_taken_accepting_everything_keeps_times_and_no_counts():
    stored = stored_entry(peak_allocated=GB, syncs=2, throughput=3.5)
    assert written("all", stored, peak_allocated=GB).metrics == {"peak_allocated": GB, "throughput": 3.5}


def test_each_measurement_is_decided_by_itself():
    other = Key("tests/test_gpt.py", "test_b", "call")
    better = Measurement("call", Workload("call"), CPU, {"peak_allocated": GB // 2})
    same = Measurement("call", Workload("call"), CPU, {"peak_allocated": GB})
    stored = {KEY: stored_entry(peak_allocated=GB), other: stored_entry(peak_allocated=GB)}
    measured = {key: judged(one, stored[key]) for key, one in ((KEY, better), (other, same))}
    assert list(entries_to_write("improved", measured, stored)) == [KEY]
    assert list(entries_to_write("all", measured, stored)) == [KEY]
    assert list(entries_to_write("new", measured, stored)) == []


# Compositions


def test_only_accepting_everything_adds_a_composition_that_the_store_lacks():
    stored = stored_entry(peak_allocated=GB)
    assert written("all", stored, peak=of(GB), peak_allocated=GB).composition == of(GB)
    for mode in ("new", "improved"):
        assert written(mode, stored, peak=of(GB), peak_allocated=GB) is None


@pytest.mark.parametrize("peak", [None, of(GB, "model.py:2")], ids=["none now", "another line"])
def test_where_no_byte_changed_the_composition_stays(peak):
    assert written("all", composed(GB), peak=peak, peak_allocated=GB) is None


@pytest.mark.parametrize(("mode", "now"), [("all", 2 * GB), ("improved", GB // 2)])
def test_another_peak_takes_its_own_composition_with_it_or_none(mode, now):
    for peak in (None, of(now)):
        entry = written(mode, composed(GB), peak=peak, peak_allocated=now)
        assert (entry.metrics["peak_allocated"], entry.composition) == (now, peak)


def test_a_peak_that_is_not_lowered_keeps_its_composition():
    stored = composed(GB, retained=10**8)
    entry = written("improved", stored, peak=of(GB + 5), peak_allocated=GB + 5, retained=0)
    assert entry.metrics == {"peak_allocated": GB, "retained": 0}
    assert entry.composition == of(GB)


def test_every_mode_says_which_outcomes_it_mends():
    assert ACCEPTS.keys() == {None, *UPDATE_MODES}
    assert ACCEPTS[None] == ACCEPTS["improved"] == frozenset()
    assert ACCEPTS["new"] < ACCEPTS["all"]


@pytest.mark.parametrize("mode", [None, *UPDATE_MODES])
def test_no_update_mends_what_is_over_budget_or_was_not_measured(mode):
    assert ACCEPTS[mode].isdisjoint({Outcome.OVER_BUDGET, Outcome.UNMEASURED})


# Times

TRAIN = Workload("train_step", "fp32", 1000, "int64[8]")
XEON, EPYC = (Environment("cpu-x86_64", "CPU (x86_64)", {"machine": name}) for name in ("Xeon", "EPYC"))


def timed_entry(*seconds: float, machine=XEON, **metrics) -> Baseline:
    runs = Runs(seconds) if seconds else None
    return Baseline(TRAIN, machine, {"peak_allocated": GB, "step_time": 1.0, **metrics}, "2026-11-02", runs=runs)


def steady(seconds: float, pace=None, invalid=None) -> Sample:
    return Sample((Round(seconds, pace),) * 12, 1, invalid, invalid and Slowdown(4.0))


def step(*samples: float | Sample, machine=XEON, workload=TRAIN, invalid=None, pace=None, **metrics) -> Measurement:
    """A step with these samples, a number for a steady one; of none, it was not timed."""
    taken = tuple(one if isinstance(one, Sample) else steady(one, pace, invalid) for one in samples)
    times = Times(taken) if taken else None
    timed = {} if times is None else {"step_time": times.median}
    return Measurement("train_step", workload, machine, {"peak_allocated": GB, **metrics, **timed}, times=times)


def written_times(mode, stored, *samples: float | Sample, reason=None, **more) -> Baseline | None:
    """What an update writes for such a `step`."""
    return update(mode, stored, step(*samples, **more), reason)


def left_out(mode, stored, *samples: float, **more) -> list[str]:
    """Why an update writes no times of such a `step`."""
    return times_left_out(mode, {KEY: judged(step(*samples, **more), stored)}, {KEY: stored})


def test_each_accepted_run_is_the_latest_and_the_oldest_of_too_many_is_forgotten():
    entry = timed_entry(1.0)
    seconds = [1.0]
    for number in range(1, MOST_RUNS + 3):
        seconds.append(1 + number / 1000)
        entry = written_times("all", entry, seconds[-1])
        assert entry.runs.seconds == tuple(seconds[-MOST_RUNS:])


def test_the_time_and_throughput_of_an_entry_are_those_of_the_median_of_its_runs():
    stored = timed_entry(1.2341, 1.2341, 1.2368)
    entry = written_times("all", stored, 1.2357, throughput=8 / 1.2357, forward_time=0.4)
    assert entry.runs.median == (1.2341 + 1.2357) / 2
    assert entry.metrics["step_time"] == 1.235
    assert entry.metrics["throughput"] == pytest.approx(8 / 1.235, rel=3e-4)
    assert entry.metrics["forward_time"] == 0.4


@pytest.mark.parametrize("seconds", [0.5, 2.0], ids=["faster", "slower"])
def test_runs_of_another_speed_that_is_accepted_begin_anew(seconds):
    stored = timed_entry(*[1.0] * MOST_RUNS)
    entry = written_times("all", stored, seconds, seconds)
    assert entry.runs == Runs((seconds,))
    assert entry.metrics["step_time"] == seconds


THROTTLED = "the GPU was throttled"
UNCERTAIN = 1.09
"""Beyond the tolerance, and within what the times of a single run vary by."""


def test_a_run_that_only_lies_apart_from_the_others_is_one_of_them():
    # Left out, the others would seem to vary less than runs do, and the next one like it would be a false alarm.
    stored = timed_entry(1.0, forward_time=0.4)
    entry = written_times("all", stored, UNCERTAIN, forward_time=0.5)
    assert entry.runs.seconds == (1.0, UNCERTAIN)


def test_a_run_on_a_slower_machine_is_none_of_the_runs_and_other_news_is_written():
    stored = replace(timed_entry(1.0, forward_time=0.4), runs=Runs((1.0,), (1e9,)))
    entry = written_times("all", stored, 1.25, pace=0.8e9, forward_time=0.5, peak_allocated=2 * GB)
    assert entry.runs == stored.runs
    assert entry.metrics == {"peak_allocated": 2 * GB, "step_time": 1.0, "forward_time": 0.4}


def test_a_slower_clock_is_no_measure_for_later_runs():
    stored = replace(timed_entry(*[1.0] * 5), runs=Runs((1.0,) * 5, (1e9,) * 5))
    assert written_times("all", stored, 1.25, pace=0.8e9) is None
    assert written_times("all", stored, 1.01, pace=1e9).runs.cycles[-1] == 1.01e9


def test_a_run_without_cycles_takes_none_from_the_others():
    stored = replace(timed_entry(1.0, 1.0), runs=Runs((1.0, 1.0), (1e9, 1e9)))
    assert written_times("all", stored, 1.01) is None
    assert left_out("all", stored, 1.01) == ["the clock rate during the steps could not be read"]


def test_a_slower_sample_that_the_gate_did_not_believe_is_none_of_the_runs():
    stored = timed_entry(*[1.0] * 5)
    samples = (1.2, steady(1.0, invalid=THROTTLED))
    assert judge(step(*samples), Budget(), stored, DEFAULT_TOLERANCES).outcome is Outcome.OK
    assert written_times("all", stored, *samples) is None


def test_runs_of_another_machine_begin_anew():
    for earlier in (1, MOST_RUNS):
        entry = written_times("all", timed_entry(*[1.0] * earlier, forward_time=0.4), 1.0, machine=EPYC)
        assert (entry.runs, entry.environment) == (Runs((1.0,)), EPYC)
        assert entry.metrics == {"peak_allocated": GB, "step_time": 1.0}


def test_runs_of_other_work_begin_anew():
    other = replace(TRAIN, batch="int64[16]")
    assert written_times("all", timed_entry(1.0, 1.0), 1.0, workload=other).runs == Runs((1.0,))


def test_times_that_the_store_lacks_are_added_with_everything():
    assert written_times("all", timed_entry(), 1.0).runs == Runs((1.0,))


def test_a_disturbed_sample_is_none_of_the_runs():
    stored = timed_entry(1.0, 1.0)
    assert written_times("all", stored, 1.0, invalid=THROTTLED) is None
    entry = written_times("all", stored, 1.0, invalid=THROTTLED, peak_allocated=2 * GB)
    assert entry.runs == Runs((1.0, 1.0))
    assert written_times("new", NoBaseline(), 1.0, invalid=THROTTLED).runs is None


def test_a_session_that_takes_no_time_keeps_the_runs_of_this_machine_only():
    stored = timed_entry(1.0, 1.0)
    assert written_times("all", stored, peak_allocated=2 * GB).runs == Runs((1.0, 1.0))
    entry = written_times("all", stored, peak_allocated=2 * GB, machine=EPYC)
    assert (entry.runs, entry.metrics) == (None, {"peak_allocated": 2 * GB})


def test_a_faster_step_begins_anew_where_improvements_are_wanted():
    stored = timed_entry(*[1.0] * MOST_RUNS, forward_time=0.7, backward_time=0.3, throughput=8.0)
    entry = written_times("improved", stored, 0.5, 0.5, forward_time=0.2, throughput=16.0)
    assert entry.runs == Runs((0.5,))
    assert entry.metrics == {"peak_allocated": GB, "forward_time": 0.2, "throughput": 16.0, "step_time": 0.5}


@pytest.mark.parametrize("seconds", [0.99, 2.0])
def test_a_step_that_is_not_faster_is_left_alone_where_improvements_are_wanted(seconds):
    stored = timed_entry(*[1.0] * MOST_RUNS)
    assert written_times("improved", stored, seconds) is None
    entry = written_times("improved", stored, seconds, peak_allocated=GB // 2, forward_time=0.4)
    assert (entry.runs, entry.metrics) == (stored.runs, {"peak_allocated": GB // 2, "step_time": 1.0})


def test_an_improvement_on_another_machine_keeps_the_times_and_their_machine():
    entry = written_times("improved", timed_entry(1.0), 1.0, machine=EPYC, peak_allocated=GB // 2)
    assert (entry.environment, entry.runs) == (XEON, Runs((1.0,)))
    assert entry.metrics == {"peak_allocated": GB // 2, "step_time": 1.0}


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_stored_times_stay_where_only_the_new_is_wanted(seconds):
    assert written_times("new", timed_entry(1.0), seconds) is None
    assert written_times("new", NoBaseline(), seconds).runs == Runs((seconds,))


@pytest.mark.parametrize("environment", [XEON, CPU], ids=["same machine", "no machine was told"])
def test_times_that_an_entry_lacks_are_added_with_their_machine_and_all_else_stays(environment):
    stored = timed_entry(machine=environment, retained=7, forward_time=0.7, backward_time=0.3)
    entry = written_times("new", stored, 0.9, peak_allocated=2 * GB, forward_time=0.4)
    metrics = {"peak_allocated": GB, "retained": 7, "forward_time": 0.4, "step_time": 0.9}
    details = {**environment.details, "machine": "Xeon"}
    there = replace(environment, details=details)
    assert entry == replace(stored, metrics=metrics, environment=there, runs=Runs((0.9,)))


def test_times_are_not_added_to_an_entry_of_another_machine_or_work():
    assert written_times("new", timed_entry(), 1.0, machine=EPYC) is None
    assert written_times("new", timed_entry(), 1.0, workload=replace(TRAIN, batch="int64[16]")) is None
    assert written_times("new", timed_entry(machine=CPU), 1.0, machine=CPU) is None


@pytest.mark.parametrize(
    ("mode", "stored", "seconds"),
    [
        ("new", timed_entry(), [1.0]),
        ("all", timed_entry(1.0), [2.0, 2.0]),
        ("all", timed_entry(1.0), []),
        ("all", timed_entry(1.0), [UNCERTAIN]),
    ],
)
def test_where_times_were_written_or_not_taken_nothing_is_left_out(mode, stored, seconds):
    assert left_out(mode, stored, *seconds) == []


def test_the_time_of_a_slower_machine_is_left_out_and_said_to_be():
    stored = replace(timed_entry(1.0), runs=Runs((1.0,), (1e9,)))
    assert left_out("all", stored, 1.25, pace=0.8e9) == ["the machine runs 20 % slower than in the baseline"]


@pytest.mark.parametrize(
    ("mode", "stored", "told"),
    [
        ("new", timed_entry(), True),
        ("new", timed_entry(1.0), False),
        ("all", timed_entry(1.0), True),
        ("improved", timed_entry(1.0), False),
    ],
)
def test_disturbed_times_are_told_where_they_are_wanted(mode, stored, told):
    assert left_out(mode, stored, 1.0, invalid=THROTTLED) == ([THROTTLED] if told else [])


# Reasons


OLD = replace(stored_entry(peak_allocated=GB), reason="the old reason")


@pytest.mark.parametrize(
    ("mode", "stored", "peak", "reason"),
    [
        ("new", NoBaseline(), GB, "a new reason"),
        ("all", OLD, 2 * GB, "a new reason"),
        ("all", OLD, 2 * GB, None),
        ("improved", OLD, GB // 2, None),
    ],
)
def test_a_change_that_is_accepted_has_its_own_reason_or_none(mode, stored, peak, reason):
    assert written(mode, stored, reason=reason, peak_allocated=peak).reason == reason


def test_a_reason_alone_changes_nothing():
    assert written("all", OLD, reason="a new reason", peak_allocated=GB) is None
    assert written("new", OLD, reason="a new reason", peak_allocated=2 * GB) is None


@pytest.mark.parametrize(("reason", "kept"), [("why counts", "why counts"), (None, "the old reason")])
def test_what_is_only_added_to_keeps_its_reason_unless_there_is_a_new_one(reason, kept):
    entry = written("new", OLD, reason=reason, peak_allocated=GB, retained=0)
    assert (entry.metrics, entry.reason) == ({"peak_allocated": GB, "retained": 0}, kept)


@pytest.mark.parametrize("reason", ["a new reason", None])
def test_one_more_run_keeps_the_reason_of_its_figures_and_another_speed_has_its_own(reason):
    stored = replace(timed_entry(1.0), reason="the old reason")
    one_more = written_times("all", stored, 1.001, reason=reason)
    assert (one_more.runs.seconds, one_more.reason) == ((1.0, 1.001), "the old reason")
    slower = written_times("all", stored, 2.0, 2.0, reason=reason)
    assert (slower.runs.seconds, slower.reason) == ((2.0,), reason)
