"""Reference cycles: which types hold memory that only the cyclic collector frees."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_gpumem.measuring.explain.cycles import MOST_CYCLES, collect_cycles, cycles_among

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True, scope="module")
def suites_objects_hidden() -> None:
    """Hide none: these tests look for cycles among all objects."""


class Trainer:
    def __init__(self) -> None:
        self.loss = torch.empty(1)


class Model:
    def hook(self) -> None:
        pass


class Node:
    """Holds a tensor, and has no dict: what it leads to is known."""

    __slots__ = ("__weakref__", "other", "tensor")

    def __init__(self, other: Any = None) -> None:
        self.other = other
        self.tensor = torch.empty(1)


@pytest.fixture(autouse=True)
def _nothing_to_collect() -> Iterator[None]:
    """Only what a test leaves behind is garbage, and it stays until somebody asks."""
    was_on = gc.isenabled()
    gc.disable()
    # What was there before, garbage too, is none of a test's: going through it would take a second each time.
    gc.freeze()
    yield
    gc.unfreeze()
    if was_on:
        gc.enable()


# Which types


def test_two_objects_that_hold_each_other():
    trainer, model = Trainer(), Model()
    trainer.model, model.trainer = model, trainer  # type: ignore[attr-defined]
    del trainer, model
    (told,) = collect_cycles()
    names = [name for name in told.split(" -> ") if name != "dict"]
    # Until Python 3.11 an object's attributes are in a dict of their own.
    assert names in (["Trainer", "Model", "Trainer"], ["Model", "Trainer", "Model"])


def test_an_object_that_holds_itself_through_a_dict():
    trainer = Trainer()
    trainer.state = {"trainer": trainer}  # type: ignore[attr-defined]
    del trainer
    (told,) = collect_cycles()
    assert told in ("Trainer -> dict -> Trainer", "Trainer -> dict -> dict -> Trainer")


def test_a_cycle_begins_with_the_type_that_says_most():
    node = Node()
    node.other = [{"key": (node,)}]
    del node
    assert collect_cycles() == ("Node -> list -> dict -> tuple -> Node",)


def test_a_closure_that_holds_itself():
    def leak() -> None:
        tensor = torch.empty(1)

        def again() -> None:
            again()
            tensor.zero_()

    leak()
    (told,) = collect_cycles()
    name = "function test_a_closure_that_holds_itself.<locals>.leak.<locals>.again"
    assert told == f"{name} -> tuple -> cell -> {name}"


def test_a_method_that_an_object_keeps_of_itself():
    node = Node()
    node.other = Model.hook.__get__(node)
    del node
    assert collect_cycles() == ("Node -> method -> Node",)


def test_the_frame_of_an_exception_that_is_kept_in_it():
    def fail() -> None:
        tensor = torch.empty(1)  # noqa: F841 - the frame holds it
        try:
            raise ValueError("kept")
        except ValueError as error:
            kept = error  # noqa: F841 - this is the cycle

    fail()
    (told,) = collect_cycles()
    assert told.startswith("ValueError -> traceback -> frame of ")
    assert told.endswith("fail -> ValueError")


def test_a_cycle_that_holds_no_tensor_is_not_told():
    held: list[object] = []
    held.append(held)

    class OfItsOwn:
        pass

    del held, OfItsOwn
    assert collect_cycles() == ()


def test_a_cycle_that_leads_to_a_tensor_through_others_is_told():
    held: list[object] = [{"state": Model()}]
    held[0]["state"].tensors = (torch.empty(1),)  # type: ignore[index]
    held.append(held)
    del held
    assert collect_cycles() == ("list -> list",)


def test_a_cycle_that_shares_a_tensor_with_what_is_alive_holds_nothing():
    tensor = torch.empty(1)
    held: list[object] = [tensor]
    held.append(held)
    del held
    assert collect_cycles() == ()
    assert tensor.numel() == 1


def test_what_only_hangs_on_a_cycle_is_not_in_it():
    node = Node()
    node.other = [node, Trainer(), {"a": Model()}]
    del node
    assert collect_cycles() == ("Node -> list -> Node",)


def test_the_shortest_cycle_is_told():
    first = Node()
    second = Node([first, Node([first])])
    first.other = second
    del first, second
    assert collect_cycles() == ("Node -> Node -> list -> Node",)


def test_a_long_cycle_is_told_by_its_beginning_and_its_end():
    first = Node()
    held: Any = first
    for _ in range(100):
        held = [held]
    first.other = held
    del first, held
    (told,) = collect_cycles()
    assert told == "Node -> list -> list -> list -> list -> list -> list -> ... -> list -> Node"


# How many


def test_cycles_of_the_same_types_are_counted_and_the_most_frequent_come_first():
    for _ in range(3):
        node = Node()
        node.other = [node]
    held: list[object] = [torch.empty(1)]
    held.append(held)
    del node, held
    assert collect_cycles() == ("Node -> list -> Node (3 times)", "list -> list")


def test_of_many_kinds_of_cycles_a_few_are_told():
    for depth in range(MOST_CYCLES + 3):
        node = Node()
        node.other = node
        for _ in range(depth):
            node.other = [node.other]
    del node
    told = collect_cycles()
    assert len(told) == MOST_CYCLES
    assert len(set(told)) == MOST_CYCLES


def test_two_cycles_through_one_object_are_one_knot():
    node = Node()
    node.other = [[node], (node,)]
    del node
    assert len(collect_cycles()) == 1


# What is left as it was


def test_what_was_garbage_is_freed():
    node = Node()
    node.other = node
    alive = weakref.ref(node)
    del node
    collect_cycles()
    assert alive() is None
    assert gc.collect() == 0


def test_the_collectors_flags_and_garbage_are_given_back():
    before, flags = gc.get_debug(), gc.DEBUG_UNCOLLECTABLE
    mine = object()
    gc.garbage.append(mine)
    gc.set_debug(flags)
    try:
        node = Node()
        node.other = node
        del node
        collect_cycles()
        assert gc.get_debug() == flags
        assert gc.garbage == [mine]
    finally:
        gc.set_debug(before)
        gc.garbage.remove(mine)


@pytest.mark.parametrize("on", [True, False])
def test_whether_the_collector_runs_by_itself_stays_as_it_was(on):
    (gc.enable if on else gc.disable)()
    collect_cycles()
    assert gc.isenabled() is on


def test_what_is_alive_is_not_told_and_stays():
    node = Node()
    node.other = node
    assert collect_cycles() == ()
    assert node.other is node


# Much of it


def test_a_chain_of_fifty_thousand_objects_that_hangs_on_a_cycle_is_passed():
    chain = [Node()]
    chain[0].other = chain[0]
    for _ in range(50_000):
        chain.append(Node(chain[-1]))
    # From the end that leads to all the others: the search goes as deep as the chain is long.
    assert cycles_among([*chain[::-1], chain[0].tensor]) == ("Node -> Node",)
