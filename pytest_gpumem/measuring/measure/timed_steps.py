"""Times a measured step without recording its allocations, between two steps whose allocations are recorded."""

from __future__ import annotations

import functools
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytest_gpumem.measuring.measure.reading import run_one_step, run_phases
from pytest_gpumem.measuring.timing.sampling import exclusive_use, invalidate_if_refused, sample_step, time_step
from pytest_gpumem.torch_support.garbage_collector import cyclic_collector_off

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

    from pytest_gpumem.facts.values.times import Sample, Times
    from pytest_gpumem.measuring.devices.contract import BlockIds, Device
    from pytest_gpumem.measuring.measure.reading import Phase
    from pytest_gpumem.measuring.timing.sampling import TimeBudget

SECONDS_BETWEEN_SAMPLES = 1.0
ROUNDS_TO_DECIDE = 3
"""The minimum number of rounds in a second or third sample, even for long steps, because this sample can fail a test."""


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
