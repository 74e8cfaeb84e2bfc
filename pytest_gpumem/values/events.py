"""Events of a recorded step: allocations and frees, among the operators and marks around them.

One contract for every source (the CPU's profiler, CUDA's allocator history, fake tensors). Tokens stand in the order in
which things happened, spans nest, and nothing here knows torch, so that a recording can be kept and read anywhere.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

SpanKind = Literal["operator", "node", "mark"]


NOWHERE = 0
"""The address of an allocation of 0 bytes that tells that memory ran out."""


class AllocationEvent(NamedTuple):
    """One allocation (``nbytes`` > 0) or free (``nbytes`` < 0) of a block of memory.

    One that is ``apart`` is another thread's: the operators, nodes and calls around it have nothing to do with it.
    """

    time_ns: int
    address: int
    nbytes: int
    apart: bool = False


class Open(NamedTuple):
    """The beginning of a span: an operator (``aten::addmm``), a node of the autograd graph that runs, or a mark of ours.

    ``sequence`` is autograd's number, which a node shares with the operator that made it; -1 for none. ``mark`` is the
    index of a mark; -1 for none.
    """

    time_ns: int
    kind: SpanKind
    name: str
    sequence: int = -1
    mark: int = -1


class Close(NamedTuple):
    """The end of the innermost open span."""

    time_ns: int


class Seen(NamedTuple):
    """A tensor that an operator took: what lies at an address, as ``float32`` and ``(8, 256)``."""

    address: int
    dtype: str
    shape: tuple[int, ...]


class Threads(NamedTuple):
    """The thread that an operator or a node ran on, and the one that made the node (0 for none), by torch's numbers."""

    ran: int
    made: int


Token = AllocationEvent | Open | Close | Seen
