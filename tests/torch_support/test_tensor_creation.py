"""The C++ functions that create tensors, called by their addresses, and torch's numbers for dtypes."""

from __future__ import annotations

import ctypes
import platform
import sys

import pytest
import torch

from pytest_gpumem.torch_support.private_api import tensor_creation
from pytest_gpumem.torch_support.private_api.tensor_creation import (
    NewTensor,
    creation_functions,
    dtypes,
    new_tensor,
    tensors_without_memory,
)

DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]


@pytest.fixture(autouse=True)
def anew():
    creation_functions.cache_clear()
    yield
    creation_functions.cache_clear()


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="the functions are known there")
def test_the_installed_torch_has_the_functions():
    library = ctypes.CDLL(torch._C.__file__)
    names = tensor_creation.CREATION_FUNCTIONS
    assert creation_functions() == tuple(ctypes.cast(library[name], ctypes.c_void_p).value for name in names)


def test_without_the_functions_or_on_another_processor_there_are_none(monkeypatch):
    monkeypatch.setattr(tensor_creation, "CREATION_FUNCTIONS", ("missing", "missing"))
    assert creation_functions() is None
    monkeypatch.undo()
    creation_functions.cache_clear()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert creation_functions() is None


def test_test_tensors_differ_in_dtype_and_shape_and_need_no_memory():
    with torch.profiler.profile(profile_memory=True) as profiler:
        tensors = list(tensors_without_memory())
    assert tensors == [NewTensor("int16", (0, 3), 0), NewTensor("float64", (7, 0), 0)]
    assert {event.name for event in profiler.events()} >= {"aten::empty", "aten::empty_strided"}
    assert not any(event.cpu_memory_usage for event in profiler.events())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float8_e5m2])
def test_a_dtypes_number_is_that_of_a_new_tensor(dtype):
    (number,) = (number for number, known in dtypes().items() if known == dtype)
    library = ctypes.CDLL(torch._C.__file__)
    assert library[f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}"]() == number
    name = str(dtype).removeprefix("torch.")
    assert new_tensor(number, [2, 3]) == NewTensor(name, (2, 3), torch.empty(2, 3, dtype=dtype).nbytes)


def test_each_number_belongs_to_a_dtype_and_another_number_to_none():
    assert len(dtypes()) == len(set(dtypes().values())) >= 15
    assert new_tensor(127, [2]) is None
