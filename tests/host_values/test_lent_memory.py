"""Host memory shared with other libraries: how long a storage is lent."""

from __future__ import annotations

import numpy as np
import torch

from pytest_gpumem.emulating.host_values.lent_memory import LentMemory


def _is_lent(lent, tensor):
    return lent.holds(tensor.untyped_storage())


def test_a_storage_is_lent_until_the_last_array_is_freed():
    lent, tensor = LentMemory(), torch.ones(4)
    assert not _is_lent(lent, tensor)
    arrays = [tensor.numpy(), tensor[1:].numpy(), tensor[2:].numpy()]
    for array in arrays:
        lent.note(tensor, array)
    del array
    for at in (2, 0):  # also if the array noted last is freed first
        del arrays[at]
        assert _is_lent(lent, tensor)
    arrays.clear()
    assert not _is_lent(lent, tensor)


def test_a_permanent_loan_does_not_end_with_a_later_array():
    lent, tensor = LentMemory(), torch.ones(4)
    lent.note(tensor)
    array = tensor.numpy()
    lent.note(tensor, array)
    del array
    assert _is_lent(lent, tensor)


def test_two_storages_in_the_memory_of_an_array_are_lent_separately():
    lent, array = LentMemory(), np.ones(4)
    first, second = torch.from_numpy(array), torch.from_numpy(array)
    for tensor in (first, second):
        lent.note(tensor)
    del second, tensor
    assert _is_lent(lent, first)


def test_another_storage_is_not_lent():
    lent, tensor = LentMemory(), torch.ones(4)
    lent.note(tensor)
    assert not _is_lent(lent, torch.ones(4))
