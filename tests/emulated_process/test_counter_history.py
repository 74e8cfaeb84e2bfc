"""The nodes that the library recorded, joined with torch's history of a GPU."""

from __future__ import annotations

from pytest_gpumem.emulating.emulated_process.counter_history import with_nodes
from pytest_gpumem.emulating.emulated_process.stacks import CREATED_NODE


def _torchs(address, action="alloc"):
    return {"action": action, "addr": address, "size": 100}


def _noted(address, number, device=0):
    node = {"node": (1, number), "node_name": f"Node{number}"}
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
    (joined,) = with_nodes([trace], [_noted(1, 5), _noted(2, 6), _noted(1, 7)])
    assert _numbers(joined) == [5, 6, 7]
    assert [{key: entry[key] for key in ("action", "addr", "size")} for entry in joined] == trace


def test_an_address_with_another_number_of_allocations_has_no_nodes():
    trace = [_torchs(1), _torchs(2), _torchs(1)]
    assert _numbers(with_nodes([trace], [_noted(1, 5), _noted(2, 6)])[0]) == [None, 6, None]
    assert _numbers(with_nodes([trace], [_noted(1, 5), _noted(1, 7), _noted(2, 6), _noted(2, 8)])[0]) == [5, None, 7]


def test_each_gpu_has_its_own_addresses_and_all_new_nodes():
    created = {"action": CREATED_NODE, "addr": 0, "size": 0, "device": 0, "node": (1, 5)}
    first, second = with_nodes([[_torchs(1)], [_torchs(1)]], [created, _noted(1, 6, device=1), _noted(1, 5, device=0)])
    assert (_numbers(first), _numbers(second)) == ([5], [6])
    assert created in first
    assert created in second
