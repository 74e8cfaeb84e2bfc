"""The nodes that the library recorded, joined with torch's history of a GPU."""

from __future__ import annotations

from pytest_gpumem.emulating.emulated_process.counter_history import (
    BEGAN_BACKWARD,
    ENDED_BACKWARD,
    joined_traces,
    with_backward_calls,
)
from pytest_gpumem.emulating.emulated_process.stacks import CREATED_NODE
from pytest_gpumem.torch_support.private_api.tensor_creation import NewTensor


def _torchs(address, action="alloc"):
    return {"action": action, "addr": address, "size": 100}


def _noted(address, number, device=0):
    node = {"node": (1, number), "node_name": f"Node{number}", "tensor": NewTensor("float32", (number,), 4 * number)}
    return {
        "action": "alloc",
        "addr": address,
        "size": 512,
        "device": device,
        "frames": [],
        "user_metadata": "",
        **node,
    }


def _numbers(trace):
    return [entry["node"][1] if "node" in entry else None for entry in trace if entry["action"] == "alloc"]


def test_the_blocks_at_an_address_have_the_nodes_in_their_order():
    trace = [_torchs(1), _torchs(2), _torchs(1, "free_completed"), _torchs(1), _torchs(9, "segment_alloc")]
    (joined,) = joined_traces([trace], [_noted(1, 5), _noted(2, 6), _noted(1, 7)])
    assert _numbers(joined) == [5, 6, 7]
    assert [{key: entry[key] for key in ("action", "addr", "size")} for entry in joined] == trace


def test_the_blocks_at_an_address_have_the_tensors_in_their_order():
    trace = [_torchs(1), _torchs(1, "free_completed"), _torchs(1)]
    (joined,) = joined_traces([trace], [_noted(1, 5), _noted(1, 7)])
    assert [entry["tensor"].shape for entry in joined if entry["action"] == "alloc"] == [(5,), (7,)]


def test_an_address_with_another_number_of_allocations_has_no_nodes():
    trace = [_torchs(1), _torchs(2), _torchs(1)]
    assert _numbers(joined_traces([trace], [_noted(1, 5), _noted(2, 6)])[0]) == [None, 6, None]
    assert _numbers(joined_traces([trace], [_noted(1, 5), _noted(1, 7), _noted(2, 6), _noted(2, 8)])[0]) == [5, None, 7]


def test_each_gpu_has_its_own_addresses_and_all_new_nodes():
    created = {"action": CREATED_NODE, "addr": 0, "size": 0, "device": 0, "node": (1, 5)}
    first, second = joined_traces(
        [[_torchs(1)], [_torchs(1)]], [created, _noted(1, 6, device=1), _noted(1, 5, device=0)]
    )
    assert (_numbers(first), _numbers(second)) == ([5], [6])
    assert created in first
    assert created in second


def _in_history(action, address=0, line=0, note=""):
    frames = [{"filename": "/model.py", "line": line, "name": "forward"}] if line else []
    return {"action": action, "addr": address, "frames": frames, "user_metadata": note}


def _lines(entries, **knows):
    return [
        ([frame["line"] for frame in entry["frames"]], entry["user_metadata"])
        for entry in with_backward_calls(entries, **knows)
        if entry["action"] == CREATED_NODE
    ]


def test_a_node_created_in_another_thread_has_the_line_that_calls_backward():
    call = _in_history(BEGAN_BACKWARD, 3, 30, "force")
    new, end = _in_history(CREATED_NODE, 1), _in_history(ENDED_BACKWARD, 3)
    assert _lines([new, call, new, end, new]) == [([], ""), ([30], "force"), ([], "")]


def test_a_node_from_forward_or_with_a_stack_of_its_own_keeps_its_line():
    call = _in_history(BEGAN_BACKWARD, 3, 30, "force")
    nodes = [_in_history(CREATED_NODE), _in_history(CREATED_NODE, 1, 40), _in_history(CREATED_NODE, 1, 40, "again")]
    assert _lines([call, *nodes]) == [([], ""), ([40], "force"), ([40], "again")]


def test_if_two_backward_passes_run_at_a_time_their_new_nodes_have_no_line():
    calls = [_in_history(BEGAN_BACKWARD, number, 30 + number) for number in (0, 1)]
    new, end = _in_history(CREATED_NODE, 1), _in_history(ENDED_BACKWARD, 0)
    assert _lines([*calls, new, end, new]) == [([], ""), ([31], "")]


def test_if_a_backward_pass_ran_before_the_history_no_new_node_has_a_line():
    call, new = _in_history(BEGAN_BACKWARD, 0, 30), _in_history(CREATED_NODE, 1)
    assert _lines([call, new], knows_passes=False) == [([], "")]


def test_begins_and_ends_of_backward_passes_are_left_out():
    entries = [_in_history(BEGAN_BACKWARD, 3, 30), _in_history("alloc", 5), _in_history(ENDED_BACKWARD, 3)]
    assert with_backward_calls(entries) == entries[1:2]
