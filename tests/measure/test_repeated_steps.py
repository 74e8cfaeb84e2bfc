"""A step is run until it repeats and then measured: the bytes by formula, what it leaves behind, and its times."""

from __future__ import annotations

import gc
from collections import deque
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from pytest_gpumem.facts.values.interference import Conditions
from pytest_gpumem.facts.values.step_peaks import StepPeaks
from pytest_gpumem.measuring.devices.contract import Device, Peak
from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.measuring.devices.device_lock import DeviceLock
from pytest_gpumem.measuring.measure.counting import FURTHER_COUNTED_STEPS, NO_COUNTS
from pytest_gpumem.measuring.measure.growth import SETTLING_STEPS, WINDOW, measure_growth
from pytest_gpumem.measuring.measure.prepared import FURTHER_STEPS, MOST_UNSTABLE_WARM_UPS, MOST_WARM_UPS
from pytest_gpumem.measuring.measure.reading import Figures, Phase, run_one_step
from pytest_gpumem.measuring.measure.settling import figures_of_steps
from pytest_gpumem.measuring.measure.timed_steps import ROUNDS_TO_DECIDE, first_times, sample_again
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.inference import infer_phases
from pytest_gpumem.measuring.steps.training import Training
from pytest_gpumem.measuring.timing.sampling import TimeBudget
from pytest_gpumem.torch_support.garbage_collector import (
    FrozenHeap,
    collect_everything,
    cyclic_collector_off,
    is_heap_frozen,
)
from pytest_gpumem.torch_support.reachability import blocks_of, reachable_tensors, storages_of
from tests.measuring import measured_steps
from tests.support.processes import own_objects_out_of_sight, state_of

if TYPE_CHECKING:
    from pytest_gpumem.measuring.measure.settling import StepFigures

KB = 1000
F32 = 4
AFTERWARDS = 1
"""Steps after the measured one: it is counted."""


@pytest.fixture(autouse=True, scope="module")
def suites_objects_hidden() -> None:
    """Hide none: these tests count what is frozen."""


def tensor(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def own_objects(request):
    """The suite's are only looked through by tests of what was there before."""
    with nullcontext() if "frozen" in request.fixturenames else own_objects_out_of_sight():
        yield


@pytest.fixture
def frozen():
    """As while a test is measured: what was there before is frozen."""
    gc.unfreeze()  # a measured test of this process may have left it so
    heap = FrozenHeap()
    heap.freeze()
    yield heap
    heap.thaw()


def measured(device, phases, held: list, *, timed=False, state=None, **more) -> StepFigures:
    """Measure a step to which the tensors in ``held`` belong from the beginning."""

    def own():
        return storages_of(reachable_tensors(held), device.torch_device)

    device.quiesce()
    blocks = blocks_of(reachable_tensors(held), device.torch_device)
    device.register_existing(own())
    other_bytes = [device.live() - sum(blocks.values())]
    figures = measured_steps(phases, device, other_bytes=other_bytes, state=state, **more)
    return replace(figures, times=first_times(phases, device, own, TimeBudget(0.1))) if timed else figures


def metrics_of(device, run, held=(), **more) -> dict[str, int]:
    return measured(device, [Phase("step", run)], list(held), **more).memory.memory_metrics()


# A linear layer, by formula

INPUTS, OUTPUTS, SAMPLES = 32, 64, 8
WEIGHT, BIAS = F32 * INPUTS * OUTPUTS, F32 * OUTPUTS
PARAMETERS = WEIGHT + BIAS
BATCH, OUTPUT, LOSS = F32 * SAMPLES * INPUTS, F32 * SAMPLES * OUTPUTS, F32


def linear_step(device, make_optimizer, **more) -> StepFigures:
    model, batch = torch.nn.Linear(INPUTS, OUTPUTS), torch.ones(SAMPLES, INPUTS)
    optimizer = make_optimizer(model.parameters())
    training = Training(
        model, model, batch, optimizer, lambda output, _batch: output.sum(), StepConfig(), device.torch_device
    )
    return measured(device, training.phases(), [model, batch, optimizer], **more)


def test_a_step_of_sgd_holds_parameters_gradients_and_one_output(device):
    figures = linear_step(device, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    metrics = figures.memory.memory_metrics()
    assert figures.memory.own == PARAMETERS + BATCH
    assert metrics["peak_forward"] == PARAMETERS + BATCH + OUTPUT + LOSS
    assert metrics["peak_backward"] >= PARAMETERS + BATCH + PARAMETERS + LOSS
    assert metrics["peak_optimizer"] == PARAMETERS + BATCH + PARAMETERS + LOSS
    assert metrics["peak_allocated"] == max(value for name, value in metrics.items() if name.startswith("peak_"))
    assert (metrics["retained"], metrics["cyclic_garbage"]) == (0, 0)
    assert figures.is_settled


def test_a_step_of_adamw_holds_two_moments_a_count_and_what_it_computes_with(device):
    figures = linear_step(device, torch.optim.AdamW)
    metrics = figures.memory.memory_metrics()
    state = 2 * PARAMETERS + 2 * F32
    own = PARAMETERS + BATCH + state
    assert figures.memory.own == own
    assert metrics["peak_forward"] == own + OUTPUT + LOSS
    # Gradients, and twice the larger parameter for the denominator; Python's numbers become scalars of a few bytes.
    scalars = metrics["peak_optimizer"] - (own + PARAMETERS + LOSS + 2 * WEIGHT)
    assert 0 <= scalars <= 32
    assert (metrics["retained"], metrics["cyclic_garbage"]) == (0, 0)
    assert figures.is_settled


def test_an_inference_step_holds_parameters_batch_and_output(device):
    model, batch = torch.nn.Linear(INPUTS, OUTPUTS), torch.ones(SAMPLES, INPUTS)
    phases = infer_phases(model, model, batch, StepConfig(), device.torch_device)
    figures = measured(device, phases, [model, batch])
    assert figures.memory.memory_metrics() == {
        "peak_allocated": PARAMETERS + BATCH + OUTPUT,
        "retained": 0,
        "cyclic_garbage": 0,
    }


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_taking_times_does_not_change_the_memory(device, optimizer):
    untimed, timed = linear_step(device, optimizer), linear_step(device, optimizer, timed=True)
    assert untimed.memory.memory_metrics() == timed.memory.memory_metrics()
    assert untimed.times is None
    assert timed.times.median > 0


@pytest.mark.parametrize("kept", [1, 3])
def test_a_step_that_replaces_what_it_keeps_measures_the_same_after_times_were_taken(device, kept):
    ring: deque[torch.Tensor] = deque(maxlen=kept)

    def push():
        ring.append(tensor(100 * KB))

    first, second = (metrics_of(device, push, [ring], timed=True) for _ in range(2))
    assert (first["peak_allocated"], first["retained"]) == ((kept + 1) * 100 * KB, 0)
    assert second == first


def test_a_tensor_that_nobody_counted_and_that_the_step_replaces_counts_once():
    held = [tensor(100 * KB)]  # before the device is opened

    def replace():
        held[0] = tensor(100 * KB)

    device = CpuDevice()
    device.open()
    try:
        assert metrics_of(device, replace, [held])["peak_allocated"] == 200 * KB
    finally:
        device.close()


def test_foreign_bytes_are_in_no_figure(device):
    alone = linear_step(device, torch.optim.AdamW).memory.memory_metrics()
    other_bytes = tensor(500 * KB)
    assert linear_step(device, torch.optim.AdamW).memory.memory_metrics() == alone
    assert other_bytes.numel() == 500 * KB


# Phases


def test_each_phase_has_its_peak_and_the_step_the_highest(device):
    kept: list[torch.Tensor] = []

    def first():
        kept.append(tensor(100 * KB))

    def second():
        kept.append(tensor(30 * KB))
        kept.clear()

    figures = measured(device, [Phase("first", first), Phase("second", second)], [kept])
    assert figures.memory.memory_metrics() == {
        "peak_allocated": 130 * KB,
        "peak_first": 100 * KB,
        "peak_second": 130 * KB,
        "retained": 0,
        "cyclic_garbage": 0,
    }


def test_a_phase_does_not_see_the_peak_of_the_one_before(device):
    phases = [Phase("first", lambda: tensor(100 * KB)), Phase("second", lambda: tensor(30 * KB))]
    metrics = measured(device, phases, []).memory.memory_metrics()
    assert (metrics["peak_first"], metrics["peak_second"], metrics["peak_allocated"]) == (100 * KB, 30 * KB, 100 * KB)


def test_phases_of_one_name_are_one_phase_with_the_highest_of_their_peaks(device):
    phases = [Phase(name, lambda kb=kb: tensor(kb * KB)) for name, kb in [("a", 10), ("b", 5), ("a", 30), ("a", 20)]]
    metrics = measured(device, phases, []).memory.memory_metrics()
    assert (metrics["peak_a"], metrics["peak_b"], metrics["peak_allocated"]) == (30 * KB, 5 * KB, 30 * KB)


def test_phases_that_all_have_one_name_are_the_step_and_not_told_apart(device):
    phases = [Phase("a", lambda: tensor(KB)), Phase("a", lambda: tensor(2 * KB))]
    metrics = measured(device, phases, []).memory.memory_metrics()
    assert metrics == {"peak_allocated": 2 * KB, "retained": 0, "cyclic_garbage": 0}


def test_an_error_of_a_phase_goes_up_and_leaves_no_window_open(device):
    def fail():
        tensor(100 * KB)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measured_steps([Phase("fail", fail)], device, other_bytes=[device.live()])
    assert device._windows == ()
    assert metrics_of(device, lambda: tensor(KB))["peak_allocated"] == KB


# Settling


def counting_step(sizes):
    """A step whose peaks are these sizes, the last one again and again; and how often it ran."""
    ran: list[int] = []

    def run():
        size = sizes[min(len(ran), len(sizes) - 1)]
        ran.append(size)
        tensor(size)

    return run, ran


@pytest.mark.parametrize(
    ("sizes", "warm_ups"),
    [
        ([5 * KB], 2),
        ([9 * KB, 5 * KB], 3),
        ([1 * KB, 2 * KB, 3 * KB, 4 * KB, 5 * KB], 6),
    ],
)
def test_a_step_is_warmed_up_until_two_peaks_agree_and_four_more_are_looked_at(device, sizes, warm_ups):
    run, ran = counting_step(sizes)
    figures = measured(device, [Phase("step", run)], [])
    assert figures.is_settled
    assert figures.left_out == warm_ups - 2
    assert len(figures.runs) == warm_ups + FURTHER_STEPS
    assert len(ran) == warm_ups + FURTHER_STEPS + AFTERWARDS
    assert figures.memory.memory_metrics()["peak_allocated"] == sizes[-1]


def test_nothing_but_the_peak_is_measured_where_no_more_is_asked_for(device):
    run, ran = counting_step([9 * KB, 5 * KB])
    figures = measured(device, [Phase("step", run)], [], peak_only=True)
    assert figures.is_settled
    assert len(figures.runs) == 3
    assert len(ran) == 3
    assert figures.counted == NO_COUNTS
    assert figures.memory.memory_metrics()["peak_allocated"] == 5 * KB


def test_what_is_made_lazily_in_the_first_step_is_measured_in_the_state_that_repeats(device):
    state: list[torch.Tensor] = []

    def run():
        if not state:
            state.append(tensor(100 * KB))
        tensor(10 * KB)

    figures = measured(device, [Phase("step", run)], [state])
    assert figures.is_settled
    assert figures.memory.memory_metrics() == {"peak_allocated": 110 * KB, "retained": 0, "cyclic_garbage": 0}


def test_a_step_that_grows_for_ever_is_measured_as_not_settled(device):
    run, ran = counting_step([number * KB for number in range(1, 20)])
    figures = measured(device, [Phase("step", run)], [])
    assert not figures.is_settled
    assert len(ran) == MOST_WARM_UPS + FURTHER_STEPS + AFTERWARDS + FURTHER_COUNTED_STEPS
    assert figures.memory.memory_metrics()["peak_allocated"] == (MOST_WARM_UPS + FURTHER_STEPS) * KB


def test_the_first_step_does_not_count_though_those_after_it_differ(device):
    run, _ = counting_step([300 * KB, *(number * KB for number in range(1, 20))])
    figures = measured(device, [Phase("step", run)], [])
    assert (figures.is_settled, figures.left_out) == (False, 1)
    assert figures.memory.memory_metrics()["peak_allocated"] == (MOST_WARM_UPS + FURTHER_STEPS - 1) * KB


def test_of_steps_that_differ_the_least_is_retained_but_no_less_than_each_keeps():
    seen = [{"cpu": Figures(0, 0, None, Peak(100 + kept), kept, kept)} for kept in (40, 30, 10, 20)]
    figures = figures_of_steps(seen, None)
    assert figures.memory_metrics()["retained"] == 10
    assert replace(figures, growth={"cpu": 15}).memory_metrics()["retained"] == 15


def spiking(period: int, first: int):
    """A step that needs ten times as much in every ``period``-th call, first in the call ``first``."""
    calls: list[int] = []

    def run():
        calls.append(1)
        tensor((100 if len(calls) % period == first % period else 10) * KB)

    return run


@pytest.mark.parametrize(("period", "first"), [(2, 1), (2, 2), (4, 3), (6, 1), (6, 6)])
def test_the_peak_of_every_second_to_sixth_step_is_found_from_any_start(device, period, first):
    figures = measured(device, [Phase("step", spiking(period, first))], [])
    assert figures.memory.memory_metrics()["peak_allocated"] == 100 * KB
    assert not figures.is_settled
    assert figures.notes()[0].startswith("peaks differ from step to step: between 10.00 kB and 100.00 kB in ")


def test_a_step_that_needs_more_than_those_that_repeat_is_left_out_and_named(device):
    run, _ = counting_step([10 * KB, 200 * KB, 10 * KB])
    figures = measured(device, [Phase("step", run)], [])
    assert figures.is_settled
    assert figures.memory.memory_metrics()["peak_allocated"] == 10 * KB
    assert figures.step_peaks == StepPeaks((10 * KB, 200 * KB, *[10 * KB] * 6), left_out=2)
    assert figures.notes() == (
        "step 2 of 8 needed 200.00 kB: warm-up steps count for budgets, but not for the baseline",
    )


def working(turns: list[int]):
    """A step that makes as many products, one after the other, as the next of ``turns`` says; the last of them again and again."""
    x = torch.ones(8, 8)

    def run():
        for _ in range(turns.pop(0) if len(turns) > 1 else turns[0]):
            torch.mm(x, x)

    return run


def test_what_every_second_step_does_more_is_counted_though_all_have_the_same_peak(device):
    for first in (1, 5):
        figures = measured(device, [Phase("step", working([first, 6 - first] * 10))], [])
        assert figures.is_settled
        assert figures.counted.counts.metrics() == {"flops": 5 * 1024, "operators": 5, "syncs": 0}
        assert figures.counted.lowest == {"flops": 1024, "operators": 1}
        assert figures.notes() == (
            "FLOPs between 1,024 and 5,120 from step to step",
            "operators between 1 and 5 from step to step",
        )


def test_a_step_that_allocates_as_much_as_the_one_before_is_counted_once(device):
    turns = [3] * 20
    figures = measured(device, [Phase("step", working(turns))], [])
    assert len(turns) == 20 - 2 - FURTHER_STEPS - 1
    assert figures.counted.counts.operators == 3
    assert figures.counted.lowest == {}


def test_a_step_whose_phases_trade_bytes_has_not_settled(device):
    turns: list[int] = []

    def first():
        turns.append(len(turns))
        tensor((10 + turns[-1]) * KB)

    figures = measured(device, [Phase("first", first), Phase("second", lambda: tensor(500 * KB))], [])
    assert set(figures.step_peaks.allocated) == {500 * KB}
    assert not figures.is_settled


def moving_state(stays_from: int):
    """A step whose state is another after each of its first runs; and how often it ran."""
    ran: list[int] = []
    return lambda: ran.append(0), lambda: min(len(ran), stays_from), ran


@pytest.mark.parametrize("warm_ups", [2, MOST_WARM_UPS + 4])
def test_a_step_that_moves_its_state_is_warmed_up_until_it_stays_and_no_longer(device, warm_ups):
    run, state, ran = moving_state(stays_from=warm_ups - 1)
    figures = measured(device, [Phase("step", run)], [], state=state)
    assert figures.is_settled
    assert len(figures.runs) == warm_ups + FURTHER_STEPS
    assert len(ran) == warm_ups + FURTHER_STEPS + AFTERWARDS


def test_a_state_that_always_moves_is_told_as_recompiling_or_overflowing(device):
    run, state, ran = moving_state(stays_from=10**6)
    figures = measured(device, [Phase("step", run)], [], state=state)
    assert not figures.is_settled
    steps = MOST_UNSTABLE_WARM_UPS + FURTHER_STEPS
    assert len(ran) == steps + AFTERWARDS + FURTHER_COUNTED_STEPS
    assert (
        figures.notes()[0]
        == f"no 2 consecutive steps of {steps} were equal: steps compiled again or gradients overflowed"
    )


# What a step leaves behind


def test_a_step_that_keeps_a_tensor_each_time_retains_it_and_does_not_settle(device):
    leaked: list[torch.Tensor] = []
    figures = measured(device, [Phase("step", lambda: leaked.append(tensor(10 * KB)))], [])
    metrics = figures.memory.memory_metrics()
    assert metrics["retained"] == 10 * KB
    assert metrics["cyclic_garbage"] == 0
    assert not figures.is_settled


def make_cycle(nbytes: int) -> None:
    cycle: list = [tensor(nbytes)]
    cycle.append(cycle)


def test_what_only_the_collector_frees_is_reported_as_cyclic_garbage(device):
    metrics = metrics_of(device, lambda: make_cycle(10 * KB))
    assert metrics == {"peak_allocated": 10 * KB, "retained": 0, "cyclic_garbage": 10 * KB}


def test_the_collector_does_not_run_of_its_own_accord_in_a_step(device):
    def run():
        for _ in range(50):
            make_cycle(KB)
        # Enough containers for the collector to set in, if it could.
        _ = [[] for _ in range(100_000)]

    assert gc.isenabled()
    assert metrics_of(device, run) == {"peak_allocated": 50 * KB, "retained": 0, "cyclic_garbage": 50 * KB}
    assert gc.isenabled()


def test_garbage_of_objects_that_were_there_before_is_found(frozen):
    frozen.thaw()
    device = CpuDevice()
    device.open()
    cycles: list[list] = [[] for _ in range(20)]
    for number in range(20):
        cycles[number].append(cycles[number])

    def run():
        cycles.pop().append(tensor(10 * KB))

    frozen.freeze()
    metrics = metrics_of(device, run)
    device.close()
    assert metrics == {"peak_allocated": 10 * KB, "retained": 0, "cyclic_garbage": 10 * KB}


class Pooled:
    """An object that goes back to its pool when it has become garbage, without its tensor."""

    def __init__(self, pool: list[Pooled], nbytes: int) -> None:
        self.pool, self.tensor, self.itself = pool, tensor(nbytes), self

    def __del__(self) -> None:
        self.tensor = None
        self.pool.append(self)


def test_memory_freed_by_finalizers_or_collector_callbacks_is_garbage(device):
    def garbage(step) -> dict[str, int]:
        metrics = run_one_step([Phase("call", step)], device, [0], older_garbage=False)["cpu"].memory_metrics()
        return {name: metrics[name] for name in ("retained", "cyclic_garbage")}

    pool: list[Pooled] = []
    cached: list[torch.Tensor] = []
    assert garbage(lambda: Pooled(pool, 10 * KB) and None) == {"retained": 0, "cyclic_garbage": 10 * KB}
    assert len(pool) == 1
    gc.callbacks.append(lambda *_: cached.clear())
    try:
        assert garbage(lambda: cached.append(tensor(10 * KB))) == {"retained": 0, "cyclic_garbage": 10 * KB}
    finally:
        gc.callbacks.pop()


def test_all_objects_are_collected_where_a_step_keeps_bytes_and_is_not_one_of_many(device, monkeypatch):
    collections: list[bool] = []
    monkeypatch.setattr("pytest_gpumem.measuring.measure.reading.collect_everything", lambda: collections.append(True))
    kept: list[torch.Tensor] = []

    def collected(step, **how: bool) -> int:
        collections.clear()
        run_one_step([Phase("call", step)], device, [0], **how)
        return len(collections)

    assert collected(lambda: tensor(KB)) == 0
    assert collected(lambda: kept.append(tensor(KB))) == 1
    assert collected(lambda: kept.append(tensor(KB)), older_garbage=False) == 0


def test_a_step_is_read_at_its_start_each_boundary_and_after_garbage_collection(device, monkeypatch):
    stops: list[bool] = []
    stop = CpuDevice._stop
    monkeypatch.setattr(CpuDevice, "_stop", lambda *arguments: stops.append(True) or stop(*arguments))
    for phases in (1, 3):
        stops.clear()
        run_one_step([Phase(f"part {number}", lambda: tensor(KB)) for number in range(phases)], device, [0])
        assert len(stops) == 2 + phases


def grown(device, step, monkeypatch) -> tuple[dict[str, int], int]:
    """Return the growth of a step, and how often all objects were collected for it."""
    collections: list[bool] = []
    for module in ("growth", "reading"):
        monkeypatch.setattr(
            f"pytest_gpumem.measuring.measure.{module}.collect_everything",
            lambda: collections.append(True) or collect_everything(),
        )
    with cyclic_collector_off():
        growth = measure_growth(partial(run_one_step, [Phase("call", step)], device, [0]), device)
    return growth, len(collections)


def test_growth_is_told_from_garbage_of_older_objects(frozen, monkeypatch):
    frozen.thaw()
    device = CpuDevice()
    device.open()
    cycles: list[list] = [[] for _ in range(2 * (SETTLING_STEPS + WINDOW))]
    for cycle in cycles:
        cycle.append(cycle)
    frozen.freeze()
    growth, _ = grown(device, lambda: cycles.pop().append(tensor(10 * KB)), monkeypatch)
    device.close()
    assert growth == {"cpu": 0}
    assert cycles == [], "those of both passes"


def test_for_growth_all_objects_are_collected_once_where_none_of_them_is_garbage(device, monkeypatch):
    kept: list[torch.Tensor] = []
    assert grown(device, lambda: kept.append(tensor(10 * KB)), monkeypatch) == ({"cpu": 10 * KB}, 1)


def test_collecting_everything_leaves_frozen_what_was_frozen(frozen):
    collect_everything()
    assert is_heap_frozen()
    frozen.thaw()
    collect_everything()
    assert not is_heap_frozen()


def raise_without_collector():
    with cyclic_collector_off():
        assert not gc.isenabled()
        raise ZeroDivisionError


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_left_as_it_was(on):
    was_on = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError):
            raise_without_collector()
        assert gc.isenabled() == on
    finally:
        (gc.enable if was_on else gc.disable)()


# Figures


def test_figures_are_differences_and_need_no_zero():
    for zero in (0, 10**6):
        figures = Figures(
            other_bytes=zero + 50,
            live_before=zero + 150,
            reserved_before=zero + 400,
            peak=Peak(zero + 250, zero + 600),
            live_run=zero + 190,
            live_after=zero + 170,
            phases={"forward": Peak(zero + 200), "backward": Peak(zero + 250)},
            held_change=5,
        )
        assert figures.memory_metrics() == {
            "peak_allocated": 200,
            "peak_forward": 150,
            "peak_backward": 200,
            "peak_reserved": 300,
            "retained": 15,
            "cyclic_garbage": 20,
        }


def test_a_step_that_frees_more_than_it_makes_retains_nothing():
    metrics = Figures(50, 150, None, Peak(150), 50, 50).memory_metrics()
    assert metrics == {"peak_allocated": 100, "retained": 0, "cyclic_garbage": 0}


# Order of readings


class Scripted(Device):
    """A device that only tells what it was asked, in order."""

    name = "scripted"
    torch_device = torch.device("cpu")

    def __init__(self):
        self.asked: list[str] = []

    def environment(self):
        raise NotImplementedError

    def quiesce(self):
        self.asked.append("rest")

    def settle(self):
        self.asked.append("settle")

    def live(self):
        return 0

    def known(self):
        return frozenset({(5, 1), (7, 2)})

    def peak(self):
        return Peak(0)

    def reset_peak(self):
        pass  # it has none

    @contextmanager
    def unrecorded(self):
        self.asked.append("pause")
        yield
        self.asked.append("go on")

    def reconcile(self, since, blocks):
        self.asked.append(f"believe {blocks} besides {sorted(address for address, _ in since)}")

    def conditions(self):
        return Conditions(seconds=0.0)

    @contextmanager
    def exclusive(self):
        self.asked.append("alone")
        yield None
        self.asked.append("shared")

    def time(self, run):
        self.asked.append("time")
        run()
        return 10.0

    def launches(self, run):
        self.asked.append("launches")
        run()

    def laps(self, runs):
        self.asked.append("laps")
        for run in runs:
            run()
        return [10.0] * len(runs)


def run_scripted(timed: bool, phases=("step",), seconds: float = 2.0) -> list[str]:
    device = Scripted()
    measured_by(device, phases, TimeBudget(seconds) if timed else None)
    return device.asked


def measured_by(device: Scripted, phases=("step",), time_budget: TimeBudget | None = None) -> StepFigures:
    step = [Phase(name, lambda: device.asked.append("run")) for name in phases]
    figures = measured_steps(step, device, other_bytes=[0])
    if time_budget is None:
        return figures
    return replace(figures, times=first_times(step, device, lambda: [Held()], time_budget))


STEP = ["run", "settle"]
COUNTED = ["run", "launches", "run"]
SET_RIGHT = ["go on", *STEP, "believe ['held'] besides [7]"]


def test_a_step_is_counted_after_its_memory_and_seen_meanwhile():
    assert run_scripted(timed=False) == ["rest", *STEP * (2 + FURTHER_STEPS), *COUNTED]


def test_times_are_taken_in_a_pause_after_counting_and_corrected_by_a_seen_step():
    untimed, asked = run_scripted(timed=False), run_scripted(timed=True)
    assert asked[: len(untimed)] == untimed
    assert asked[len(untimed) :] == [*STEP, "pause", "alone", "time", "run", "shared", *SET_RIGHT]


def test_what_counting_takes_is_in_no_window(device):
    outer = device.open_window()
    counting = []

    def step():
        tensor(100 * KB if counting else KB)

    def count(*_, **__):
        counting.append(True)
        step()
        return NO_COUNTS

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pytest_gpumem.measuring.measure.prepared.count_step", count)
        before = device.live()
        measured_steps([Phase("step", step)], device, other_bytes=[before])
    assert counting
    assert device.close_window(outer).allocated - before == KB


def test_the_phases_of_a_step_are_timed_when_the_whole_is_and_as_alone():
    asked = run_scripted(timed=True, phases=("forward", "backward"), seconds=1000.0)
    laps = asked.index("laps")
    assert asked[laps : -len(SET_RIGHT) - 1] == [*["laps", "run", "run"] * 3, "shared"]
    assert asked[:laps].count("alone") == asked.count("alone") == 1
    times = measured_by(Scripted(), ("forward", "backward"), TimeBudget()).times
    assert times.phases == {"forward": 10.0, "backward": 10.0}
    assert measured_by(Scripted(), ("step",), TimeBudget()).times.phases == {}


def test_what_timing_took_is_spent():
    time_budget = TimeBudget(1000.0)
    measured_by(Scripted(), ("forward", "backward"), time_budget)
    # 12 rounds of 10 s, and 3 rounds of two phases of 10 s.
    assert 2 * time_budget.share == 1000.0 - 12 * 10.0 - 3 * 20.0


class Held:
    """A storage that a step holds, at an address that a `Scripted` device knows."""

    def data_ptr(self) -> int:
        return 5

    def __repr__(self) -> str:
        return "'held'"


def test_a_step_that_is_timed_again_is_alone_and_set_right_by_a_step_that_is_seen():
    device = Scripted()
    phases = [Phase("step", lambda: device.asked.append("run"))]
    sample = sample_again(phases, device, lambda: [Held()], 25.0)
    assert [one.seconds for one in sample.rounds] == [10.0] * 3
    # The first run within the pause is not timed: settling has emptied the caches.
    timed = ["run", *["time", "run"] * 3]
    assert device.asked == ["rest", *STEP, "pause", "alone", *timed, "shared", *SET_RIGHT]


@pytest.mark.parametrize("again", [False, True], ids=["at first", "again"])
def test_a_step_that_raises_while_it_is_timed_leaves_everything_as_it_was(tmp_path, again):
    held: list[torch.Tensor] = []
    timing: list[bool] = []

    class Timed(CpuDevice):
        def time(self, run):
            timing.append(True)
            return super().time(run)

    def run():
        held[:] = [tensor(100 * KB)]
        if timing:
            held.clear()
            raise ZeroDivisionError

    def first() -> None:
        measured(device, phases, held, timed=True)

    def second() -> None:
        sample_again(phases, device, lambda: storages_of(reachable_tensors(held), device.torch_device), 0.1)

    phases = [Phase("step", run)]
    device = Timed(DeviceLock("cpu", folder=tmp_path))
    device.open()
    try:
        before = device.live()
        if again:
            measured(device, phases, held)
        with pytest.raises(ZeroDivisionError):
            (second if again else first)()
        assert gc.isenabled()
        assert state_of(tmp_path) == "shared"
        # What the step freed in the pause, nobody saw.
        assert device.live() == before
        timing.clear()
        assert measured(device, phases, [held]).memory.memory_metrics()["peak_allocated"] == 200 * KB
    finally:
        device.close()
    assert state_of(tmp_path) == "free"


@pytest.mark.parametrize(("anew", "again"), [(False, True), (True, False)], ids=["made once", "made by each step"])
def test_what_only_cpp_code_holds_is_still_known_when_a_step_has_been_timed(device, anew, again):
    held: dict[str, torch.Tensor] = {}
    weight = torch.zeros(1, requires_grad=True)

    def step():
        tensor(KB)
        if anew or not held:
            # The graph keeps 100 kB, to which no Python object leads.
            held["output"] = (weight * tensor(100 * KB)).square().sum()

    phases = [Phase("step", step)]

    def reached():
        return storages_of(reachable_tensors([held, weight]), device.torch_device)

    device.register_existing(reached())
    before = device.live()
    device.quiesce()
    figures = measured_steps(phases, device, other_bytes=[before])
    first_times(phases, device, reached, TimeBudget())
    if again:
        sample_again(phases, device, reached, 0.1)
    after = run_one_step(phases, device, [before])["cpu"]
    assert (after.own_peak, after.live_after) == (figures.memory.own_peak, figures.memory.live_after)
    assert after.live_after > before + 100 * KB


def test_a_very_long_step_is_timed_often_enough_to_decide():
    device = Scripted()
    sample = sample_again([Phase("step", lambda: None)], device, dict, 1.0)
    assert len(sample.rounds) == ROUNDS_TO_DECIDE


def test_a_step_that_could_not_be_timed_alone_has_an_invalid_sample():
    class Crowded(Scripted):
        @contextmanager
        def exclusive(self):
            yield "another measured test kept the GPU busy for 60 s"

    (sample,) = measured_by(Crowded(), time_budget=TimeBudget()).times.samples
    assert sample.invalid == "another measured test kept the GPU busy for 60 s"
