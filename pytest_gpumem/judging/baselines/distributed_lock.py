"""A distributed lock of numbered objects, for storage that creates an object only once (S3, Google Cloud Storage).

A process takes the lock by creating the object with the next number, which only one process can do. This process is the lock's
holder until it writes into the object that the lock is released. If the object does not change for `LOCK_SECONDS`, other
processes regard the holder as dead. Time is only measured between two moments of one process, so no two clocks have to agree.
The object with the highest number is never removed. A process with an old list of numbers may create a removed number again.
This process then finds the higher number, and does not take the lock.

For example, process A creates object 7. Before each write, A renews the object if 15 s have passed. B sees that the object
changes, and waits. Then A is killed. B sees the same text for 60 s, creates object 8, and removes object 7.
"""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import DistributedLockError

if TYPE_CHECKING:
    from collections.abc import Callable

LOCK_SECONDS = 60.0
"""If a lock's object does not change for this many seconds, its holder counts as dead."""
WAIT_SECONDS = 600.0
"""The number of seconds to wait while other processes hold the lock."""
_RENEWED_AFTER = LOCK_SECONDS / 4
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


class LockObjects:
    """The lock's objects by number, in a folder on an fsspec file system. Exceptions from fsspec are not caught."""

    def __init__(self, files: Any, folder: str) -> None:
        self._files = files
        self._folder = folder

    def numbers(self) -> list[int]:
        self._files.invalidate_cache()
        try:
            names = self._files.ls(self._folder, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        numbers = (str(name).rpartition("/")[2] for name in names)
        return [int(number) for number in numbers if number.isdecimal()]

    def create(self, number: int, text: str) -> bool:
        """Create an object. Return False if an object with this number already existed."""
        try:
            self._files.pipe_file(self._path(number), text.encode(), mode="create")
        except FileExistsError:
            return False
        except TypeError:
            # An older fsspec cannot refuse to overwrite an object. `acquire` notices this by creating the same object again.
            self.replace(number, text)
        except OSError as error:
            # S3 raises ConditionalRequestConflict if two processes create the object at once. Similar servers may raise another
            # error, so check whether the object exists.
            if "ConditionalRequestConflict" not in str(error) and self.read(number) is None:
                raise
            return False
        return True

    def read(self, number: int) -> str | None:
        try:
            return str(self._files.cat_file(self._path(number)).decode("utf-8", "replace"))
        except FileNotFoundError:
            return None

    def replace(self, number: int, text: str) -> None:
        self._files.pipe_file(self._path(number), text.encode())

    def remove(self, number: int) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(self._path(number))

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number:08}"


class DistributedLock:
    """The lock for a single session: call `acquire` once, `renew` before each write, and `release` at the end."""

    def __init__(
        self,
        objects: LockObjects,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._objects = objects
        self._clock = clock
        self._sleep = sleep
        self._token = uuid.uuid4().hex
        self._number = 0
        self._renewals = 0
        self._renewed = 0.0

    def acquire(self) -> bool:
        """Wait until no other process holds the lock, and take it.

        Returns:
            True if this process holds the lock. False if the storage overwrites existing objects, so it cannot lock.

        Raises:
            DistributedLockError: Other processes have held the lock, one after the other, for `WAIT_SECONDS`.
        """
        self._wait_and_create()
        try:
            if self._objects.create(self._number, self._text()):
                # The object existed already, so a storage that can lock would have refused to create it again.
                self._objects.remove(self._number)
                return False
            for number in self._objects.numbers():
                if number < self._number:
                    self._objects.remove(number)
        except BaseException:
            with suppress(Exception):
                self.release()
            raise
        return True

    def renew(self) -> None:
        """Change the lock's object if the last change is 15 s old, so other processes see that the holder is alive.

        Raises:
            DistributedLockError: Another process may have taken the lock.
        """
        started = self._clock()
        if started - self._renewed < _RENEWED_AFTER:
            return
        self._check_held()
        self._renewals += 1
        self._objects.replace(self._number, self._text())
        # If the renewal took 60 s, another process may have taken the lock before the object changed.
        if self._clock() - self._renewed >= LOCK_SECONDS:
            raise DistributedLockError(_lost(self._clock() - self._renewed))
        self._renewed = started

    def release(self) -> None:
        """Release the lock. Raises `DistributedLockError` if another process has taken the lock meanwhile."""
        self._check_held()
        self._objects.replace(self._number, self._text(released=True))

    def _wait_and_create(self) -> None:
        started, pause, watched, watched_since = self._clock(), _FIRST_PAUSE, (0, ""), 0.0
        while True:
            top = max(self._objects.numbers(), default=0)
            # Read the clock before the request. Otherwise a slow request would make the object seem unchanged for too long.
            read_at = self._clock()
            state = self._objects.read(top) if top else None
            free = state is None or _released(state)
            if state is not None and (top, state) != watched:
                watched, watched_since = (top, state), self._clock()
            if free or read_at - watched_since >= LOCK_SECONDS:
                if self._created(top + 1):
                    return
            elif read_at - started > WAIT_SECONDS:
                raise DistributedLockError(
                    f"locked by {_holder(watched[1])} for more than {WAIT_SECONDS / 60:g} minutes"
                )
            else:
                self._sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)

    def _created(self, number: int) -> bool:
        created_at = self._clock()
        text = self._text()
        # fsspec repeats a request that got no answer. The repeated request then fails, because the first created the object.
        if not self._objects.create(number, text) and self._objects.read(number) != text:
            return False
        if max(self._objects.numbers(), default=number) > number:
            self._objects.remove(number)
            return False
        self._number, self._renewed = number, created_at
        return True

    def _check_held(self) -> None:
        if max(self._objects.numbers(), default=0) != self._number:
            raise DistributedLockError(_lost(self._clock() - self._renewed))

    def _text(self, *, released: bool = False) -> str:
        holder = f"{platform.node() or 'a machine without a name'}, process {os.getpid()}"
        fields = {"holder": holder, "token": self._token, "renewals": self._renewals, "released": released}
        return json.dumps(fields) + "\n"


def _released(state: str) -> bool:
    return _fields(state).get("released") is True


def _holder(state: str) -> str:
    return str(_fields(state).get("holder", "somebody"))


def _fields(state: str) -> dict[str, object]:
    try:
        fields = json.loads(state)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _lost(seconds: float) -> str:
    return (
        f"the lock was lost: a request took {seconds:.0f} s, and after {LOCK_SECONDS:.0f} s other jobs may write; "
        "their entries may have been replaced, so run the update once more"
    )
