"""What bytes are: the category of each block by its rule, and rows that always add up. From recordings written by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.facts.values.categories import CATEGORIES
from pytest_gpumem.facts.values.composition import Composition, Row
from pytest_gpumem.measuring.explain.compose import (
    category_of,
    composition_at,
    composition_of_garbage,
    composition_of_peak,
    composition_of_retained,
    compositions_of_phases,
)
from pytest_gpumem.measuring.explain.lifetimes import timeline_of
from pytest_gpumem.measuring.explain.trace import Label
from tests.explain.stream import Stream

if TYPE_CHECKING:
    from pytest_gpumem.facts.values.events import SpanKind

unhurried = settings(deadline=None)


def categories(stream: Stream) -> dict[int, str]:
    """By address."""
    timeline = stream.timeline()
    return {block.address: category_of(block, timeline) for block in timeline.lifetimes}


# Categories


@pytest.mark.parametrize("category", ["parameter", "gradient"])
def test_tensors_on_the_model_optimizer_or_batch_have_that_category(category):
    stream = Stream(before={1: 8, 2: 8}, own={1, 2})
    stream.snapshot(Label(1, category, "fc"))
    with stream.node("MulBackward0", 3):
        stream.alloc(3)
    stream.snapshot(Label(3, category, "fc"))
    assert categories(stream) == {1: category, 2: "other", 3: category}


def test_an_input_was_there_before_the_step():
    # What the step puts into a list that was handed in can be reached from there, too.
    stream = Stream(before={1: 8}, own={1})
    stream.snapshot(Label(1, "input"))
    with stream.node("MulBackward0", 3):
        stream.alloc(3)
    stream.snapshot(Label(3, "input"))
    assert categories(stream) == {1: "input", 3: "temporary"}


def test_what_is_freed_before_its_call_ended_is_a_workspace():
    stream = Stream()
    with stream.mark("module", "conv"):
        with stream.mark("call", "conv", "model.py:1"), stream.operator("aten::convolution"):
            stream.alloc(1)
            stream.free(1)
            stream.alloc(2)
        stream.free(2)
    assert categories(stream) == {1: "workspace", 2: "temporary"}


def test_a_block_freed_within_its_module_is_temporary_and_a_passed_on_an_activation():
    stream = Stream()
    with stream.mark("module", "GPT"):
        with stream.mark("module", "fc"):
            stream.alloc(1)
            stream.alloc(2)
            stream.free(1)
        stream.alloc(3)
        stream.free(2)
        stream.free(3)
    assert categories(stream) == {1: "temporary", 2: "activation", 3: "temporary"}


def test_outside_of_modules_what_backward_finds_is_an_activation():
    stream = Stream()
    with stream.operator("aten::mul", sequence=1):
        stream.alloc(1)
    with stream.operator("aten::add", sequence=2):
        stream.alloc(2)
    stream.free(2)
    with stream.node("MulBackward0", 1):
        pass
    stream.free(1)
    assert categories(stream) == {1: "activation", 2: "temporary"}


def test_without_backward_surviving_blocks_are_other_and_freed_blocks_temporary():
    stream = Stream()
    stream.alloc(1)
    stream.alloc(2)
    stream.free(1)
    with stream.mark("rest", "garbage"):
        stream.free(2)
    assert categories(stream) == {1: "temporary", 2: "other"}


def test_a_nodes_allocation_is_temporary_unless_it_is_freed_within_the_node():
    stream = Stream()
    with stream.node("MulBackward0", 1):
        stream.alloc(1)
        stream.alloc(2)
        stream.free(1)
    with stream.node("AddBackward0", 0):
        stream.free(2)
    assert categories(stream) == {1: "workspace", 2: "temporary"}


def test_what_recomputed_modules_make_is_what_it_would_be_in_forward():
    stream = Stream()
    with stream.node("CheckpointFunctionBackward", 1):
        with stream.mark("module", "h.0", "model.py:1"):
            stream.alloc(1)
            stream.alloc(2)
            stream.free(1)
        stream.free(2)
    assert categories(stream) == {1: "temporary", 2: "activation"}


def test_freed_optimizer_blocks_are_temporary_and_unfound_kept_blocks_are_other():
    stream = Stream()
    with stream.mark("optimizer"):
        with stream.operator("aten::sqrt"):
            stream.alloc(1)
        stream.alloc(2)
        stream.alloc(3)
        stream.free(1)
    stream.snapshot(Label(2, "optimizer state", "fc"))
    assert categories(stream) == {1: "temporary", 2: "optimizer state", 3: "other"}


def test_what_goes_with_the_backends_workspaces_is_a_workspace_and_nothing_retained():
    stream = Stream()
    with stream.mark("module", "fc"), stream.mark("call", "fc", "model.py:1"), stream.operator("aten::addmm"):
        stream.alloc(1, 100)
        stream.alloc(2, 10)
    with stream.mark("rest", "workspaces"):
        stream.free(1)
    with stream.mark("rest", "garbage"):
        pass
    assert categories(stream) == {1: "workspace", 2: "activation"}
    retained = composition_of_retained(stream.timeline())
    assert [(row.category, row.nbytes) for row in retained.rows] == [("activation", 10)]


# Rows


def test_a_row_says_who_where_and_what():
    stream = Stream()
    for layer in range(2):
        path = f"h.{layer}.attn"
        with (
            stream.mark("module", path, "model.py:5"),
            stream.mark("call", path, "model.py:9", "lib/gpt.py:3"),
            stream.operator("aten::_softmax"),
        ):
            stream.alloc(layer, 32)
        stream.seen(layer, "float32", 8)
    row = Row("activation", 64, "h.*.attn", "model.py:9", "lib/gpt.py:3", "_softmax", "float32[8]", count=2)
    composition = composition_of_peak(stream.timeline(), 0)
    assert (composition.total, composition.rows) == (64, (row,))


def test_a_row_of_backward_has_the_node_as_its_operator_and_the_line_of_forward():
    stream = Stream()
    with stream.mark("call", "fc", "model.py:9"), stream.operator("aten::mul", sequence=7):
        pass
    with stream.node("MulBackward0", 7), stream.operator("aten::mul"):
        stream.alloc(1, 32)
    row = Row("temporary", 32, "fc", "model.py:9", operator="MulBackward0")
    assert composition_of_peak(stream.timeline(), 0).rows == (row,)


def test_a_label_decides_the_blocks_owner_and_a_mark_decides_its_line():
    stream = Stream()
    with stream.mark("module", "GPT", "train.py:1"), stream.operator("aten::zeros"):
        stream.alloc(1, 32)
    stream.snapshot(Label(1, "buffer", "h.3.attn", "float32[8]", "model.py:2"))
    row = Row("buffer", 32, "h.*.attn", "train.py:1", "", "zeros", "float32[8]")
    assert composition_of_peak(stream.timeline(), 0).rows == (row,)


def test_what_was_there_before_has_the_line_that_its_label_knows():
    stream = Stream(before={1: 32}, own={1})
    stream.snapshot(Label(1, "parameter", "h.3.attn", "float32[8]", "model.py:2"))
    row = Row("parameter", 32, "h.*.attn", "model.py:2", tensor="float32[8]")
    assert composition_of_peak(stream.timeline(), 32).rows == (row,)


def test_a_label_that_does_not_know_leaves_what_the_mark_knows():
    stream = Stream()
    with stream.mark("module", "GPT", "train.py:1"), stream.operator("aten::zeros"):
        stream.alloc(1, 32)
    stream.seen(1, "float32", 8)
    stream.snapshot(Label(1, "buffer"))
    row = Row("buffer", 32, "GPT", "train.py:1", "", "zeros", "float32[8]")
    assert composition_of_peak(stream.timeline(), 0).rows == (row,)


def test_what_was_recomputed_is_told_with_the_peak():
    stream = Stream()
    with stream.node("CheckpointFunctionBackward", 1), stream.mark("module", "h.0", "model.py:1"):
        stream.alloc(1)
    assert composition_of_peak(stream.timeline(), 0).recomputed == {"h.*": 1}


# Sums


def test_the_total_is_the_steps_own_and_what_it_allocated():
    stream = Stream(before={1: 100, 2: 1000}, own={1})
    stream.snapshot(Label(1, "parameter", "fc"))
    stream.alloc(3, 40)
    composition = composition_of_peak(stream.timeline(), 100)
    assert composition.total == 140
    assert {row.category: row.nbytes for row in composition.rows} == {"parameter": 100, "other": 40}, (
        "somebody else's 1000 bytes are in no row"
    )


def test_own_bytes_that_nobody_found_one_by_one_are_a_row_of_their_own():
    stream = Stream(before={1: 100}, own={1})
    stream.snapshot(Label(1, "parameter", "fc"))
    composition = composition_of_peak(stream.timeline(), 130)
    assert composition.total == 130
    assert Row("unattributed", 30) in composition.rows
    assert composition.rest == 0


def test_a_foreign_block_freed_meanwhile_is_missing_from_the_total_and_noted():
    stream = Stream(before={1: 100, 2: 1000}, own={1})
    stream.free(2)
    stream.alloc(3, 2000)
    composition = composition_of_peak(stream.timeline(), 100)
    assert composition.total == 1100, "as a reading of the device would be"
    assert Row("unattributed", -1000) in composition.rows
    assert composition.rest == 0


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["alloc", "free", "operator", "node", "module", "call", "optimizer", "snapshot", "close"]),
        st.integers(1, 6),
        st.integers(1, 1000),
    ),
    max_size=40,
)


def stream_of(actions: list[tuple[str, int, int]], before: dict[int, int]) -> Stream:
    """A recording in which spans nest and blocks come and go as ``actions`` say."""
    stream = Stream(before, set(before))
    opened = []
    for action, number, nbytes in actions:
        if action == "alloc":
            stream.alloc(number, nbytes)
        elif action == "free":
            stream.free(number)
        elif action == "snapshot":
            stream.snapshot(Label(number, [*CATEGORIES][nbytes % 5], f"h.{number}"))
        elif action == "close":
            if opened:
                opened.pop().__exit__(None, None, None)
        elif action in ("operator", "node"):
            kind: SpanKind = "node" if action == "node" else "operator"
            opened.append(stream.operator("aten::mul", number) if kind == "operator" else stream.node("Mul", number))
            opened[-1].__enter__()
        else:
            opened.append(stream.mark(action, f"h.{number}", f"model.py:{number}"))
            opened[-1].__enter__()
    while opened:
        opened.pop().__exit__(None, None, None)
    with stream.mark("rest", "garbage"):
        stream.free(1)
    return stream


BEFORE = st.dictionaries(st.integers(1, 6), st.integers(1, 1000), max_size=4)


@unhurried
@given(ACTIONS, BEFORE, st.integers(-100, 100))
def test_rows_add_up_to_the_total_at_every_moment_of_every_recording(actions, before, unknown):
    timeline = stream_of(actions, before).timeline()
    own = sum(before.values())
    for moment in range(-1, len(timeline.live)):
        live = timeline.live[moment] if moment >= 0 else 0
        composition = composition_at(timeline, moment, own + unknown)
        assert composition.total == own + unknown + live
        assert composition.rest == 0
        assert composition.of("unattributed") == unknown, "all that is known one by one is in rows"
        assert all(row.nbytes > 0 for row in composition.rows if row.category != "unattributed")


# What is left


def leaving(before: dict[int, int], own_bytes: int) -> Composition:
    """A step that leaves a block of 40 bytes each time it runs; ``before`` are the blocks that were there."""
    stream = Stream(before)
    with stream.mark("module", "fc", "model.py:1"):
        stream.alloc(9, 40)
    with stream.mark("rest", "garbage"):
        pass
    return composition_of_peak(timeline_of(stream.trace(), own_bytes), own_bytes)


def test_what_earlier_steps_left_is_told_as_what_this_one_leaves():
    row = Row("activation", 120, "fc", "model.py:1", count=3)
    composition = leaving({1: 40, 2: 40}, own_bytes=80)
    assert (composition.total, composition.rows) == (120, (row,))


def test_what_is_of_another_size_is_nobodys_leak():
    composition = leaving({1: 44, 2: 36}, own_bytes=80)
    assert composition.of("activation") == 40
    assert composition.of("unattributed") == 80


def test_no_more_is_told_of_earlier_steps_than_the_step_held_when_it_began():
    composition = leaving({1: 40, 2: 40, 3: 40}, own_bytes=60)
    assert (composition.total, composition.of("activation"), composition.of("unattributed")) == (100, 80, 20)


@pytest.mark.parametrize("freed", [1, 3])
def test_an_older_block_that_the_step_frees_is_its_own_wherever_it_lies(freed):
    stream = Stream({1: 40, 2: 40, 3: 40}, own={1, 2, 3})
    stream.free(freed)
    stream.alloc(8, 40)
    stream.alloc(9, 40)
    # When it was measured it held two of the three.
    timeline = timeline_of(stream.trace(), 80)
    assert composition_of_retained(timeline).total == 40


@pytest.mark.parametrize("before", [(40, 40, 30, 30), (30, 40, 40, 30), (30, 30, 40, 40)])
def test_what_later_steps_have_kept_is_of_each_size_wherever_it_lies(before):
    stream = Stream(dict(enumerate(before, 1)))
    stream.alloc(8, 40)
    stream.alloc(9, 30)
    # One step has left 70 bytes until then, and another since.
    timeline = timeline_of(stream.trace(), 70)
    assert sorted(block.nbytes for block in timeline.lifetimes if block.own and block.allocated < 0) == [30, 40]


def test_without_leftovers_what_was_there_is_somebody_elses():
    stream = Stream({1: 40})
    stream.alloc(9, 40)
    stream.free(9)
    composition = composition_of_peak(timeline_of(stream.trace(), 0), 0)
    assert composition == Composition(40, (Row("temporary", 40),), phase="forward")


def test_each_other_phase_has_the_composition_of_its_peak():
    stream = Stream()
    for phase, sizes in (("forward", (30, 10)), ("backward", (20, 90)), ("optimizer", (7,))):
        with stream.mark("phase", phase):
            for address, size in enumerate(sizes, 10):
                stream.alloc(address, size)
            for address, _ in enumerate(sizes, 10):
                stream.free(address)
    timeline = timeline_of(stream.trace())
    assert composition_of_peak(timeline, 5).phase == "backward"
    others = compositions_of_phases(timeline, 5)
    assert {phase: (one.phase, one.total) for phase, one in others.items()} == {
        "forward": ("forward", 45),
        "optimizer": ("optimizer", 12),
    }


def test_code_without_phases_has_those_of_autograd_and_the_optimizer():
    stream = Stream()
    with stream.mark("phase", "step"):
        stream.alloc(1, 30)
        with stream.node("MulBackward0", 1):
            stream.alloc(2, 30)
        with stream.mark("optimizer", "AdamW"):
            stream.alloc(3, 30)
    timeline = timeline_of(stream.trace())
    assert composition_of_peak(timeline, 0).phase == "optimizer"
    assert {phase: one.total for phase, one in compositions_of_phases(timeline, 0).items()} == {
        "forward": 30,
        "backward": 60,
    }


def test_retained_is_what_the_step_made_and_left_behind():
    stream = Stream(before={1: 100}, own={1})
    with stream.mark("module", "fc", "model.py:1"):
        stream.alloc(2, 20)
        stream.alloc(3, 3)
    stream.free(3)
    with stream.mark("rest", "garbage"):
        pass
    row = Row("activation", 20, "fc", "model.py:1")
    assert composition_of_retained(stream.timeline()) == Composition(20, (row,))


@pytest.mark.parametrize(("old", "new"), [(None, None), (None, "gradient"), ("gradient", None)])
def test_a_block_that_replaces_an_older_one_is_not_retained_whoever_owns_them(old, new):
    stream = Stream(before={1: 256, 2: 400}, own={1})
    stream.snapshot(*([Label(1, old, "fc")] if old else []))
    stream.free(1)
    stream.alloc(3, 256)
    stream.alloc(4, 400)
    stream.snapshot(*([Label(3, new, "fc")] if new else []))
    # The older 400 bytes are what earlier steps kept, which leaves no room for the 256.
    for own in (256, 656):
        assert composition_of_retained(timeline_of(stream.trace(), own)).total == 400


def test_garbage_is_what_only_the_collector_freed():
    stream = Stream()
    stream.alloc(1, 10)
    stream.alloc(2, 200)
    stream.alloc(3, 3000)
    stream.free(1)
    with stream.mark("rest", "workspaces"):
        pass
    with stream.mark("rest", "garbage"):
        stream.free(2)
    timeline = stream.timeline()
    assert composition_of_garbage(timeline) == Composition(200, (Row("other", 200),))
    assert composition_of_retained(timeline).total == 3000


def test_without_a_collection_there_is_no_garbage():
    stream = Stream()
    stream.alloc(1, 10)
    assert composition_of_garbage(stream.timeline()) == Composition(0, ())
