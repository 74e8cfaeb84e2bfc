"""cuBLAS's workspaces in a running process.

torch allocates a workspace for each thread that multiplies matrices at the same time as another thread, and keeps it. So chance
decides how many workspaces a server with several threads has. A workspace takes 33,554,432 bytes on an H100.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from pytest_gpumem.emulating.emulated_process.usage import Workspaces
from pytest_gpumem.torch_support.garbage_collector import is_heap_frozen
from pytest_gpumem.torch_support.private_api.allocator import cublas_workspace_sizes, cuda_snapshot
from pytest_gpumem.torch_support.private_api.tensors import data_address
from pytest_gpumem.torch_support.reachability import alive
from pytest_gpumem.torch_support.static_access import parts_of


def workspaces() -> dict[int, Workspaces]:
    """Return the workspaces by GPU index. Each is a block with a workspace's size that no tensor in Python refers to.

    A weight may have the size of a workspace, so blocks of tensors are left out. Nothing is found after ``gc.freeze()``, which
    hides tensors, or with an allocator without snapshots.
    """
    sizes = cublas_workspace_sizes()
    if not sizes or is_heap_frozen() or torch.cuda.memory.get_allocator_backend() != "native":
        return {}
    blocks = [
        (segment["device"], block["address"], block["requested_size"])
        for segment in cuda_snapshot()["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated" and block["requested_size"] in sizes
    ]
    of_tensors = _addresses() if blocks else set()
    by_device: dict[int, dict[int, int]] = {}
    for device, address, nbytes in blocks:
        if address not in of_tensors:
            by_device.setdefault(device, {})[address] = nbytes
    return {
        device: Workspaces(sum(by_address.values()), sum({*by_address.values()}), frozenset(by_address))
        for device, by_address in by_device.items()
    }


def _addresses() -> set[int]:
    addresses = set()
    for tensor in alive(torch.Tensor):
        with suppress(Exception):  # some tensors have no memory
            addresses |= {data_address(part) for part in parts_of(tensor)}
    return addresses
