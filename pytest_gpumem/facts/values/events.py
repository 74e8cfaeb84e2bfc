"""Events of a recorded step: allocations and frees, and the operators and marks around them.

The CPU's profiler, CUDA's allocator history, and fake tensors all produce these events. They have the order in which they
happened, and spans nest. The module does not use torch, so a recording can be stored and read anywhere.

Example: ``a @ b`` is ``SpanBegin(100, "operator", "aten::mm")``, ``AllocationEvent(120, 0x7f10, 4096)`` and ``SpanEnd(180)``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

SpanKind = Literal["operator", "node", "mark"]


NOWHERE = 0
"""The address in an allocation with 0 bytes, which marks the moment when memory ran out."""


class AllocationEvent(NamedTuple):
    """A block's allocation (``nbytes`` > 0) or free (``nbytes`` < 0).

    An event with ``from_other_thread`` comes from another thread, so the operators, nodes and calls around it did not cause it.
    """

    time_ns: int
    address: int
    nbytes: int
    from_other_thread: bool = False


class SpanBegin(NamedTuple):
    """The beginning of a span: an operator (``aten::addmm``), a running autograd node, or a mark from this package.

    ``sequence`` is autograd's number, which a node shares with its operator; -1 without a number. ``mark`` is
    the index of a mark; -1 for other spans.
    """

    time_ns: int
    kind: SpanKind
    name: str
    sequence: int = -1
    mark: int = -1


class SpanEnd(NamedTuple):
    """The end of the innermost open span."""

    time_ns: int


class TensorRecord(NamedTuple):
    """A tensor that an operator took as an argument: its address, dtype (``float32``) and shape (``(8, 256)``)."""

    address: int
    dtype: str
    shape: tuple[int, ...]


class Threads(NamedTuple):
    """The thread that ran an operator or a node, and the thread that made the node (0 for operators), by torch's numbers."""

    run_by: int
    made_by: int


Token = AllocationEvent | SpanBegin | SpanEnd | TensorRecord
