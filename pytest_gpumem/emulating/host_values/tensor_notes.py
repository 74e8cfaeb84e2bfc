"""Track which tensors have known values, by notes about their storages.

- A storage on the GPU is unknown if no note marks it as known. Example: ``torch.ones(4, dtype=torch.int64)`` is known.
- A storage on the host is known if no note marks it as unknown. Example: the copy ``torch.randn(4, device="cuda").cpu()``.
- Further notes describe unknown values: `Constants`, `Exclusions` and the masks of `AssumedRouting`.

A note is about a whole storage, so it is about each view of the storage too (`StorageNotes`).
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from torch.multiprocessing.reductions import StorageWeakRef

from pytest_gpumem.emulating.host_values.constants import Constants
from pytest_gpumem.emulating.host_values.exclusions import Exclusions
from pytest_gpumem.emulating.host_values.host_operators import (
    BIGGEST_COPY,
    covers_its_storage,
    has_storage,
    is_exact,
    is_ordinary,
    is_small,
    on_host,
    on_the_same_memory,
    parts_of,
)
from pytest_gpumem.emulating.host_values.lent_memory import LentMemory
from pytest_gpumem.emulating.host_values.routing import AssumedRouting
from pytest_gpumem.emulating.host_values.storage_notes import StorageNotes
from pytest_gpumem.emulating.host_values.unknown_float import UNKNOWN
from pytest_gpumem.torch_support.private_api.dispatch import beneath_modes
from pytest_gpumem.torch_support.private_api.tensors import unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from pytest_gpumem.emulating.host_values.constants import Constant
    from pytest_gpumem.emulating.host_values.reads import Reads
    from pytest_gpumem.facts.values.option_words import Routing


class _KnownValues(NamedTuple):
    """A note about a storage on the GPU: all its values are known."""

    routing: Routing | None
    """The assumed routing on which the values depend; ``None`` if they depend on no assumption."""


class _UnknownValues(NamedTuple):
    """A note about a storage on the host: at least one of its values is unknown."""

    of_floats: bool
    """True if the program made this storage's unknown values from Python floats (``torch.tensor(loss.item())``).
    `UnknownFloat` has already recorded how these floats were used."""


class TensorNotes:
    """All notes about tensors in a process with emulated GPUs.

    Args:
        reads: The record of the program's reads. Some notes cause reads, for example about memory shared with NumPy.
    """

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self._known: StorageNotes[_KnownValues] = StorageNotes()
        """The GPU storages whose values are known. The values in all other GPU storages are unknown."""
        self._unknown_on_host: StorageNotes[_UnknownValues] = StorageNotes()
        """The host storages with unknown values. The values in all other host storages are known."""
        self._last_unknown: StorageWeakRef | None = None
        """The GPU storage most recently marked as unknown."""
        self.captured: StorageNotes[None] | None = None
        """The GPU storages to which operators wrote during the current CUDA graph capture. ``None`` if nothing is captured."""
        self.lent = LentMemory()
        self.choosing = AssumedRouting(self.is_unknown)
        self.constants = Constants(self._is_uncertain)
        self.exclusions = Exclusions(self._is_uncertain)
        self.has_left = False
        """True after the first unknown value was copied to the host. Until then, all host tensors are known."""
        self.values_read = 0
        """Counts how often the host has read unknown values."""
        self._made_of_unknown = False
        """True while `torch.tensor` makes a tensor from a list with unknown tensors."""

    def note(
        self,
        tensor: torch.Tensor,
        is_known: bool,
        constant: Constant | None = None,
        *,
        has_values: bool = False,
        routing: Routing | None = None,
    ) -> None:
        """Note whether the values in a GPU tensor's storage are known.

        Unknown integers are set to 0, so every process has the same numbers. If the CPU computed them from such zeros
        (``has_values``), they are not changed.

        Args:
            tensor: A tensor on the GPU.
            is_known: Whether all values in the storage are known.
            constant: The elements' common value; ``None`` if they differ or their value is not known.
            has_values: Whether the CPU computed the values, even from unknown inputs.
            routing: The assumed routing on which known values depend, if any.
        """
        if not has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if self.captured is not None:
            self.captured.set(storage, None)
            is_known, constant = False, None
        self.constants.note(storage, constant)
        self.exclusions.forget(address)
        self.choosing.forget(address)
        if is_known:
            self._known.set(storage, _KnownValues(routing))
        else:
            self._known.delete(address)
            self._last_unknown = StorageWeakRef(storage)
            if is_exact(tensor) and not has_values and (storage.nbytes() <= BIGGEST_COPY or is_small((tensor,))):
                if tensor.is_contiguous():
                    ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)
                elif not tensor.is_conj():
                    on_the_same_memory(tensor).zero_()

    def note_from_gpu(self, tensor: torch.Tensor, is_known: bool, *, has_values: bool) -> None:
        """Note whether a host tensor copied from the GPU is known.

        Unknown floats are set to `UNKNOWN` and unknown integers to 0, so every process has the same numbers.
        """
        self.has_left = self.has_left or not is_known
        self.values_read += not is_known
        if not is_known and not has_values and tensor.nbytes <= BIGGEST_COPY:
            tensor.fill_(0 if is_exact(tensor) or tensor.is_quantized else UNKNOWN)
        self.note_on_host(tensor, is_known, is_overwritten=covers_its_storage(tensor))

    def note_on_host(
        self, tensor: torch.Tensor, is_known: bool, *, is_overwritten: bool = True, of_floats: bool = False
    ) -> None:
        """Note whether an operator's host tensor is known.

        Args:
            tensor: A tensor to which an operator wrote. GPU tensors are ignored.
            is_known: Whether all written values are known.
            is_overwritten: Whether the operator wrote to the whole storage. If false, the storage may still contain older
                unknown values.
            of_floats: Whether the program made all unknown values from Python floats (`_UnknownValues.of_floats`).
        """
        if tensor.device.type != "cpu" or not has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not is_known and address:
            self.has_left = True
            if self.lent.holds(storage):
                if is_exact(tensor):
                    self._reads.invalid("NumPy or another library gets values")
                self._reads.of_float()
            self._unknown_on_host.set(storage, _UnknownValues(of_floats))
        elif is_overwritten:
            self._unknown_on_host.delete(address)

    def are_known(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether all values in all tensors are known."""
        return not any(map(self.is_unknown, tensors))

    def is_unknown(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor contains an unknown value."""
        if tensor.numel() == 0 or tensor.device.type not in ("cpu", "cuda"):
            return False
        if type(tensor).__name__ == "FakeTensor":
            return False  # a fake tensor has no values
        if not has_storage(tensor):
            within = unwrapped(tensor)
            if within is not tensor:
                return is_ordinary(type(within)) and self.is_unknown(within)
            parts = parts_of(tensor)
            return any(map(self.is_unknown, parts)) if parts else tensor.is_cuda
        address = tensor.untyped_storage().data_ptr()
        if tensor.is_cuda:
            return self._known.at(address) is None
        return self._unknown_on_host.at(address) is not None

    def _is_uncertain(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's values are unknown or depend on an assumed routing."""
        return self.is_unknown(tensor) or self.routing_of(tensor) is not None

    def routing_of(self, tensor: torch.Tensor) -> Routing | None:
        """Return the assumed routing on which a tensor's values depend; ``None`` if there is none."""
        note = self._known.of(tensor) if self.choosing.made and tensor.is_cuda else None
        return None if note is None else note.routing

    def routing_among(self, tensors: Iterable[torch.Tensor]) -> Routing | None:
        """Return the first assumed routing on which one of the tensors depends; ``None`` if there is none."""
        return next(filter(None, map(self.routing_of, tensors)), None) if self.choosing.made else None

    def note_routing(self, routing: Routing | None) -> None:
        """If ``routing`` is not ``None``, record a read of values from this assumed routing."""
        if routing is not None:
            self._reads.of_routing(routing)

    def is_of_floats(self, tensor: torch.Tensor) -> bool:
        """Return whether the program made all unknown values in a tensor from Python floats (`_UnknownValues.of_floats`)."""
        if not self.is_unknown(tensor):
            return True
        unknown = None if tensor.is_cuda else self._unknown_on_host.of(tensor)
        return unknown is not None and unknown.of_floats

    def knows(self, address: int) -> bool:
        """Return whether the value at a GPU address is known. If the value depends on an assumed routing, record the read."""
        entry = self._known.around(address)
        if entry is not None:
            self.note_routing(entry[1].routing)
        return entry is not None

    def forget_at(self, address: int) -> None:
        """Mark the GPU storage around ``address`` as unknown."""
        entry = self._known.around(address)
        if entry is not None:
            self._known.delete(entry[0])
            self.constants.forget(entry[0])

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mark tensors as unknown after code has written to them without an operator visible to `HostValues`."""
        for tensor in tensors:
            if not is_ordinary(type(tensor)):
                parts, _ = tensor.__tensor_flatten__() if hasattr(tensor, "__tensor_flatten__") else ((), None)
                self.forget(getattr(tensor, part) for part in parts)
            else:
                self.note_unknown(tensor)

    def note_copy(self, copy: torch.Tensor, original: torch.Tensor) -> None:
        """Note a copy as known if its original is known. Torch made this copy without an operator visible to `HostValues`."""
        for part, source in zip(parts_of(copy), parts_of(original), strict=False):
            routing = self.routing_of(source)
            is_known = not self.is_unknown(source) and part.untyped_storage().nbytes() <= BIGGEST_COPY
            if part.is_cuda:
                self.note(part, is_known, routing=routing)
            elif not is_known:
                self.note_on_host(part, is_known)

    def note_known(self, tensor: torch.Tensor) -> None:
        """Mark a GPU tensor as known, because its values were loaded without an operator, for example by `pickle`."""
        self.note(tensor, tensor.untyped_storage().nbytes() <= BIGGEST_COPY)

    def note_unknown(self, tensor: torch.Tensor) -> None:
        """Note a tensor's storage as unknown."""
        if tensor.is_cuda:
            self.note(tensor, False)
        else:
            self.note_on_host(tensor, False)

    def has_moved(self, old_address: int, storage: torch.UntypedStorage) -> None:
        """Move the note about a host storage to its new address, for example after a move to shared memory."""
        self._unknown_on_host.move(old_address, storage)

    def note_made(self, tensor: torch.Tensor) -> None:
        """Note a tensor made by `torch.tensor`, from a tensor with a note or from Python numbers."""
        storage = tensor.untyped_storage()
        is_known = not self._made_of_unknown and not (self.has_left and contains_unknown(tensor))
        if not tensor.is_cuda:
            if not is_known:
                self.note_on_host(tensor, is_known, of_floats=not self._made_of_unknown)
        elif self._last_unknown is None or self._last_unknown.cdata != StorageWeakRef(storage).cdata:
            self.note(tensor, is_known and storage.nbytes() <= BIGGEST_COPY)

    @contextmanager
    def making(self, of_unknown: bool) -> Iterator[None]:
        """If ``of_unknown`` is true, mark all results from `torch.tensor` within this context as unknown."""
        outer, self._made_of_unknown = self._made_of_unknown, of_unknown
        try:
            yield
        finally:
            self._made_of_unknown = outer


def contains_unknown(tensor: torch.Tensor) -> bool:
    """Return whether a float tensor contains the number `UNKNOWN`. The answer for a large tensor, or one on meta, is False."""
    if tensor.is_meta or not tensor.is_floating_point() or not is_small((tensor,)):
        return False
    with beneath_modes():  # a dispatch mode in the program might record these operators
        return bool((on_host(tensor) == UNKNOWN).any())
