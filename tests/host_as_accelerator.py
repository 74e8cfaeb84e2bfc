"""Host memory counted as an accelerator's allocator counts its own: what `torch.xpu` would say, of the CPU's tensors.

`install` puts the functions of such a module (``memory_allocated`` and so on) into others like `torch.cpu`, so that a device whose
``torch_device`` is the CPU finds them by `torch.get_device_module`. No figure of them is one of an accelerator; what an
operator allocates within itself and frees again (the numbers that AdamW's make tensors of) is not seen.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HostAllocator(TorchDispatchMode):
    """Statistics of the storages that operators return, as long as they live."""

    def __init__(self):
        super().__init__()
        self._storages: dict[int, weakref.ref] = {}
        self._live = self._peak = 0
        self._random = torch.Generator()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.layout is torch.strided:
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage):
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if not nbytes or address in self._storages:
            return

        def freed(_):
            del self._storages[address]
            self._live -= nbytes

        self._storages[address] = weakref.ref(storage, freed)
        self._live += nbytes
        self._peak = max(self._peak, self._live)

    # As torch.xpu has them

    def memory_allocated(self, device=None):
        return self._live

    def max_memory_allocated(self, device=None):
        return self._peak

    def reset_peak_memory_stats(self, device=None):
        self._peak = self._live

    def synchronize(self, device=None):
        return

    def get_device_name(self, device=None):
        return "Host 1550"

    def rand(self, *size):
        """Random numbers of the accelerator's own."""
        return torch.rand(*size, generator=self._random)

    def get_rng_state(self, device):
        assert device == 0
        return self._random.get_state()

    def set_rng_state(self, state, device):
        assert device == 0
        self._random.set_state(state)


NAMES = (
    "memory_allocated",
    "max_memory_allocated",
    "reset_peak_memory_stats",
    "synchronize",
    "get_device_name",
    "rand",
    "get_rng_state",
    "set_rng_state",
)


def install(*modules):
    """Count until what is returned is closed; meanwhile these modules tell."""
    stack = ExitStack()
    allocator = stack.enter_context(HostAllocator())
    for module in modules:
        for name in NAMES:
            stack.enter_context(patch.object(module, name, getattr(allocator, name), create=True))
    return stack
