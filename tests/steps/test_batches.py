"""Batches: moved to a device, described, counted, and fed to a model."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.steps.batches import describe, feed, on_device, samples_in, tensors_in

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
        (ids(), 1),
        ((ids(), mask()), 2),
        ([ids(), [mask(), mask()]], 3),
        ({"ids": ids(), "labels": None}, 1),
        (OrderedDict(ids=ids()), 1),
        (UserDict(ids=ids(), mask=mask()), 2),
        (Pair(ids(), mask()), 2),
        ({"nested": ({"ids": ids()}, 5, "text")}, 1),
        ("text", 0),
        (None, 0),
    ],
)
def test_the_tensors_of_a_batch_are_found_in_containers(batch, count):
    assert len(list(tensors_in(batch))) == count


def test_the_tensors_of_a_batch_come_in_order():
    first, second, third = ids(), mask(), ids()
    assert [id(tensor) for tensor in tensors_in({"a": first, "b": [second, third]})] == [
        id(first),
        id(second),
        id(third),
    ]


# Moving


@pytest.mark.parametrize(
    "batch",
    [
        ids(),
        (ids(), mask()),
        [ids(), mask()],
        {"ids": ids(), "mask": mask()},
        Pair(ids(), mask()),
        {"nested": [(ids(),), {"mask": mask()}]},
    ],
    ids=["tensor", "tuple", "list", "dict", "named tuple", "nested"],
)
def test_a_moved_batch_has_the_same_shape_elsewhere(batch):
    moved = on_device(batch, META)
    assert type(moved) is type(batch)
    assert describe(moved) == describe(batch)
    assert {tensor.device for tensor in tensors_in(moved)} == {META}


def test_what_is_on_the_device_is_not_copied():
    batch = {"ids": ids(), "more": [mask()]}
    moved = on_device(batch, CPU)
    assert moved["ids"] is batch["ids"]
    assert moved["more"][0] is batch["more"][0]


def test_a_batch_keeps_what_is_no_tensor():
    assert on_device({"text": "abc", "number": 5, "nothing": None}, META) == {
        "text": "abc",
        "number": 5,
        "nothing": None,
    }


def test_a_named_tuple_can_still_be_asked_by_name():
    assert on_device(Pair(ids(), mask()), META).mask.device == META


def test_a_mapping_of_a_library_becomes_keyword_arguments():
    moved = on_device(UserDict(ids=ids()), META)
    assert list(moved) == ["ids"]
    assert moved["ids"].device == META


# Describing


def test_a_batch_is_described_by_dtypes_and_shapes():
    assert describe((ids(), mask())) == "int64[4, 256], bool[4]"
    assert describe({"loss": torch.tensor(1.0)}) == "float32[]"
    assert describe("text") == ""


def test_the_samples_of_a_batch_are_the_first_dimension_of_its_first_tensor():
    assert samples_in({"text": "abc", "ids": ids(), "mask": mask()[:2]}) == 4
    assert samples_in([torch.ones(7, 2), ids()]) == 7


def test_a_batch_without_a_first_dimension_has_no_samples():
    assert samples_in(torch.tensor(1.0)) is None
    assert samples_in([]) is None


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
    assert describe(moved) == describe(batch)
    assert samples_in(moved) == samples_in(batch)
    assert all(tensor.device == META for tensor in tensors_in(moved))
    assert all(tensor.device == CPU for tensor in tensors_in(batch))


# Feeding


def model(*args, **kwargs):
    return args, kwargs


def test_a_tensor_is_the_only_argument():
    batch = ids()
    args, kwargs = feed(model, batch)
    assert args[0] is batch
    assert (len(args), kwargs) == (1, {})


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_sequence_is_positional_arguments(kind):
    assert feed(model, kind([1, 2])) == ((1, 2), {})


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
def test_a_mapping_is_keyword_arguments(kind):
    assert feed(model, kind(a=1, b=2)) == ((), {"a": 1, "b": 2})


def test_anything_else_is_the_only_argument():
    assert feed(model, None) == ((None,), {})
