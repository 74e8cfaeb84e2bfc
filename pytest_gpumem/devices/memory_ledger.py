"""A ledger of a device's memory, among all processes of a user: tests whose peaks are known share it as far as they fit.

Between processes: workers of one session, and sessions. What a process that died had reserved is given back.
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

from pytest_gpumem.devices.record_locks import SECONDS_BETWEEN_TRIES, LockFile, file_name_of, folder_of_user

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

MOST_SECONDS = 1800.0
"""The test whose turn it is begins after so many seconds in any case: whoever has the memory hangs, or is in a debugger."""
_SLOTS = 256
_SLOT = struct.Struct("<QQB47x")
# Bytes that are locked, behind those of the slots: a slot's first byte is its process's.
_MUTEX, _TURNSTILE = _SLOTS * _SLOT.size, _SLOTS * _SLOT.size + 1


class State(IntEnum):
    """The use that a process makes of a device."""

    RESTS = 1
    """Running no test that needs the device's memory."""
    SHARES = 2
    """Running a test beside others."""
    ALONE = 3
    """Running a test that takes the whole device."""


class Entry(NamedTuple):
    """The share that one process has of a device: ``rest`` bytes also between tests, and ``test`` more while one runs."""

    rest: int
    test: int
    state: State

    @property
    def total(self) -> int:
        return self.rest + self.test


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory now, in bytes: ``held`` is this process's part of what is not ``free``."""

    total: int
    free: int
    held: int


class SharedMemory(Protocol):
    """The memory of a device that processes share."""

    ledger: MemoryLedger

    def now(self) -> DeviceMemory:
        """Return the memory as it is now."""
        ...

    def limit(self, most: int | None) -> None:
        """Let this process hold at most ``most`` bytes, its context included, from now on; ``None`` for no limit."""
        ...

    def release(self) -> None:
        """Give back what the allocator keeps without a need."""
        ...

    def refusals(self) -> int:
        """Return how often memory has run out in this process, whoever caught the error."""
        ...


def may_begin(wanted: Entry, others: Iterable[Entry], now: Callable[[], DeviceMemory]) -> bool:
    """Return whether a process may begin a test, given the entries of the ``others``.

    It may if no other runs one: nothing that it could wait for will be given back. Beside others that share, it may if what
    all have reserved fits, and what is not free now would leave room for it, too: programs that have no entry hold memory.
    """
    everyone = list(others)
    running = [other for other in everyone if other.state is not State.RESTS]
    if not running:
        return True
    if State.ALONE in {wanted.state, *(other.state for other in running)}:
        return False
    memory = now()
    reserved = sum(other.total for other in everyone)
    return max(reserved, memory.total - memory.free - memory.held) + wanted.total <= memory.total


class MemoryLedger:
    """The ledger of the device called ``name`` (a GPU's UUID), in ``folder`` (default: this user's).

    Raises ``OSError`` from `enter` where there can be none: on Windows, or where the folder cannot be used.
    """

    def __init__(self, name: str, *, folder: Path | None = None) -> None:
        self._file_name = file_name_of(name, ".memory")
        self._folder = folder

    def enter(self, rest: int) -> None:
        """Enter this process with the ``rest`` that it holds between tests. Twice does nothing more."""
        self._of_this_process().enter(rest)

    def leave(self) -> None:
        """Take this process out, unless it runs a test; the last one removes the file."""
        self._of_this_process().leave()

    @contextmanager
    def reserved(self, wanted: int | None, now: Callable[[], DeviceMemory]) -> Iterator[Reservation]:
        """Wait until a test may begin, and reserve the device's memory for it within.

        Args:
            wanted: Bytes that the test needs beside what the process holds; ``None`` for the whole device.
            now: Reads the device's memory. When the region ends, what the process still holds becomes its rest.
        """
        process = self._of_this_process()
        if process.runs_a_test:
            # A session within a test has what its test has.
            yield Reservation(process, None, now)
            return
        try:
            process.begin(wanted, now)
            yield Reservation(process, wanted, now)
        finally:
            process.end(now)

    def _of_this_process(self) -> _ProcessLedger:
        return _process_ledger(self._folder, self._file_name, os.getpid())


class Reservation:
    """A running test's part of a device: ``wanted`` bytes beside what its process held, or ``None``: all of it."""

    def __init__(self, process: _ProcessLedger, wanted: int | None, now: Callable[[], DeviceMemory]) -> None:
        self._process = process
        self._now = now
        self.wanted = wanted

    @property
    def limit(self) -> int | None:
        """The most bytes that the process may hold; ``None`` where the test has the whole device."""
        return None if self.wanted is None else self._process.entry.total

    def take_all(self) -> None:
        """Exchange what is reserved for the whole device. Others may run in between."""
        if self.wanted is not None:
            self.wanted = None
            self._process.end(self._now)
            self._process.begin(None, self._now)


class _ProcessLedger:
    """The ledger as one process has it open: record locks belong to a process, not to an object."""

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
                    self._slot = self._claimed(file)
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

    def begin(self, wanted: int | None, now: Callable[[], DeviceMemory]) -> None:
        held = self._held(now)
        self.enter(held)
        entry = Entry(held, wanted or 0, State.ALONE if wanted is None else State.SHARES)
        assert self._file is not None, "it was just entered"
        try:
            # The first in the queue waits here for room, and the others behind it: many small ones cannot starve it.
            while not self._file.take(_TURNSTILE):
                time.sleep(SECONDS_BETWEEN_TRIES)
            deadline = time.monotonic() + MOST_SECONDS
            while not self._begun(self._file, entry, now, in_any_case=time.monotonic() >= deadline):
                time.sleep(SECONDS_BETWEEN_TRIES)
        finally:
            self._file.free(_TURNSTILE)

    def end(self, now: Callable[[], DeviceMemory]) -> None:
        # A child that was forked within a region has inherited this object, and no lock.
        if self._file is None or not self.runs_a_test or self._process != os.getpid():
            return
        held = self._held(now)
        with self._alone_with_the_file(self._file) as file:
            self._write(file, Entry(held, 0, State.RESTS))

    def _held(self, now: Callable[[], DeviceMemory]) -> int:
        try:
            return now().held
        except RuntimeError:
            return self.entry.total  # after an illegal access a device tells nothing, and frees nothing

    def _begun(self, file: LockFile, entry: Entry, now: Callable[[], DeviceMemory], *, in_any_case: bool) -> bool:
        with self._alone_with_the_file(file):
            try:
                begins = in_any_case or may_begin(entry, self._others(file), now)
            except RuntimeError:
                begins = True  # a process that cannot ask its device cannot take more of it either
            if begins:
                self._write(file, entry)
            return begins

    def _claimed(self, file: LockFile) -> int:
        for slot in range(_SLOTS):
            if file.take(slot * _SLOT.size):
                return slot
        raise OSError(errno.EUSERS, f"more than {_SLOTS} processes share this device")

    def _others(self, file: LockFile) -> list[Entry]:
        content = os.pread(file.descriptor, _SLOTS * _SLOT.size, 0)
        others = []
        for slot in range(len(content) // _SLOT.size):
            rest, test, state = _SLOT.unpack_from(content, slot * _SLOT.size)
            if slot == self._slot or not state:
                continue
            if file.take(slot * _SLOT.size):
                # Its process has ended.
                os.pwrite(file.descriptor, bytes(_SLOT.size), slot * _SLOT.size)
                file.free(slot * _SLOT.size)
            else:
                others.append(Entry(rest, test, State(state)))
        return others

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
"""Returns the ledger of one process: were there two objects, closing the file of one would free what the other holds."""
