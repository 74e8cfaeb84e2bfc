"""Lives of blocks, from recordings written by hand: when a block was born, in what, and when it died."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.facts.values.events import AllocationEvent, TensorRecord
from pytest_gpumem.measuring.devices.live_blocks import LiveBlocks
from pytest_gpumem.measuring.explain.lifetimes import timeline_of
from pytest_gpumem.measuring.explain.trace import Label, Mark, Trace
from tests.explain.stream import Stream

unhurried = settings(deadline=None)

# Bytes over time


def test_live_bytes_are_told_after_each_token_and_count_from_what_was_there():
    stream = Stream(before={1: 1000}, own={1})
    with stream.operator("aten::relu"):
        stream.alloc(2, 40)
    stream.free(1)
    assert stream.timeline().live == (0, 40, 40, -960)


def test_the_peak_is_the_first_moment_of_the_most_bytes():
    stream = Stream()
    stream.alloc(1, 10)
    highest = stream.alloc(2, 20)
    stream.free(1)
    stream.alloc(3, 10)
    timeline = stream.timeline()
    assert (timeline.peak, timeline.peak_bytes) == (highest, 30)
    assert {block.address for block in timeline.at(timeline.peak)} == {1, 2}


def test_what_never_rises_above_the_beginning_has_its_peak_before_the_recording():
    stream = Stream(before={1: 1000}, own={1})
    stream.free(1)
    stream.alloc(2, 1000)
    timeline = stream.timeline()
    assert (timeline.peak, timeline.peak_bytes) == (-1, 0)
    assert [block.address for block in timeline.at(-1)] == [1]


def test_an_address_that_is_used_again_is_another_block():
    stream = Stream()
    first = stream.alloc(1, 10)
    freed = stream.free(1)
    second = stream.alloc(1, 30)
    lifetimes = stream.timeline().lifetimes
    assert [(block.nbytes, block.allocated, block.freed) for block in lifetimes] == [
        (10, first, freed),
        (30, second, None),
    ]


def test_what_another_thread_allocates_is_of_the_phase_and_of_nothing_else_that_runs():
    stream = Stream()
    with stream.mark("phase", "load"), stream.mark("call", "net", "test_it.py:3"), stream.operator("aten::clone"):
        stream.alloc(1, 10)
        stream.alloc(2, 20, from_other_thread=True)
    own, other = stream.timeline().lifetimes
    assert (own.phase, own.operator, own.mark and own.mark.site) == ("load", "aten::clone", "test_it.py:3")
    assert (other.phase, other.operator, other.mark) == ("load", "", None)


def test_of_what_was_there_before_only_the_steps_own_is_the_steps():
    stream = Stream(before={1: 100, 2: 200}, own={1})
    stream.alloc(3, 4)
    own = {block.address: (block.own, block.allocated) for block in stream.timeline().lifetimes}
    assert own == {1: (True, -1), 2: (False, -1), 3: (True, 0)}


EVENTS = st.lists(
    st.builds(AllocationEvent, st.just(0), st.integers(1, 5), st.integers(1, 100) | st.integers(-100, -1)),
    max_size=30,
)
BEFORE = st.dictionaries(st.integers(1, 5), st.integers(1, 100), max_size=4)


@unhurried
@given(EVENTS, BEFORE)
def test_a_timeline_counts_as_the_ledger_does(events, before):
    """What is measured and what explains it follow the same events by the same rules."""
    ledger = LiveBlocks()
    ledger.register_existing(before)
    ledger.reset_peak()
    start = ledger.live
    ledger.apply(events)
    timeline = timeline_of(Trace(tuple(events), before=before))
    assert (timeline.live[-1] if events else 0) == ledger.live - start
    assert timeline.peak_bytes == ledger.peak.allocated - start
    at_the_end = {block.address: block.nbytes for block in timeline.at(len(events))}
    assert at_the_end == ledger.blocks


# What a block was allocated in


def test_a_block_has_the_operator_that_python_called_and_not_the_factory_within():
    stream = Stream()
    with stream.operator("aten::addmm"), stream.operator("aten::empty_strided"):
        stream.alloc(1)
    assert stream.lifetimes()[1].operator == "aten::addmm"


def test_an_operator_within_another_says_more_unless_it_is_a_factory():
    stream = Stream()
    with stream.operator("aten::softmax"):
        with stream.operator("aten::_softmax"), stream.operator("aten::empty"):
            stream.alloc(1)
        with stream.operator("aten::to"), stream.operator("aten::_to_copy"), stream.operator("aten::empty"):
            stream.alloc(2)
    lifetimes = stream.lifetimes()
    assert lifetimes[1].operator == "aten::_softmax"
    assert lifetimes[2].operator == "aten::softmax"


def test_a_factory_that_is_called_by_itself_is_the_operator():
    stream = Stream()
    with stream.operator("aten::zeros"), stream.operator("aten::empty"):
        stream.alloc(1)
    assert stream.lifetimes()[1].operator == "aten::zeros"


def test_a_block_has_the_innermost_mark_of_a_module_or_a_call_and_the_phase_around():
    stream = Stream()
    with stream.mark("phase", "forward"), stream.mark("module", "GPT", "train.py:1"):
        stream.alloc(1)
        with stream.mark("module", "h.0", "model.py:5"), stream.mark("call", "h.0", "model.py:9", "lib/x.py:2"):
            stream.alloc(2)
        stream.alloc(3)
    lifetimes = stream.lifetimes()
    assert lifetimes[1].mark == lifetimes[3].mark == Mark("module", "GPT", "train.py:1")
    assert lifetimes[2].mark == Mark("call", "h.0", "model.py:9", "lib/x.py:2")
    assert {block.phase for block in lifetimes.values()} == {"forward"}


def test_a_call_ends_where_its_mark_does_and_a_module_where_its_own_does():
    stream = Stream()
    with stream.mark("module", "GPT"):
        with stream.mark("call", "GPT", "model.py:9"), stream.operator("aten::mul"):
            stream.alloc(1)
        call_ended = len(stream.tokens) - 1
    module_ended = len(stream.tokens) - 1
    block = stream.lifetimes()[1]
    assert (block.call_ended, block.module_ended) == (call_ended, module_ended)


def test_without_a_call_the_outermost_operator_is_what_ends():
    stream = Stream()
    with stream.operator("aten::softmax"), stream.operator("aten::_softmax"):
        stream.alloc(1)
    outermost_ended = len(stream.tokens) - 1
    block = stream.lifetimes()[1]
    assert (block.call_ended, block.module_ended) == (outermost_ended, None)


def test_the_calls_of_a_module_are_not_those_of_the_code_around_it():
    stream = Stream()
    with stream.mark("call", "", "train.py:1"), stream.mark("module", "fc"):
        stream.alloc(1)
    block = stream.lifetimes()[1]
    assert block.call_ended is None, "what the module passes on outlives no call within it"
    assert block.module_ended is not None


def test_what_a_recording_breaks_off_in_ends_with_it():
    stream = Stream()
    with stream.mark("module", "fc"):
        stream.alloc(1)
        cut = stream.trace()
    block = timeline_of(cut).lifetimes[0]
    assert block.module_ended == len(cut.tokens)


# Backward


def forward_of(stream: Stream, sequence: int, path: str = "fc", site: str = "model.py:9") -> None:
    """A call that autograd remembers under a number."""
    with (
        stream.mark("module", path, "model.py:5"),
        stream.mark("call", path, site),
        stream.operator("aten::mul", sequence),
    ):
        pass


def test_what_a_node_allocates_is_led_back_to_the_call_that_made_the_node():
    stream = Stream()
    forward_of(stream, 7, "fc1", "model.py:9")
    forward_of(stream, 8, "fc2", "model.py:10")
    with stream.node("MulBackward0", 8), stream.operator("aten::mul"):
        stream.alloc(1)
    with stream.node("MulBackward0", 7), stream.operator("aten::mul"):
        stream.alloc(2)
    lifetimes = stream.lifetimes()
    assert (lifetimes[1].node, lifetimes[1].mark) == ("MulBackward0", Mark("call", "fc2", "model.py:10"))
    assert (lifetimes[2].node, lifetimes[2].mark) == ("MulBackward0", Mark("call", "fc1", "model.py:9"))


def test_a_node_of_which_nobody_saw_the_making_has_no_mark_whatever_called_backward():
    stream = Stream()
    with stream.mark("call", "", "train.py:3"), stream.node("MulBackward0", 7):
        stream.alloc(1)
    block = stream.lifetimes()[1]
    assert (block.node, block.mark) == ("MulBackward0", None)


def test_a_node_has_calls_of_its_own_and_no_module():
    stream = Stream()
    with stream.mark("module", "GPT"), stream.mark("call", "GPT", "train.py:3"):
        with stream.node("MulBackward0", 7), stream.operator("aten::mul"):
            stream.alloc(1)
        node_ended = len(stream.tokens) - 1
    block = stream.lifetimes()[1]
    assert (block.call_ended, block.module_ended) == (node_ended, None)


def test_a_number_that_autograd_gave_anew_is_that_of_the_latest_operator():
    stream = Stream()
    forward_of(stream, 7, "old", "model.py:1")
    forward_of(stream, 7, "new", "model.py:2")
    with stream.node("MulBackward0", 7):
        stream.alloc(1)
    assert stream.lifetimes()[1].mark == Mark("call", "new", "model.py:2")


def test_code_recomputed_in_backward_keeps_its_marks_and_belongs_to_no_node():
    stream = Stream()
    forward_of(stream, 7)
    with stream.node("CheckpointFunctionBackward", 7):
        stream.alloc(1)
        with stream.mark("module", "h.0", "model.py:5"):
            stream.alloc(2)
            module = len(stream.tokens)
    lifetimes = stream.lifetimes()
    assert (lifetimes[1].node, lifetimes[1].recomputed) == ("CheckpointFunctionBackward", False)
    assert (lifetimes[2].node, lifetimes[2].recomputed) == ("", True)
    assert lifetimes[2].mark == Mark("module", "h.0", "model.py:5")
    assert lifetimes[2].module_ended == module


def test_calls_of_torchs_own_code_in_backward_are_the_nodes():
    stream = Stream()
    forward_of(stream, 7)
    with stream.node("FlexAttentionBackward", 7), stream.mark("call", "", ""):
        stream.alloc(1)
    block = stream.lifetimes()[1]
    assert (block.node, block.recomputed, block.mark) == (
        "FlexAttentionBackward",
        False,
        Mark("call", "fc", "model.py:9"),
    )


def test_a_functions_own_backward_has_its_own_lines_and_the_module_of_forward():
    stream = Stream()
    forward_of(stream, 7, "h.0", "model.py:9")
    with stream.node("DoubleBackward", 7), stream.mark("call", "", "double.py:12"), stream.operator("aten::mul"):
        stream.alloc(1)
    block = stream.lifetimes()[1]
    assert (block.node, block.recomputed, block.mark) == ("DoubleBackward", False, Mark("call", "h.0", "double.py:12"))


def test_a_module_that_torch_calls_in_backward_has_the_line_of_forward():
    stream = Stream()
    with stream.mark("module", "h.0", "model.py:5"):
        pass
    with stream.node("CheckpointFunctionBackward", 7), stream.mark("module", "h.0"):
        stream.alloc(1)
    block = stream.lifetimes()[1]
    assert (block.recomputed, block.mark) == (True, Mark("module", "h.0", "model.py:5"))


def test_a_module_that_an_optimizers_closure_runs_is_not_the_optimizers():
    stream = Stream()
    with stream.mark("optimizer"):
        with stream.mark("module", "fc"):
            stream.alloc(1)
        stream.alloc(2)
    lifetimes = stream.lifetimes()
    assert (lifetimes[1].in_optimizer, lifetimes[2].in_optimizer) == (False, True)


def test_a_node_that_runs_in_code_that_is_recomputed_is_a_node_again():
    stream = Stream()
    forward_of(stream, 8, "inner", "model.py:11")
    recomputing = stream.node("CheckpointFunctionBackward", 7)
    with recomputing, stream.mark("module", "h.0", "model.py:5"), stream.node("MulBackward0", 8):
        stream.alloc(1)
    block = stream.lifetimes()[1]
    assert (block.node, block.recomputed, block.mark) == ("MulBackward0", False, Mark("call", "inner", "model.py:11"))


def test_a_line_recomputed_outside_a_module_belongs_to_its_module_in_forward():
    stream = Stream()
    forward_of(stream, 7, "h.0.mlp", "model.py:9")
    with stream.node("CheckpointFunctionBackward", 7), stream.mark("call", "", "model.py:9"):
        stream.alloc(1)
    assert stream.lifetimes()[1].mark == Mark("call", "h.0.mlp", "model.py:9")


def test_modules_in_backward_count_by_folded_path_without_their_children():
    stream = Stream()
    with stream.mark("module", "h.0"), stream.mark("module", "h.0.mlp"):
        pass
    for layer in (1, 0):
        with (
            stream.node("CheckpointFunctionBackward", layer),
            stream.mark("module", f"h.{layer}"),
            stream.mark("call", f"h.{layer}", "model.py:1"),
            stream.mark("module", f"h.{layer}.mlp"),
        ):
            pass
    assert stream.timeline().recomputed == {"h.*": 2}


def test_nothing_is_recomputed_where_modules_run_in_forward_only():
    stream = Stream()
    with stream.mark("module", "GPT"), stream.mark("module", "h.0"):
        pass
    with stream.node("MulBackward0", 7), stream.mark("call", "", "x.py:1"):
        pass
    timeline = stream.timeline()
    assert timeline.recomputed == {}
    assert len(timeline.nodes) == 1


# What was seen of a block


def test_what_was_seen_at_a_look_labels_the_block_that_is_there_then():
    label = Label(1, "gradient", "fc", "float32[2]", "model.py:3")
    stream = Stream()
    stream.alloc(1, 4)
    stream.free(1)
    stream.alloc(1, 8)
    stream.snapshot(label)
    stream.free(1)
    stream.alloc(1, 16)
    assert [block.label for block in stream.timeline().lifetimes] == [None, label, None]


def test_the_first_label_stands():
    parameter, gradient = Label(1, "parameter", "fc"), Label(1, "gradient", "fc")
    stream = Stream()
    stream.alloc(1)
    stream.snapshot(parameter)
    stream.snapshot(gradient)
    assert stream.lifetimes()[1].label == parameter


def test_an_input_is_what_is_nothing_else():
    entered, parameter = Label(1, "input"), Label(1, "parameter", "fc")
    stream = Stream()
    stream.alloc(1)
    stream.snapshot(entered, parameter)
    assert stream.lifetimes()[1].label == parameter


def test_a_line_that_comes_to_be_known_later_is_told():
    early, late = Label(1, "gradient", "fc"), Label(1, "gradient", "fc", site="train.py:3")
    stream = Stream()
    stream.alloc(1)
    stream.snapshot(early)
    stream.snapshot(late)
    stream.snapshot(early)
    assert stream.lifetimes()[1].label == late


def test_a_call_that_returns_a_block_tells_what_it_is_as_a_tensor():
    stream = Stream()
    with stream.mark("call", "fc", "model.py:9"):
        stream.alloc(1, 32)
    block = timeline_of(replace(stream.trace(), results={0: (TensorRecord(1, "float32", (8,)),)})).lifetimes[0]
    assert block.tensor == "float32[8]"


def test_a_label_of_no_block_is_passed_over():
    stream = Stream()
    stream.alloc(1)
    stream.snapshot(Label(77, "parameter", "fc"))
    assert stream.lifetimes()[1].label is None


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("bool", (5, 1), 5),
        ("float8_e4m3fn", (7,), 7),
        ("complex128", (2,), 32),
        ("int64", (), 8),
    ],
)
def test_a_block_that_an_operator_took_as_a_tensor_has_its_dtype_and_shape(dtype, shape, nbytes):
    stream = Stream()
    stream.alloc(1, nbytes)
    stream.seen(1, dtype, *shape)
    assert stream.lifetimes()[1].tensor == f"{dtype}{list(shape)}"


def test_a_view_of_another_size_does_not_say_what_a_block_is():
    stream = Stream()
    stream.alloc(1, 8192)
    stream.seen(1, "float32", 8, 255)
    assert stream.lifetimes()[1].tensor == ""
    stream.seen(1, "float32", 256, 8)
    stream.seen(1, "float32", 8, 256)
    assert stream.lifetimes()[1].tensor == "float32[256, 8]", "the first that fits stands"


# After the step


def test_the_step_is_over_where_the_first_rest_begins():
    stream = Stream()
    stream.alloc(1)
    began = len(stream.tokens)
    with stream.mark("rest", "workspaces"):
        pass
    with stream.mark("rest", "garbage"):
        stream.free(1)
    timeline = stream.timeline()
    assert timeline.step_ended == began
    assert timeline.workspaces == (began, began + 1)
    assert timeline.garbage == (began + 2, began + 4)
