"""Count torch's allocations on the CPU in this process, in all threads, and record their call stacks.

The library `native/allocation_counter.c` counts. Its bytes are those that PyTorch's profiler reports for a single thread,
except for memory that processes share: a block in shared memory is not counted.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.base.errors import MeasuringError
from pytest_gpumem.emulating.emulated_process.stacks import CREATED_NODE
from pytest_gpumem.torch_support.private_api.autograd_nodes import NEXT_NUMBER, NodeFunctions, node_functions, node_name
from pytest_gpumem.torch_support.private_api.native_frames import native_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from pytest_gpumem.emulating.emulated_process.workspaces import Workspaces

_TEST_BYTES = 4096
MOST_ENTRIES = 2**18
"""The most entries in a history. A tensor has two. An entry with 40 frames takes 0.7 kB."""
_ACTIONS = ("free_completed", "alloc", CREATED_NODE)
"""The entries' actions by the library's numbers for them."""
_BEGIN = ctypes.CFUNCTYPE(None)
_PYTHON = (
    "PyGILState_Ensure",
    "PyGILState_Release",
    "PyErr_Fetch",
    "PyErr_Restore",
    "PyEval_GetFrame",
    "PyFrame_GetBack",
    "PyFrame_GetCode",
    "PyFrame_GetLineNumber",
    "Py_IncRef",
    "Py_DecRef",
)
"""The library calls Python by these functions of Python's documented interface."""


class _Block(ctypes.Structure):
    _fields_ = (("address", ctypes.c_size_t), ("bytes", ctypes.c_int64))


class _Frame(ctypes.Structure):
    _fields_ = (("code", ctypes.py_object), ("line", ctypes.c_int64))


class _Node(ctypes.Structure):
    _fields_ = (
        ("thread", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
        ("class", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
    )


class _Event(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_size_t),
        ("bytes", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("note", ctypes.c_int64),
        ("node", _Node),
        ("depth", ctypes.c_int64),
        ("native_depth", ctypes.c_int64),
        ("frames", ctypes.POINTER(_Frame)),
        ("native", ctypes.POINTER(ctypes.c_size_t)),
    )


class _Autograd(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in NodeFunctions._fields)


class CpuStatistics:
    """The statistics of torch's allocator for the CPU in this process. A fork counts its own allocations."""

    device_type = "cpu"
    is_kept = True

    @property
    def own_history(self) -> CpuStatistics:
        """The history, which this object records itself."""
        return self

    def __init__(self, library: str) -> None:
        """Begin to count.

        torch uses a single intra-op thread from now on, as in the test's own process, because some kernels allocate memory for
        each thread. Otherwise bytes would depend on the number of cores.

        Args:
            library: The path of the compiled library.

        Raises:
            MeasuringError: The library does not count here. The message is a clause.
        """
        try:
            self._library = ctypes.CDLL(library)
            self._python = ctypes.PyDLL(library)
            """The same library, called with Python's lock."""
        except OSError as error:
            raise MeasuringError(f"the counter of allocations cannot be loaded: {error}") from None
        pointers = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p) for name in _PYTHON]
        self._library.counter_note.argtypes = [ctypes.c_int64]
        self._begin: Any = _BEGIN()
        self._notes = {"": 0}
        """The numbers that the library notes, by the texts of `note_on_allocations`."""
        torch.set_num_threads(1)
        is_found = self._library.counter_install((ctypes.c_void_p * len(pointers))(*pointers))
        self._library.counter_begin(None)  # a session within a measured process has forks that count for the session
        if not is_found or not self._counts():
            raise MeasuringError(
                f"torch {torch.__version__} allocates memory on the CPU by functions that cannot be counted"
            )

    def _counts(self) -> bool:
        """Return whether a test allocation is counted exactly."""
        before = self._read()
        storage = torch.UntypedStorage(_TEST_BYTES)  # type: ignore[no-untyped-call]
        during = self._read()
        del storage
        after = self._read()
        return (during[0] - before[0], during[2] - before[2], after[0] - before[0]) == (_TEST_BYTES, 1, 0)

    def when_it_begins(self, call: Callable[[], None]) -> None:
        """Call a function after this process's first allocation from now on, and after the first one in each fork."""
        self._begin = _BEGIN(call)
        self._library.counter_begin(self._begin)

    def stop_calls(self) -> None:
        """Call no function any more, because Python ends."""
        self._library.counter_stop_calls()

    def devices(self) -> range:
        """Return the devices' numbers. There is one CPU."""
        return range(1)

    def statistics(self, _device: int) -> Mapping[str, Any]:
        """Return statistics in the form of those that torch keeps for a GPU."""
        live, peak, allocations, _ = self._read()
        nbytes = {"all": {"current": live, "peak": peak}}
        return {
            "allocated_bytes": nbytes,
            "requested_bytes": nbytes,
            "active_bytes": nbytes,
            "allocation": {"all": {"allocated": allocations}},
        }

    def reset(self, _device: int) -> None:
        """Begin a new peak."""
        self._library.counter_restart_peak()

    def begin(self, _before_reset: Callable[[], None]) -> AbstractContextManager[object]:
        """Do nothing, because a program cannot reset this peak."""
        return nullcontext()

    def used(self, _reserved: Mapping[int, int]) -> list[int]:
        """Return the devices on which this process used memory."""
        return list(self.devices())

    def index_in_machine(self, device: int) -> int:
        """Return the device's number."""
        return device

    def retries(self, _device: int) -> int:
        """Return 0, because the allocator caches nothing."""
        return 0

    def workspaces(self) -> dict[int, Workspaces]:
        """Return nothing, because libraries' own memory on the CPU is not torch's."""
        return {}

    def _read(self) -> tuple[int, int, int, int]:
        figures = (ctypes.c_int64 * 4)()
        self._library.counter_read(figures)
        live, peak, allocations, is_cut = figures
        return live, peak, allocations, is_cut

    def lacking_history(self) -> None:
        """Return ``None``, because the history can always be recorded."""

    def before_history_changes(self, _call: Callable[[], None]) -> AbstractContextManager[object]:
        """Do nothing, because a program does not know this history."""
        return nullcontext()

    def start_history(self) -> None:
        """Start to record each allocation with its stack, each free, and each new node in autograd's graph."""
        functions = node_functions()
        if functions is not None:
            self._library.counter_watch_nodes(ctypes.byref(_Autograd(*functions)), NEXT_NUMBER.encode())
        self._python.counter_record(ctypes.c_size_t(MOST_ENTRIES))

    def stop_history(self) -> None:
        """Stop recording, and delete the history."""
        self._python.counter_stop_recording()

    def note_on_allocations(self, text: str) -> None:
        """Let the history show a text as ``user_metadata`` at each further allocation in this thread."""
        self._library.counter_note(self._notes.setdefault(text, len(self._notes)))

    def frees(self) -> list[int]:
        """Return the number of frees so far."""
        counts = (ctypes.c_size_t * 2)()
        self._library.counter_copy(None, None, 0, counts)
        return [self._read()[2] - counts[1]]

    def history(self) -> tuple[list[list[dict[str, Any]]], dict[int, dict[int, int]]] | str:
        """Return the entries in the form of torch's snapshots of GPUs, and each live block's bytes by address.

        If the history has no room for all entries, return a clause that says so.
        """
        counts = (ctypes.c_size_t * 2)()
        most = 0
        while not most or max(counts) > most:  # other threads may allocate in the meantime
            most = max(1, *counts) * 2
            events, alive = (_Event * most)(), (_Block * most)()
            self._library.counter_copy(events, alive, most, counts)
        if self._read()[3]:
            return f"the history has no room for more than {MOST_ENTRIES:,} entries"
        notes = {number: text for text, number in list(self._notes.items())}
        stacks: dict[bytes, list[dict[str, Any]]] = {}
        entries = [
            {
                "action": _ACTIONS[event.kind],
                "addr": event.address,
                "size": event.bytes,
                "frames": _frames_of(event, stacks),
                "user_metadata": notes.get(event.note, ""),
                "node": (event.node.thread, event.node.number),
                "node_name": node_name(getattr(event.node, "class"), event.node.name),
            }
            for event in events[: counts[0]]
        ]
        return [entries], {0: {block.address: block.bytes for block in alive[: counts[1]]}}


def _frames_of(event: _Event, stacks: dict[bytes, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return an entry's frames in the form of torch's snapshots. Equal stacks are a single list in ``stacks``."""
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
