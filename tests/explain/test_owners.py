"""Paths of modules as a composition shows them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_gpumem.measuring.explain.owners import TensorOwners


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))


class Stack(nn.Sequential):
    pass


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    ("model", "paths"),
    [
        (nn.Sequential(nn.Linear(4, 4)), ["Sequential", "Sequential.0"]),
        (Stack(nn.Sequential(nn.ReLU())), ["Stack", "Stack.0", "Stack.0.0"]),
        (Stack(Net()), ["Stack", "Stack.0", *(f"Stack.0.layers{end}" for end in ("", ".0", ".1", ".1.0"))]),
        (nn.ModuleList([nn.ReLU()]), ["ModuleList", "ModuleList.0"]),
        (Net(), ["Net", "layers", "layers.0", "layers.1", "layers.1.0"]),
        (compiled(nn.Sequential(nn.ReLU())), ["Sequential", "Sequential", "Sequential.0"]),
        (nn.Sequential(compiled(nn.Sequential(nn.ReLU()))), ["Sequential", *["Sequential.0"] * 2, "Sequential.0.0"]),
        (nn.DataParallel(nn.Sequential(nn.ReLU())), ["DataParallel", "Sequential", "Sequential.0"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_module_whose_name_is_a_number_has_the_class_of_its_model(model, paths):
    owners = TensorOwners(torch.device("cpu"), {})
    owners.model(model)
    assert [owners.path_of(module) for module in model.modules()] == paths


def test_models_of_two_classes_are_told_apart_by_one_prefix():
    owners = TensorOwners(torch.device("cpu"), {})
    first, second = nn.Sequential(nn.ReLU()), Stack(Net())
    owners.model(first)
    owners.model(second)
    assert owners.path_of(first[0]) == "Sequential.0"
    assert owners.path_of(second[0].layers) == "Stack.0.layers"
