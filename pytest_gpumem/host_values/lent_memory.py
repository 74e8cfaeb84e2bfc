"""Memory of the host that tensors have in common with NumPy or another library, which reads it where nothing is seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from torch.multiprocessing.reductions import StorageWeakRef

from pytest_gpumem.host_values.host_operators import has_storage
from pytest_gpumem.torch_support.private_api import unwrapped

if TYPE_CHECKING:
    import torch

_MOST_NOTED = 4096
"""Storages that are noted before those that are gone are forgotten."""


class LentMemory:
    """Storages of the host whose memory came from another library, or was given to one."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[StorageWeakRef, list[ref[Any]] | None]] = {}
        """Storages, and the arrays that were made of each; None if the storage is lent for as long as it is there."""

    def note(self, tensor: torch.Tensor, array: object = None) -> None:
        """Note that a tensor's memory is another library's as well, for as long as ``array`` is there, if one is given."""
        tensor = unwrapped(tensor)
        if tensor.device.type != "cpu" or not has_storage(tensor):
            return
        if len(self._noted) > _MOST_NOTED:
            self._noted = {at: one for at, one in self._noted.items() if not one[0].expired()}
        storage = StorageWeakRef(tensor.untyped_storage())
        _, arrays = self._noted.get(storage.cdata, (None, []))
        if array is None or arrays is None:
            self._noted[storage.cdata] = storage, None
        else:
            self._noted[storage.cdata] = storage, [*(one for one in arrays if one() is not None), ref(array)]

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Return whether another library sees what is written to a storage."""
        if not self._noted:
            return False
        _, arrays = self._noted.get(StorageWeakRef(storage).cdata, (None, []))
        return arrays is None or any(one() is not None for one in arrays)
