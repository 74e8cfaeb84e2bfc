"""By what factor a disturbance can have made an interval longer, from made-up readings at its two ends."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.facts.values.interference import PACE, UNREAD_PACE, Conditions, Slowdown
from pytest_gpumem.measuring.timing import validity

CPU = Conditions(seconds=100.0, graphs=3, waited=1.0, stolen=2.0, other_cpu_seconds=50.0, cores=2)
CUDA = Conditions(
    seconds=100.0,
    retries=4,
    graphs=3,
    waited=1.0,
    clock_events=frozenset(),
    sm_clock=2e9,
    sm_clock_default=2e9,
    other_processes=0,
)


def slowed(before: Conditions, after: Conditions) -> float:
    """Where the pace is what it was."""
    return validity.slowdown(before, after).by(1.0)


FACTORS = (validity.time_factor, slowed, validity.gpu_slowdown)
SHARES = st.floats(0.0, 1.0)


def after(before: Conditions, **readings: object) -> tuple[Conditions, Conditions]:
    """The two ends of a second that ended with ``readings``."""
    return before, replace(before, seconds=before.seconds + 1, **readings)


@pytest.mark.parametrize("before", [CPU, CUDA, Conditions(100.0)], ids=["cpu", "cuda", "nothing read"])
def test_where_nothing_happened_nothing_is_explained(before):
    assert [factor(*after(before)) for factor in FACTORS] == [1.0] * 3


@given(SHARES, st.floats(0.0, 2.0), SHARES)
def test_no_load_explains_less_than_nothing_or_everything(waited, others, stolen):
    ends = after(CPU, waited=1 + waited, other_cpu_seconds=50 + others, stolen=2 + stolen)
    for factor in FACTORS:
        assert 1.0 <= factor(*ends) < math.inf


@given(SHARES, SHARES)
def test_the_more_a_thread_waited_the_more_is_explained(one, other):
    less, more = (after(CPU, waited=1 + share) for share in sorted((one, other)))
    for factor in (validity.time_factor, slowed):
        assert factor(*less) <= factor(*more)


# What took time


def test_waiting_took_as_long_as_it_lasted():
    assert validity.time_factor(*after(CPU, waited=1.5)) == pytest.approx(2.0)
    assert validity.time_factor(*after(CUDA, waited=1.2)) == pytest.approx(1.25)


def test_where_waiting_is_not_counted_it_may_be_all_that_others_used():
    assert validity.time_factor(*after(replace(CPU, waited=None), other_cpu_seconds=50.5)) == pytest.approx(2.0)


@given(st.floats(0.0, 2.0), SHARES, SHARES)
def test_uncounted_waiting_explains_at_least_what_counted_waiting_does(others, off_core, waited):
    """Waiting is part of the time off the core, and of what others used."""
    off_core, others = max(off_core, waited), max(others, waited)
    counted = after(CPU, waited=1 + waited, other_cpu_seconds=50 + others)
    uncounted = after(replace(CPU, waited=None, off_core=1.0), off_core=1 + off_core, other_cpu_seconds=50 + others)
    for factor in (validity.time_factor, slowed):
        assert factor(*uncounted) >= factor(*counted) * (1 - 1e-9)


@given(SHARES, SHARES, SHARES)
def test_what_others_may_take_from_a_server_explains_what_they_take_from_a_thread(waited, others, seen):
    """Seen or not, a step that waited for a core may have been slowed as much."""
    others, seen = max(others, waited), seen * waited
    ends = {"other_cpu_seconds": 50 + others, "off_core": 1 + waited}
    of_thread = after(replace(CPU, off_core=1.0), waited=1 + waited, **ends)
    start = replace(CPU, off_core=1.0, children_cpu_seconds=0.0)
    of_server = after(start, waited=1 + seen, children_cpu_seconds=0.1, **ends)
    for factor in (validity.time_factor, slowed):
        assert factor(*of_server) >= factor(*of_thread) * (1 - 1e-9)


def test_a_server_that_slept_on_an_idle_machine_explains_nothing():
    asks = replace(CPU, off_core=1.0, children_cpu_seconds=0.0)
    ends = after(asks, off_core=1.9, children_cpu_seconds=0.1)
    assert [factor(*ends) for factor in FACTORS] == [1.0] * 3


def test_a_thread_that_ran_all_the_time_has_not_waited():
    ends = after(replace(CPU, waited=None, off_core=1.0), off_core=1.0, other_cpu_seconds=50.9)
    assert validity.time_factor(*ends) == 1.0


@pytest.mark.parametrize("readings", [{"other_processes": 1}, {"other_processes": 1, "other_pids": frozenset({7})}])
def test_each_process_on_a_gpu_takes_its_turns(readings):
    assert validity.time_factor(*after(CUDA, **readings)) == 2 * validity.OTHERS_ON_GPU
    assert validity.time_factor(*after(CUDA, other_processes=3)) == 4 * validity.OTHERS_ON_GPU


def test_events_took_their_seconds_and_may_have_filled_a_short_stretch():
    long = replace(CUDA, seconds=90.0), replace(CUDA, seconds=100.0, retries=5)
    assert validity.time_factor(*long) == pytest.approx(10 / 9)
    assert validity.time_factor(*after(CUDA, retries=5)) > 1e5
    assert validity.time_factor(*after(CPU, graphs=4)) > 1e5


# What slowed the step


def test_a_neighbour_on_the_other_core_shares_caches_and_memory():
    assert slowed(*after(CPU, other_cpu_seconds=51.0)) == pytest.approx(1 + validity.OTHER_CORES)
    assert slowed(*after(CPU, other_cpu_seconds=50.5)) == pytest.approx(1 + validity.OTHER_CORES / 2)


def test_no_more_than_the_other_cores_are_beside_the_step():
    assert slowed(*after(CPU, other_cpu_seconds=51.9)) == slowed(*after(CPU, other_cpu_seconds=51.0))
    assert slowed(*after(replace(CPU, cores=1), other_cpu_seconds=50.5)) == 1.0


def test_a_thread_that_waited_finds_its_caches_used_by_others():
    assert slowed(*after(CPU, waited=1.5, other_cpu_seconds=51.5)) == pytest.approx(1 + validity.REFILLING)
    assert slowed(*after(CPU, waited=1.9, other_cpu_seconds=51.9)) == pytest.approx(1 + 9 * validity.REFILLING)


def test_many_neighbours_slow_a_step_by_no_more_than_a_limit():
    many = replace(CPU, cores=64)
    assert slowed(*after(many, other_cpu_seconds=60.0)) == pytest.approx(1 + 10 * validity.OTHER_CORES)
    assert slowed(*after(many, other_cpu_seconds=112.0)) == validity.MOST_SLOWED


def test_the_larger_of_neighbour_and_pace_counts_and_cold_caches_are_added():
    assert Slowdown(shared=1.2).by(1.05) == 1.2
    assert Slowdown(shared=1.2).by(1.5) == 1.5**PACE
    assert Slowdown(shared=1.2, refilled=1.4).by(1.5) == 1.4 * 1.5**PACE
    assert Slowdown(shared=1.2, refilled=1.1).by(1.0) == 1.2
    assert Slowdown(shared=1.2, refilled=1.1).alone == 1.2**UNREAD_PACE


def test_stolen_time_may_all_have_been_the_steps():
    assert slowed(*after(CPU, stolen=2.2)) == pytest.approx((1 + validity.REFILLING / 4) / 0.8)


@pytest.mark.parametrize("event", ["HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown"])
def test_a_throttled_gpu_may_run_at_half_its_clock(event):
    assert validity.gpu_slowdown(*after(CUDA, clock_events=frozenset({event}))) == validity.THROTTLED


def test_a_low_clock_explains_what_it_lost_twice_unless_the_step_lowers_it_itself():
    assert validity.gpu_slowdown(*after(CUDA, sm_clock=1e9)) == pytest.approx(4.0)
    assert validity.gpu_slowdown(*after(CUDA, sm_clock=1e9, clock_events=frozenset({"SwPowerCap"}))) == 1.0


def test_a_shared_machine_shows_neighbours_on_a_cpu_and_hides_them_on_a_gpu():
    assert validity.contention_factor(CPU) == 1.0
    assert validity.contention_factor(CUDA) == 2 * validity.OTHERS_ON_GPU
    assert validity.contention_factor(replace(CUDA, other_cpu_seconds=50.0)) == 2 * validity.OTHERS_ON_GPU
