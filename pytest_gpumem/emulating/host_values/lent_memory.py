"""Track which host storages share their memory with NumPy or another library, because such a library reads without an
operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from torch.multiprocessing.reductions import StorageWeakRef

from pytest_gpumem.emulating.host_values.host_operators import has_storage
from pytest_gpumem.torch_support.private_api.tensors import unwrapped

if TYPE_CHECKING:
    import torch

_MOST_NOTED = 4096
"""If there are more notes than this, the notes about freed storages are deleted."""


class LentMemory:
    """The host storages whose memory is shared with another library ("lent").

    Example: after ``array = tensor.numpy()``, the tensor's storage is lent until ``array`` is freed.
    """

    def __init__(self) -> None:
        self._noted: dict[int, tuple[StorageWeakRef, list[ref[Any]] | None]] = {}
        """Each lent storage and the arrays on its memory, by address. ``None`` in place of the arrays if the storage is lent
        until it is freed."""

    def note(self, tensor: torch.Tensor, array: object = None) -> None:
        """Note a tensor's storage as lent to another library.

        Args:
            tensor: The tensor. GPU tensors are ignored.
            array: The other library's object. The storage is lent until this object is freed, or with ``None`` until the
                storage is freed.
        """
        tensor = unwrapped(tensor)
        if tensor.device.type != "cpu" or not has_storage(tensor):
            return
        if len(self._noted) > _MOST_NOTED:
            self._noted = {at: note for at, note in self._noted.items() if not note[0].expired()}
        storage = StorageWeakRef(tensor.untyped_storage())
        _, arrays = self._noted.get(storage.cdata, (None, []))
        if array is None or arrays is None:
            self._noted[storage.cdata] = storage, None
        else:
            live_arrays = (array_ref for array_ref in arrays if array_ref() is not None)
            self._noted[storage.cdata] = storage, [*live_arrays, ref(array)]

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage still shares its memory with another library."""
        if not self._noted:
            return False
        _, arrays = self._noted.get(StorageWeakRef(storage).cdata, (None, []))
        return arrays is None or any(array() is not None for array in arrays)
