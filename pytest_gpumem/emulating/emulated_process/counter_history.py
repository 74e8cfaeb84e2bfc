"""Record a history by the library `native/allocation_counter.c`: allocations, frees, and new nodes in autograd's graph.

An entry has the same form as in torch's snapshots, and further keys. At an allocation, ``node`` is autograd's running node as a
pair of thread and number, ``node_name`` is its name, and ``tensor`` is the `NewTensor` for which memory is allocated. An entry
with the action `CREATED_NODE` has a new ``node``.

Example: forward creates the node ``(1, 7)`` at line 30 in the module ``blocks.0.up``. When backward runs this node, its
allocations have the same pair, so they belong to this line and this module.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import Counter, defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_gpumem.emulating.emulated_process.stacks import CREATED_NODE
from pytest_gpumem.torch_support.private_api.autograd import backward_runs
from pytest_gpumem.torch_support.private_api.autograd_nodes import (
    NEXT_NUMBER,
    NodeFunctions,
    node_functions,
    node_name,
)
from pytest_gpumem.torch_support.private_api.dispatch import beneath_modes
from pytest_gpumem.torch_support.private_api.native_frames import native_frame
from pytest_gpumem.torch_support.private_api.tensor_creation import (
    CREATION_FUNCTIONS,
    creation_functions,
    new_tensor,
    tensors_without_memory,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pytest_gpumem.emulating.emulated_process.allocation_counter import AllocationCounter
    from pytest_gpumem.torch_support.private_api.tensor_creation import NewTensor

BEGAN_BACKWARD, ENDED_BACKWARD = "began backward", "ended backward"
_ACTIONS = ("free_completed", "alloc", CREATED_NODE, BEGAN_BACKWARD, ENDED_BACKWARD)
"""The entries' actions by the library's numbers for them."""


class _Block(ctypes.Structure):
    _fields_ = (("address", ctypes.c_size_t), ("bytes", ctypes.c_int64))


class _Frame(ctypes.Structure):
    _fields_ = (("code", ctypes.py_object), ("line", ctypes.c_int64))


class _Node(ctypes.Structure):
    _fields_ = (
        ("thread", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
        ("class_address", ctypes.c_void_p),
        ("python_name", ctypes.c_char_p),
    )


class _Event(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_size_t),
        ("bytes", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("device", ctypes.c_int64),
        ("note", ctypes.c_int64),
        ("node", _Node),
        ("depth", ctypes.c_int64),
        ("native_depth", ctypes.c_int64),
        ("frames", ctypes.POINTER(_Frame)),
        ("native", ctypes.POINTER(ctypes.c_size_t)),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
    )


class _Autograd(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in NodeFunctions._fields)


class CounterHistory:
    """The history that the library of a counter records in this process."""

    def __init__(self, counter: AllocationCounter) -> None:
        self._counter = counter
        self._library = counter.library
        self._library.counter_note.argtypes = [ctypes.c_int64]
        self._with_lock = ctypes.PyDLL(counter.path)
        """The same library, called with Python's lock."""
        self._passes = itertools.count()
        self.knows_passes = True
        """False if a backward pass already ran when the recording started."""
        self._notes = {"": 0}
        """The noted numbers, by the texts in `note`."""

    def start(self, most_entries: int) -> None:
        """Start a new recording with room for ``most_entries``. Unknown nodes and tensors are left out."""
        functions = node_functions()
        if functions is not None:
            self._library.counter_watch_nodes(ctypes.byref(_Autograd(*functions)), NEXT_NUMBER.encode())
        addresses = creation_functions()
        if addresses is not None:
            names = [name.encode() for name in CREATION_FUNCTIONS]
            self._library.counter_watch_tensors((ctypes.c_void_p * 2)(*addresses), (ctypes.c_char_p * 2)(*names))
            if self._sees_tensors():
                self._library.counter_trust_shapes()
        self._with_lock.counter_record(ctypes.c_size_t(most_entries))
        self.knows_passes = not backward_runs()

    def _sees_tensors(self) -> bool:
        """Return whether the dtypes and shapes of test tensors are seen correctly."""
        seen = (ctypes.c_int64 * 3)()
        self._library.counter_test_shapes(seen)
        try:
            with beneath_modes():  # the program's modes must not see these tensors
                return all(new_tensor(seen[0], seen[1:]) == tensor for tensor in tensors_without_memory())
        except Exception:  # noqa: BLE001 -- the program may change how torch creates tensors
            return False
        finally:
            self._library.counter_test_shapes(None)

    def stop(self) -> None:
        """Stop recording. The history stays, because another thread may read it."""
        self._library.counter_stop_recording()

    def delete(self) -> None:
        """Stop recording, and delete the history. Nobody may read it meanwhile."""
        self._with_lock.counter_delete_history()

    def stop_calls(self) -> None:
        """Call Python no more, because it ends."""
        self._counter.stop_calls()

    def note(self, text: str) -> None:
        """Let the history show a text as ``user_metadata`` at each further entry from this thread."""
        self._library.counter_note(self._notes.setdefault(text, len(self._notes)))

    @contextmanager
    def backward(self, _roots: object = None) -> Iterator[None]:
        """Note that this thread runs a backward pass. Autograd runs the nodes of GPUs in other threads, without Python code."""
        number = ctypes.c_size_t(next(self._passes))
        self._note_backward(BEGAN_BACKWARD, number)
        try:
            yield
        finally:
            self._note_backward(ENDED_BACKWARD, number)

    def _note_backward(self, action: str, number: ctypes.c_size_t) -> None:
        self._with_lock.counter_note_backward(ctypes.c_int64(_ACTIONS.index(action)), number)

    def recorded(self) -> tuple[list[dict[str, Any]], dict[int, int]] | None:
        """Return all entries, and the bytes of each live block on the CPU by address. ``None`` if the history lacks entries."""
        counts = (ctypes.c_size_t * 2)()
        most = 0
        while not most or max(counts) > most:  # other threads may allocate in the meantime
            most = max(1, *counts) * 2
            events, alive = (_Event * most)(), (_Block * most)()
            self._library.counter_copy(events, alive, most, counts)
        if self._counter.figures().is_cut:
            return None
        notes = {number: text for text, number in list(self._notes.items())}
        stacks: dict[bytes, list[dict[str, Any]]] = {}
        tensors: dict[tuple[int, ...], NewTensor | None] = {}
        entries = [
            {
                "action": _ACTIONS[event.kind],
                "addr": event.address,
                "size": event.bytes,
                "device": event.device,
                "frames": _frames_of(event, stacks),
                "user_metadata": notes.get(event.note, ""),
                "node": (event.node.thread, event.node.number),
                "node_name": node_name(event.node.class_address, event.node.python_name),
                "tensor": _tensor_of(event, tensors),
            }
            for event in events[: counts[0]]
        ]
        return with_backward_calls(entries, knows_passes=self.knows_passes), {
            block.address: block.bytes for block in alive[: counts[1]]
        }


def _frames_of(event: _Event, stacks: dict[bytes, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return an entry's frames as in torch's snapshots. Equal stacks are a single list in ``stacks``."""
    depth, native_depth = event.depth, event.native_depth
    if not depth and not native_depth:
        return []
    nbytes = depth * ctypes.sizeof(_Frame) + native_depth * ctypes.sizeof(ctypes.c_size_t)
    key = depth.to_bytes(1, "big") + ctypes.string_at(event.frames, nbytes)
    if key not in stacks:
        stacks[key] = [native_frame(address) for address in event.native[:native_depth]] + [
            {"filename": frame.code.co_filename, "line": frame.line, "name": frame.code.co_name}
            for frame in event.frames[:depth]
        ]
    return stacks[key]


def _tensor_of(event: _Event, tensors: dict[tuple[int, ...], NewTensor | None]) -> NewTensor | None:
    """Return the tensor for which an entry allocated memory. Equal tensors are a single value in ``tensors``."""
    if not event.shape:
        return None
    dtype, dims = event.shape[:2]
    key = (dtype, *event.shape[2 : 2 + dims])
    if key not in tensors:
        tensors[key] = new_tensor(dtype, key[1:])
    return tensors[key]


def with_backward_calls(entries: Iterable[dict[str, Any]], *, knows_passes: bool = True) -> list[dict[str, Any]]:
    """Return the entries without the begins and ends of backward passes.

    If backward creates a node (``create_graph=True``) in a thread without Python code, the node gets the stack of the call that
    began the backward pass. In a thread without a note, it gets the call's note. If several passes run at this time, the node
    stays as it is.

    Args:
        entries: The history's entries.
        knows_passes: False if passes began before the history. Then all nodes stay as they are.
    """
    passes: dict[int, dict[str, Any]] = {}
    kept = []
    for entry in entries:
        if entry["action"] == BEGAN_BACKWARD:
            passes[entry["addr"]] = entry
        elif entry["action"] == ENDED_BACKWARD:
            passes.pop(entry["addr"], None)
        elif entry["action"] == CREATED_NODE and entry["addr"] and knows_passes and len(passes) == 1:
            (call,) = passes.values()
            kept.append({**entry, **{key: entry[key] or call[key] for key in ("frames", "user_metadata")}})
        else:
            kept.append(entry)
    return kept


_FURTHER_KEYS = ("node", "node_name", "tensor")
"""The keys that torch's entries do not have."""


def joined_traces(
    traces: Sequence[Sequence[Mapping[str, Any]]], entries: Iterable[Mapping[str, Any]]
) -> list[list[Mapping[str, Any]]]:
    """Return torch's entries for each GPU with nodes and tensors from this library's entries, and the entries for new nodes.

    Both histories have the same allocations in the same order. If another thread allocated while they began or ended, only one
    of them has its block. So an address gets no nodes and tensors if the numbers differ.
    """
    noted: defaultdict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    created = []
    for entry in entries:
        if entry["action"] == CREATED_NODE:
            created.append(entry)
        else:
            noted[entry["device"], entry["addr"]].append({key: entry[key] for key in _FURTHER_KEYS})
    joined = []
    for device, trace in enumerate(traces):
        counts = Counter(entry["addr"] for entry in trace if entry["action"] == "alloc")
        matching = {
            address: iter(noted[device, address])
            for address, count in counts.items()
            if len(noted[device, address]) == count
        }
        further = (
            next(matching.get(entry["addr"], iter(())), {}) if entry["action"] == "alloc" else {} for entry in trace
        )
        joined.append([{**entry, **fields} for entry, fields in zip(trace, further, strict=True)] + created)
    return joined
