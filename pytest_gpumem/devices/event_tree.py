"""From the event tree of a profile to tokens: which operator, node or mark an allocation happened in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.devices.events import AllocationEvent, Close, Open, Seen, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.profiler import profile

MARK_PREFIX = "gpumem#"
"""A span of this name and a number is a mark."""

_NODE = "autograd::engine::evaluate_function: "
_ENGINE = "torch::autograd::"
# The call of a dispatch mode, since torch 2.8 or so: neither an operator nor a mark.
_DISPATCH_MODE = "PythonDispatchMode"


def tokens_of(
    profiler: profile, device_type: str, told: Callable[[int, str], Iterable[Token]] | None = None
) -> list[Token]:
    """What a stopped profiler recorded with ``profile_memory=True, record_shapes=True``, of one thread's operators.

    A source without allocations of its own tells them by names of spans: a span for whose time (in ns) and name ``told``
    gives tokens is replaced by them.

    The tree is private to torch, as in `allocation_events`; the public views lose addresses, nesting and order.
    """
    recorded: Any = profiler.profiler
    tree = recorded.kineto_results.experimental_event_tree()
    tokens: list[Token] = []
    spans = _OpenSpans(tokens)
    stack: list[Any] = sorted(tree, key=lambda event: event.start_time_ns, reverse=True)
    while stack:
        event = stack.pop()
        if isinstance(event, _End):
            spans.end(event)
            continue
        kind = event.tag.name
        spans.close_until(event.start_time_ns)
        if kind == "Allocation":
            fields = event.extra_fields
            if fields.device.type == device_type:
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
                stack.append(spans.begin(event))
        stack.extend(reversed(event.children))
    spans.close_all()
    return tokens


@dataclass(eq=False, slots=True)
class _End:
    """The end of a span in the tree. ``late``: the span goes on when the tree has ended it."""

    time_ns: int
    late: bool


class _OpenSpans:
    """The spans that are open, which is more than the tree says.

    A span that Python begins in a dispatch mode's call is within that call, and so the tree ends it with the call.
    """

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._open: list[_End] = []

    def begin(self, event: Any) -> _End:
        around = event.parent
        late = around is not None and around.name == _DISPATCH_MODE and around.end_time_ns < event.end_time_ns
        end = _End(event.end_time_ns, late)
        self._open.append(end)
        return end

    def end(self, end: _End) -> None:
        """The tree ends a span, and with it what is within."""
        if not end.late:
            while self._close() is not end:
                pass

    def close_until(self, time_ns: int) -> None:
        while self._open and self._open[-1].late and self._open[-1].time_ns <= time_ns:
            self._close()

    def close_all(self) -> None:
        while self._open:
            self._close()

    def _close(self) -> _End:
        end = self._open.pop()
        self._tokens.append(Close(end.time_ns))
        return end


def _somebody_elses(event: Any) -> bool:
    """Whether it is a `record_function` of the measured code, or of an optimizer: a name, and no operator."""
    return event.extra_fields.scope.name == "USER_SCOPE" and not event.name.startswith(MARK_PREFIX)


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
