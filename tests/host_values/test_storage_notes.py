"""Notes about storages: they expire with their storage, their number is bounded, and addresses inside a storage find them."""

from __future__ import annotations

import ctypes

import pytest
import torch

from pytest_gpumem.emulating.host_values.storage_notes import SMALL_TABLE, StorageNotes


@pytest.fixture
def notes() -> StorageNotes[str]:
    return StorageNotes()


@pytest.fixture
def memory():
    """Memory at a fixed address, in which a test places several storages one after the other."""
    return (ctypes.c_char * 32)()


def _tensor_in(memory):
    return torch.frombuffer(memory, dtype=torch.int64)


def test_a_note_is_found_by_tensor_view_and_address(notes):
    ones = torch.ones(4, dtype=torch.int64)
    notes.set(ones.untyped_storage(), "known")
    assert [notes.of(ones), notes.of(ones[2:]), notes.at(ones.data_ptr())] == ["known"] * 3
    assert notes.of(torch.ones(4)) is None
    assert notes.at(ones[2:].data_ptr()) is None  # `at` takes the start of a storage only


def test_a_note_expires_when_the_storage_is_freed(notes, memory):
    tensor = _tensor_in(memory)
    address = tensor.data_ptr()
    notes.set(tensor.untyped_storage(), "known")
    view = tensor[1:]
    del tensor
    assert notes.at(address) == "known"  # the view keeps the storage alive
    del view
    assert notes.at(address) is None
    assert notes.around(address) is None
    assert notes.addresses() == []


def test_a_new_storage_at_the_address_of_a_freed_storage_has_no_note(notes, memory):
    tensor = _tensor_in(memory)
    address = tensor.data_ptr()
    notes.set(tensor.untyped_storage(), "known")
    del tensor
    tensor = _tensor_in(memory)
    assert tensor.data_ptr() == address
    assert notes.of(tensor) is None
    notes.set(tensor.untyped_storage(), "new")
    assert notes.of(tensor) == "new"


def test_a_later_note_replaces_an_earlier_note_until_it_is_deleted(notes):
    tensor = torch.ones(4)
    for note in ("first", "second"):
        notes.set(tensor.untyped_storage(), note)
    assert notes.of(tensor) == "second"
    for _ in range(2):  # deleting a note that is not there changes nothing
        notes.delete(tensor.data_ptr())
        assert notes.of(tensor) is None


def test_an_address_inside_a_storage_finds_the_note(notes):
    tensor = torch.arange(4)
    start = tensor.data_ptr()
    notes.set(tensor.untyped_storage(), "known")
    assert [notes.around(start + at) for at in (0, 16, 31)] == [(start, "known")] * 3
    assert notes.around(start - 1) is None
    assert notes.around(start + 32) is None


def test_a_freed_storage_does_not_hide_a_live_storage_around_the_address(notes):
    memory = (ctypes.c_char * 64)()
    freed, live = torch.frombuffer(memory, dtype=torch.int64), torch.frombuffer(memory, dtype=torch.int64, offset=32)
    notes.set(freed.untyped_storage(), "freed")
    notes.set(live.untyped_storage(), "live")
    start = live.untyped_storage().data_ptr()
    del freed
    assert notes.around(start + 8) == (start, "live")


def test_a_tensor_without_a_single_storage_has_no_note(notes):
    ones = torch.ones(4)
    notes.set(ones.untyped_storage(), "known")
    assert notes.of(ones.to_sparse()) is None


def test_the_number_of_expired_notes_is_bounded(notes):
    live = [torch.ones(1) for _ in range(3)]
    for tensor in live:
        notes.set(tensor.untyped_storage(), "live")
    for address in range(1, 10 * SMALL_TABLE):
        notes.set(torch.ones(1).untyped_storage(), "freed", address)
        assert len(notes) <= SMALL_TABLE + 1
    assert [notes.of(tensor) for tensor in live] == ["live"] * 3


def test_notes_about_live_storages_are_never_deleted(notes):
    live = [torch.ones(1) for _ in range(10 * SMALL_TABLE)]
    for tensor in live:
        notes.set(tensor.untyped_storage(), "live")
    assert {notes.of(tensor) for tensor in live} == {"live"}
    assert sorted(notes.addresses()) == sorted(tensor.data_ptr() for tensor in live)


def test_a_note_moves_with_its_storage(notes):
    tensor = torch.ones(4)
    old_address = tensor.data_ptr()
    notes.set(tensor.untyped_storage(), "unknown")
    tensor.share_memory_()
    assert tensor.data_ptr() != old_address
    notes.move(old_address, tensor.untyped_storage())
    assert notes.of(tensor) == "unknown"
    assert notes.at(old_address) is None  # another storage may get the old address now
