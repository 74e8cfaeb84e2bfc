"""A ledger in which a user's processes reserve memory on a device. Tests with known peaks run at the same time if they fit.

All workers and all sessions of a user share the ledger. If a process dies, its reservation ends.

For example, a GPU has 80 GB. Worker A holds 2 GB between tests and runs a test that needs 30 GB, so its entry is
``Entry(2 GB, 30 GB, SHARES)``. Worker B holds 2 GB, and its next test needs 50 GB. Both workers together would need 84 GB, so B
waits until A's test has ended. A test with 40 GB would begin at once, because 74 GB fit into 80 GB.
"""

from __future__ import annotations

import errno
import functools
import os
import struct
import time
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pytest_gpumem.measuring.devices.record_locks import SECONDS_BETWEEN_TRIES, LockFile, file_name_of, folder_of_user

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

MOST_SECONDS = 1800.0
"""The longest wait for memory, in seconds. Afterwards the test begins even if it may not fit.

A process that needs its memory for longer probably hangs or is in a debugger.
"""
_SLOTS = 256
_SLOT = struct.Struct("<QQB47x")
# A process locks the first byte of its slot for as long as it is in the ledger. It locks these two bytes only briefly.
_MUTEX, _TURNSTILE = _SLOTS * _SLOT.size, _SLOTS * _SLOT.size + 1


class State(IntEnum):
    """A process's current use of a device."""

    RESTS = 1
    """The process does not run a test on the device."""
    SHARES = 2
    """The process runs a test, and other processes may run tests at the same time."""
    ALONE = 3
    """The process runs a test alone on the device."""


class Entry(NamedTuple):
    """A process's reservation on a device: ``rest`` bytes at all times, and ``test`` additional bytes during a test."""

    rest: int
    test: int
    state: State

    @property
    def total(self) -> int:
        return self.rest + self.test


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's current memory in bytes. ``held`` is the memory that this process uses.

    For example, if ``DeviceMemory(total=80, free=50, held=10)``, other processes use 20 bytes.
    """

    total: int
    free: int
    held: int


class SharedMemory(Protocol):
    """A device's memory, which several processes share under ``--gpumem-pack``."""

    ledger: MemoryLedger

    def now(self) -> DeviceMemory:
        """Return the device's current memory."""
        ...

    def limit(self, most: int | None) -> None:
        """Limit this process to ``most`` bytes, including its CUDA context; ``None`` removes the limit."""
        ...

    def release(self) -> None:
        """Return the allocator's cached memory to the device, so other processes can use it."""
        ...

    def refusals(self) -> int:
        """Return how often this process has run out of memory, even if the program has caught the errors."""
        ...


def may_begin(request: Entry, entries: Iterable[Entry], read_memory: Callable[[], DeviceMemory]) -> bool:
    """Return whether a process may begin a test now.

    If no other process runs a test, the test may begin, because waiting would free no memory. If any of the running tests or
    this test needs the whole device, the test must wait. Otherwise the test may begin if two sums fit into the device's
    memory: the reservations of all processes, and the memory that other processes really use plus this reservation. The second
    sum includes programs that are not in the ledger.

    For example, a test needs 30 GB on a GPU with 80 GB. Other processes have reserved 40 GB, so the first sum is 70 GB, which
    fits. But they use 60 GB, so the second sum is 90 GB, and the test waits.

    Args:
        request: The process's entry if it begins the test.
        entries: The entries of all other processes.
        read_memory: Reads the device's memory. Called only if the second sum is needed.
    """
    other_entries = list(entries)
    running = [entry for entry in other_entries if entry.state is not State.RESTS]
    if not running:
        return True
    if State.ALONE in {request.state, *(entry.state for entry in running)}:
        return False
    memory = read_memory()
    reserved = sum(entry.total for entry in other_entries)
    return max(reserved, memory.total - memory.free - memory.held) + request.total <= memory.total


class MemoryLedger:
    """The ledger for the device called ``name`` (a GPU's UUID). It is a file in ``folder``, by default in this user's folder.

    `enter` and `reserved` raise ``OSError`` on Windows, or if the folder cannot be used.
    """

    def __init__(self, name: str, *, folder: Path | None = None) -> None:
        self._file_name = file_name_of(name, ".memory")
        self._folder = folder

    def enter(self, rest: int) -> None:
        """Add an entry for this process, which holds ``rest`` bytes between tests. If it has an entry already, do nothing."""
        self._of_this_process().enter(rest)

    def leave(self) -> None:
        """Remove this process's entry, unless the process runs a test. The last process in the ledger removes the file."""
        self._of_this_process().leave()

    @contextmanager
    def reserved(self, request: int | None, read_memory: Callable[[], DeviceMemory]) -> Iterator[Reservation]:
        """Wait until a test may begin, and reserve the device's memory until the context ends.

        Args:
            request: The bytes that the test needs in addition to the process's ``rest``; ``None`` for the whole device.
            read_memory: Reads the device's memory. When the context ends, the bytes that the process holds become its ``rest``.

        Yields:
            The reservation.
        """
        process = self._of_this_process()
        if process.runs_a_test:
            # This is a pytest session inside a test (``pytester``). It uses the reservation of the outer test.
            yield Reservation(process, None, read_memory)
            return
        try:
            process.begin(request, read_memory)
            yield Reservation(process, request, read_memory)
        finally:
            process.end(read_memory)

    def _of_this_process(self) -> _ProcessLedger:
        return _process_ledger(self._folder, self._file_name, os.getpid())


class Reservation:
    """The memory that a running test has reserved on a device.

    ``needed`` is the number of bytes in addition to the process's ``rest``, or ``None`` for the whole device.
    """

    def __init__(self, process: _ProcessLedger, request: int | None, read_memory: Callable[[], DeviceMemory]) -> None:
        self._process = process
        self._read_memory = read_memory
        self.needed = request

    @property
    def limit(self) -> int | None:
        """The limit in bytes for this process's memory on the device; ``None`` if the test has the whole device."""
        return None if self.needed is None else self._process.entry.total

    def take_all(self) -> None:
        """Reserve the whole device instead, because the test needs more memory than expected.

        The old reservation ends first, so other processes may run tests before this process has the whole device.
        """
        if self.needed is not None:
            self.needed = None
            self._process.end(self._read_memory)
            self._process.begin(None, self._read_memory)


class _ProcessLedger:
    """A ledger's state in this process. All `MemoryLedger` objects share it, because record locks belong to a process."""

    def __init__(self, folder: Path | None, file_name: str, process: int) -> None:
        self._folder = folder
        self._file_name = file_name
        self._process = process
        self._file: LockFile | None = None
        self._slot = 0
        self.entry = Entry(0, 0, State.RESTS)

    @property
    def runs_a_test(self) -> bool:
        return self.entry.state is not State.RESTS

    def enter(self, rest: int) -> None:
        while self._file is None:
            with self._alone_with_the_file(LockFile(self._folder or folder_of_user(), self._file_name)) as file:
                if not file.is_removed:
                    self._slot = self._claim_slot(file)
                    self._write(file, Entry(rest, 0, State.RESTS))
                    self._file = file
            if self._file is None:
                file.close()

    def leave(self) -> None:
        if self._file is None or self.runs_a_test or self._process != os.getpid():
            return
        with self._alone_with_the_file(self._file) as file:
            os.pwrite(file.descriptor, bytes(_SLOT.size), self._slot * _SLOT.size)
            if not self._others(file):
                file.remove()
        self._file = None
        file.close()

    def begin(self, request: int | None, read_memory: Callable[[], DeviceMemory]) -> None:
        held_bytes = self._held(read_memory)
        self.enter(held_bytes)
        entry = Entry(held_bytes, request or 0, State.ALONE if request is None else State.SHARES)
        assert self._file is not None, "enter() has opened the file"
        try:
            # Only the process with the turnstile waits for memory, and all others wait for the turnstile. So many small tests
            # cannot keep a large test waiting forever.
            while not self._file.take(_TURNSTILE):
                time.sleep(SECONDS_BETWEEN_TRIES)
            deadline = time.monotonic() + MOST_SECONDS
            while not self._try_to_begin(self._file, entry, read_memory, in_any_case=time.monotonic() >= deadline):
                time.sleep(SECONDS_BETWEEN_TRIES)
        finally:
            self._file.free(_TURNSTILE)

    def end(self, read_memory: Callable[[], DeviceMemory]) -> None:
        # A child process that was forked during a test has a copy of this object, but no locks.
        if self._file is None or not self.runs_a_test or self._process != os.getpid():
            return
        held_bytes = self._held(read_memory)
        with self._alone_with_the_file(self._file) as file:
            self._write(file, Entry(held_bytes, 0, State.RESTS))

    def _held(self, read_memory: Callable[[], DeviceMemory]) -> int:
        try:
            return read_memory().held
        except RuntimeError:
            return self.entry.total  # after an illegal memory access, CUDA neither reports nor frees memory

    def _try_to_begin(
        self, file: LockFile, entry: Entry, read_memory: Callable[[], DeviceMemory], *, in_any_case: bool
    ) -> bool:
        with self._alone_with_the_file(file):
            try:
                may = in_any_case or may_begin(entry, self._others(file), read_memory)
            except RuntimeError:
                may = True  # after an illegal memory access, this process can no longer allocate memory
            if may:
                self._write(file, entry)
            return may

    def _claim_slot(self, file: LockFile) -> int:
        for slot in range(_SLOTS):
            if file.take(slot * _SLOT.size):
                return slot
        raise OSError(errno.EUSERS, f"more than {_SLOTS} processes share this device")

    def _others(self, file: LockFile) -> list[Entry]:
        content = os.pread(file.descriptor, _SLOTS * _SLOT.size, 0)
        entries = []
        for slot in range(len(content) // _SLOT.size):
            rest, test, state = _SLOT.unpack_from(content, slot * _SLOT.size)
            if slot == self._slot or not state:
                continue
            if file.take(slot * _SLOT.size):
                # The lock was free, so the slot's process has ended.
                os.pwrite(file.descriptor, bytes(_SLOT.size), slot * _SLOT.size)
                file.free(slot * _SLOT.size)
            else:
                entries.append(Entry(rest, test, State(state)))
        return entries

    def _write(self, file: LockFile, entry: Entry) -> None:
        os.pwrite(file.descriptor, _SLOT.pack(*entry), self._slot * _SLOT.size)
        self.entry = entry

    @contextmanager
    def _alone_with_the_file(self, file: LockFile) -> Iterator[LockFile]:
        file.wait_for(_MUTEX)
        try:
            yield file
        finally:
            file.free(_MUTEX)


_process_ledger = functools.cache(_ProcessLedger)
"""Return the process's only `_ProcessLedger` for a file. Closing a second descriptor would free all its locks on the file."""
