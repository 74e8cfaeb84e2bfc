"""The text of a failure, literally: what happened, with numbers and units, and the command or edit that mends it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import textwrap
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.base.units import ThroughputLimit
from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.values.interference import Slowdown
from pytest_gpumem.facts.values.operator_counts import MADE_OF_OPERATORS, Tally
from pytest_gpumem.facts.values.times import Round, Sample, Times
from pytest_gpumem.judging.gate.baseline import Baseline, Budget, NoBaseline
from pytest_gpumem.judging.gate.failing import failing_outcomes
from pytest_gpumem.judging.gate.judge import judge
from pytest_gpumem.judging.gate.verdict import Outcome, TestVerdict
from pytest_gpumem.judging.times.comparison import Runs
from pytest_gpumem.judging.times.intervals import LEVEL
from pytest_gpumem.plugin.config.settings import DEFAULT_TOLERANCES
from pytest_gpumem.reporting.reports.failure import accept_command, bisect_command, failure_text, measured_section
from pytest_gpumem.reporting.reports.layout import Screen
from tests.pages import output

unhurried = settings(deadline=None)

GB = 10**9
PATH = "tests/test_gpt.py::test_train[amp-bf16]"
# No such GPU was measured for these tests: the figures are made up.
H100 = Environment("nvidia-h100-80gb-hbm3", "NVIDIA H100 80GB HBM3", {"torch": "2.11.0"})
CPU = Environment("cpu-x86_64", "CPU (x86_64)", {"torch": "2.11.0", "cpu_capability": "AVX2"})
TRAIN = Workload("train_step", "fp32", 1000, "int64[8, 1024]")


def measured(name="train_step", environment=H100, settled=True, notes=(), **metrics) -> Measurement:
    return Measurement(name, TRAIN, environment, metrics, settled, notes)


def stored(environment=H100, workload=TRAIN, commit="abc1234", **metrics) -> Baseline:
    return Baseline(workload, environment, metrics, "2026-11-02", commit)


def text_of(
    *compared, strict=False, units="si", path=PATH, options=(), tolerances=DEFAULT_TOLERANCES, memory="GPU memory"
) -> str:
    """The failure of a test with these measurements, each given with its budget and its baseline."""
    verdicts = tuple(judge(one, budget, baseline, tolerances) for one, budget, baseline in compared)
    verdict = TestVerdict("tests/test_gpt.py", "test_train[amp-bf16]", verdicts)
    failing = failing_outcomes(verdict, strict=strict, compares=True, accepts=frozenset())
    assert failing, "a test that does not fail has no such text"
    return failure_text(
        verdict, failing, units, accept_command(verdict, failing, words=("pytest", path), options=options), memory
    )


def missing_text(test: TestVerdict) -> str:
    """The failure of a test that no longer takes a measurement that has a baseline."""
    failing = frozenset({Outcome.MISSING})
    return failure_text(test, failing, "si", accept_command(test, failing, words=("pytest", PATH)))


def literal(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


def test_another_package_release_is_named_first_with_the_command_that_checks_it():
    now, then = (
        Environment(H100.slug, H100.device, {"torch": torch}, {"transformers": release, "peft": "0.12.0"})
        for torch, release in (("2.13.0", "4.38.2"), ("2.11.0", "4.37.2"))
    )
    one = measured(environment=now, peak_allocated=9 * GB)
    verdict = judge(one, Budget(), stored(then, peak_allocated=8 * GB), DEFAULT_TOLERANCES)
    test = TestVerdict("tests/test_gpt.py", "test_train[amp-bf16]", (verdict,))
    failing = frozenset({Outcome.REGRESSED})
    command = bisect_command(test, failing, PATH, ["--gpumem-device=emulated:h100"])
    text = failure_text(test, failing, "si", bisect=command)
    assert text.splitlines()[0] == (
        "Memory regressed: peak 9.00 GB, baseline 8.00 GB: +1.00 GB (+12.5 %), allowed +0.5 %; "
        "torch 2.13.0, was 2.11.0; transformers 4.38.2, was 4.37.2"
    )
    told = f'  bisect:   gpumem bisect --packages "{PATH}" -- --gpumem-device=emulated:h100'
    assert told in text.splitlines()


def test_no_package_is_blamed_for_a_budget_or_where_none_differs():
    environment = Environment(H100.slug, H100.device, {"torch": "2.11.0"}, {"transformers": "4.38.2"})
    earlier = stored(environment, peak_allocated=8 * GB)
    same = judge(measured(environment=environment, peak_allocated=9 * GB), Budget(), earlier, DEFAULT_TOLERANCES)
    newer = Environment(H100.slug, H100.device, {"torch": "2.13.0"})
    budget = Budget({"peak_allocated": GB})
    over = judge(measured(environment=newer, peak_allocated=8 * GB), budget, earlier, DEFAULT_TOLERANCES)
    for verdict in (same, over):
        test = TestVerdict("tests/test_gpt.py", "test_train[amp-bf16]", (verdict,))
        failing = frozenset({Outcome.REGRESSED, Outcome.OVER_BUDGET})
        assert bisect_command(test, failing, PATH) is None
        assert "was" not in failure_text(test, failing, "si").splitlines()[0]


def test_a_regression():
    now = measured(peak_allocated=9_310_000_000, peak_forward=5 * GB, retained=0, step_time=0.01238)
    earlier = stored(peak_allocated=8_120_000_000, retained=0)
    assert text_of((now, Budget(), earlier)) == literal(
        """
        GPU memory regressed: peak 9.31 GB, baseline 8.12 GB: +1.19 GB (+14.7 %), allowed +0.5 %

          metric          baseline      now   change    allowed
          peak allocated   8.12 GB  9.31 GB  +14.7 %     +0.5 %  regressed
          peak forward              5.00 GB
          retained             0 B      0 B   +0.0 %  +64.00 kB  ok

          baseline: 2026-11-02, NVIDIA H100 80GB HBM3, torch 2.11.0, commit abc1234

          accept:   pytest "tests/test_gpt.py::test_train[amp-bf16]" --gpumem-update=all
        """
    )


def test_a_regression_of_one_of_several_gpus_names_it_and_shows_the_others():
    def on_gpus(first: int, second: int) -> Measurement:
        by_device = {"cuda:0": {"peak_allocated": first}, "cuda:1": {"peak_allocated": second}}
        return replace(measured(peak_allocated=max(first, second)), by_device=by_device)

    earlier = replace(stored(peak_allocated=3 * GB), by_device=on_gpus(2 * GB, 3 * GB).by_device)
    assert text_of((on_gpus(int(2.9 * GB), 3 * GB), Budget(), earlier)) == literal(
        """
        GPU memory regressed: peak on cuda:0 2.90 GB, baseline 2.00 GB: +900.00 MB (+45.0 %), allowed +0.5 %

          metric                    baseline      now   change  allowed
          peak allocated on cuda:0   2.00 GB  2.90 GB  +45.0 %   +0.5 %  regressed

          note: peak 3.00 GB on cuda:1 (cuda:0 2.90 GB)

          baseline: 2026-11-02, NVIDIA H100 80GB HBM3, torch 2.11.0, commit abc1234

          accept:   pytest "tests/test_gpt.py::test_train[amp-bf16]" --gpumem-update=all
        """
    )


IN_THE_GUIDE = output("docs/guide/servers-and-launched-jobs.md", "In launch: GPU memory regressed")
RANKS = "train.py rank 1 has the largest peak of all ranks, 5.00 GB, and train.py rank 0 the smallest, 4.00 GB"


def test_ranks_that_are_no_longer_balanced_are_named_with_their_bytes():
    def job(second: int, imbalance: float) -> Measurement:
        by_device = {
            gpu: {"peak_allocated": nbytes, "peak_reserved": nbytes + GB // 5}
            for gpu, nbytes in (("cuda:0", 4 * GB), ("cuda:1", second))
        }
        one = measured("launch", notes=(RANKS,), **by_device["cuda:1"], imbalance=imbalance)
        return replace(one, by_device=by_device)

    grown, even = job(5 * GB, 1.25), job(4 * GB, 1.0)
    rank_0 = measured("launch: train.py rank 0", peak_allocated=4 * GB)
    earlier = replace(stored(**even.metrics), by_device=even.by_device)
    text = text_of((grown, Budget(), earlier), (rank_0, Budget(), stored(peak_allocated=4 * GB)))
    assert text.startswith(f"{IN_THE_GUIDE.text.strip()}\n")


def test_ranks_over_their_budget():
    now = measured("launch", notes=(RANKS,), imbalance=1.25)
    text = text_of((now, Budget({"imbalance": 1.2}), None))
    assert text.startswith("GPU memory over budget: imbalance over ranks 1.25, budget 1.20: +4.2 %\n")


def test_an_imbalance_that_shrank_with_another_cudnn_is_not_said_to_be_worse():
    now, then = (Environment(H100.slug, H100.device, {"emulated_cudnn": release}) for release in ("9.21.0", "9.20.0"))
    compared = measured(environment=now, imbalance=1.0), Budget(), stored(then, imbalance=1.25)
    text = text_of(compared, strict=True)
    assert text.startswith("GPU memory is not comparable: imbalance over ranks 1.00, baseline 1.25: -20.0 %")
    assert "emulated_cudnn was 9.20.0, now 9.21.0, which can change bytes without a code change" in text


def test_why_a_baseline_was_accepted_stands_below_it_in_one_harmless_line():
    earlier = replace(stored(peak_allocated=GB), reason="attention off\nuntil #12 \x1b[31m\u202e")
    lines = text_of((measured(peak_allocated=2 * GB), Budget(), earlier)).splitlines()
    assert lines[-4:] == [
        "  baseline: 2026-11-02, NVIDIA H100 80GB HBM3, torch 2.11.0, commit abc1234",
        "  reason:   attention off\\nuntil #12 \\x1b[31m\\u202e",
        "",
        '  accept:   pytest "tests/test_gpt.py::test_train[amp-bf16]" --gpumem-update=all',
    ]


def test_a_regression_in_binary_units():
    now, earlier = measured(peak_allocated=3 * 2**30), stored(peak_allocated=2 * 2**30, commit=None)
    assert text_of((now, Budget(), earlier), units="iec") == literal(
        """
        GPU memory regressed: peak 3.00 GiB, baseline 2.00 GiB: +1.00 GiB (+50.0 %), allowed +0.5 %

          metric          baseline       now   change  allowed
          peak allocated  2.00 GiB  3.00 GiB  +50.0 %   +0.5 %  regressed

          baseline: 2026-11-02, NVIDIA H100 80GB HBM3, torch 2.11.0

          accept:   pytest "tests/test_gpt.py::test_train[amp-bf16]" --gpumem-update=all
        """
    )


def test_a_peak_over_budget_that_nobody_compared():
    now = measured(peak_allocated=9_310_000_000, retained=0)
    assert text_of((now, Budget({"peak_allocated": 8 * GB}), None)) == literal(
        """
        GPU memory over budget: peak 9.31 GB, budget 8.00 GB: +1.31 GB (+16.4 %)

          metric              now   budget
          peak allocated  9.31 GB  8.00 GB  over budget
          retained            0 B

          budget:   set by the test's @pytest.mark.gpumem, or by budget or models in [tool.gpumem]
        """
    )


def test_a_leak_over_a_budget_of_nothing():
    assert text_of((measured(retained=512), Budget({"retained": 0}), None)) == literal(
        """
        GPU memory over budget: retained 512 B, budget 0 B: +512 B

          metric      now  budget
          retained  512 B     0 B  over budget

          budget:   set by the test's @pytest.mark.gpumem, or by budget or models in [tool.gpumem]
        """
    )


def test_a_tiny_baseline_is_held_against_by_sizes_and_factors():
    lines = text_of((measured(retained=6_291_556), Budget(), stored(retained=100))).splitlines()
    assert (
        lines[0] == "GPU memory regressed: retained 6.29 MB, baseline 100 B: +6.29 MB (62,916 times), allowed +64.00 kB"
    )
    assert [line.split() for line in lines if line.startswith("  retained")] == [
        ["retained", "100", "B", "6.29", "MB", "+6.29", "MB", "+64.00", "kB", "regressed"]
    ]


def test_over_budget_and_regressed_is_told_as_over_budget_with_both_ways_out():
    now = measured(peak_allocated=9_310_000_000, retained=3_000_000)
    earlier = stored(peak_allocated=8_120_000_000, retained=0)
    assert text_of((now, Budget({"peak_allocated": 9 * GB}), earlier)) == literal(
        """
        GPU memory over budget: peak 9.31 GB, budget 9.00 GB: +310.00 MB (+3.4 %)

          metric          baseline      now    change    allowed   budget
          peak allocated   8.12 GB  9.31 GB   +14.7 %             9.00 GB  over budget
          retained             0 B  3.00 MB  +3.00 MB  +64.00 kB           regressed

          baseline: 2026-11-02, NVIDIA H100 80GB HBM3, torch 2.11.0, commit abc1234

          budget:   set by the test's @pytest.mark.gpumem, or by budget or models in [tool.gpumem]
          accept:   pytest "tests/test_gpt.py::test_train[amp-bf16]" --gpumem-update=all
        """
    )


def test_a_new_test_under_strict():
    now = measured(peak_allocated=9_310_000_000, peak_forward=5 * GB)
    assert text_of((now, Budget(), NoBaseline()), strict=True) == literal(
        """
        Not compared (required by --gpumem-strict): new, there is no baseline for NVIDIA H100 80GB HBM3 yet

          metric              now
          peak allocated  9.31 GB  new
          peak forward    5.00 GB

          accept:   pytest "tests/test_gpt.py::test_train[amp-bf16]" --gpumem-update=new
        """
    )


def test_a_stale_test_under_strict():
    earlier = stored(workload=Workload("train_step", "fp32", 1000, "int64[4, 1024]"), peak_allocated=2.2 * GB)
    assert text_of((measured(peak_allocated=GB), Budget(), earlier), strict=True) == literal(
        """
        Not compared (required by --gpumem-strict): stale, batch int64[8, 1024], was int64[4, 1024]

          metric          baseline      now   change
          peak allocated   2.20 GB  1.00 GB  -54.5 %  stale

          baseline: 2026-11-02, NVIDIA H100 80GB HBM3, torch 2.11.0, commit abc1234

          accept:   pytest "tests/test_gpt.py::test_train[amp-bf16]" --gpumem-update=all
        """
    )


def test_a_larger_workload_is_the_first_reason_for_what_grew():
    earlier = stored(workload=Workload("train_step", "fp32", 790, "int64[8, 1024]"), peak_allocated=GB, operators=5)
    first, _, *table = text_of((measured(peak_allocated=2 * GB, operators=9), Budget(), earlier)).splitlines()
    assert first == (
        "GPU memory regressed: peak 2.00 GB, baseline 1.00 GB: +1.00 GB (+100.0 %), allowed +0.5 %; "
        "another workload: parameters 1.00 k, were 790"
    )
    assert table[:3] == [
        "  metric          baseline      now    change  allowed",
        "  peak allocated   1.00 GB  2.00 GB  +100.0 %   +0.5 %  regressed",
        "  operators              5        9   +80.0 %           stale",
    ]


def test_a_step_that_keeps_more_each_time_is_told_before_the_peak_that_rises_with_it():
    now = measured(peak_allocated=2 * GB, growth=100_000_000, retained=100_000_000)
    first, *_ = text_of((now, Budget(), stored(peak_allocated=GB, retained=0))).splitlines()
    assert first == "GPU memory regressed: growth per step 100.00 MB, baseline 0 B: +100.00 MB, allowed +1.02 kB"


def test_a_measurement_that_is_not_taken_any_more():
    taken = (judge(measured(peak_allocated=GB), Budget(), stored(peak_allocated=GB), DEFAULT_TOLERANCES),)
    test = TestVerdict("tests/test_gpt.py", "test_train[amp-bf16]", taken, missing=("eval", "other"))
    assert missing_text(test) == literal(
        """
        Measurement missing: it has baselines on this device for measurements that it no longer takes: eval, other

          accept:   pytest "tests/test_gpt.py::test_train[amp-bf16]" --gpumem-update=all
        """
    )


def test_a_test_that_measures_nothing_any_more_has_no_command_that_accepts_that():
    test = TestVerdict("tests/test_gpt.py", "test_a", relations=1, missing=("measure",))
    assert missing_text(test) == literal(
        """
        Measurement missing: it has baselines on this device for measurements that it no longer takes: measure

          mend:     take the measurement again, or remove its baseline from the store
        """
    )


def test_a_test_that_is_not_measured_any_more():
    test = TestVerdict("tests/test_gpt.py", "test_a", unmeasured="another profiler was active", missing=("call",))
    assert missing_text(test) == literal(
        """
        Not measured any more: another profiler was active

          baseline: call, but no figures were compared with it
          mend:     measure the test again, or remove its marker or fixture and run `gpumem prune`
        """
    )


def test_an_uncertain_regression_under_strict():
    now = measured(environment=Environment(CPU.slug, CPU.device, {"cpu_capability": "AVX512"}), peak_allocated=1.2 * GB)
    earlier = stored(environment=CPU, peak_allocated=GB)
    assert text_of((now, Budget(), earlier), strict=True, memory="Memory") == literal(
        """
        Memory may have regressed: peak 1.20 GB, baseline 1.00 GB: +200.00 MB (+20.0 %), allowed +0.5 %

          metric          baseline      now   change  allowed
          peak allocated   1.00 GB  1.20 GB  +20.0 %   +0.5 %  uncertain

          note: peak allocated: cpu_capability was AVX2, now AVX512, which can change bytes without a code change

          baseline: 2026-11-02, CPU (x86_64), torch 2.11.0, commit abc1234

          accept:   pytest "tests/test_gpt.py::test_train[amp-bf16]" --gpumem-update=all
        """
    )


def test_of_several_measurements_only_the_guilty_are_told_and_by_name():
    fine = measured("plain", peak_allocated=GB), Budget(), stored(peak_allocated=GB)
    bad = measured("checkpointed", peak_allocated=2 * GB), Budget(), stored(peak_allocated=GB)
    over = measured("generate", peak_allocated=3 * GB), Budget({"peak_allocated": 2 * GB}), None
    assert text_of(fine, bad, over) == literal(
        """
        In checkpointed: GPU memory regressed: peak 2.00 GB, baseline 1.00 GB: +1.00 GB (+100.0 %), allowed +0.5 %

          metric          baseline      now    change  allowed
          peak allocated   1.00 GB  2.00 GB  +100.0 %   +0.5 %  regressed

          baseline: 2026-11-02, NVIDIA H100 80GB HBM3, torch 2.11.0, commit abc1234

        In generate: GPU memory over budget: peak 3.00 GB, budget 2.00 GB: +1.00 GB (+50.0 %)

          metric              now   budget
          peak allocated  3.00 GB  2.00 GB  over budget

          budget:   set by the test's @pytest.mark.gpumem, or by budget or models in [tool.gpumem]
          accept:   pytest "tests/test_gpt.py::test_train[amp-bf16]" --gpumem-update=all
        """
    )


def test_a_note_of_the_measurement_is_told_once():
    note = "peaks of 6 warm-up steps moved from 1 to 6 bytes"
    now = measured(settled=False, notes=(note,), peak_allocated=2 * GB)
    text = text_of((now, Budget(), stored(peak_allocated=GB)), strict=True)
    assert text.count(note) == 1


@pytest.mark.parametrize(
    ("metric", "then", "now", "headline"),
    [
        ("operators", 1236, 1284, "operators 1,284, baseline 1,236: +48 (+3.9 %), allowed +0.0 %"),
        ("syncs", 0, 1, "syncs 1, baseline 0: +1, allowed +0"),
        ("flops", 10**9, 10**9 + 4096, "FLOPs 1.00 GFLOP, baseline 1.00 GFLOP: +4.10 kFLOP (+0.0 %), allowed +0.0 %"),
        ("launches", 400, 412, "kernel launches 412, baseline 400: +12 (+3.0 %), allowed +0.0 %"),
    ],
)
def test_more_work_is_told_by_how_much_there_is_of_it(metric, then, now, headline):
    heavier, lighter = measured(peak_allocated=GB, **{metric: now}), stored(peak_allocated=GB, **{metric: then})
    assert text_of((heavier, Budget(), lighter)).splitlines()[0] == f"Work regressed: {headline}"


@pytest.mark.parametrize(
    ("grown", "headline"),
    [
        (("launches", "operators", "flops", "syncs"), "Work regressed: syncs"),
        (("launches", "operators", "flops"), "Work regressed: FLOPs"),
        (("launches", "operators"), "Work regressed: operators"),
        (("syncs", "growth", "peak_allocated"), "GPU memory regressed: growth per step"),
        (("syncs", "peak_allocated"), "GPU memory regressed: peak"),
    ],
)
def test_of_several_metrics_that_grew_the_nearest_to_the_cause_comes_first(grown, headline):
    then = {"peak_allocated": GB, "growth": 0, "flops": 5, "operators": 5, "syncs": 5, "launches": 5}
    now = {name: value + GB if name in grown else value for name, value in then.items()}
    made_of = {name: (Tally("mm", now[name]),) for name in MADE_OF_OPERATORS}
    lines = text_of((replace(measured(**now), by_operator=made_of), Budget(), stored(**then))).splitlines()
    assert lines[0].startswith(f"{headline} ")
    titles = [line.split()[1] for line in lines if line.startswith("  all ")]
    assert titles == [title for title in ("syncs", "FLOPs", "operators", "kernel") if title in " ".join(titles)]
    assert len(titles) == len({*grown} & {*MADE_OF_OPERATORS})


# Speed


ON_XEON = Environment("cpu-x86_64", "CPU (x86_64)", {"torch": "2.11.0", "machine": "Xeon, 8 cores"})
ON_EPYC = Environment("cpu-x86_64", "CPU (x86_64)", {"torch": "2.11.0", "machine": "EPYC, 64 cores"})


def timed(*seconds: float, environment=ON_XEON, invalid=None) -> Measurement:
    """A measurement of a step on 8 samples, with a steady sample of each of ``seconds``."""
    times = Times(tuple(Sample((Round(one),) * 12, 1, invalid, invalid and Slowdown(4.0)) for one in seconds))
    metrics = {"peak_allocated": GB, "step_time": times.median}
    return Measurement("train_step", TRAIN, environment, metrics, times=times, work={"samples": 8})


def stored_times(*seconds: float) -> Baseline:
    metrics = {"peak_allocated": GB, "step_time": seconds[0]}
    return Baseline(TRAIN, ON_XEON, metrics, "2026-11-02", "abc1234", runs=Runs(seconds))


def test_a_slower_step_is_told_in_seconds_and_with_the_interval_of_its_ratio():
    text = text_of((timed(0.012, 0.0121), Budget(), stored_times(*[0.010] * 10)))
    # The ends of the interval are the comparison's own.
    headline, body = text.split("\n", 1)
    found = re.fullmatch(
        r"Time regressed: step time 12\.00 ms, baseline 10\.00 ms: \+20\.0 % \((\d\d) % between (\+1\d\.\d %) and "
        r"(\+2\d\.\d %)\), allowed \+2\.5 %",
        headline,
    )
    assert found is not None, headline
    assert int(found[1]) == LEVEL * 100
    assert literal(body) == literal(
        """
          metric          baseline            now   change  allowed
          peak allocated   1.00 GB        1.00 GB   +0.0 %   +0.5 %  ok
          step time       10.00 ms       12.00 ms  +20.0 %   +2.5 %  regressed
          throughput                667 samples/s

          baseline: 2026-11-02, CPU (x86_64), torch 2.11.0, commit abc1234

          accept:   pytest "tests/test_gpt.py::test_train[amp-bf16]" --gpumem-update=all
        """
    )


def test_too_little_throughput_is_told_with_its_budget_and_where_that_is_set():
    text = text_of((timed(0.012), Budget(min_throughput=ThroughputLimit(800, "samples")), None))
    assert text == literal(
        """
        Throughput below budget: throughput 667 samples/s, budget 800 samples/s: -16.7 %

          metric                now         budget
          step time        12.00 ms
          throughput  667 samples/s  800 samples/s  over budget

          budget:   set by the test's @pytest.mark.gpumem, or by budget or models in [tool.gpumem]
        """
    )


def test_an_uncertain_time_that_strictness_does_not_let_pass_says_why():
    now = timed(0.012, invalid="the GPU was throttled")
    text = text_of((now, Budget(), stored_times(*[0.010] * 10)), strict=True)
    assert text.startswith("Time may have regressed: step time 12.00 ms, baseline 10.00 ms: +20.0 % (")
    assert "\n  note: step time: the GPU was throttled\n" in text


def test_times_from_another_machine_required_by_a_limit_are_accepted_with_the_rest():
    now = timed(0.010, environment=ON_EPYC)
    text = text_of((now, Budget(max_slowdown=0.1), stored_times(0.010)), strict=True)
    reason = "time is not compared: the baseline's time comes from Xeon, 8 cores, and this machine is EPYC, 64 cores"
    assert f"step time: {reason}\n" in text
    assert text.count(reason) == 1
    # "new" would leave the baseline as it is.
    assert text.endswith("--gpumem-update=all")


# The command


def accepting(**more) -> str:
    text = text_of((measured(peak_allocated=2 * GB), Budget(), stored(peak_allocated=GB)), **more)
    return text.splitlines()[-1].removeprefix("  accept:   ")


def test_the_command_repeats_the_options_that_decide_what_is_measured():
    assert accepting(path="a.py::test_a", options=["--gpumem-device=cpu", "--gpumem-store=my store"]) == (
        'pytest a.py::test_a --gpumem-update=all --gpumem-device=cpu "--gpumem-store=my store"'
    )


@pytest.mark.parametrize(
    ("path", "typed"),
    [
        ("a.py::test_a", "a.py::test_a"),
        ("a.py::test_a[fp32]", '"a.py::test_a[fp32]"'),
        ("my tests/a.py::test_a", '"my tests/a.py::test_a"'),
        ("a.py::test_a['b']", "\"a.py::test_a['b']\""),
        ("a.py::test_a[$HOME]", "'a.py::test_a[$HOME]'"),
        ('a.py::test_a["b"]', "'a.py::test_a[\"b\"]'"),
    ],
)
def test_the_id_of_the_test_is_quoted_as_people_do(path, typed):
    assert accepting(path=path) == f"pytest {typed} --gpumem-update=all"


@unhurried
@given(st.text(st.characters(exclude_categories=("C", "Zl", "Zp")), min_size=1, max_size=12))
def test_a_shell_reads_the_id_of_the_test_as_it_is(parameter):
    path = f"tests/a.py::test_a[{parameter}]"
    assert shlex.split(accepting(path=path)) == ["pytest", path, "--gpumem-update=all"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash to ask")
def test_bash_reads_an_id_with_what_cannot_be_seen_as_it_is():
    path = "a.py::test_a[it's\n\x1b[31mred\\ \u202e 漢 \udcff]"
    command = accepting(path=path)
    assert Screen().legible(command) == command
    done = subprocess.run(["bash", "-c", f"printf '%s' {command.split(' ', 1)[1]}"], capture_output=True, check=True)
    assert done.stdout == os.fsencode(path) + b"--gpumem-update=all"


def test_no_note_and_no_reason_moves_the_cursor():
    text = text_of((measured(peak_allocated=2 * GB, notes=("one\ntwo\x1b[2J",)), Budget(), stored(peak_allocated=GB)))
    assert r"  note: one\ntwo\x1b[2J" in text.split("\n")
    unmeasured = TestVerdict("a.py", "test_a", unmeasured="so\x1b[31m")
    assert r"so\x1b[31m" in failure_text(unmeasured, frozenset(), "si")


# The section of a test that failed for a reason of its own


def test_what_was_measured_before_a_test_failed_by_itself():
    section = measured_section(
        [
            measured("plain", peak_allocated=5 * GB, retained=0, step_time=0.1),
            measured("checkpointed", peak_allocated=1_024),
        ],
        "si",
    )
    assert section == literal(
        """
        metric          measurement         now
        peak allocated  plain           5.00 GB
        retained        plain               0 B
        step time       plain         100.00 ms
        peak allocated  checkpointed    1.02 kB
        """
    )


def test_a_reason_that_several_metrics_share_is_told_once():
    note = "the step's peaks went up and down: 1.00 GB, 1.20 GB"
    figures = {"peak_allocated": 12 * GB // 10, "peak_reserved": 12 * GB // 10, "operators": 6, "launches": 6}
    newer = replace(H100, details={**H100.details, "torch": "2.13.0"})
    now = measured(environment=newer, settled=False, notes=(note,), **figures)
    text = text_of((now, Budget(), stored(peak_allocated=GB, peak_reserved=GB, operators=5, launches=5)), strict=True)
    assert [line for line in text.splitlines() if "note: " in line] == [
        f"  note: peak allocated, peak reserved: the step's peak did not settle: {note}",
        "  note: operators, kernel launches: torch was 2.11.0, now 2.13.0, which can change counts without a code change",
    ]


@pytest.mark.parametrize("budget", [Budget({"peak_allocated": GB}), Budget()], ids=["over budget", "regressed"])
def test_a_failed_region_says_why_it_is_not_explained_and_what_explains_it(budget):
    region = replace(measured("region", peak_allocated=2 * GB), workload=Workload("region"))
    earlier = stored(workload=Workload("region"), peak_allocated=GB)
    told = (
        "gpumem.track() runs once and is not recorded, so its lines and tensors are unknown; to see them, move its code"
    )
    assert told in text_of((region, budget, earlier))
    step = replace(region, workload=Workload("measure"))
    assert told not in text_of((step, budget, stored(workload=Workload("measure"), peak_allocated=GB)))
