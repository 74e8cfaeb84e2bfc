"""The cuda device counts what tensors hold, to the byte."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

from pytest_gpumem.emulating.emulation.load import current_emulation
from pytest_gpumem.measuring.devices.cuda import cuda_slug
from pytest_gpumem.measuring.devices.registry import BUILT_IN, Devices

if TYPE_CHECKING:
    from pytest_gpumem.measuring.devices.contract import Device

# Around the sizes at which the allocator rounds, and changes from small segments to large ones.
SIZES = (1, 511, 512, 513, 2**20 - 1, 2**20 + 1, 10 * 2**20 - 1, 10_000_001, 20 * 2**20 + 3)
TEMPORARY = 5_000_001


def tensor(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("nbytes", [1, 512, 2**20 + 1, 20 * 2**20 + 3])
def test_live_bytes_are_those_that_were_asked_for(device: Device, nbytes: int) -> None:
    before = device.live()
    held = tensor(nbytes)
    assert device.live() - before == nbytes
    del held
    assert device.live() == before


def test_a_peak_holds_what_lived_at_once_and_begins_with_what_is_live(device: Device) -> None:
    before = device.live()
    device.pop_peak()
    held = [tensor(nbytes) for nbytes in SIZES]
    temporary = tensor(TEMPORARY)
    del temporary
    assert device.pop_peak().allocated - before == sum(SIZES) + TEMPORARY
    del held
    assert device.pop_peak().allocated - before == sum(SIZES)
    assert device.pop_peak().allocated == before


def test_turnover_is_what_was_asked_for_in_all(device: Device) -> None:
    before = device.turnover()
    held = [tensor(nbytes) for nbytes in SIZES]
    tensor(TEMPORARY)
    tensor(TEMPORARY)
    torch.cuda.reset_peak_memory_stats()
    assert device.turnover() - before == sum(SIZES) + 2 * TEMPORARY
    del held


def test_rest_gives_back_garbage_workspaces_and_cache(device: Device) -> None:
    live, reserved = device.live(), device.reserved()
    matrix = torch.ones(1024, 1024, device="cuda")
    cycle: list[object] = [matrix @ matrix]
    cycle.append(cycle)
    del matrix, cycle
    device.quiesce()
    assert device.live() == live
    assert device.reserved() == reserved


def test_workspaces_are_gone_once_released(device: Device) -> None:
    matrix = torch.ones(1024, 1024, device="cuda")
    before = device.live()
    product = matrix @ matrix
    device.release_workspaces()
    assert device.live() - before == product.nbytes


def test_the_environment_says_which_gpu_and_software_gave_the_figures(device: Device) -> None:
    environment = device.environment()
    name = torch.cuda.get_device_name()
    emulation = current_emulation()
    slug = cuda_slug(name) if emulation is None else f"emulated-{cuda_slug(emulation.gpu.title)}"
    assert (environment.device, environment.slug) == (name, slug)
    assert ("emulated" in name) == (emulation is not None)
    assert environment.details["torch"] == torch.__version__
    assert environment.details["cuda"] == torch.version.cuda
    assert environment.details["total_memory"] == torch.cuda.get_device_properties().total_memory
    assert environment.details.keys() >= {"driver", "allocator"}


def test_auto_is_cuda_where_there_is_a_gpu() -> None:
    assert Devices(BUILT_IN).get("auto").name == "cuda"


def test_nvml_knows_this_gpu_while_it_works(device: Device) -> None:
    """Its clock, and that this process is not somebody else."""
    matrix = torch.rand(4096, 4096, device="cuda")
    before = device.conditions()
    device.time(lambda: [matrix @ matrix for _ in range(50)])
    pace, after = device.pace(), device.conditions()
    if after.clock_events is None:
        pytest.skip("NVML does not tell this GPU's clocks")
    assert pace is not None
    assert 1e8 < pace < 1e10
    assert after.sm_clock_default is not None
    assert pace <= 1.2 * after.sm_clock_default
    assert after.retries == before.retries
    assert os.getpid() not in after.other_pids


def test_a_cuda_context_is_beside_torch_and_this_process_is_no_other_program(device: Device) -> None:
    """An emulated GPU has no context, so nothing is said about it."""
    use = device.gpu_use()
    if current_emulation() is not None:
        assert use is None
        return
    if use is None:
        pytest.skip("NVML does not list this GPU's processes")
    assert os.getpid() not in {process.pid for process in use.processes}
    assert use.beside_torch is None or 50e6 < use.beside_torch < 5e9


def test_kernels_are_counted_and_copies_are_not(device: Device) -> None:
    x = torch.ones(1000, device="cuda")

    def run() -> None:
        y = x + 1
        y.mul_(2)
        y.cpu()

    kernels = [device.launches(run) for _ in range(3)]
    assert [sum(found.values()) for found in kernels if found is not None] == [2, 2, 2]
    assert kernels[0] == kernels[1] == kernels[2]
    assert not device.launches(lambda: None)
