"""Count torch's allocations on CUDA devices in this process as they happen, in the allocating thread.

The library `native/allocation_counter.c` counts. torch's statistics have the same bytes, but nobody can read them at each
allocation without Python.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from pytest_gpumem.base.errors import MeasuringError


class CudaBytes(NamedTuple):
    """A CUDA device's memory in this process."""

    live: int
    """The allocated bytes in tensors now, after rounding to blocks."""
    peak: int
    """The largest `live` since the last `CudaReports.restart_peak`."""
    allocations: int


class CudaReports:
    """The reports of torch's caching allocator for CUDA. Other allocators do not report, so everything stays 0."""

    def __init__(self, library: str) -> None:
        """Begin to count. CUDA is not initialized.

        Args:
            library: The path of the compiled library (`counter_library.counter_library`).

        Raises:
            MeasuringError: The library does not count here. The message is a clause.
        """
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise MeasuringError(f"the counter of allocations cannot be loaded: {error}") from None
        if not self._library.cuda_install():
            raise MeasuringError("torch's CUDA allocator does not report its allocations")

    def read(self, device: int) -> CudaBytes:
        """Return a device's bytes. ``device`` is its index in this process."""
        figures = (ctypes.c_int64 * 3)()
        self._library.cuda_read(device, figures)
        return CudaBytes(*figures)

    def restart_peak(self, device: int) -> None:
        """Begin a new peak at the live bytes."""
        self._library.cuda_restart_peak(device)
