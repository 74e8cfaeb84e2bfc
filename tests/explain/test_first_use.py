"""Tensors that a run left: which they are, and what keeps them, while none is kept alive by looking."""

from __future__ import annotations

import gc
import types
import weakref
from dataclasses import replace

import pytest
import torch

from pytest_gpumem.facts.values.composition import Composition, Explanation, Holder, Row, holder_at
from pytest_gpumem.measuring.explain import first_use
from pytest_gpumem.measuring.explain.first_use import NewTensors, blocks_retained_by_run
from tests.support.processes import own_objects_out_of_sight

CPU = torch.device("cpu")
SQUARE = Row("other", 3600, tensor="float32[30, 30]")


@pytest.fixture
def cache():
    """A global of a module that is not hidden."""
    with own_objects_out_of_sight():
        module = types.ModuleType("young")
        module.CACHE = {}
        yield module.CACHE
        module.CACHE.clear()


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_what_a_run_makes_and_leaves_is_found_and_nothing_older(cache):
    cache["older"] = torch.ones(30, 30)
    made = NewTensors()
    cache["view"] = cache["older"][0]
    cache["new"] = torch.ones(30, 30)
    torch.ones(30, 30)
    made.record()
    cache["later"] = torch.ones(30, 30)
    assert [*made.alive_by_address(CPU)] == [address(cache["new"])]


def test_nothing_is_kept_alive(cache):
    made = NewTensors()
    cache["new"] = torch.ones(30, 30)
    made.record()
    left = blocks_retained_by_run(made, CPU, (), {})
    new = weakref.ref(cache["new"])
    cache.clear()
    assert new() is None
    assert left.blocks
    assert not made.alive_by_address(CPU)


def test_what_is_kept_on_purpose_is_left_out(cache):
    made = NewTensors()
    cache["new"] = torch.ones(30, 30)
    made.record()
    assert not blocks_retained_by_run(made, CPU, {address(cache["new"])}, {}).blocks


def test_a_heap_that_other_code_has_thawed_tells_nothing(cache, monkeypatch):
    """Older tensors would be taken for new ones."""
    states = iter([True, False])
    monkeypatch.setattr(first_use, "_is_torch_frozen", lambda: next(states))
    made = NewTensors()
    cache["new"] = torch.ones(30, 30)
    made.record()
    assert not made.alive_by_address(CPU)


def test_torch_in_sight_of_the_collector_is_not_frozen(cache, monkeypatch):
    assert first_use._is_torch_frozen()
    monkeypatch.setattr(gc, "get_objects", lambda: [cache, torch])
    assert not first_use._is_torch_frozen()


def explained(*holders: Holder) -> Explanation:
    rows = tuple(row for holder in holders for row in holder.kept.rows)
    return Explanation(Composition(0, ()), Composition(sum(row.nbytes for row in rows), rows), holders=holders)


@pytest.mark.parametrize("next_run", ["nothing", "the same", "a replacement"])
def test_a_cache_is_what_the_next_run_finds_full(cache, next_run):
    made = NewTensors()
    cache["new"] = torch.ones(30, 30)
    made.record()
    left = blocks_retained_by_run(made, CPU, (), {})
    path = "young.CACHE[...]"
    line = Holder(path, Composition(3600, (Row("activation", 3600, site="net.py:7"),)))
    if next_run == "a replacement":
        cache["new"] = torch.ones(40)
    recorded = explained(line) if next_run == "the same" else explained()
    expected = {
        "nothing": (Holder(path, Composition(3600, (SQUARE,)), first_use=True),),
        "the same": (line,),
        "a replacement": (Holder(path, Composition(3600, (SQUARE,))),),
    }[next_run]
    told = left.extend_explanation(recorded)
    assert told.holders == expected
    assert told.retained.total == 3600


def test_a_possible_holder_of_what_the_next_run_keeps_is_no_cache(cache):
    made = NewTensors()
    cache["new"] = torch.ones(30, 30)
    made.record()
    row = Row("activation", 3600, site="net.py:7")
    recorded = explained(holder_at(("Net.last", "young.CACHE[...]"), Composition(3600, (row,))))
    assert blocks_retained_by_run(made, CPU, (), {}).extend_explanation(recorded) == recorded


LEAK = Row("activation", 3600, site="net.py:7")


@pytest.mark.parametrize(
    "holders",
    [
        pytest.param((), id="no holder"),
        pytest.param((Holder("", Composition(3600, (LEAK,))),), id="a holder that was not found"),
        pytest.param((Holder("Net.same", Composition(3600, (LEAK,))),), id="another path"),
    ],
)
def test_a_leak_in_the_recorded_run_is_no_cache_and_counts_once(cache, holders):
    made = NewTensors()
    cache["new"] = torch.ones(30, 30)
    made.record()
    recorded = Explanation(Composition(0, ()), Composition(3600, (LEAK,)), holders=holders)
    assert blocks_retained_by_run(made, CPU, (), {}).extend_explanation(recorded) == recorded


@pytest.mark.parametrize(
    ("path", "first_use"),
    [
        pytest.param("Net.seen[...]", True, id="a leak whose holder is known"),
        pytest.param("", False, id="a leak whose holder is not known"),
    ],
)
def test_a_cache_beside_a_leak_is_joined_by_the_bytes_beyond_the_leak(cache, path, first_use):
    made = NewTensors()
    cache["new"] = torch.ones(30, 30)
    made.record()
    leak = Holder(path, Composition(400, (replace(LEAK, nbytes=400),)))
    told = blocks_retained_by_run(made, CPU, (), {}).extend_explanation(explained(leak))
    beyond = Holder("young.CACHE[...]", Composition(3200, (Row("other", 3200),)), first_use=first_use)
    assert told.holders == (beyond, leak)
    assert told.retained.total == 3600


def test_a_leak_that_both_runs_find_at_a_path_takes_nothing_from_a_cache(cache):
    made = NewTensors()
    leaked, cache["new"] = torch.ones(10, 10), torch.ones(30, 30)
    made.record()
    left = blocks_retained_by_run(made, CPU, (), {})
    left = replace(left, paths={**left.paths, address(leaked): "Net.seen[...]"})
    leak = Holder("Net.seen[...]", Composition(900, (replace(LEAK, nbytes=900),)))
    told = left.extend_explanation(explained(leak))
    assert told.holders == (Holder("young.CACHE[...]", Composition(3600, (SQUARE,)), first_use=True), leak)
    assert told.retained.total == 4500
