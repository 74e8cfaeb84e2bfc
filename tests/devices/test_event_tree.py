"""From a profile's event tree to tokens: spans are open from their beginning to their end."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_gpumem.devices.event_tree import MARK_PREFIX, tokens_of
from pytest_gpumem.devices.events import AllocationEvent, Close, Open
from pytest_gpumem.devices.torch_internals import span


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
    with span(f"{MARK_PREFIX}0"):
        with span(f"{MARK_PREFIX}1"):
            torch.empty(100)
        torch.empty(100)
    torch.empty(100)


EXPECTED = [("mark 0", "mark 1", "aten::empty"), ("mark 0", "aten::empty"), ("aten::empty",)]


def test_an_allocation_is_within_the_marks_and_operators_around_it():
    assert spans_of(marked) == (EXPECTED, 0)


def test_a_dispatch_mode_is_no_span_and_ends_no_mark():
    def run() -> None:
        with PassingOn(), PassingOn():
            marked()

    around, left = spans_of(run)
    # A mode calls the operator once more.
    assert [tuple(dict.fromkeys(names)) for names in around] == EXPECTED
    assert left == 0


def test_a_node_has_the_number_of_its_function_also_where_a_hook_comes_first():
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2

    def run(hooked: bool) -> list[tuple[str, str | None]]:
        leaf = torch.ones(3, requires_grad=True)
        profiler = profile(activities=[ProfilerActivity.CPU])
        profiler.start()
        product = leaf.exp()
        if hooked:
            product.register_hook(hook)
        product.sum().backward()
        profiler.stop()
        tokens = [token for token in tokens_of(profiler, "cpu") if isinstance(token, Open)]
        made = {token.sequence: token.name for token in tokens if token.kind == "operator" and token.sequence >= 0}
        return [(token.name, made.get(token.sequence)) for token in tokens if token.kind == "node"]

    assert run(hooked=True) == run(hooked=False)
    assert ("ExpBackward0", "aten::exp") in run(hooked=True)


def test_a_span_that_tells_tokens_is_replaced_by_them():
    def told(time_ns, name):
        if name == "made":
            yield AllocationEvent(time_ns, 7, 70)

    def run() -> None:
        with span(f"{MARK_PREFIX}0"), span("made"):
            pass

    assert spans_of(run, told) == ([("mark 0",)], 0)
