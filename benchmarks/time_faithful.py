"""The package's step time against a loop that a person would write: in one process, in turns."""

from __future__ import annotations

import gc
import statistics
import time
from typing import TYPE_CHECKING

from claims import claim_of, ratio_of_medians
from time_steps import STEPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from claims import Claim

    from pytest_gpumem.devices.contract import Device

LIMIT = 1.01
SUB_STEPS = 20
LOOP_STEPS = 20
SECONDS = 1.0
"""Of a sample, as in a test."""


def faithful_claims(turns: int) -> list[Claim]:
    """For each device here and each step: the ratio of both times, and its inverse, are at most `LIMIT`."""
    import torch

    from pytest_gpumem.devices.cpu import CpuDevice
    from pytest_gpumem.devices.cuda import CudaDevice

    claims = _on(CpuDevice(), turns, lambda step: plain_loop(step, LOOP_STEPS), STEPS)
    if torch.cuda.is_available():
        on_gpu = {name: _on_gpu(make) for name, make in STEPS.items() if name != "python"}
        claims += _on(CudaDevice(), turns, lambda step: plain_events(step, LOOP_STEPS), on_gpu)
    return claims


def plain_loop(step: Callable[[], object], steps: int) -> float:
    """Seconds a step, by the clock."""
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - began) / steps


def plain_events(step: Callable[[], object], steps: int) -> float:
    """Seconds a step, by two events of the GPU."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / steps


def times_in_turns(
    step: Callable[[], object], device: Device, plain: Callable[[Callable[[], object]], float], turns: int
) -> tuple[list[float], list[float]]:
    """Medians of the package's samples and of plain loops, ABBA; a loop's time is the median of as many as fill a sample."""
    from pytest_gpumem.timing.sampling import sample_step

    ours: list[float] = []
    theirs: list[float] = []

    def sample() -> None:
        ours.append(sample_step(step, device, SECONDS).median)

    def loops() -> None:
        end, taken = time.perf_counter() + SECONDS, []
        while not taken or time.perf_counter() < end:
            taken.append(plain(step))
        theirs.append(statistics.median(taken))

    for turn in range(turns):
        for take in (sample, loops) if turn % 2 == 0 else (loops, sample):
            take()
    return ours, theirs


def _on(
    device: Device,
    turns: int,
    plain: Callable[[Callable[[], object]], float],
    steps: dict[str, Callable[[], Callable[[], object]]],
) -> list[Claim]:
    claims = []
    device.open()
    try:
        with device.unrecorded():
            for name, make in steps.items():
                sub_step = make()

                def step(run: Callable[[], object] = sub_step) -> None:
                    for _ in range(SUB_STEPS):
                        run()

                for _ in range(3):
                    step()
                gc.collect()
                gc.disable()
                ours, theirs = times_in_turns(step, device, plain, turns)
                gc.enable()
                text = f"{device.name}, {name}: the package's step time over a plain loop's"
                # Neighbours are compared with one another: what drifts from turn to turn drops out.
                ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
                claims.append(claim_of(text, ratio_of_medians, (ratios, [1.0]), LIMIT))
                claims.append(
                    claim_of(f"{text}, inverse", ratio_of_medians, ([1 / one for one in ratios], [1.0]), LIMIT)
                )
    finally:
        device.close()
    return claims


def _on_gpu(make: Callable[[], Callable[[], object]]) -> Callable[[], Callable[[], object]]:
    def made() -> Callable[[], object]:
        import torch

        with torch.device("cuda"):
            return make()

    return made
