"""A thread in a measured process: it writes changed usage, and answers the test's requests."""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from pytest_gpumem.emulating.emulated_process.control import answer_line, connect
from pytest_gpumem.emulating.emulated_process.pausing_thread import PausingThread
from pytest_gpumem.emulating.emulated_process.threads import other_threads

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pytest_gpumem.emulating.emulated_process.usage import ProcessUsage

_LOOK_SECONDS = 0.01
_QUIET_LOOKS = 3
_GRACE_SECONDS = 0.5
"""After SIGTERM, the main thread has this many seconds to run its handler."""
_MOST_SECONDS_TO_SEND = 60.0
"""The test's process may read other answers first."""
_MOST_SECONDS = 1.0
"""The longest wait for the process's other threads. A server may have a thread that never sleeps."""


class Recorder(Protocol):
    """The figures of this process."""

    def write_if_changed(self) -> None:
        """Write the usage if it has changed."""

    def begin_window(self, window: int) -> ProcessUsage | None:
        """Begin a window, and return the usage in the window before. If this process ends, return ``None``."""

    def end(self, status: int | None = None) -> None:
        """Write the usage of an ending process, with its exit status or the negative number of the signal that ends it."""


def start_reporting(
    recorder: Recorder, folder: Path, seconds: float, has_sigterm: Callable[[], bool] | None = None
) -> None:
    """Start the thread. It ends with the process.

    Args:
        recorder: The figures of this process.
        folder: The folder in which the test's process may listen.
        seconds: The time between two looks at the usage.
        has_sigterm: Returns whether SIGTERM has come, although the main thread may not have noticed.
    """
    _Reporting(recorder, folder, seconds, has_sigterm).begin()


class _Reporting(PausingThread):
    def __init__(
        self, recorder: Recorder, folder: Path, seconds: float, has_sigterm: Callable[[], bool] | None
    ) -> None:
        super().__init__("gpumem-usage")
        self._recorder = recorder
        self._folder = folder
        self._seconds = seconds
        self._has_sigterm = has_sigterm
        self._connection: socket.socket | None = None
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        if hasattr(os, "register_at_fork"):
            for end in (self._woken, self._waker):
                os.register_at_fork(after_in_child=end.close)

    def run(self) -> None:
        """Write changed usage and answer requests, until this process forks or ends."""
        while not self.is_over.is_set():
            if self._has_sigterm is not None and self._has_sigterm():
                time.sleep(_GRACE_SECONDS)
                _die(self._recorder)
            if self._connection is None:
                self._connection = connect(self._folder, self._seconds)
            if self._connection is None:
                self.is_over.wait(self._seconds)
            elif self._is_asked(self._connection) and not _answered(self._recorder, self._connection):
                self._connection.close()
                self._connection = None
            self._recorder.write_if_changed()

    def wake(self) -> None:
        """Wake the thread, because this process forks."""
        with suppress(OSError):
            self._waker.send(b"1")

    def _is_asked(self, connection: socket.socket) -> bool:
        """Wait for a request or for `wake`, and return whether the test's process has sent a request, or has ended."""
        poll = select.poll()
        for end in (connection, self._woken):
            poll.register(end, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(1000 * self._seconds)}
        with suppress(OSError):
            self._woken.recv(4096)
        return connection.fileno() in ready


def _die(recorder: Recorder) -> None:
    """End this process by SIGTERM, because the main thread waits in C, for example for another rank, and runs no handler."""
    recorder.end(-signal.SIGTERM)
    # Only the main thread may call `signal.signal`.
    ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
    os.kill(os.getpid(), signal.SIGTERM)


def _answered(recorder: Recorder, connection: socket.socket) -> bool:
    """Answer a request if there is one. Return whether the test's process still listens."""
    with suppress(OSError, ValueError):
        try:
            requests = connection.recv(4096).splitlines()
        except TimeoutError:
            return True
        if requests:
            _wait_until_quiet()
            # Garbage in cycles is freed at any time by chance, and would look like a leak.
            if gc.isenabled():
                gc.collect()
            window = int(requests[-1])
            while (usage := recorder.begin_window(window)) is None:
                time.sleep(
                    _LOOK_SECONDS
                )  # this process ends and has written its usage, or fails to run another program
            seconds = connection.gettimeout()
            connection.settimeout(_MOST_SECONDS_TO_SEND)
            connection.sendall(answer_line(window, usage))
            connection.settimeout(seconds)
            return True
    return False


def _wait_until_quiet() -> None:
    """Wait until the other threads of this process sleep and are not woken. Only Linux shows that.

    A server sends its response, and frees the request's tensors afterwards.
    """
    deadline = time.monotonic() + _MOST_SECONDS
    previous, quiet_looks = other_threads(), 0
    while quiet_looks < _QUIET_LOOKS and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        current = other_threads()
        is_quiet = current == previous and all(is_asleep for is_asleep, _ in current.values())
        quiet_looks = quiet_looks + 1 if is_quiet else 0
        previous = current
