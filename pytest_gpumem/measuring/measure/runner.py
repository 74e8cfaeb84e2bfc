"""Measures a step that repeats: memory after the step has settled, then growth, counts and time."""

from __future__ import annotations

import functools
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from pytest_gpumem.measuring.measure.counting import NO_COUNTS, count_step
from pytest_gpumem.measuring.measure.growth import measure_growth
from pytest_gpumem.measuring.measure.reading import run_one_step, run_phases
from pytest_gpumem.measuring.measure.settling import do_equal_work, figures_of_steps, have_same_peaks
from pytest_gpumem.measuring.timing.sampling import exclusive_use, invalidate_if_refused, sample_step, time_step
from pytest_gpumem.torch_support.garbage_collector import cyclic_collector_off

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

    from pytest_gpumem.facts.values.times import Sample, Times
    from pytest_gpumem.measuring.devices.contract import BlockIds, Device
    from pytest_gpumem.measuring.measure.reading import Phase
    from pytest_gpumem.measuring.measure.settling import StepFigures
    from pytest_gpumem.measuring.timing.sampling import TimeBudget

MOST_WARM_UPS = 6
"""A step runs at most this many times until two consecutive runs have the same peaks."""
FURTHER_STEPS = 4
"""The number of further runs after the first two equal runs, or after `MOST_WARM_UPS` runs without an equal pair."""
SECONDS_BETWEEN_SAMPLES = 1.0
ROUNDS_TO_DECIDE = 3
"""The minimum number of rounds in a second or third sample, even for long steps, because this sample can fail a test."""
MOST_UNSTABLE_WARM_UPS = 16
"""The same limit as `MOST_WARM_UPS`, for steps that may compile again, or whose gradients may overflow, before they repeat."""


def measure_step(
    phases: Sequence[Phase],
    device: Device,
    *,
    other_bytes: Sequence[int],
    state: Callable[[], object] | None = None,
    is_compiled: bool = False,
    peak_only: bool = False,
) -> StepFigures:
    """Measure a step.

    The step runs until two consecutive runs have the same peaks, at least twice and at most `MOST_WARM_UPS` times. By then, the
    optimizer has created its lazy state, and autotuning is finished. `FURTHER_STEPS` more runs follow, which show work that the
    step does only every second to sixth time. All ranks decide together, so all run equally many steps (`Device.consensus`).
    See `settling` for an example.

    Args:
        phases: The step's phases, in order.
        device: The step's device.
        other_bytes: Other code's live bytes on each device (`Device.everywhere`).
        state: Returns state that may change in a step, for example the gradient scale or the graphs compiled so far. A run
            that changes this state does not count as equal, and the step runs up to `MOST_UNSTABLE_WARM_UPS` times.
        is_compiled: True if the step is compiled. In this case, operators are not counted.
        peak_only: True to measure only the peak, without further runs and without counts.
    """
    run_step = functools.partial(run_one_step, phases, device, other_bytes)
    step = functools.partial(run_phases, phases)
    device.quiesce()
    with cyclic_collector_off():
        seen = [run_step()]
        settled_at = None
        most_warm_ups = MOST_UNSTABLE_WARM_UPS if device.consensus.any(state is not None) else MOST_WARM_UPS
        while settled_at is None and len(seen) < most_warm_ups:
            previous_state = state() if state is not None else None
            seen.append(run_step())
            is_changed = state is not None and state() != previous_state
            if device.consensus.all(have_same_peaks(*seen[-2:]) and not is_changed):
                settled_at = len(seen) - 2
        latest = seen[-1]
        further = [latest, *(run_step() for _ in range(0 if peak_only else FURTHER_STEPS))]
        seen += further[1:]
        growth = (
            measure_growth(run_step, device)
            if device.consensus.any(any(figures.keeps_bytes for run in further for figures in run.values()))
            else {}
        )
        # Count before timing. Timing trains for an unpredictable number of steps, and a step's work may depend on the weights.
        with device.peak_ignored():
            alike = device.consensus.all(
                settled_at is not None and all(do_equal_work(*pair) for pair in pairwise(further))
            )
            counted = NO_COUNTS if peak_only else count_step(step, device, is_compiled=is_compiled, repeats=alike)
    return replace(figures_of_steps(seen, settled_at), counted=counted, growth=growth)


def first_times(
    phases: Sequence[Phase],
    device: Device,
    own: Callable[[], Iterable[torch.UntypedStorage]],
    time_budget: TimeBudget,
) -> Times:
    """Return a measured step's first time sample, and the times for its phases.

    Timing runs hundreds of steps without recording their allocations. A step with recorded allocations runs before these steps,
    and another runs after them, to correct the device's list of live blocks (`unrecorded_steps`).

    Args:
        phases: The step's phases, in order.
        device: The step's device.
        own: Returns the storages that currently belong to the step.
        time_budget: The remaining seconds for timing.
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
    """Record no allocations within the context. At its end, record a step, and correct the device's list of live blocks.

    While allocations are not recorded, a step may replace memory blocks. At the end, `Device.reconcile` gets the blocks that
    are live then:

    - Blocks reachable from the step's objects.
    - Other blocks that outlived the recorded step before the context, for example tensors saved by a graph.
    - Other blocks from the recorded step at the end, because each step creates new ones, for example the buckets in
      `DistributedDataParallel`.

    The list is also corrected if a step raises, because the test may continue and measure another step.

    Args:
        device: The step's device.
        earlier: The live blocks before the recorded step that precedes the context.
        own: Returns the storages reachable from the step's objects.
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
    """Return another time sample for a measured step, with a recorded step before and after, as in `first_times`.

    A pause of `SECONDS_BETWEEN_SAMPLES` comes first, so a short burst of work in another process affects at most one sample.

    Args:
        phases: The step's phases, in order.
        device: The step's device.
        own: Returns the storages that currently belong to the step.
        seconds: The time for the sample.
    """
    time.sleep(SECONDS_BETWEEN_SAMPLES)
    run_step = functools.partial(run_one_step, phases, device, [0] * len(device.everywhere))
    device.quiesce()
    with cyclic_collector_off():
        earlier = device.known()
        run_step()
        with unrecorded_steps(device, earlier, own, run_step), exclusive_use(device) as refused:
            # quiesce() has emptied the caches. This run fills them before the sample, because a sample may have few rounds.
            run_phases(phases)
            sample = sample_step(functools.partial(run_phases, phases), device, seconds, ROUNDS_TO_DECIDE)
    return invalidate_if_refused(refused, sample, device)
