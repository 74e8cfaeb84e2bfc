"""What disturbed a timed stretch, from made-up readings at its two ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.facts.values.interference import Conditions
from pytest_gpumem.measuring.timing.validity import disturbance, tick_disturbance

GHZ = 1e9
CPU = Conditions(seconds=100.0, graphs=3, waited=1.0, stolen=2.0, other_cpu_seconds=50.0, cores=2)
CUDA = Conditions(
    seconds=100.0,
    retries=4,
    graphs=3,
    waited=1.0,
    clock_events=frozenset(),
    sm_clock=1.98 * GHZ,
    sm_clock_default=1.98 * GHZ,
    other_processes=0,
)


def after(before: Conditions, seconds: float, **readings: object) -> str | None:
    """What disturbed a stretch of ``seconds`` that ended with ``readings``."""
    return disturbance(before, replace(before, seconds=before.seconds + seconds, **readings))


@pytest.mark.parametrize("before", [CPU, CUDA], ids=["cpu", "cuda"])
def test_a_stretch_in_which_nothing_changed_was_not_disturbed(before):
    assert after(before, 0.02) is None


def test_what_cannot_be_read_disturbs_nothing():
    assert disturbance(Conditions(1.0), Conditions(2.0)) is None
    assert disturbance(Conditions(1.0), replace(CUDA, other_processes=0)) is None
    assert disturbance(CPU, Conditions(200.0)) is None


# Counters


@pytest.mark.parametrize(("retries", "said"), [(5, "once"), (6, "twice"), (7, "3 times")])
def test_a_retry_of_the_allocator_is_a_disturbance(retries, said):
    assert after(CUDA, 0.02, retries=retries) == f"the allocator retried {said}"


@pytest.mark.parametrize(
    ("graphs", "said"), [(4, "a graph was compiled meanwhile"), (5, "2 graphs were compiled meanwhile")]
)
def test_compiling_is_a_disturbance(graphs, said):
    assert after(CPU, 0.02, graphs=graphs) == said


def test_a_counter_that_was_reset_tells_what_came_since():
    assert after(CUDA, 0.02, retries=0, graphs=0) is None
    assert after(CUDA, 0.02, retries=1) == "the allocator retried once"


# The GPU


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ("HwSlowdown", "slowdown by hardware"),
        ("SwThermalSlowdown", "thermal slowdown by the driver"),
        ("HwThermalSlowdown", "thermal slowdown by hardware"),
        ("HwPowerBrakeSlowdown", "external power brake"),
    ],
)
def test_a_throttled_gpu_is_a_disturbance_at_either_end(event, said):
    assert after(CUDA, 0.02, clock_events=frozenset({event})) == f"the GPU was throttled: {said}"
    throttled = replace(CUDA, clock_events=frozenset({event}))
    assert after(throttled, 0.02, clock_events=frozenset()) == f"the GPU was throttled: {said}"


def test_a_slowdown_by_hardware_is_told_by_its_cause_where_there_is_one():
    events = frozenset({"HwSlowdown", "HwThermalSlowdown"})
    assert after(CUDA, 0.02, clock_events=events) == "the GPU was throttled: thermal slowdown by hardware"


@pytest.mark.parametrize("event", ["SwPowerCap", "SyncBoost"])
def test_other_reasons_for_a_lower_clock_are_no_throttling(event):
    assert after(CUDA, 0.02, clock_events=frozenset({event})) is None


@pytest.mark.parametrize(("clock", "said"), [(0.76, None), (0.6, "the SM clock was at 60 % of its default")])
def test_a_clock_below_three_quarters_of_its_default_is_a_disturbance(clock, said):
    assert after(CUDA, 0.02, sm_clock=clock * 1.98 * GHZ) == said


@pytest.mark.parametrize("event", ["GpuIdle", "SwPowerCap", "ApplicationsClocksSetting"])
def test_a_low_clock_that_is_at_rest_or_the_steps_own_doing_or_wished_for_is_none(event):
    assert after(CUDA, 0.02, sm_clock=0.5 * GHZ, clock_events=frozenset({event})) is None


def test_a_low_clock_before_the_work_began_is_none():
    assert after(replace(CUDA, sm_clock=0.3 * GHZ), 0.02, sm_clock=1.98 * GHZ) is None


def test_processes_of_others_on_the_gpu_are_named_where_they_are_known():
    assert after(CUDA, 0.02, other_processes=1, other_pids=frozenset({4711})) == "process 4711 also used the GPU"
    three = after(CUDA, 0.02, other_processes=3, other_pids=frozenset({9, 7, 8}))
    assert three == "processes 7, 8 and 9 also used the GPU"
    assert after(CUDA, 0.02, other_processes=1) == "another process also used the GPU"
    assert after(replace(CUDA, other_processes=2), 0.02, other_processes=0) == "2 other processes also used the GPU"


# The host


def test_a_thread_that_waited_for_a_core_was_disturbed():
    assert after(CPU, 0.02, waited=1.0024) == "the thread waited 12 % of the time for a core"
    assert after(CPU, 0.02, waited=1.0003) is None
    assert after(CUDA, 0.02, waited=1.0024) == "the thread waited 12 % of the time for a core"


UNCOUNTED = replace(CPU, waited=None, off_core=5.0)
"""As on macOS and Windows, where nothing counts waiting."""


@pytest.mark.parametrize(
    ("off_core", "others", "said"),
    [
        (
            0.3,
            0.9,
            "the thread may have waited 30 % of the time for a core, other processes used 0.90 of 2 cores meanwhile",
        ),
        (0.3, 0.15, "the thread may have waited 15 % of the time for a core"),
        (0.0, 0.15, None),  # it ran all the time
        (0.9, 0.0, None),  # it slept: nobody took a core from it
        (0.9, 0.06, None),  # within five ticks and what counts as waiting
        (0.02, 0.15, None),
    ],
)
def test_uncounted_waiting_is_at_most_what_others_used_while_a_thread_was_off(off_core, others, said):
    assert after(UNCOUNTED, 1.0, off_core=5 + off_core, other_cpu_seconds=50 + others) == said


def test_on_a_single_core_uncounted_waiting_counts():
    single = replace(UNCOUNTED, cores=1)
    said = "the thread may have waited 50 % of the time for a core"
    assert after(single, 1.0, off_core=5.5, other_cpu_seconds=50.5) == said


def test_uncounted_waiting_in_a_whole_sample_is_told():
    end = replace(UNCOUNTED, seconds=101.0, off_core=5.5, other_cpu_seconds=50.2)
    assert tick_disturbance(UNCOUNTED, end) == "the thread may have waited 20 % of the time for a core"


SERVER = replace(CPU, off_core=5.0, children_cpu_seconds=9.0)
"""A thread asks a server, and sleeps until it answers."""


def test_on_a_gpu_only_the_bound_of_a_servers_waiting_counts():
    asks = replace(CUDA, other_cpu_seconds=50.0, off_core=5.0, children_cpu_seconds=9.0)
    end = {"off_core": 5.9, "children_cpu_seconds": 9.2, "other_cpu_seconds": 90.0}
    assert after(asks, 1.0, **end) == "the step's other processes may have waited 90 % of the time for a core"
    assert after(asks, 1.0, **{**end, "off_core": 5.0}) is None


@pytest.mark.parametrize(
    ("off_core", "worked", "others", "said"),
    [
        (0.8, 0.2, 0.6, "the step's other processes may have waited 60 % of the time for a core"),
        (0.3, 0.2, 0.6, "the step's other processes may have waited 30 % of the time for a core"),
        (0.9, 0.2, 0.0, None),  # the server is slow on an idle machine
        (0.9, 0.2, 0.06, None),  # within five ticks and what counts as waiting
        (0.9, 0.0, 0.6, None),  # no other process worked: the thread slept
        (0.0, 0.2, 0.6, None),  # the thread ran all the time, and the server beside it
    ],
)
def test_a_thread_that_asks_a_server_does_not_see_its_waiting(off_core, worked, others, said):
    end = {"off_core": 5 + off_core, "children_cpu_seconds": 9 + worked, "other_cpu_seconds": 50 + others}
    busy = f"other processes used {others:.2f} of 2 cores meanwhile" if others > 0.5 else None
    assert after(SERVER, 1.0, **end) == (", ".join(filter(None, (said, busy))) or None)


def test_a_servers_waiting_is_told_beside_that_of_the_thread():
    assert after(SERVER, 1.0, waited=1.1, off_core=5.3, children_cpu_seconds=9.1, other_cpu_seconds=50.25) == (
        "the thread waited 10 % of the time for a core, "
        "the step's other processes may have waited 20 % of the time for a core"
    )


def test_time_stolen_by_the_hypervisor_is_a_disturbance():
    assert after(CPU, 1.0, stolen=2.05) == "the hypervisor took 5 % of the time of each busy core"
    assert after(CPU, 1.0, stolen=2.03) is None


def test_stolen_time_is_shared_among_the_cores_that_had_work():
    assert after(CPU, 1.0, stolen=2.05, other_cpu_seconds=50.24) is not None
    busy = after(CPU, 1.0, stolen=2.05, other_cpu_seconds=51.0)
    assert busy == "other processes used 1.00 of 2 cores meanwhile"


def test_other_processes_that_use_much_of_the_other_cores_are_a_disturbance():
    assert after(CPU, 1.0, other_cpu_seconds=50.97) == "other processes used 0.97 of 2 cores meanwhile"
    assert after(CPU, 1.0, other_cpu_seconds=50.35) == "other processes used 0.35 of 2 cores meanwhile"
    assert after(CPU, 1.0, other_cpu_seconds=50.2) is None


def test_what_is_harmless_grows_with_the_cores():
    many = replace(CPU, cores=16)
    assert after(many, 1.0, other_cpu_seconds=53.0) is None
    assert after(many, 1.0, other_cpu_seconds=55.0) == "other processes used 5.00 of 16 cores meanwhile"


def test_on_a_single_core_only_waiting_counts():
    assert after(replace(CPU, cores=1), 1.0, other_cpu_seconds=50.5) is None


@given(st.floats(0.001, 0.05), st.integers(0, 5))
def test_a_short_round_says_nothing_of_what_is_counted_in_ticks(seconds, ticks):
    """Five counters, each of which may be a tick off."""
    assert after(CPU, seconds, other_cpu_seconds=CPU.other_cpu_seconds + ticks * 0.01) is None


@given(st.floats(0.001, 10.0))
def test_one_tick_of_stolen_time_never_counts(seconds):
    assert after(CPU, seconds, stolen=CPU.stolen + 0.01) is None


def test_two_readings_at_the_same_moment_say_nothing_of_shares():
    assert after(CPU, 0.0, waited=2.0, stolen=3.0, other_cpu_seconds=60.0) is None


def test_everything_that_disturbed_is_told():
    said = after(CPU, 1.0, graphs=4, waited=1.5, other_cpu_seconds=50.9)
    assert said == (
        "a graph was compiled meanwhile, the thread waited 50 % of the time for a core, "
        "other processes used 0.90 of 2 cores meanwhile"
    )


def test_the_load_of_a_sample_is_only_what_its_rounds_could_not_tell():
    end = replace(CPU, seconds=101.0, graphs=4, waited=1.5, other_cpu_seconds=50.9)
    assert tick_disturbance(CPU, end) == "other processes used 0.90 of 2 cores meanwhile"
    assert tick_disturbance(CUDA, replace(CUDA, seconds=101.0, retries=9, other_processes=2)) is None
