"""What the gpumem fixture measures on a GPU: leaks, cycles, somebody else's bytes, resets in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.plugin.fixture import Gpumem

RESET_KEPT_BEFORE = torch.cuda.reset_peak_memory_stats


def tensor(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def reset_through(module: object) -> Callable[[], None]:
    if not hasattr(module, "reset_peak_memory_stats"):
        pytest.skip("this torch has no torch.accelerator.reset_peak_memory_stats")
    return module.reset_peak_memory_stats


RESETS: dict[str, Callable[[], Callable[[], None]]] = {
    "torch.cuda": lambda: reset_through(torch.cuda),
    "torch.cuda.memory": lambda: reset_through(torch.cuda.memory),
    "torch.accelerator": lambda: reset_through(getattr(torch, "accelerator", None)),
    "a reference that was kept": lambda: RESET_KEPT_BEFORE,
}


@pytest.mark.parametrize("name", RESETS)
def test_a_reset_in_the_measured_code_does_not_hide_the_peak(gpumem: Gpumem, name: str) -> None:
    reset = RESETS[name]()
    with gpumem.track() as region:
        tensor(100_000_001)
        reset()
        tensor(1_000_001)
        reset()
    assert region.measurement.peak_allocated == 100_000_001


def test_what_outlives_the_code_is_retained_to_the_byte(gpumem: Gpumem) -> None:
    kept = []
    with gpumem.track() as region:
        kept.append(tensor(10_000_001))
        tensor(20_000_001)
    assert region.measurement.retained == 10_000_001
    assert region.measurement.cyclic_garbage == 0
    assert region.measurement.peak_allocated == 30_000_002


def test_a_cycle_is_garbage_and_not_retained(gpumem: Gpumem) -> None:
    with gpumem.track() as region:
        cycle: list[object] = [tensor(10_000_001)]
        cycle.append(cycle)
        del cycle
    assert region.measurement.cyclic_garbage == 10_000_001
    assert region.measurement.retained == 0


def test_a_block_that_another_stream_still_uses_is_neither_garbage_nor_retained(gpumem: Gpumem) -> None:
    side = torch.cuda.Stream()

    def step() -> None:
        used = tensor(10_000_001)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            used.zero_()
        used.record_stream(side)

    with gpumem.track() as region:
        step()
    assert region.measurement.peak_allocated == 10_000_001
    assert region.measurement.cyclic_garbage == 0
    assert region.measurement.retained == 0


@pytest.mark.hardware("no time passes on an emulated one")
def test_a_step_is_timed(gpumem: Gpumem) -> None:
    matrix = torch.ones(2048, 2048, device=gpumem.device)
    measured = gpumem.measure(lambda: matrix @ matrix, items=2048)
    assert measured.step_time > 0
    assert measured.throughput == pytest.approx(2048 / measured.step_time)
