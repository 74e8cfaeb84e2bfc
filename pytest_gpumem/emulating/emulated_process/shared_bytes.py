"""A file in which several processes publish the bytes of their tensors, so the highest sum of all processes is known.

Each process changes its bytes in the file at every allocation and every free, by the library
`native/allocation_counter.c`. The test's process publishes its own bytes as well, and reads the highest sum on each device.

Example:
    Two processes have peaks of 3 GB and 2 GB on a GPU. While the first has 3 GB, the second has 1 GB. The highest sum is 4 GB,
    and the sum of both peaks is 5 GB.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import MeasuringError
from pytest_gpumem.emulating.emulated_process.cuda_reports import CudaReports
from pytest_gpumem.emulating.emulated_process.marks import opened_if_own

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_NAME = "bytes"
_MOST_DEVICES = 64
_MOST_PROCESSES = 512
_PID_BITS = 22
"""Linux has no higher pids."""
_COUNTED, _CUDA, _PROFILED = range(3)
"""The sources of published bytes (``enum source`` in the library)."""
_OWN_SOURCES = {"cpu": (_PROFILED, "profiled_install"), "cuda": (_CUDA, "cuda_install")}
"""The source of the bytes in the test's process, and the function that begins to count them, by the device's type."""


def _loaded(library: str) -> ctypes.CDLL:
    loaded = ctypes.CDLL(library)
    loaded.shared_bytes.restype = ctypes.c_size_t
    loaded.shared_map.restype = ctypes.c_void_p
    loaded.shared_own.restype = ctypes.c_int64
    table, owner, array, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
    loaded.shared_unmap.argtypes = [table]
    loaded.shared_own.argtypes = [table, number]
    loaded.shared_publish.argtypes = [table, owner, array, number, number, number]
    loaded.shared_owners.argtypes = loaded.shared_restart.argtypes = [table, array]
    loaded.shared_remove.argtypes = [table, owner]
    return loaded


def _publish(
    library: ctypes.CDLL, table: int, owner: int, indices: Sequence[int], source: int, *, is_own: bool
) -> bool:
    """Publish this process's bytes. Return whether the table has room.

    Args:
        library: The library.
        table: The mapped file.
        owner: A number that identifies this process.
        indices: The machine's index of each device in this process.
        source: A source, for example `_CUDA`.
        is_own: Whether the file belongs to tests in this process.
    """
    in_machine = (ctypes.c_int32 * max(1, len(indices)))(*indices)
    return bool(library.shared_publish(table, owner, in_machine, len(indices), source, is_own))


class SharedBytes:
    """The file in the test's process. Without a C compiler or on other systems than Linux, there is no file."""

    def __init__(self, folder: Path) -> None:
        """Make the file in a folder that only this user can open."""
        self._table: int | None = None
        self._own: tuple[str, tuple[int, ...]] | None = None
        # Other processes get the library's path, and need no compiler.
        from pytest_gpumem.emulating.emulated_process.counter_library import counter_library

        library = counter_library()
        if isinstance(library, str):
            return
        with suppress(OSError):
            self._library = _loaded(str(library))
            self._table = self._made(folder)

    def _made(self, folder: Path) -> int | None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with opened_if_own(folder) as directory:
            file = os.open(_NAME, flags, mode=0o600, dir_fd=directory)
        try:
            # A write into a hole would end the process if the disk is full.
            os.posix_fallocate(file, 0, self._library.shared_bytes())
            table: int | None = self._library.shared_map(file)
            return table
        finally:
            os.close(file)

    def publish_own(self, device_type: str, indices: Sequence[int]) -> None:
        """Publish this process's bytes from now on, so the highest sum contains them. Further equal calls change nothing.

        Nothing is published if torch does not report its allocations. A session within a test publishes in its own file
        instead.

        Args:
            device_type: The devices' type in torch. For ``"cpu"``, the bytes are those that PyTorch's profiler records.
            indices: The machine's index of each device in this process.
        """
        requested = device_type, tuple(indices)
        if self._table is None or (requested == self._own and self.own(0) is not None):
            return
        self._own = requested
        self._library.shared_leave(1)
        source, install = _OWN_SOURCES.get(device_type, (None, ""))
        if source is not None and getattr(self._library, install)():
            _publish(self._library, self._table, os.getpid(), indices, source, is_own=True)

    def own(self, device: int) -> int | None:
        """Return the bytes that this process publishes on a device now; ``None`` if it publishes none.

        Args:
            device: The device's index in this process.
        """
        nbytes = -1 if self._table is None or device >= _MOST_DEVICES else self._library.shared_own(self._table, device)
        return None if nbytes < 0 else nbytes

    @contextmanager
    def own_paused(self) -> Iterator[None]:
        """Within the context, leave this process's published bytes as they are. Contexts may be nested."""
        if self._table is None:
            yield
            return
        self._library.shared_pause()
        try:
            yield
        finally:
            self._library.shared_resume()

    def remove_ended(self, is_running: Callable[[int, int], bool]) -> None:
        """Take the bytes of killed processes out of the sum.

        Args:
            is_running: Returns whether a process runs, from its pid and the time of its start.
        """
        if self._table is None:
            return
        owners = (ctypes.c_int64 * _MOST_PROCESSES)()
        self._library.shared_owners(self._table, owners)
        for owner in filter(None, owners):
            if not is_running(owner % (1 << _PID_BITS), owner >> _PID_BITS):
                self._library.shared_remove(self._table, owner)

    def restart(self) -> dict[int, int]:
        """Return the highest sum on each device since the last call, by the device's index in the machine.

        The next highest sum begins at the current sum. Devices without bytes are left out.
        """
        if self._table is None:
            return {}
        highest = (ctypes.c_int64 * _MOST_DEVICES)()
        self._library.shared_restart(self._table, highest)
        return {device: nbytes for device, nbytes in enumerate(highest) if nbytes}

    def close(self) -> None:
        """Stop to read. Processes that still run go on to publish."""
        if self._table is not None:
            self._library.shared_unmap(self._table)
            self._table = None


class PublishedBytes:
    """The bytes that this process publishes. It publishes none if the file or the library is missing."""

    def __init__(self, library: str | None, folder: Path, *, is_cuda: bool) -> None:
        """Look for the file. Nothing is published yet.

        Args:
            library: The path of the library; ``None`` without a C compiler.
            folder: The folder with the file.
            is_cuda: Whether to publish the bytes on CUDA devices. Otherwise those on the CPU, which `CpuStatistics` counts.
        """
        self._table: int | None = None
        self._cuda: CudaReports | None = None
        self._indices: Sequence[int] = ()
        self._is_cuda = is_cuda
        with suppress(OSError, AttributeError, MeasuringError):
            if library is not None:
                self._library = _loaded(library)
                self._cuda = CudaReports(library) if is_cuda else None
                self._table = self._mapped(folder)

    def _mapped(self, folder: Path) -> int | None:
        with opened_if_own(folder) as directory:
            file = os.open(_NAME, os.O_RDWR | os.O_NOFOLLOW, dir_fd=directory)
        try:
            is_whole = os.fstat(file).st_size >= self._library.shared_bytes()
            table: int | None = self._library.shared_map(file) if is_whole else None
            return table
        finally:
            os.close(file)

    def begin(self, started: int, indices: Sequence[int]) -> None:
        """Publish this process's bytes.

        Args:
            started: The time of this process's start (`ProcessIdentity.started`).
            indices: The machine's index of each device in this process.
        """
        if self._table is None or not started:
            return
        owner = (started << _PID_BITS) + os.getpid()
        source = _CUDA if self._is_cuda else _COUNTED
        if _publish(self._library, self._table, owner, indices, source, is_own=False):
            self._indices = indices[:_MOST_DEVICES]

    def end(self) -> None:
        """Take this process's bytes out of the file, because the process ends."""
        if self._indices:
            self._library.shared_leave(0)
            self._indices = ()

    def restart_peaks(self) -> None:
        """Begin new peaks for `live`. Call this before the allocator's own peaks begin again."""
        if self._cuda is not None:
            for device in range(len(self._indices)):
                self._cuda.restart_peak(device)

    def live(self, device: int, live: int, peak: int) -> int | None:
        """Return the published bytes on a device; ``None`` if nothing is published, or not everything.

        Args:
            device: The device's index in this process.
            live: The bytes on the CPU.
            peak: The peak of allocated bytes from the allocator's statistics. If the published bytes were never as high, the
                allocator does not report its allocations.
        """
        if device >= len(self._indices) or self._indices[device] >= _MOST_DEVICES:
            return None
        if self._cuda is None:
            return live
        published = self._cuda.read(device)
        return published.live if published.peak >= peak else None
