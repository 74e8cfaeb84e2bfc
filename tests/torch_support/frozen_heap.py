"""The heap that a session freezes: what is collected before a measured test, and when all of it is gone through.

Run by test_garbage_collector.py, in a process of their own.
"""

from __future__ import annotations

import gc
import sys
import weakref

import pytest

from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.torch_support import garbage_collector
from pytest_gpumem.torch_support.garbage_collector import FrozenHeap, everything_in_sight, is_heap_frozen


class Node:
    def __init__(self):
        self.itself = self


class Device:
    """A device of which only the collector is seen. ``held`` is what its allocator holds."""

    held: int | None = None

    @property
    def everywhere(self):
        return (self,)

    def quiesce(self) -> None:
        CpuDevice().quiesce()

    def reserved(self) -> int | None:
        return self.held


@pytest.fixture
def heap():
    gc.collect()
    heap = FrozenHeap()
    yield heap
    heap.close()
    assert not is_heap_frozen()


@pytest.fixture
def device():
    return Device()


def dropped(node: list[Node]) -> weakref.ref[Node]:
    """Make garbage of the node in the list."""
    return weakref.ref(node.pop())


def collected(begins, heap, device) -> bool:
    """Return whether an object that was there before ``heap`` was frozen, and is garbage now, is gone after ``begins``."""
    old = [Node()]
    heap.begin(device)
    gone = dropped(old)
    begins()
    heap.begin(device)
    return gone() is None


def test_before_a_test_all_garbage_is_collected_that_is_younger_than_the_frozen_heap(heap, device):
    heap.begin(device)
    for _ in range(3):
        frozen = gc.get_freeze_count()
        gone = dropped([Node()])
        heap.begin(device)
        assert gone() is None
        assert is_heap_frozen()
        assert gc.get_freeze_count() <= frozen


def test_objects_that_outlive_several_tests_are_no_part_of_the_frozen_heap(heap, device):
    heap.begin(device)
    kept = [Node()]
    heap.begin(device)
    heap.begin(device)
    gone = dropped(kept)
    heap.begin(device)
    assert gone() is None


def test_frozen_objects_are_not_gone_through_without_a_reason(heap, device):
    assert not collected(lambda: None, heap, device)


def test_all_objects_are_gone_through_once_a_shared_fixture_from_before_is_torn_down(heap, device):
    assert collected(lambda: heap.fixture_is_gone("old"), heap, device)


def test_a_shared_fixture_that_is_younger_than_the_heap_is_garbage_like_any_other(heap, device):
    def comes_and_goes():
        heap.fixture_is_set_up("young")
        heap.fixture_is_gone("young")

    assert not collected(comes_and_goes, heap, device)


def test_all_objects_are_gone_through_where_the_device_holds_bytes(heap, device):
    device.held = 0
    assert not collected(lambda: None, heap, device)
    device.held = 1
    assert collected(lambda: None, heap, device)


def test_all_objects_are_gone_through_when_there_are_many_younger_ones(heap, device, monkeypatch):
    monkeypatch.setattr(garbage_collector, "MOST_YOUNGER", 1000 + len(gc.get_objects()))
    kept = []
    # The second call freezes what the first has kept.
    assert collected(lambda: kept.extend([number] for number in range(1000)), heap, device) is False
    monkeypatch.setattr(garbage_collector, "MOST_YOUNGER", 1000)
    assert collected(lambda: kept.extend([number] for number in range(2000)), heap, device)


def test_a_requested_full_collection_sees_all_objects_until_the_next_test(heap, device):
    old = [Node()]
    heap.begin(device)
    gone = dropped(old)
    gc.collect(1)
    assert gone() is not None
    assert heap.frozen
    gc.collect()
    assert gone() is None
    assert not heap.frozen
    assert any(one is old for one in gc.get_objects())
    heap.begin(device)
    assert heap.frozen


def test_our_own_collections_leave_the_heap_frozen(heap, device):
    heap.begin(device)
    source = "import gc\ngc.collect()\n"
    exec(compile(source, "ours", "exec"), {"__name__": "pytest_gpumem.measuring.devices.cpu"})
    assert heap.frozen
    exec(compile(source, "theirs", "exec"), {"__name__": "test_it"})
    assert not heap.frozen


def test_one_that_python_runs_by_itself_is_told_from_one_that_is_asked_for(monkeypatch):
    def allocates():
        return garbage_collector._is_asked_for(sys._getframe())

    def asks():
        asked = garbage_collector._is_asked_for(sys._getframe())
        return asked, gc.collect

    monkeypatch.setattr(gc, "get_threshold", lambda: (700, 10, 10))
    monkeypatch.setattr(gc, "get_count", lambda: (0, 0, 10))
    assert allocates()
    monkeypatch.setattr(gc, "get_count", lambda: (0, 0, 11))
    assert not allocates()
    assert asks()[0]
    gc.disable()
    try:
        assert allocates()
    finally:
        gc.enable()


def test_frames_of_callers_are_kept_by_nobody(heap, device):
    heap.begin(device)

    def collects():
        node = Node()
        node.itself = None
        gc.collect(2)
        return weakref.ref(node)

    assert collects()() is None


def test_a_heap_that_somebody_else_froze_is_neither_thawed_nor_gone_through(heap, device):
    old, theirs = [Node()], FrozenHeap()
    theirs.freeze()
    try:
        gone = dropped(old)
        heap.begin(device)
        heap.begin(device)
        heap.close()
        assert gone() is not None
        assert is_heap_frozen()
    finally:
        theirs.thaw()


def test_what_python_begins_with_is_frozen_by_nobody(monkeypatch):
    done = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)  # of Python 3.12
    monkeypatch.setattr(gc, "freeze", lambda: done.append("frozen"))
    with everything_in_sight():
        pass
    assert done == []
    FrozenHeap().freeze()
    assert done == ["frozen"]


def test_the_last_failure_is_let_go_of_before_a_test(heap, device):
    def fails():
        node = Node()
        raise ValueError(weakref.ref(node))

    try:
        fails()
    except ValueError as error:
        gone = error.args[0]
        sys.last_value = sys.last_exc = error
    heap.begin(device)
    assert gone() is None


def test_closing_takes_the_callback_away(heap, device):
    callbacks = list(gc.callbacks)
    heap.begin(device)
    assert len(gc.callbacks) == len(callbacks) + 1
    heap.close()
    assert gc.callbacks == callbacks
