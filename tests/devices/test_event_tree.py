"""From a profile's event tree to tokens: spans are open from their beginning to their end."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_gpumem.devices.event_tree import MARK_PREFIX, tokens_of
from pytest_gpumem.devices.events import AllocationEvent, Close, Open


class PassingOn(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def spans_of(run, told=None) -> tuple[list[tuple[str, ...]], int]:
    """The names of the spans around each allocation, and how many spans were left open."""
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True)
    profiler.start()
    try:
        run()
    finally:
        profiler.stop()
    around: list[tuple[str, ...]] = []
    open_spans: list[str] = []
    for token in tokens_of(profiler, "cpu", told):
        if isinstance(token, Open):
            open_spans.append(token.name or f"mark {token.mark}")
        elif isinstance(token, Close):
            open_spans.pop()
        elif isinstance(token, AllocationEvent) and token.nbytes > 0:
            around.append(tuple(open_spans))
    return around, len(open_spans)


def marked() -> None:
    with record_function(f"{MARK_PREFIX}0"):
        with record_function(f"{MARK_PREFIX}1"):
            torch.empty(100)
        torch.empty(100)
    torch.empty(100)


EXPECTED = [("mark 0", "mark 1", "aten::empty"), ("mark 0", "aten::empty"), ("aten::empty",)]


def test_an_allocation_is_within_the_marks_and_operators_around_it():
    assert spans_of(marked) == (EXPECTED, 0)


def test_a_mark_within_a_dispatch_mode_is_open_until_it_ends():
    def run() -> None:
        with PassingOn(), PassingOn():
            marked()

    around, left = spans_of(run)
    # A mode calls the operator once more.
    assert [tuple(dict.fromkeys(names)) for names in around] == EXPECTED
    assert left == 0


def test_a_mark_within_a_dispatch_mode_ends_with_the_operator_that_it_is_in():
    class Marks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            with PassingOn(), record_function(f"{MARK_PREFIX}0"):
                result = func(*args, **(kwargs or {}))
            return result

    def run() -> None:
        with Marks():
            one = torch.empty(100)
        one + torch.empty(100)

    around, left = spans_of(run)
    assert left == 0
    assert [tuple(dict.fromkeys(names)) for names in around] == [
        ("aten::empty", "mark 0"),
        ("aten::empty",),
        ("aten::add",),
    ]


def test_a_span_that_tells_tokens_is_replaced_by_them():
    def told(time_ns, name):
        if name == "made":
            yield AllocationEvent(time_ns, 7, 70)

    def run() -> None:
        with record_function(f"{MARK_PREFIX}0"), record_function("made"):
            pass

    assert spans_of(run, told) == ([("mark 0",)], 0)
