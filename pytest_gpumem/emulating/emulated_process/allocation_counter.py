"""Count torch's allocations on the CPU in this process, by the library `native/allocation_counter.c`."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from pytest_gpumem.base.errors import MeasuringError

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
"""The library calls Python by these functions from Python's documented interface."""


class CpuBytes(NamedTuple):
    """torch's memory on the CPU in this process."""

    live: int
    """The bytes in tensors now."""
    peak: int
    """The largest `live` since the last restart."""
    allocations: int
    is_cut: int
    """1 if the history had no room for an entry."""


class AllocationCounter:
    """The counter. It counts after ``library.counter_install()``.

    Args:
        path: The path of the compiled library.

    Raises:
        MeasuringError: The library cannot be loaded. The message is a clause.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.library = ctypes.CDLL(path)
        except OSError as error:
            raise MeasuringError(f"the counter of allocations cannot be loaded: {error}") from None
        pointers = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p) for name in _PYTHON]
        self.is_prepared = bool(self.library.counter_prepare((ctypes.c_void_p * len(pointers))(*pointers)))

    def figures(self) -> CpuBytes:
        """Return the bytes on the CPU."""
        figures = (ctypes.c_int64 * 4)()
        self.library.counter_read(figures)
        return CpuBytes(*figures)

    def live_blocks(self) -> int:
        """Count the live blocks on the CPU."""
        counts = (ctypes.c_size_t * 2)()
        self.library.counter_copy(None, None, 0, counts)
        return counts[1]

    def stop_calls(self) -> None:
        """Call Python no more, because Python ends."""
        self.library.counter_stop_calls()
