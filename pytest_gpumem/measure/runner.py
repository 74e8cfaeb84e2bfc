"""Measures a step that repeats: its memory once it has settled, its growth and its counts, and then its time."""

from __future__ import annotations

import functools
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from pytest_gpumem.measure.counting import NOTHING_COUNTED, count_step
from pytest_gpumem.measure.growth import measure_growth
from pytest_gpumem.measure.reading import run_one_step, run_phases
from pytest_gpumem.measure.settling import do_the_same, figures_of_steps, have_same_peaks
from pytest_gpumem.timing.sampling import invalid_if, sample_step, time_step, to_themselves
from pytest_gpumem.torch_support.garbage_collector import cyclic_collector_off

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

    from pytest_gpumem.devices.contract import BlockIds, Device
    from pytest_gpumem.measure.reading import Phase
    from pytest_gpumem.measure.settling import StepFigures
    from pytest_gpumem.timing.sampling import TimeBudget
    from pytest_gpumem.values.times import Sample, Times

MOST_WARM_UPS = 6
FURTHER_STEPS = 4
"""Steps that are looked at after two in a row that are alike, or that do not come."""
SECONDS_BETWEEN_SAMPLES = 1.0
ROUNDS_TO_DECIDE = 3
"""A sample that a test may fail by has so many rounds, however long a step takes."""
MOST_UNSTABLE_WARM_UPS = 16
"""For steps that may compile anew, or overflow, before they repeat."""


def measure_step(
    phases: Sequence[Phase],
    device: Device,
    *,
    not_own: Sequence[int],
    state: Callable[[], object] | None = None,
    compiled: bool = False,
    peak_only: bool = False,
) -> StepFigures:
    """Measure the step that ``phases`` make.

    Runs it until two consecutive steps give the same peaks (at least 2 steps, at most `MOST_WARM_UPS`), so that lazy
    optimizer state and autotuning are behind, then `FURTHER_STEPS` more: what happens every second to sixth time is seen.
    ``not_own`` bytes are live that are not the step's own, on each of `Device.everywhere`. A step that changes ``state()``
    (graphs that were compiled, the gradient scale) is not like the next one, and up to `MOST_UNSTABLE_WARM_UPS` are run until
    it stays. Of a step that was ``compiled`` no operators are counted. With ``peak_only`` no further steps are run, and
    nothing is counted. On several ranks all run as many steps, as they decide (`Device.consensus`).
    """
    run_step = functools.partial(run_one_step, phases, device, not_own)
    step = functools.partial(run_phases, phases)
    device.quiesce()
    with cyclic_collector_off():
        seen = [run_step()]
        settled_at = None
        most = MOST_UNSTABLE_WARM_UPS if device.consensus.any(state is not None) else MOST_WARM_UPS
        while settled_at is None and len(seen) < most:
            before = state() if state is not None else None
            seen.append(run_step())
            moved = state is not None and state() != before
            if device.consensus.all(have_same_peaks(*seen[-2:]) and not moved):
                settled_at = len(seen) - 2
        latest = seen[-1]
        further = [latest, *(run_step() for _ in range(0 if peak_only else FURTHER_STEPS))]
        seen += further[1:]
        growth = (
            measure_growth(run_step, device)
            if device.consensus.any(any(one.keeps for step in further for one in step.values()))
            else {}
        )
        # Before any time is taken: how many steps that takes is chance, and what a step does may depend on its weights.
        with device.peak_ignored():
            alike = device.consensus.all(
                settled_at is not None and all(do_the_same(*pair) for pair in pairwise(further))
            )
            counted = NOTHING_COUNTED if peak_only else count_step(step, device, compiled=compiled, alike=alike)
    return replace(figures_of_steps(seen, settled_at), counted=counted, growth=growth)


def first_times(
    phases: Sequence[Phase],
    device: Device,
    own: Callable[[], Iterable[torch.UntypedStorage]],
    time_budget: TimeBudget,
) -> Times:
    """Return the first sample of a measured step's time, and the times of its phases.

    A recorded step begins and ends it, because timing runs hundreds of steps unrecorded.

    Args:
        phases: The parts of the step, in order.
        device: Where it runs.
        own: Returns the storages that are the step's own at any moment.
        time_budget: The seconds that are left for timing.
    """
    run_step = functools.partial(run_one_step, phases, device, [0] * len(device.everywhere))
    with cyclic_collector_off():
        earlier = device.known()
        run_step()
        with unrecorded_steps(device, earlier, own, run_step):
            return time_step(functools.partial(run_phases, phases), phases, device, time_budget)


@contextmanager
def unrecorded_steps(
    device: Device, earlier: BlockIds, own: Callable[[], Iterable[torch.UntypedStorage]], run_step: Callable[[], object]
) -> Iterator[None]:
    """Run steps within without recording them, then one that is recorded, and correct what the device takes to be live.

    While nothing is recorded, a step may replace what it holds. What can be reached of that is known at the end. Of the rest,
    such as buckets of `DistributedDataParallel` and what graphs have saved, what outlived a recorded step stays, and what each
    step makes anew is taken from the last one. Also when a step raises, since the test may go on and measure another.

    Args:
        device: Where the steps run.
        earlier: What the device knew before the last recorded step.
        own: Returns the storages that can be reached from the step.
        run_step: Runs a recorded step.
    """
    reached = {storage.data_ptr() for storage in own()}
    before = device.known()
    lasting = frozenset(block for block in earlier & before if block[0] not in reached)
    try:
        with device.unrecorded():
            yield
        run_step()
    finally:
        device.reconcile(lasting | (device.known() - before), own())


def sample_again(
    phases: Sequence[Phase],
    device: Device,
    own: Callable[[], Iterable[torch.UntypedStorage]],
    seconds: float,
) -> Sample:
    """Return another sample of a step that has been measured. A recorded step ends it, as in `measure_step`.

    Taken after a pause of `SECONDS_BETWEEN_SAMPLES`, so that one burst of another process is not in both.
    """
    time.sleep(SECONDS_BETWEEN_SAMPLES)
    run_step = functools.partial(run_one_step, phases, device, [0] * len(device.everywhere))
    device.quiesce()
    with cyclic_collector_off():
        earlier = device.known()
        run_step()
        with unrecorded_steps(device, earlier, own, run_step), to_themselves(device) as refused:
            # Settling has emptied the caches, and of few rounds none may be one that fills them again.
            run_phases(phases)
            sample = sample_step(functools.partial(run_phases, phases), device, seconds, ROUNDS_TO_DECIDE)
    return invalid_if(refused, sample, device)
