"""Other people's objects are inspected without running their code."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from pytest_gpumem.torch_support.reachability import blocks_of, reachable_tensors
from pytest_gpumem.torch_support.static_access import named_modules, named_tensors
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


# A model's modules, parameters and buffers with their paths


class Tied(nn.Module):
    """Modules and parameters in two places, an empty place, and one of each that is registered by hand."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.again = self.first
        self.last = nn.Linear(2, 2)
        self.last.weight = self.first[0].weight
        self.register_module("nothing", None)
        self.register_parameter("scale", nn.Parameter(torch.ones(1)))
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def forward(self, x):
        return self.last(self.first(x)) * self.scale


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


MODELS = {
    "parametrised": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d()),
    "scripted": scripted,
    "with a scripted part": lambda: nn.Sequential(scripted(), Tied()),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_all_are_found_as_torch_finds_them(make):
    model = make()
    assert [(path, id(one)) for path, one in named_modules(model)] == [
        (path, id(one)) for path, one in model.named_modules()
    ]
    for kind, theirs in (("parameters", model.named_parameters()), ("buffers", model.named_buffers())):
        mine = [(f"{path}.{name}" if path else name, one.dtype) for path, name, one in named_tensors(model, kind)]
        assert mine == [(path, one.dtype) for path, one in theirs]


def test_a_module_that_forbids_it_is_read_all_the_same():
    kept = torch.ones(2)
    model = nn.Sequential(zoo.HostileModule(kept))
    zoo.RAN.clear()
    assert [path for path, _ in named_modules(model)] == ["", "0"]
    assert [(path, name, one is kept) for path, name, one in named_tensors(model, "buffers")] == [("0", "kept", True)]
    assert zoo.RAN == []


def test_a_module_before_its_init_has_no_parts():
    assert list(named_modules(nn.Linear.__new__(nn.Linear)))[1:] == []
