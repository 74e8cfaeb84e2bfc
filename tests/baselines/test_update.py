"""Which measurements an update writes: what is missing, what got better, or everything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpumem.baselines.entry import Absent, Entry, Key, entry_of
from pytest_gpumem.baselines.update import ACCEPTS, entries_to_write
from pytest_gpumem.baselines.update_modes import UPDATE_MODES
from pytest_gpumem.composition import Composition, Explanation, Row
from pytest_gpumem.gate.budget import Budget
from pytest_gpumem.gate.judge import judge
from pytest_gpumem.gate.verdict import Outcome
from pytest_gpumem.measurement import Environment, Measurement, Workload
from pytest_gpumem.settings import DEFAULT_TOLERANCES

CPU = Environment("cpu-x86_64", "CPU (x86_64)", {"torch": "2.13.0"})
KEY = Key("tests/test_gpt.py", "test_a", "call")
GB = 10**9


def written(mode, stored, workload=None, peak=None, **metrics) -> Entry | None:
    """What an update writes for a test that now measures ``metrics``; ``peak`` is its composition."""
    explanation = None if peak is None else Explanation(peak)
    measurement = Measurement("call", workload or Workload("call"), CPU, metrics, explanation=explanation)
    verdict = judge(measurement, Budget(), stored, DEFAULT_TOLERANCES)
    entry = entry_of(measurement, "2026-12-24", "new1234")
    return entries_to_write(mode, {KEY: (verdict, entry)}, {KEY: stored}).get(KEY)


def stored_entry(**metrics) -> Entry:
    return Entry(Workload("call"), CPU, metrics, "2026-11-02", "old1234")


@pytest.mark.parametrize("mode", ["new", "all"])
@pytest.mark.parametrize("absent", [Absent(), Absent(("NVIDIA A100",))], ids=["nowhere", "elsewhere"])
def test_what_is_missing_is_added(mode, absent):
    assert written(mode, absent, peak_allocated=GB).metrics == {"peak_allocated": GB}


def test_what_is_missing_is_not_added_when_only_improvements_are_wanted():
    assert written("improved", Absent(), peak_allocated=GB) is None


@pytest.mark.parametrize("now", [GB // 2, GB, 2 * GB])
def test_what_is_stored_stays_when_only_the_new_is_wanted(now):
    assert written("new", stored_entry(peak_allocated=GB), peak_allocated=now) is None


@pytest.mark.parametrize("now", [GB // 2, GB + 1, 2 * GB])
def test_everything_that_differs_is_accepted_on_demand(now):
    entry = written("all", stored_entry(peak_allocated=GB), peak_allocated=now)
    assert (entry.metrics["peak_allocated"], entry.recorded, entry.commit) == (now, "2026-12-24", "new1234")


def test_what_says_the_same_is_not_written_again():
    stored = stored_entry(peak_allocated=GB, step_time=0.5)
    assert written("all", stored, peak_allocated=GB, step_time=0.6) is None


def test_another_workload_is_accepted_with_everything():
    workload = Workload("call", batch="int64[8]")
    assert written("all", stored_entry(peak_allocated=GB), workload, peak_allocated=GB).workload == workload


@pytest.mark.parametrize("mode", ["new", "improved"])
def test_another_workload_is_otherwise_left_alone(mode):
    workload = Workload("call", batch="int64[8]")
    assert written(mode, stored_entry(peak_allocated=GB), workload, peak_allocated=GB // 2) is None


def test_what_got_better_is_lowered():
    entry = written("improved", stored_entry(peak_allocated=GB), peak_allocated=GB // 2)
    assert (entry.metrics["peak_allocated"], entry.recorded, entry.commit) == (GB // 2, "2026-12-24", "new1234")


@pytest.mark.parametrize("now", [GB - 10**6, GB, GB + 10**6, 2 * GB], ids=["within", "same", "within above", "worse"])
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


def test_each_measurement_is_decided_by_itself():
    other = Key("tests/test_gpt.py", "test_b", "call")
    better = Measurement("call", Workload("call"), CPU, {"peak_allocated": GB // 2})
    same = Measurement("call", Workload("call"), CPU, {"peak_allocated": GB})
    stored = {KEY: stored_entry(peak_allocated=GB), other: stored_entry(peak_allocated=GB)}
    measured = {
        key: (judge(one, Budget(), stored[key], DEFAULT_TOLERANCES), entry_of(one, "2026-12-24", None))
        for key, one in ((KEY, better), (other, same))
    }
    assert list(entries_to_write("improved", measured, stored)) == [KEY]
    assert list(entries_to_write("all", measured, stored)) == [KEY]
    assert list(entries_to_write("new", measured, stored)) == []


# Compositions


def of(total: int, site: str = "model.py:1") -> Composition:
    return Composition(total, (Row("activation", total, site=site),))


def composed(total: int, **metrics) -> Entry:
    return replace(stored_entry(peak_allocated=total, **metrics), composition=of(total))


@pytest.mark.parametrize("mode", ["new", "all"])
def test_what_is_added_has_its_composition(mode):
    assert written(mode, Absent(), peak=of(GB), peak_allocated=GB).composition == of(GB)


def test_a_composition_that_the_store_lacks_is_added_with_everything():
    assert written("all", stored_entry(peak_allocated=GB), peak=of(GB), peak_allocated=GB).composition == of(GB)


@pytest.mark.parametrize("mode", ["new", "improved"])
def test_a_composition_that_the_store_lacks_is_otherwise_not_added(mode):
    assert written(mode, stored_entry(peak_allocated=GB), peak=of(GB), peak_allocated=GB) is None


@pytest.mark.parametrize("peak", [None, of(GB, "model.py:2")], ids=["none now", "another line"])
def test_where_no_byte_changed_the_composition_stays(peak):
    assert written("all", composed(GB), peak=peak, peak_allocated=GB) is None


@pytest.mark.parametrize("peak", [None, of(2 * GB)], ids=["none now", "one now"])
def test_another_peak_takes_its_own_composition_with_it_or_none(peak):
    entry = written("all", composed(GB), peak=peak, peak_allocated=2 * GB)
    assert (entry.metrics["peak_allocated"], entry.composition) == (2 * GB, peak)


@pytest.mark.parametrize("peak", [None, of(GB // 2)], ids=["none now", "one now"])
def test_a_lowered_peak_takes_its_own_composition_with_it_or_none(peak):
    entry = written("improved", composed(GB), peak=peak, peak_allocated=GB // 2)
    assert (entry.metrics["peak_allocated"], entry.composition) == (GB // 2, peak)


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
