"""A thread in a measured process: it writes changed usage, and answers the test's requests."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from pytest_gpumem.emulating.emulated_process.control import answer_line, connect
from pytest_gpumem.emulating.emulated_process.threads import other_threads

if TYPE_CHECKING:
    import socket
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

    def end(self) -> None:
        """Write the usage of an ending process."""


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
    arguments = (recorder, folder, seconds, has_sigterm)
    thread = threading.Thread(target=_report, args=arguments, name="gpumem-usage", daemon=True)
    with suppress(RuntimeError):  # an ending interpreter starts no thread
        thread.start()


def _report(recorder: Recorder, folder: Path, seconds: float, has_sigterm: Callable[[], bool] | None) -> None:
    connection = None
    while True:
        if has_sigterm is not None and has_sigterm():
            time.sleep(_GRACE_SECONDS)
            _die(recorder)
        if connection is None:
            connection = connect(folder, seconds)
        if connection is None:
            time.sleep(seconds)
        elif not _answered(recorder, connection):
            connection.close()
            connection = None
        recorder.write_if_changed()


def _die(recorder: Recorder) -> None:
    """End this process by SIGTERM, because the main thread waits in C, for example for another rank, and runs no handler."""
    recorder.end()
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
