"""Events in a recorded step: memory blocks were allocated or freed, and operators or autograd nodes began or ended.

The events come from PyTorch's profiler, and on CUDA also from the allocator's history. A recording lists its events in the
order in which they happened, and spans are nested. This module does not import torch, so a recording can be stored and read on
a machine without torch.

Example: ``a @ b`` is ``SpanBegin(100, "operator", "aten::mm")``, ``AllocationEvent(120, 0x7f10, 4096)`` and ``SpanEnd(180)``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

SpanKind = Literal["operator", "node", "mark"]


NOWHERE = 0
"""A failed allocation's address. If memory runs out, the recording has an allocation with 0 bytes at this address."""


class AllocationEvent(NamedTuple):
    """A memory block was allocated (``nbytes`` > 0) or freed (``nbytes`` < 0).

    If ``from_other_thread`` is true, another thread allocated or freed the block, and the spans around this event did not
    cause it.
    """

    time_ns: int
    address: int
    nbytes: int
    from_other_thread: bool = False


class SpanBegin(NamedTuple):
    """A span begins: an operator (``aten::addmm``), an autograd node, or a mark.

    A mark is a span of Python code that this package labels, such as a phase or a module call.

    ``sequence`` is autograd's sequence number, or -1 if there is none. A forward operator and the autograd node that it created
    have the same sequence number. ``mark`` is the mark's index in the recording, or -1 for operators and nodes.
    """

    time_ns: int
    kind: SpanKind
    name: str
    sequence: int = -1
    mark: int = -1


class SpanEnd(NamedTuple):
    """The innermost open span ends."""

    time_ns: int


class TensorRecord(NamedTuple):
    """An operator's tensor argument: the address, dtype (``float32``) and shape (``(8, 256)``)."""

    address: int
    dtype: str
    shape: tuple[int, ...]


class Threads(NamedTuple):
    """Two threads, by torch's numbers: the thread that ran an operator or a node, and the thread that created the node.

    ``made_by`` is 0 for operators.
    """

    run_by: int
    made_by: int


Token = AllocationEvent | SpanBegin | SpanEnd | TensorRecord
