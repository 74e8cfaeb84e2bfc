"""Bytes that a server had gained before a test began: growth that other tests caused is not this test's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.judging.baselines.update import entries_to_write
from pytest_gpumem.judging.gate.baseline import Budget, Key, baseline_of
from pytest_gpumem.judging.gate.judge import judge
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.plugin.config.settings import DEFAULT_TOLERANCES

MB = 10**6
GPU = Environment("emulated-h100", "emulated H100")
OK, RED, BETTER, UNSURE = Outcome.OK, Outcome.REGRESSED, Outcome.IMPROVED, Outcome.UNCERTAIN


def figures(peak: int, retained: int, gained: int, step: str = "process") -> Measurement:
    """Figures of a server in MB."""
    metrics = {"peak_allocated": peak * MB, "retained": retained * MB}
    return Measurement("call: server.py", Workload(step), GPU, metrics, gained_before=gained * MB)


def judged(now: Measurement, before: Measurement | None, **budget: int):
    baseline = None if before is None else baseline_of(before, "2026-11-02", None)
    return judge(now, Budget(budget), baseline, DEFAULT_TOLERANCES)


@pytest.mark.parametrize(
    ("before", "now", "peak", "retained", "noted"),
    [
        # The server has weights of 100 MB when the session first sees it. A request takes 10 MB.
        pytest.param((110, 0, 0), (150, 40, 0), RED, RED, False, id="the test that leaks 40 MB"),
        pytest.param((110, 0, 0), (150, 0, 40), OK, OK, True, id="a test after the leak"),
        pytest.param((110, 0, 0), (110, 0, 0), OK, OK, False, id="a test before the leak"),
        pytest.param((110, 0, 0), (170, 0, 40), RED, OK, True, id="its own growth by 20 MB after the leak"),
        pytest.param((110, 0, 0), (170, 20, 40), RED, RED, True, id="its own leak after the leak"),
        pytest.param((110, 0, 0), (230, 0, 80), RED, OK, True, id="its own growth after two leaks"),
        pytest.param((150, 0, 40), (190, 0, 80), OK, OK, True, id="a second leak, after a first leak was accepted"),
        pytest.param((150, 0, 40), (150, 0, 40), OK, OK, False, id="the accepted leak"),
        pytest.param((150, 0, 40), (110, 0, 0), OK, OK, False, id="a test after the accepted leak, run alone"),
        pytest.param((150, 0, 40), (130, 0, 0), UNSURE, OK, False, id="its own growth by 20 MB, run alone"),
        pytest.param((150, 0, 40), (170, 0, 0), RED, OK, False, id="its own growth by 60 MB, run alone"),
        pytest.param((150, 0, 40), (100, 0, 0), BETTER, OK, False, id="its own decrease by 10 MB, run alone"),
        pytest.param((150, 0, 40), (150, 0, 80), OK, OK, False, id="a decrease after further growth is not seen"),
        # The server has a cache of 40 MB when the session first sees it. Another test frees it.
        pytest.param((150, 0, 0), (110, 0, -40), OK, OK, False, id="after the cache is freed, recorded alone"),
        pytest.param((110, 0, -40), (150, 0, 0), OK, OK, True, id="run alone, recorded after the cache was freed"),
        pytest.param((110, 0, -40), (110, 0, -40), OK, OK, False, id="recorded and run after the cache was freed"),
        pytest.param((110, 0, -40), (190, 0, 40), OK, OK, True, id="recorded after a decrease, run after growth"),
        pytest.param((190, 0, 40), (110, 0, -40), OK, OK, False, id="recorded after growth, run after a decrease"),
        pytest.param((150, 0, 0), (130, 0, -40), UNSURE, OK, False, id="its own growth after the cache is freed"),
        pytest.param((110, 0, -40), (170, 0, 0), RED, OK, True, id="its own growth, run alone"),
        # The test fills the cache again.
        pytest.param((150, 0, 0), (150, 40, -40), OK, OK, False, id="the cache is filled again, recorded alone"),
        pytest.param((150, 40, -40), (150, 0, 0), OK, OK, False, id="the cache is filled again, run alone"),
        pytest.param((150, 40, -40), (170, 0, 0), UNSURE, OK, True, id="the same beside its own growth"),
        pytest.param((150, 0, 0), (170, 40, -40), RED, OK, False, id="the same beside its own growth, recorded alone"),
        pytest.param((110, 0, 0), (150, 0, 0), RED, OK, False, id="weights grew before the session saw the server"),
        # The server loads weights of 100 MB at the first request.
        pytest.param((110, 100, 0), (110, 0, 100), OK, OK, False, id="loaded by an earlier test, recorded alone"),
        pytest.param((110, 0, 100), (110, 100, 0), OK, OK, False, id="loaded by this test, recorded in full"),
        pytest.param((110, 100, 0), (150, 140, 0), RED, RED, False, id="larger weights, loaded by this test"),
        pytest.param((110, 100, 0), (150, 0, 140), OK, OK, True, id="larger weights, loaded by an earlier test"),
        pytest.param((110, 0, 100), (150, 0, 140), OK, OK, True, id="the same, recorded in full"),
        pytest.param((110, 0, 100), (150, 140, 0), RED, RED, False, id="larger weights, recorded in full, run alone"),
        pytest.param((110, 0, 100), (150, 140, 0), RED, RED, False, id="a leak, recorded in full, run alone"),
        pytest.param((110, 100, 0), (150, 0, 100), UNSURE, OK, True, id="a request that grew, recorded alone"),
        pytest.param((110, 100, 0), (220, 0, 100), RED, OK, True, id="a request that grew by more than the weights"),
        pytest.param((110, 0, 100), (150, 0, 100), RED, OK, False, id="a request that grew, recorded in full"),
        pytest.param((110, 0, 100), (150, 100, 0), RED, OK, False, id="a request that grew, run alone"),
        pytest.param((150, 140, 0), (110, 0, 100), BETTER, BETTER, False, id="smaller weights, recorded alone"),
        pytest.param((150, 0, 140), (110, 100, 0), OK, OK, False, id="smaller weights, recorded in full, run alone"),
        # An earlier test makes a workspace of 30 MB that this test does not use.
        pytest.param((110, 0, 0), (140, 0, 30), OK, OK, True, id="an unused workspace, recorded alone"),
        pytest.param((110, 100, 0), (140, 0, 130), OK, OK, True, id="the same beside lazily loaded weights"),
        pytest.param((140, 0, 30), (110, 0, 0), OK, OK, False, id="an unused workspace, recorded in full, run alone"),
        # The server keeps its last result until the next result replaces it.
        pytest.param((110, 10, 0), (120, 0, 10), UNSURE, OK, True, id="the last result of an earlier test"),
        pytest.param((120, 0, 10), (110, 10, 0), OK, OK, False, id="the last result, recorded in full, run alone"),
    ],
)  # fmt: skip
def test_growth_before_a_test_began_is_not_the_tests(before, now, peak, retained, noted):
    verdict = judged(figures(*now), figures(*before))
    assert [metric.outcome for metric in verdict.metrics] == [peak, retained]
    assert bool(verdict.measurement.notes) == noted


def test_a_note_says_how_much_more_the_process_held():
    (note,) = judged(figures(150, 0, 40), figures(110, 0, 0)).measurement.notes
    assert note == "the process held 40.00 MB more when this measurement began than when the session first saw it"
    (note,) = judged(figures(190, 0, 80), figures(150, 0, 40)).measurement.notes
    assert note.endswith("first saw it; in the baseline, 40.00 MB more")
    (note,) = judged(figures(150, 0, 40, "processes"), figures(110, 0, 0, "processes")).measurement.notes
    assert note == "the processes held 40.00 MB more when this measurement began than when the session first saw them"


def test_a_note_says_that_the_process_held_less_in_the_baseline():
    (note,) = judged(figures(150, 0, 0), figures(110, 0, -40)).measurement.notes
    assert note.endswith(
        "held 0 B more when this measurement began than when the session first saw it; in the baseline, 40.00 MB less"
    )


def test_a_doubt_says_that_the_process_held_more_in_the_baseline():
    verdict = judged(figures(130, 0, 0), figures(150, 0, 40)).of("peak_allocated")
    assert verdict.reason == (
        "the process had gained 40.00 MB less before this measurement than in the baseline, and its peak is not lower by as much"
    )


def test_the_sum_over_all_processes_is_not_doubted():
    """Run alone, the test loads what an earlier test loaded in the baseline's run."""
    measurement = figures(150, 0, 0, "processes")
    alone = replace(measurement, metrics={"peak_allocated": 150 * MB})
    assert judged(alone, figures(150, 0, 40, "processes")).outcome is OK


def test_the_allowed_growth_includes_the_growth_before():
    """The allowed growth in a report: 40 MB and 0.5 % of the baseline."""
    verdict = judged(figures(150, 0, 40), figures(110, 0, 0))
    assert [metric.allowed for metric in verdict.metrics] == [40 * MB + 0.55 * MB, 64e3]
    verdict = judged(figures(110, 100, 0), figures(110, 0, 100))
    assert [metric.allowed for metric in verdict.metrics] == [0.55 * MB, 100 * MB + 64e3]


def test_a_doubtful_peak_says_whose_bytes_they_may_be():
    verdict = judged(figures(150, 0, 100), figures(110, 100, 0)).of("peak_allocated")
    assert verdict.reason == (
        "the process had gained 100.00 MB more before this measurement than in the baseline, where this test itself may have "
        "allocated them"
    )


@pytest.mark.parametrize(("gained", "noted"), [(0, False), (40, True)])
@pytest.mark.parametrize("before", [None, figures(150, 0, 40)])
def test_a_budget_is_absolute_and_the_growth_before_is_a_note(before, gained, noted):
    verdict = judged(figures(150, 0, gained), before, peak_allocated=149 * MB)
    assert verdict.outcome is Outcome.OVER_BUDGET
    assert bool(verdict.measurement.notes) == noted
    assert judged(figures(150, 0, gained), before, peak_allocated=150 * MB).measurement.notes == ()


def test_a_baseline_stores_the_growth_before_unless_it_is_zero():
    assert baseline_of(figures(150, 0, 40), "2026-11-02", None).gained_before == 40 * MB
    assert baseline_of(figures(150, 0, 0), "2026-11-02", None).gained_before is None
    assert baseline_of(figures(150, 0, -40), "2026-11-02", None).gained_before == -40 * MB


def updated(mode, before: Measurement, now: Measurement):
    stored, key = baseline_of(before, "2026-11-02", None), Key("test_it.py", "test_it", "call: server.py")
    entry = baseline_of(now, "2026-11-03", None)
    return entries_to_write(mode, {key: (judged(now, before), entry)}, {key: stored}).get(key)


def test_an_update_stores_the_growth_before_with_the_peak():
    assert updated("improved", figures(150, 0, 40), figures(100, 0, 10)).gained_before == 10 * MB
    assert updated("improved", figures(150, 140, 0), figures(150, 0, 100)).gained_before == 100 * MB
    assert updated("improved", figures(110, 100, 0), figures(110, 0, 100)) is None
    assert updated("all", figures(110, 0, 0), figures(110, 0, 10)).gained_before == 10 * MB
    assert updated("all", figures(110, 0, 10), figures(110, 0, 10)) is None


def test_each_gpu_is_judged_by_its_own_retained_bytes():
    """The weights on both GPUs were loaded by this test alone, and by an earlier test now. One request grew."""

    def on_two(peaks, retained, gained):
        by_device = {
            f"cuda:{gpu}": {"peak_allocated": peak * MB, "retained": kept * MB}
            for gpu, (peak, kept) in enumerate(zip(peaks, retained, strict=True))
        }
        return replace(figures(max(peaks), max(retained), gained), by_device=by_device)

    alone = on_two((110, 60), (100, 50), 0)
    assert judged(on_two((110, 60), (0, 0), 100), alone).outcome is OK
    verdict = judged(on_two((110, 260), (0, 0), 100), alone).of("peak_allocated")
    assert (verdict.outcome, verdict.gpu) == (RED, "cuda:1")
