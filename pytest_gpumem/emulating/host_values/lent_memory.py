"""Track which host storages share their memory with NumPy or another library.

Such a library reads values without an operator, so `HostValues` cannot intercept these reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from torch.multiprocessing.reductions import StorageWeakRef

from pytest_gpumem.emulating.host_values.host_operators import has_storage
from pytest_gpumem.emulating.host_values.storage_notes import StorageNotes
from pytest_gpumem.torch_support.private_api.tensors import unwrapped

if TYPE_CHECKING:
    import torch


class _Loan(NamedTuple):
    """A note about a lent storage."""

    arrays: tuple[ref[Any], ...] = ()
    """The arrays on the storage's memory. The storage is lent until they are freed."""
    is_permanent: bool = False
    """True if the storage is lent until it is freed itself."""


class LentMemory:
    """The host storages whose memory is shared with another library ("lent").

    Example: after ``array = tensor.numpy()``, the tensor's storage is lent until ``array`` is freed.
    """

    def __init__(self) -> None:
        self._loans: StorageNotes[_Loan] = StorageNotes()
        """The notes by the address of torch's storage object. Two such objects may have the same memory, for example after two
        calls of ``from_numpy`` with the same array, and each is lent until it is freed."""

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
        storage = tensor.untyped_storage()
        address = StorageWeakRef(storage).cdata
        loan = self._loans.at(address) or _Loan()
        live_arrays = (array_ref for array_ref in loan.arrays if array_ref() is not None)
        arrays = () if array is None else (*live_arrays, ref(array))
        self._loans.set(storage, _Loan(arrays, loan.is_permanent or array is None), address)

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage still shares its memory with another library."""
        loan = self._loans.at(StorageWeakRef(storage).cdata) if self._loans else None
        return loan is not None and (loan.is_permanent or any(array() is not None for array in loan.arrays))
