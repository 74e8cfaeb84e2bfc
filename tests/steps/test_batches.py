"""Batches: moved to a device, described, counted, shared out, and fed to a model."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import OrderedDict, UserDict
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.measuring.steps.batches import (
    call_model,
    describe,
    map_tensors,
    micro_batches,
    number_of_items,
    on_device,
    samples_in,
    work_in,
)
from pytest_gpumem.torch_support.reachability import tensors_in
from tests import zoo

unhurried = settings(deadline=None)
# A device that every torch has and that is not where the tensors are made.
META = torch.device("meta")
CPU = torch.device("cpu")


class Pair(NamedTuple):
    ids: torch.Tensor
    mask: torch.Tensor


def ids() -> torch.Tensor:
    return torch.zeros(4, 256, dtype=torch.int64)


def mask() -> torch.Tensor:
    return torch.ones(4, dtype=torch.bool)


# Tensors of a batch


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ([ids(), [mask(), mask()]], 3),
        (OrderedDict(ids=ids()), 1),
        (UserDict(ids=ids(), mask=mask()), 2),
        (Pair(ids(), mask()), 2),
        ({"nested": ({"ids": ids()}, 5, "text")}, 1),
        ("text", 0),
    ],
)
def test_the_tensors_of_a_batch_are_found_in_containers(batch, count):
    assert len(list(tensors_in(batch))) == count


# Moving


def test_what_is_on_the_device_is_not_copied():
    batch = {"ids": ids(), "more": [mask()]}
    moved = on_device(batch, CPU)
    assert moved["ids"] is batch["ids"]
    assert moved["more"][0] is batch["more"][0]


def test_a_mapping_of_a_library_becomes_keyword_arguments():
    moved = on_device(UserDict(ids=ids()), META)
    assert list(moved) == ["ids"]
    assert moved["ids"].device == META


def test_a_functions_batch_moves_to_the_device_and_may_use_a_host_generator():
    def make():
        drawn = torch.randn(2, generator=torch.Generator().manual_seed(0))
        return {"ids": ids(), "drawn": drawn, "there": torch.ones(1, device=META)}

    moved = on_device(make, META)
    assert {tensor.device for tensor in tensors_in(moved)} == {META}


# Changing


@pytest.mark.parametrize(
    "batch",
    [ids(), Pair(ids(), mask()), {"nested": [(ids(), 5), {"mask": mask(), "none": None}]}],
    ids=["tensor", "named tuple", "nested"],
)
def test_a_changed_batch_has_each_tensor_changed_and_the_rest_as_it_was(batch):
    changed = map_tensors(batch, torch.bitwise_not)
    assert type(changed) is type(batch)
    before, after = list(tensors_in(batch)), list(tensors_in(changed))
    assert [torch.equal(new, ~old) for new, old in zip(after, before, strict=True)] == [True] * len(before)
    assert repr(map_tensors(changed, torch.bitwise_not)) == repr(batch)


# Sharing out


def test_one_part_is_the_batch_itself():
    batch = {"ids": ids()}
    assert micro_batches(batch, 1)[0] is batch
    assert micro_batches(None, 1) == [None]


def test_parts_are_views_of_equal_size_in_order():
    batch = {"x": torch.arange(12).view(6, 2), "y": [torch.arange(6)]}
    parts = micro_batches(batch, 3)
    assert [part["x"].tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert [part["y"][0].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    addresses = {part["x"].untyped_storage().data_ptr() for part in parts}
    assert addresses == {batch["x"].untyped_storage().data_ptr()}


def test_what_has_not_the_batchs_first_dimension_is_in_every_part():
    shared, scalar = torch.ones(3, 3), torch.tensor(5.0)
    parts = micro_batches({"x": torch.ones(4), "shared": shared, "scalar": scalar, "text": "abc"}, 2)
    for part in parts:
        assert part["x"].shape == (2,)
        assert part["shared"] is shared
        assert part["scalar"] is scalar
        assert part["text"] == "abc"


@pytest.mark.parametrize(
    ("batch", "number", "message"),
    [
        (torch.ones(6), 4, "accumulate=4 splits a batch into 4 equal parts, but this batch has 6 samples"),
        (torch.tensor(1.0), 2, "accumulate=2 splits a batch into 2 equal parts, but this batch has no samples"),
    ],
)
def test_a_batch_that_cannot_be_shared_out_equally_is_told(batch, number, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        micro_batches(batch, number)


# Describing


def test_a_batch_is_described_by_dtypes_and_shapes_in_order():
    assert describe({"x": ids(), "y": [mask(), ids()]}) == "int64[4, 256], bool[4], int64[4, 256]"
    assert describe({"loss": torch.tensor(1.0)}) == "float32[]"
    assert describe("text") == ""


def test_the_samples_of_a_batch_are_the_first_dimension_of_its_first_tensor():
    assert samples_in({"text": "abc", "ids": ids(), "mask": mask()[:2]}) == 4
    assert samples_in([torch.ones(7, 2), ids()]) == 7


def test_a_batch_without_a_first_dimension_has_no_samples():
    assert samples_in(torch.tensor(1.0)) is None
    assert samples_in([]) is None


@pytest.mark.parametrize(
    ("batch", "work"),
    [
        ({"x": torch.ones(4, 8), "ids": ids()}, [("samples", 4), ("tokens", 4 * 256)]),
        (torch.ones(4, 8), [("samples", 4)]),
        ("text", []),
    ],
)
def test_a_step_works_on_samples_unless_told_otherwise_and_on_what_can_be_counted(batch, work):
    assert list(work_in(batch, None).items()) == list(work_in(batch, "samples").items()) == work


@pytest.mark.parametrize("items", [3, np.float32(2.5), Fraction(5, 2)])
def test_a_number_of_items_comes_before_what_the_batch_tells(items):
    assert next(iter(work_in(ids(), items).items())) == ("items", items)
    work = work_in("text", items)
    assert work == {"items": items}
    assert json.loads(json.dumps(work)) == work


@pytest.mark.parametrize("items", [0, -0.5, math.nan, math.inf, 10**400, True, [8], torch.tensor(8), 8j])
def test_items_that_are_no_finite_number_above_zero_are_told_with_what_is_right(items):
    message = re.escape(f"items={items!r}: write the number of items in a step, a finite number above zero")
    with pytest.raises(ValueError, match=f"^{message}$"):
        number_of_items(items)
    with pytest.raises(ValueError, match=f"^{message}$"):
        work_in(ids(), items)


def test_tokens_are_the_elements_of_the_first_tensor_of_integers():
    work = work_in({"x": torch.ones(4, 8), "ids": ids(), "labels": ids()[:2]}, "tokens")
    assert list(work.items()) == [("tokens", 4 * 256), ("samples", 4)]


@pytest.mark.parametrize(
    ("batch", "items", "message"),
    [
        (ids(), "words", "items='words': write a number, 'samples' or 'tokens'"),
        (
            torch.ones(4, 2),
            "tokens",
            "items='tokens' counts the elements of an integer tensor, but the batch has no such tensor: float32[4, 2]",
        ),
    ],
)
def test_items_that_cannot_be_counted_are_told(batch, items, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        work_in(batch, items)


SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
LEAVES = SHAPES.map(torch.zeros) | st.none() | st.integers() | st.text(max_size=3)
BATCHES = st.recursive(
    LEAVES,
    lambda batches: (
        st.lists(batches, max_size=3)
        | st.lists(batches, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), batches, max_size=3)
    ),
    max_leaves=6,
)


@unhurried
@given(BATCHES)
def test_moving_never_changes_what_a_batch_is(batch):
    moved = on_device(batch, META)
    assert type(moved) is type(batch)
    assert describe(moved) == describe(batch)
    assert samples_in(moved) == samples_in(batch)
    assert all(tensor.device == META for tensor in tensors_in(moved))
    assert all(tensor.device == CPU for tensor in tensors_in(batch))


# Feeding


def model(*args, **kwargs):
    return args, kwargs


def test_a_tensor_is_the_only_argument():
    batch = ids()
    args, kwargs = call_model(model, batch)
    assert args[0] is batch
    assert (len(args), kwargs) == (1, {})


@pytest.mark.parametrize(
    ("batch", "arguments"),
    [
        ([1, 2], ((1, 2), {})),
        ((1, 2), ((1, 2), {})),
        ({"a": 1, "b": 2}, ((), {"a": 1, "b": 2})),
        (UserDict(a=1, b=2), ((), {"a": 1, "b": 2})),
        (None, ((None,), {})),
    ],
)
def test_a_sequence_is_fed_by_position_a_mapping_by_keyword_and_all_else_as_it_is(batch, arguments):
    assert call_model(model, batch) == arguments


# What else may be in a batch


def test_a_part_that_leads_back_to_the_batch_stays_as_it_is():
    batch = {"ids": ids()}
    batch["itself"] = [batch]
    moved = on_device(batch, META)
    assert moved["ids"].device == META
    assert moved["itself"][0] is batch
    assert describe(batch) == "int64[4, 256]"


def test_a_batch_may_be_nested_deeper_than_python_recurses():
    batch, depth = ids(), 10 * sys.getrecursionlimit()
    for _ in range(depth):
        batch = [batch]
    moved = on_device(batch, META)
    for _ in range(depth):
        (moved,) = moved
    assert moved.device == META
    assert describe(batch) == "int64[4, 256]"


@pytest.mark.parametrize(
    "name",
    [
        *("a list that fails", "an ordered dict that fails", "a named tuple that fails"),
        "a proxy of a mapping that fails",
    ],
)
def test_a_container_is_moved_without_its_own_code(name):
    container = zoo.HOLDING[name](ids())
    zoo.RAN.clear()
    moved = on_device([container], META)
    (tensor,) = tensors_in(moved)
    assert (tensor.device, zoo.RAN) == (META, [])


def test_a_list_of_a_class_of_its_own_keeps_its_class_and_its_attributes():
    class Samples(list):
        def __init__(self, source):
            super().__init__(source.split())

    samples = Samples("a b")
    samples.append(ids())
    samples.split = "train"
    moved = on_device(samples, META)
    assert (type(moved), moved.split, moved[:2], moved[2].device) == (Samples, "train", ["a", "b"], META)


def test_a_size_among_a_batch_stays_one():
    moved = on_device({"ids": ids(), "size": torch.Size([2, 3])}, META)
    assert (type(moved["size"]), moved["size"]) == (torch.Size, torch.Size([2, 3]))


@pytest.mark.parametrize(
    "name", ["a mock of a tensor", "a dead proxy", "an object that says it is a tensor", "a set that fails"]
)
def test_what_only_looks_like_a_tensor_or_container_stays_as_it_is(name):
    value = {**zoo.HOLDING, **zoo.NOT_HOLDING}[name](ids())
    zoo.RAN.clear()
    assert on_device({"ids": ids(), "more": value}, META)["more"] is value
    assert zoo.RAN == []


def test_a_mapping_that_raises_stays_as_it_is():
    class Remote(UserDict):
        def __iter__(self):
            raise ConnectionError

    remote = Remote(ids=ids())
    assert on_device({"ids": ids(), "remote": remote}, META)["remote"] is remote
