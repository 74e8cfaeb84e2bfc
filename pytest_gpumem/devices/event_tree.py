"""From the event tree of a profile to tokens: which operator, node or mark an allocation happened in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpumem.torch_support.private_api import event_tree
from pytest_gpumem.values.events import AllocationEvent, Close, Open, Seen, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from pytest_gpumem.torch_support.private_api import Profile

MARK_PREFIX = "gpumem#"
"""A span of this name and a number is a mark."""

_NODE = "autograd::engine::evaluate_function: "
_ENGINE = "torch::autograd::"
# The call of a dispatch mode, since torch 2.8 or so: neither an operator nor a mark.
_DISPATCH_MODE = "PythonDispatchMode"


def tokens_of(
    profiler: Profile, device: torch.device, told: Callable[[int, str], Iterable[Token]] | None = None
) -> list[Token]:
    """What a stopped profiler recorded with ``profile_memory=True, record_shapes=True``, of one thread's operators.

    A source without allocations of its own tells them by names of spans: a span for whose time (in ns) and name ``told``
    gives tokens is replaced by them.

    The tree is private to torch, as in `allocation_events`; the public views lose addresses, nesting and order.
    """
    tokens: list[Token] = []
    stack: list[Any] = sorted(event_tree(profiler), key=lambda event: event.start_time_ns)[::-1]
    while stack:
        event = stack.pop()
        if isinstance(event, Close):
            tokens.append(event)
            continue
        kind = event.tag.name
        if kind == "Allocation":
            fields = event.extra_fields
            if fields.device.type == device.type and device.index in (None, fields.device.index):
                tokens.append(AllocationEvent(event.start_time_ns, fields.ptr, fields.alloc_size))
            continue
        if kind == "TorchOp" and event.name != _DISPATCH_MODE:
            instead = list(told(event.start_time_ns, event.name)) if told is not None else []
            if instead:
                tokens += instead
                continue
            if not _somebody_elses(event):
                tokens.append(_opened(event))
                tokens.extend(_inputs(event.extra_fields.inputs))
                stack.append(Close(event.end_time_ns))
        stack.extend(reversed(event.children))
    return tokens


def _somebody_elses(event: Any) -> bool:
    """Whether it is a `record_function` of the measured code, or of an optimizer: a name, and no operator."""
    return event.extra_fields.scope.name == "USER_SCOPE" and not event.name.startswith(MARK_PREFIX)


def _opened(event: Any) -> Open:
    name, sequence = event.name, event.extra_fields.sequence_number
    if name.startswith(MARK_PREFIX):
        return Open(event.start_time_ns, "mark", "", mark=int(name.removeprefix(MARK_PREFIX)))
    if name.startswith(_NODE):
        return Open(event.start_time_ns, "node", name.removeprefix(_NODE).removeprefix(_ENGINE), _sequence_of(event))
    # What a node runs has its number, too, and is not what made it.
    return Open(event.start_time_ns, "operator", name, -1 if _is_backward(event) else sequence)


def _sequence_of(node: Any) -> int:
    """The number of a node. It is that of its function, which torch only looks for right after the node's beginning."""
    functions = (child for child in node.children if child.tag.name == "TorchOp" and _is_backward(child))
    function = next(functions, node)
    return int(function.extra_fields.sequence_number)


def _is_backward(event: Any) -> bool:
    return bool(event.extra_fields.scope.name == "BACKWARD_FUNCTION")


def _inputs(inputs: list[Any]) -> list[Seen]:
    seen = []
    for value in inputs:
        for tensor in value if isinstance(value, list) else (value,):
            address = getattr(tensor, "storage_data_ptr", None)
            if address:
                seen.append(Seen(address, str(tensor.dtype).removeprefix("torch."), tuple(tensor.sizes)))
    return seen
