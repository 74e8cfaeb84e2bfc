"""Who keeps a tensor: the attribute, variable or container that a leak is mended at."""

from __future__ import annotations

import collections
import gc

import pytest
import torch

from pytest_gpumem.explain.holders import MOST_PATHS, holders_of

REGISTRY = {}


@pytest.fixture(autouse=True, scope="module")
def suites_objects_hidden() -> None:
    """Hide none: these tests look for holders among all objects."""


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []
        self.last = None


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("frozen", [False, True], ids=["young", "frozen"])
def test_an_attribute_and_an_element_of_one_are_told_by_the_objects_class(frozen):
    net = Net()
    if frozen:
        gc.freeze()
    try:
        net.seen.append({"x": (torch.ones(3),)})
        net.last = torch.ones(4)
        assert holders_of({address(net.seen[0]["x"][0])}) == ("Net.seen[...]",)
        assert holders_of({address(net.last)}) == ("Net.last",)
    finally:
        gc.unfreeze()


def test_a_view_is_kept_like_the_tensor():
    net = Net()
    net.seen = collections.deque([torch.ones(4, 4)[1]])
    assert holders_of({address(net.seen[0])}) == ("Net.seen[...]",)


def test_a_variable_of_a_function_is_told_with_it():
    kept = []

    def step():
        kept.append(torch.ones(5))

    step()
    assert holders_of({address(kept[0])}) == ("test_a_variable_of_a_function_is_told_with_it.<locals>.kept[...]",)


def test_a_global_is_told_with_its_module(monkeypatch):
    monkeypatch.setitem(REGISTRY, "last", [torch.ones(6)])
    assert holders_of({address(REGISTRY["last"][0])}) == (f"{__name__}.REGISTRY[...]",)


def test_the_holder_of_the_most_tensors_comes_first_and_few_are_told():
    nets = [type(f"Net{number}", (), {})() for number in range(5)]
    for number, net in enumerate(nets):
        net.seen = [torch.ones(7) for _ in range(number + 1)]
    told = holders_of({address(tensor) for net in nets for tensor in net.seen})
    assert told == ("Net4.seen[...]", "Net3.seen[...]", "Net2.seen[...]")
    assert len(told) == MOST_PATHS


def test_containers_that_lead_to_one_another_end():
    loop = [torch.ones(8)]
    loop.append(loop)
    assert isinstance(holders_of({address(loop[0])}), tuple)
    del loop[:]


def test_code_of_holders_is_not_run():
    class Hostile:
        def __getattribute__(self, name):
            raise AssertionError(name)

        def __eq__(self, other):
            raise AssertionError

        __hash__ = None

    hostile = Hostile()
    tensor = torch.ones(9)
    object.__setattr__(hostile, "kept", tensor)
    assert holders_of({address(tensor)}) == ("Hostile.kept",)


def test_a_dict_that_is_computed_is_not_asked():
    class Computed:
        __slots__ = ("kept",)

        @property
        def __dict__(self):
            raise RuntimeError

    holder = Computed()
    holder.kept = [torch.ones(10)]
    assert holders_of({address(holder.kept[0])}) == ()
