"""A distributed lock of numbered objects, for storage that creates an object only once (S3, Google Cloud Storage).

A process takes the lock by creating the object with the next number, which only one process can do. It holds the lock until it
writes into the object that the lock is released. If other processes have seen the object unchanged for `LOCK_SECONDS`, they
regard the holder as dead. Time is only measured between two moments of one process, so no two clocks have to agree. The
highest number is never removed. A process that listed the numbers long ago may create a removed number again, but it then
finds a higher number.

For example, process A creates object 7 and renews it before a write if 15 s have passed. B sees the object change and waits.
Then A is killed. B watches the same text for 60 s, creates object 8, and removes object 7.
"""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pytest_gpumem.judging.baselines.errors import DistributedLockError

if TYPE_CHECKING:
    from collections.abc import Callable

LOCK_SECONDS = 60.0
"""Seconds after which an unchanged lock's holder counts as dead."""
WAIT_SECONDS = 600.0
"""Seconds to wait for living holders."""
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
        """Create an object, and return True if the object did not exist before."""
        try:
            self._files.pipe_file(self._path(number), text.encode(), mode="create")
        except FileExistsError:
            return False
        except TypeError:
            # An older fsspec cannot refuse to overwrite. `acquire` notices this by creating the same object again.
            self.replace(number, text)
        except OSError as error:
            # S3 raises this error if two processes create the object at once. Similar servers do not name the condition.
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
    """A single use of the lock: acquire, renew before each write, release."""

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
        """Wait for the lock.

        Returns:
            False if the storage creates an existing object again, because such storage cannot lock.

        Raises:
            DistributedLockError: Other processes have held the lock, one after the other, for `WAIT_SECONDS`.
        """
        self._wait_and_create()
        try:
            if self._objects.create(self._number, self._text()):
                # The object already existed, so a second creation should have failed.
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
        """Renew the lock's object if 15 s have passed, so other processes see that the holder is alive.

        Raises:
            DistributedLockError: Other processes may have taken the lock.
        """
        started = self._clock()
        if started - self._renewed < _RENEWED_AFTER:
            return
        self._check_held()
        self._renewals += 1
        self._objects.replace(self._number, self._text())
        # A process that saw the renewal in time does not take the lock, but another process may have taken it.
        if self._clock() - self._renewed >= LOCK_SECONDS:
            raise DistributedLockError(_lost(self._clock() - self._renewed))
        self._renewed = started

    def release(self) -> None:
        """Release the lock. Raises `DistributedLockError` if another process has taken it."""
        self._check_held()
        self._objects.replace(self._number, self._text(released=True))

    def _wait_and_create(self) -> None:
        started, pause, watched, watched_since = self._clock(), _FIRST_PAUSE, (0, ""), 0.0
        while True:
            top = max(self._objects.numbers(), default=0)
            # Take the time before the request, so `read_at - watched_since` never overstates how long the object was unchanged.
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
        # A request without an answer is sent again, and then finds its own object.
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
