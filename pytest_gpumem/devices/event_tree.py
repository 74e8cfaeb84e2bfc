"""From the event tree of a profile to tokens: which operator, node or mark an allocation happened in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpumem.devices.events import AllocationEvent, Close, Open, Seen, Token

if TYPE_CHECKING:
    from torch.profiler import profile

MARK_PREFIX = "gpumem#"
"""A `torch.profiler.record_function` of this name and a number is a mark."""

_NODE = "autograd::engine::evaluate_function: "
_ENGINE = "torch::autograd::"


def tokens_of(profiler: profile, device_type: str) -> list[Token]:
    """What a stopped profiler recorded with ``profile_memory=True, record_shapes=True``, of one thread's operators.

    The tree is private to torch, as in `allocation_events`; the public views lose addresses, nesting and order.
    """
    recorded: Any = profiler.profiler
    tree = recorded.kineto_results.experimental_event_tree()
    tokens: list[Token] = []
    stack: list[Any] = sorted(tree, key=lambda event: event.start_time_ns, reverse=True)
    while stack:
        event = stack.pop()
        if isinstance(event, Close):
            tokens.append(event)
            continue
        kind = event.tag.name
        if kind == "Allocation":
            fields = event.extra_fields
            if fields.device.type == device_type:
                tokens.append(AllocationEvent(event.start_time_ns, fields.ptr, fields.alloc_size))
            continue
        if kind == "TorchOp":
            tokens.append(_opened(event))
            tokens.extend(_inputs(event.extra_fields.inputs))
            stack.append(Close(event.end_time_ns))
        stack.extend(reversed(event.children))
    return tokens


def _opened(event: Any) -> Open:
    name, sequence = event.name, event.extra_fields.sequence_number
    if name.startswith(MARK_PREFIX):
        return Open(event.start_time_ns, "mark", "", mark=int(name.removeprefix(MARK_PREFIX)))
    if name.startswith(_NODE):
        return Open(event.start_time_ns, "node", name.removeprefix(_NODE).removeprefix(_ENGINE), sequence)
    # What a node runs has its number, too, and is not what made it.
    backward = event.extra_fields.scope.name == "BACKWARD_FUNCTION"
    return Open(event.start_time_ns, "operator", name, -1 if backward else sequence)


def _inputs(inputs: list[Any]) -> list[Seen]:
    seen = []
    for value in inputs:
        for tensor in value if isinstance(value, list) else (value,):
            address = getattr(tensor, "storage_data_ptr", None)
            if address:
                seen.append(Seen(address, str(tensor.dtype).removeprefix("torch."), tuple(tensor.sizes)))
    return seen
