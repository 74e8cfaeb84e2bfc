"""Autograd's nodes as C++ objects: their numbers, their names, and the functions that create and find nodes.

In C++, an allocation can be attributed to the running node without Python. The places of a node's fields depend on the torch
release, so `node_functions` compares nodes in memory with what Python says about them.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import re
import sys
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from pytest_gpumem.torch_support.private_api.native_frames import symbol_at

_CURRENT_NODE = "_ZN5torch8autograd16get_current_nodeEv"
_THREAD = "_ZN2at14RecordFunction15currentThreadIdEv"
NEXT_NUMBER = "_ZN2at15sequence_number17get_and_incrementEv"
"""The C++ function ``at::sequence_number::get_and_increment``, which each node calls for its number."""
_POINTER_BYTES = 8
_REFERENCES = 8
"""The place of the number of references, in a node or in its owner."""
_TYPE = 8
_NAME = object.__basicsize__ + 8
"""The place of a type's name: after the head of a Python object with a length (``PyTypeObject.tp_name``)."""
_MOST_SECONDS = 10
_MOST_BYTES = 512
"""The place of the Python object is below this."""
_CLASS = re.compile(r"vtable for torch::autograd::(?:generated::)?(\w+)")


class _Layout(NamedTuple):
    number: int
    thread: int
    is_counted_in_node: bool


_LAYOUTS = (_Layout(16, 40, is_counted_in_node=True), _Layout(24, 48, is_counted_in_node=False))
"""torch 2.13 and 2.15 have the first layout (`c10::intrusive_ptr`), and torch 2.6 the second (`std::shared_ptr`)."""


class NodeFunctions(NamedTuple):
    """Addresses of C++ functions, and the places of fields in bytes."""

    current_node: int
    """Returns a reference to the node that this thread runs in backward."""
    thread: int
    """Returns torch's number for this thread."""
    next_number: int
    """Returns the number for a new node."""
    python_class: int
    """The C++ class of a `torch.autograd.Function`'s node."""
    number_at: int
    """In a node: its sequence number."""
    thread_at: int
    """In a node: torch's number for the thread that created it."""
    is_counted_in_node: int
    """1 if the node counts its references itself, 0 if its owner counts them."""
    object_at: int
    """In a `torch.autograd.Function`'s node: its Python object."""
    type_at: int
    """In a Python object: its type."""
    name_at: int
    """In a type: its name."""


@cache
def node_functions() -> NodeFunctions | None:
    """Return the functions and places in the installed torch. ``None`` if they are unknown.

    Two new threads create a few nodes without memory. So no mode of the calling thread is on, and its numbers do not change.
    """
    import torch

    if sys.platform != "linux":
        return None
    try:
        library = ctypes.CDLL(torch._C.__file__)
        current_node, thread, next_number = (getattr(library, name) for name in (_CURRENT_NODE, _THREAD, NEXT_NUMBER))
    except (OSError, AttributeError):
        return None
    thread.restype = ctypes.c_uint64
    seen: dict[int, tuple[int, ...]] = {}
    for _ in range(2):
        is_done = _thread.allocate_lock()
        is_done.acquire()
        with suppress(RuntimeError):  # the process has as many threads as it may have
            _thread.start_new_thread(_look, (torch, thread, seen, is_done))
            is_done.acquire(timeout=_MOST_SECONDS)
    if len(seen) < 2 or len(set(seen.values())) > 1:
        return None
    addresses = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in (current_node, thread, next_number))
    return NodeFunctions(*addresses, *next(iter(seen.values())))


def _look(torch: Any, thread: Any, seen: dict[int, tuple[int, ...]], is_done: _thread.LockType) -> None:
    """Look at nodes in this thread. An import here could wait for the import in which the calling thread is."""
    try:
        with suppress(Exception):  # another release may do anything
            # A wrong address is an error in this file, and not a crash.
            memory = os.open("/proc/self/mem", os.O_RDONLY)
            try:
                number = thread()
                (layout,) = (layout for layout in _LAYOUTS if _has_layout(torch, layout, memory, number))
                python_class, object_at = _python_node(torch, layout, memory, number)
                seen[number] = python_class, *map(int, layout), object_at, _TYPE, _NAME
            finally:
                os.close(memory)
    finally:
        is_done.release()


def _has_layout(torch: Any, layout: _Layout, memory: int, thread: int) -> bool:
    """Return whether nodes that this thread creates have their fields at the places in ``layout``."""
    results = [torch.empty(0, device="cpu", requires_grad=True).clone()]
    try:
        for _ in range(3):
            node: Any = results[-1].grad_fn
            # After the head of the Python object: the pointer to the node, and perhaps the pointer to its owner.
            address, owner = (_read(memory, id(node) + object.__basicsize__ + place) for place in (0, _POINTER_BYTES))
            counted = (address if layout.is_counted_in_node else owner) + _REFERENCES
            references = _read(memory, counted, 4)
            results.append(results[-1].clone())
            if not _is_node(address, node, layout, memory, thread):
                return False
            if _read(memory, counted, 4) != references + 1:  # by the next node
                return False
    except OSError:
        return False
    return True


def _is_node(address: int, node: Any, layout: _Layout, memory: int, thread: int) -> bool:
    fields = (_read(memory, address + layout.number), _read(memory, address + layout.thread))
    return fields == (node._sequence_nr(), thread)


def _python_node(torch: Any, layout: _Layout, memory: int, thread: int) -> tuple[int, int]:
    """Return the C++ class of a `torch.autograd.Function`'s node, and the place of the Python object in the node.

    Raises:
        ValueError: The node, its object or the name of its type is not found.
    """

    class Same(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(_: Any, tensor: Any) -> Any:
            return tensor.view_as(tensor)

    node: Any = Same.apply(torch.empty(0, device="cpu", requires_grad=True).clone()).grad_fn
    name = _read(memory, _read(memory, id(node) + _TYPE) + _NAME)
    if os.pread(memory, len("SameBackward\0"), name) != b"SameBackward\0":
        raise ValueError(name)
    for place in range(object.__basicsize__, type(node).__basicsize__, _POINTER_BYTES):
        address = _read(memory, id(node) + place)
        with suppress(OSError, OverflowError):
            if _is_node(address, node, layout, memory, thread):
                found = os.pread(memory, _MOST_BYTES, address)
                return _read(memory, address), found.index(id(node).to_bytes(_POINTER_BYTES, sys.byteorder))
    raise ValueError(place)


def _read(memory: int, address: int, nbytes: int = _POINTER_BYTES) -> int:
    return int.from_bytes(os.pread(memory, nbytes, address), sys.byteorder)


def node_name(class_address: int | None, python_name: bytes | None) -> str:
    """Return a running node's name: ``AddmmBackward0``. Empty for no node, or an unknown class.

    Args:
        class_address: The address of the C++ class, as in `NodeFunctions.python_class`.
        python_name: The name of the Python class. ``None`` for other nodes.
    """
    if python_name:
        return python_name.decode(errors="replace")
    match = _CLASS.fullmatch(symbol_at(class_address)[1]) if class_address else None
    return "" if match is None else match[1]
