"""Traces: folded module paths, tensors as text, and the way through JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.explain.lifetimes import timeline_of
from pytest_gpumem.explain.trace import Label, Mark, Trace, folded, tensor_text, trace_from_plain
from pytest_gpumem.values.events import AllocationEvent, Seen
from tests.explain.stream import Stream

unhurried = settings(deadline=None)
NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
ADDRESSES = st.integers(1, 2**47)


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("h.0.attn", "h.*.attn"),
        ("layers.10.experts.3", "layers.*.experts.*"),
        ("0", "*"),
        ("0.1", "*.*"),
        ("0.1.2.3", "*.*.*.*"),
        ("layer1.0.conv2", "layer1.*.conv2"),
        ("blocks.12a", "blocks.12a"),
        ("", ""),
        ("GPT", "GPT"),
    ],
)
def test_layer_numbers_of_a_path_are_folded_and_nothing_else_is(path, shown):
    assert folded(path) == shown
    assert folded(shown) == shown


def test_a_tensor_reads_as_dtype_and_shape():
    assert tensor_text("float32", (8, 256)) == "float32[8, 256]"
    assert tensor_text("bool", ()) == "bool[]"


LABELS = st.builds(Label, ADDRESSES, NAMES, NAMES, NAMES, NAMES)
SEEN = st.builds(Seen, ADDRESSES, NAMES, st.lists(st.integers(0, 9), max_size=3).map(tuple))
TRACES = st.builds(
    Trace,
    st.lists(st.builds(AllocationEvent, ADDRESSES, ADDRESSES, ADDRESSES), max_size=3).map(tuple),
    st.lists(st.builds(Mark, st.sampled_from(["module", "look"]), NAMES, NAMES, NAMES), max_size=3).map(tuple),
    st.dictionaries(st.integers(0, 9), st.lists(LABELS, max_size=2).map(tuple), max_size=2),
    st.dictionaries(ADDRESSES, ADDRESSES, max_size=3),
    st.frozensets(ADDRESSES, max_size=3),
    st.booleans(),
    st.integers(1, 512),
    st.dictionaries(st.integers(0, 9), st.lists(SEEN, max_size=2).map(tuple), max_size=2),
)


@unhurried
@given(TRACES)
def test_a_trace_travels_whole(trace):
    assert trace_from_plain(json.loads(json.dumps(trace.to_plain()))) == trace


def test_a_trace_that_was_kept_gives_the_same_timeline():
    stream = Stream(before={1: 100}, own={1})
    stream.look(Label(1, "parameter", "fc", "float32[25]", "model.py:3"))
    with stream.mark("module", "fc", "model.py:9"), stream.operator("aten::addmm", sequence=4):
        stream.alloc(2, 40)
        stream.seen(2, "float32", 10)
    with stream.node("AddmmBackward0", sequence=4):
        stream.alloc(3, 8)
    trace = stream.trace()
    assert timeline_of(trace_from_plain(json.loads(json.dumps(trace.to_plain())))) == timeline_of(trace)
