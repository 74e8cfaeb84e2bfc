"""A ledger of a device's memory, shared by all of a user's processes. Tests with known peaks run together if they fit.

Workers of a session share the ledger, and so do separate sessions. If a process dies, its reservation ends.

For example, a GPU has 80 GB. Worker A holds 2 GB between tests and runs a test that needs 30 GB, so its entry is
``Entry(2 GB, 30 GB, SHARES)``. Worker B holds 2 GB and wants to run a test of 50 GB. The total would be 84 GB, so B waits until
A's test has ended. A test of 40 GB would begin at once, because 74 GB fit.
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
"""The next test begins after this many seconds in any case, because a process that needs its memory for so long hangs or is in
a debugger."""
_SLOTS = 256
_SLOT = struct.Struct("<QQB47x")
# The processes lock the first byte of their slots, and these two bytes after the slots.
_MUTEX, _TURNSTILE = _SLOTS * _SLOT.size, _SLOTS * _SLOT.size + 1


class State(IntEnum):
    """A process's current use of a device."""

    RESTS = 1
    """The process runs no test on the device."""
    SHARES = 2
    """The process runs a test, and other processes may run tests at the same time."""
    ALONE = 3
    """The process runs a test that takes the whole device."""


class Entry(NamedTuple):
    """A process's share of a device: ``rest`` bytes between tests, and ``test`` additional bytes during a test."""

    rest: int
    test: int
    state: State

    @property
    def total(self) -> int:
        return self.rest + self.test


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory at a moment, in bytes. ``held`` is this process's part of the used memory.

    For example, ``DeviceMemory(total=80, free=50, held=10)`` shows 20 bytes in other processes.
    """

    total: int
    free: int
    held: int


class SharedMemory(Protocol):
    """A device's memory, which processes share."""

    ledger: MemoryLedger

    def now(self) -> DeviceMemory:
        """Return a reading of the memory."""
        ...

    def limit(self, most: int | None) -> None:
        """Limit this process to ``most`` bytes, including its CUDA context; ``None`` removes the limit."""
        ...

    def release(self) -> None:
        """Return the allocator's unused memory to the device."""
        ...

    def refusals(self) -> int:
        """Return how often memory has run out in this process, including errors that the program caught."""
        ...


def may_begin(request: Entry, entries: Iterable[Entry], read_memory: Callable[[], DeviceMemory]) -> bool:
    """Return whether a process may begin a test.

    If no other process runs a test, the test may begin, because waiting would free no memory. Beside tests that share the
    device, the test may begin if two sums fit in the total: all reservations, and the memory in use plus this reservation. The
    second sum accounts for programs without an entry in the ledger.

    For example, a test needs 30 GB on an 80 GB GPU. The other entries sum up to 40 GB, so the first sum is 70 GB and fits. But
    20 GB are free, this process holds none, and so 60 GB are in use. The second sum is 90 GB, and the test waits.

    Args:
        request: The entry that the process would write.
        entries: The entries of all other processes.
        read_memory: Reads the device's memory. Called only if other tests share the device.
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
    """The ledger of the device called ``name`` (a GPU's UUID), in ``folder`` (default: this user's folder).

    `enter` and `reserved` raise ``OSError`` if there can be no ledger: on Windows, or if the folder cannot be used.
    """

    def __init__(self, name: str, *, folder: Path | None = None) -> None:
        self._file_name = file_name_of(name, ".memory")
        self._folder = folder

    def enter(self, rest: int) -> None:
        """Enter this process with the ``rest`` bytes that it holds between tests. A second call does nothing."""
        self._of_this_process().enter(rest)

    def leave(self) -> None:
        """Remove this process's entry, unless it runs a test. The last process removes the file."""
        self._of_this_process().leave()

    @contextmanager
    def reserved(self, request: int | None, read_memory: Callable[[], DeviceMemory]) -> Iterator[Reservation]:
        """Wait until a test may begin, and reserve the device's memory until the context ends.

        Args:
            request: The test's bytes in addition to the process's ``rest``; ``None`` for the whole device.
            read_memory: Reads the device's memory. The process's bytes at the end of the context become its ``rest``.

        Yields:
            The reservation.
        """
        process = self._of_this_process()
        if process.runs_a_test:
            # A session within a test shares the test's reservation.
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
    """A running test's part of a device.

    ``needed`` is the test's bytes in addition to the process's ``rest``, or ``None`` for the whole device.
    """

    def __init__(self, process: _ProcessLedger, request: int | None, read_memory: Callable[[], DeviceMemory]) -> None:
        self._process = process
        self._read_memory = read_memory
        self.needed = request

    @property
    def limit(self) -> int | None:
        """The most bytes that the process may hold; ``None`` if the test has the whole device."""
        return None if self.needed is None else self._process.entry.total

    def take_all(self) -> None:
        """Exchange the reservation for the whole device. Tests of other processes may run in between."""
        if self.needed is not None:
            self.needed = None
            self._process.end(self._read_memory)
            self._process.begin(None, self._read_memory)


class _ProcessLedger:
    """A process's state of the ledger. All `MemoryLedger` objects share it, because record locks belong to a process."""

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
            # The first process in the queue waits for memory, and all others wait behind it. Many small tests cannot starve it.
            while not self._file.take(_TURNSTILE):
                time.sleep(SECONDS_BETWEEN_TRIES)
            deadline = time.monotonic() + MOST_SECONDS
            while not self._try_to_begin(self._file, entry, read_memory, in_any_case=time.monotonic() >= deadline):
                time.sleep(SECONDS_BETWEEN_TRIES)
        finally:
            self._file.free(_TURNSTILE)

    def end(self, read_memory: Callable[[], DeviceMemory]) -> None:
        # A child that was forked during a test has inherited this object, but no lock.
        if self._file is None or not self.runs_a_test or self._process != os.getpid():
            return
        held_bytes = self._held(read_memory)
        with self._alone_with_the_file(self._file) as file:
            self._write(file, Entry(held_bytes, 0, State.RESTS))

    def _held(self, read_memory: Callable[[], DeviceMemory]) -> int:
        try:
            return read_memory().held
        except RuntimeError:
            return self.entry.total  # after an illegal memory access the device answers no query and frees nothing

    def _try_to_begin(
        self, file: LockFile, entry: Entry, read_memory: Callable[[], DeviceMemory], *, in_any_case: bool
    ) -> bool:
        with self._alone_with_the_file(file):
            try:
                may = in_any_case or may_begin(entry, self._others(file), read_memory)
            except RuntimeError:
                may = True  # a process whose device answers no query cannot allocate on it either
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
                # The slot's process has ended.
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
"""Return the process's ledger. There is only one ledger, because closing a second file would free all locks of the process."""
