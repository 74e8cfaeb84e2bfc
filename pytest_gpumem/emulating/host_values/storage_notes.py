"""A table of notes about storages. A note expires when its storage is freed, because the allocator may reuse the address.

Example: ``ones = torch.ones(4, dtype=torch.int64)`` gets the storage at ``0x5ffffe001600``, with 32 bytes. ::

    notes: StorageNotes[str] = StorageNotes()
    notes.set(ones.untyped_storage(), "known")
    notes.of(ones[2:])               # "known": the view has the same storage
    notes.around(0x5ffffe001610)     # (0x5ffffe001600, "known"): the view begins 16 bytes after the storage's start
    del ones
    notes.at(0x5ffffe001600)         # None, even if another storage has the address now
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from torch.multiprocessing.reductions import StorageWeakRef

from pytest_gpumem.emulating.host_values.host_operators import has_storage

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

SMALL_TABLE = 16
"""A table with at most this many notes is not searched for expired notes."""


class StorageNotes(Generic[T]):
    """Notes about storages on the GPU or on the host, by address. The module's docstring has an example.

    Expired notes are deleted when a table has more than `SMALL_TABLE` notes and twice as many as after the last deletion. So a
    table's size follows the number of live storages, and deleting costs little per note.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[StorageWeakRef, int, T]] = {}
        """Each storage, its size in bytes and the note about it, by address."""
        self._most = SMALL_TABLE
        """If there are more entries than this, expired entries are deleted."""

    def __len__(self) -> int:
        """Return the number of notes, including expired notes."""
        return len(self._entries)

    def set(self, storage: torch.UntypedStorage, note: T, address: int | None = None) -> None:
        """Store the note about a storage, in place of an earlier note.

        Args:
            storage: The storage with which the note expires.
            note: The note.
            address: The address under which the note is found, by default the address of the storage's memory.
        """
        if len(self._entries) > self._most:
            self._delete_expired()
        address = storage.data_ptr() if address is None else address
        self._entries[address] = StorageWeakRef(storage), storage.nbytes(), note

    def at(self, address: int) -> T | None:
        """Return the note about the storage that begins at an address; ``None`` if there is no note or it has expired."""
        entry = self._entries.get(address)
        return None if entry is None or entry[0].expired() else entry[2]

    def of(self, tensor: torch.Tensor) -> T | None:
        """Return the note about a tensor's storage; ``None`` if there is no note or the tensor has no single storage."""
        return self.at(tensor.untyped_storage().data_ptr()) if self._entries and has_storage(tensor) else None

    def around(self, address: int) -> tuple[int, T] | None:
        """Return the start of the storage that contains an address, and the storage's note; ``None`` if there is no note."""
        for start, (storage, nbytes, note) in self._entries.copy().items():
            if start <= address < start + nbytes and not storage.expired():
                return start, note
        return None

    def addresses(self) -> list[int]:
        """Return the addresses of all live storages with a note."""
        return [address for address, (storage, _, _) in self._entries.copy().items() if not storage.expired()]

    def delete(self, address: int) -> None:
        """Delete the note at an address, if there is one."""
        self._entries.pop(address, None)

    def move(self, old_address: int, storage: torch.UntypedStorage) -> None:
        """Move the note about a storage to its new address, for example after a move to shared memory."""
        note = self.at(old_address)
        self.delete(old_address)
        if note is not None:
            self.set(storage, note)

    def _delete_expired(self) -> None:
        # Another thread may add notes meanwhile, so the table itself is not replaced.
        for address, entry in self._entries.copy().items():
            if entry[0].expired() and self._entries.get(address) is entry:
                self.delete(address)
        self._most = max(SMALL_TABLE, 2 * len(self._entries))
