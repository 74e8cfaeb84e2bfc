"""Whose turn it is on a device: measured tests of one user share it, and the one that is being timed has it alone.

Between processes: workers of one session, and sessions. The system holds the locks and frees those of a dead process.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import stat
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST_SECONDS_FOR_BEING_ALONE = 60.0
MOST_SECONDS_FOR_A_SHARE = 600.0
"""Nobody is alone for as long, unless somebody's step hangs, or stands in a debugger."""
MOST_SECONDS_NEXT_TIME = 5.0
"""When a wait was in vain, the next one is no longer than this: a suite must not wait a minute in each of its tests."""

# So seldom that it does not disturb the one who is alone, on whose cores it runs.
_SECONDS_BETWEEN_TRIES = 0.02


class DeviceLock:
    """The lock on the device called ``name`` (a GPU's UUID, ``"cpu"``), in ``folder`` (default: this user's).

    All locks of one name and folder are the same to a process: it never disturbs itself, nor does it wait for itself.
    No lock can be had where the folder cannot be used, nor on Windows: nobody fails, and in a worker of pytest-xdist, beside
    which others are at work, `alone` tells.
    """

    def __init__(self, name: str, *, spoken: str = "the GPU", folder: Path | None = None) -> None:
        self._file_name = re.sub(r"[^A-Za-z0-9-]", "_", name) + ".lock"
        self._spoken = spoken
        self._folder = folder

    @contextmanager
    def shared(self) -> Iterator[None]:
        """A stretch in which others may measure, and nobody is alone."""
        turns = self._turns()
        turns.enter()
        try:
            yield
        finally:
            turns.leave()

    @contextmanager
    def alone(self) -> Iterator[str | None]:
        """A stretch within a `shared` one in which nobody of another process has a share.

        Waits at most `MOST_SECONDS_FOR_BEING_ALONE`. Yields ``None``, or a clause that says why nobody is kept off. The share
        is given up meanwhile, so that two who both want this do not wait for one another, and had again afterwards.
        """
        turns = self._turns()
        refused = turns.become_alone(self._spoken)
        try:
            yield refused
        finally:
            turns.share_again()

    def _turns(self) -> _Turns:
        return _turns_of(self._folder, self._file_name, os.getpid())


class _Turns:
    """What this process holds of one lock: the system's record locks are a process's, not an object's."""

    def __init__(self, folder: Path | None, file_name: str, process: int) -> None:
        self._folder = folder
        self._file_name = file_name
        self._process = process
        self._guard = threading.RLock()
        self._room: _Room | None = None
        self._broken: OSError | None = None
        self._refused: str | None = None
        self._sharing = 0
        self._being_alone = 0
        self._for_a_share = _Patience(MOST_SECONDS_FOR_A_SHARE)
        self._for_being_alone = _Patience(MOST_SECONDS_FOR_BEING_ALONE)

    def enter(self) -> None:
        with self._guard:
            if self._over():
                self._begin()
            self._sharing += 1

    def leave(self) -> None:
        if self._forked():
            return
        with self._guard:
            self._sharing -= 1
            self._end_if_over()

    def become_alone(self, spoken: str) -> str | None:
        with self._guard:
            if self._over():  # in a child that was forked within a stretch
                self._begin()
            if self._being_alone == 0:
                self._refused = self._why_not_alone(spoken)
            self._being_alone += 1
            return self._refused

    def share_again(self) -> None:
        if self._forked():
            return
        with self._guard:
            self._being_alone -= 1
            if self._being_alone == 0 and self._room is not None:
                with suppress(OSError):
                    self._room.admit_others()
            self._end_if_over()

    def _begin(self) -> None:
        self._broken = None
        try:
            self._room = _Room(self._folder or _folder_of_user(), self._file_name)
            self._for_a_share.wait_for(self._room.enter)
        except OSError as error:
            self._give_up(error)
        except BaseException:  # Ctrl-C while waiting
            self._close()
            raise

    def _why_not_alone(self, spoken: str) -> str | None:
        seconds = 0.0
        try:
            if self._room is not None:
                seconds = self._waited_in_vain(self._room)
        except OSError as error:
            self._give_up(error)
        if self._broken is not None:
            # One process is the rule, and of others the device's conditions tell.
            if "PYTEST_XDIST_WORKER" not in os.environ:
                return None
            return f"no lock keeps other measured tests off {spoken} ({self._broken})"
        return f"another measured test kept {spoken} busy for {seconds:.0f} s" if seconds else None

    def _waited_in_vain(self, room: _Room) -> float:
        """Give up the share and become alone, or have the share again and tell for how many seconds that was tried."""
        began = time.monotonic()
        # Two who kept their shares and waited for the other's would wait for ever.
        room.leave()
        try:
            alone = self._for_being_alone.wait_for(room.enter_alone)
        except BaseException:  # Ctrl-C while waiting
            room.enter()  # which opens the gate, too, and does not wait
            raise
        room.open_gate()
        seconds = time.monotonic() - began
        if not alone:
            self._for_a_share.wait_for(room.enter)
        return 0.0 if alone else seconds

    def _give_up(self, error: OSError) -> None:
        self._broken = error
        self._close()

    def _over(self) -> bool:
        return self._sharing == 0 and self._being_alone == 0

    def _end_if_over(self) -> None:
        if self._over():
            self._close()

    def _close(self) -> None:
        if self._room is not None:
            self._room.close()
            self._room = None

    def _forked(self) -> bool:
        """Whether this is a child that was forked within a stretch: it has inherited this object, and no lock."""
        return self._process != os.getpid()


@functools.cache
def _turns_of(folder: Path | None, file_name: str, process: int) -> _Turns:
    """One for each lock and process: were there two, closing the file of one would free what the other holds."""
    return _Turns(folder, file_name, process)


class _Patience:
    """How long to wait for what others hold."""

    def __init__(self, most_seconds: float) -> None:
        self._most_seconds = most_seconds
        self._was_in_vain = False

    def wait_for(self, attempt: Callable[[], bool]) -> bool:
        """Whether ``attempt`` succeeded in time. It is made at least once."""
        most = min(self._most_seconds, MOST_SECONDS_NEXT_TIME) if self._was_in_vain else self._most_seconds
        deadline = time.monotonic() + most
        while not (done := attempt()) and time.monotonic() < deadline:
            time.sleep(_SECONDS_BETWEEN_TRIES)
        self._was_in_vain = not done
        return done


class _Room:
    """A room that many may be in, or one who is alone: POSIX record locks on two bytes of a file.

    Whoever comes passes the gate. Whoever wants to be alone keeps it closed while waiting for the room to be empty, so
    that those who come later cannot keep it busy for ever.

    Record locks are freed when the process ends, however it ends, and a forked child has none of them: unlike those of
    ``flock``, which a child that outlives a killed parent (a worker of a ``DataLoader``) would go on holding.
    Raises ``OSError`` where they cannot be had.
    """

    _GATE, _ROOM = 0, 1

    def __init__(self, folder: Path, file_name: str) -> None:
        try:
            import fcntl
        except ImportError:
            raise OSError(errno.ENOSYS, "this system has no POSIX record locks") from None
        self._fcntl = fcntl
        self._file = _open_private(folder, file_name)

    def enter(self) -> bool:
        """Come in with others, if nobody is alone, or waits for it."""
        if not self._take(self._fcntl.LOCK_SH, self._GATE):
            return False
        try:
            return self._take(self._fcntl.LOCK_SH, self._ROOM)
        finally:
            self.open_gate()

    def enter_alone(self) -> bool:
        """Come in if nobody is there. In any case the gate may stay closed: see `open_gate`."""
        return self._take(self._fcntl.LOCK_EX, self._GATE) and self._take(self._fcntl.LOCK_EX, self._ROOM)

    def admit_others(self) -> None:
        """Stay, but not alone: from one moment to the next, so that nobody else can be alone in between."""
        self._take(self._fcntl.LOCK_SH, self._ROOM)

    def leave(self) -> None:
        self._free(self._ROOM)

    def open_gate(self) -> None:
        self._free(self._GATE)

    def close(self) -> None:
        os.close(self._file)

    def _take(self, kind: int, byte: int) -> bool:
        try:
            self._fcntl.lockf(self._file, kind | self._fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):  # POSIX allows both for "somebody else holds it"
            return False
        return True

    def _free(self, byte: int) -> None:
        self._fcntl.lockf(self._file, self._fcntl.LOCK_UN, 1, byte)


def _folder_of_user() -> Path:
    # A user's number and not a name: in a container it may have none.
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return Path(tempfile.gettempdir()) / f"pytest-gpumem-{user}"


def _open_private(folder: Path, file_name: str) -> int:
    """A file to lock, in a folder that only this user may enter.

    Anybody may have put something of that name into the temporary folder before us: a symbolic link is not followed,
    and another user's folder not used. Raises ``OSError``.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(opened)
        if status.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "the folder belongs to another user", str(folder))
        if stat.S_IMODE(status.st_mode) & 0o077:
            os.fchmod(opened, 0o700)
        # Non-blocking, as opening a named pipe would wait for a reader.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(file_name, flags, 0o600, dir_fd=opened)
    except OSError as error:
        if error.filename == file_name:
            error.filename = str(folder / file_name)
        raise
    finally:
        os.close(opened)
