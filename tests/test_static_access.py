"""Other people's objects are inspected without running their code."""

from __future__ import annotations

import pytest
import torch

from pytest_gpumem.torch_support.reachability import blocks_of, reachable_tensors
from tests import zoo

NBYTES = 400


@pytest.fixture
def kept() -> torch.Tensor:
    return torch.empty(NBYTES, dtype=torch.uint8).requires_grad_(False)


def reached(value: object) -> set[int]:
    zoo.RAN.clear()
    found = {id(tensor) for tensor in reachable_tensors([value])}
    assert zoo.RAN == []
    return found


@pytest.mark.parametrize("name", zoo.HOLDING)
def test_a_tensor_is_reached_and_no_code_is_run_through(name, kept):
    value = zoo.HOLDING[name](kept)
    assert id(kept) in reached(value)
    assert blocks_of(reachable_tensors([value]), torch.device("cpu"))[kept.data_ptr()] == NBYTES
    assert zoo.RAN == []


@pytest.mark.parametrize("name", zoo.NOT_HOLDING)
def test_no_tensor_is_reached_and_no_code_is_run_through(name, kept):
    value = zoo.NOT_HOLDING[name](kept)
    assert reached(value) == set()
