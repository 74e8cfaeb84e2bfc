"""Run commands in process groups of their own, and end the whole group after a signal.

Signals such as Ctrl-C are recorded, and checked while a command runs. So the command ends in order, even after a second
Ctrl-C.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import FrameType

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name))
POLL_SECONDS = 0.2
GRACE_SECONDS = 3.0
"""Time for a process to end by itself before it is killed."""


class StopSignal(Exception):
    """Raised after a signal has asked the program to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"ended by {signal.Signals(signum).name}")
        self.signum = signum
        self.exit_status = 128 + signum
        """The usual exit status in shells for the signal: 130 for SIGINT."""


class Stop:
    """The first signal that asked the program to end, if any has come."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def record(self, signum: int, _frame: FrameType | None = None) -> None:
        """Record a signal. Only the first counts."""
        if self.signum is None:
            self.signum = signum

    def check(self) -> None:
        """Raise `StopSignal` if a signal has come."""
        if self.signum is not None:
            raise StopSignal(self.signum)


@contextmanager
def recorded_signals() -> Iterator[Stop]:
    """Within the context, record signals that ask the program to end, so they do not interrupt any code."""
    stop = Stop()
    # Only the main thread can handle signals. Ignored signals, for example by nohup, stay ignored.
    is_main_thread = threading.current_thread() is threading.main_thread()
    signums = [signum for signum in _SIGNALS if is_main_thread and signal.getsignal(signum) is not signal.SIG_IGN]
    previous_handlers = {signum: signal.signal(signum, stop.record) for signum in signums}
    try:
        yield stop
    finally:
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)


def run(
    command: Sequence[str] | str,
    *,
    folder: Path,
    environment: Mapping[str, str],
    output: Path,
    stop: Stop,
    errors: Path | None = None,
    tick: Callable[[], None] = lambda: None,
) -> int:
    """Run a command to its end, or until a signal comes.

    Args:
        command: The words of the command, or a text for the shell.
        folder: The folder to run in.
        environment: The environment of the command.
        output: The file to append its output to.
        stop: The recorded signals.
        errors: The file to append its standard error to; by default ``output``.
        tick: Called a few times a second.

    Returns:
        The exit status, which is negative if a signal ended the command.

    Raises:
        StopSignal: A signal has come. The command and its children have ended.
    """
    with (
        output.open("ab") as file,
        nullcontext(subprocess.STDOUT) if errors is None else errors.open("ab") as error_file,
    ):
        stop.check()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=error_file,
            shell=isinstance(command, str),
            # Only this process gets Ctrl-C from the terminal. Then it ends the command.
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - it makes one system call and takes no lock
        )
        try:
            while True:
                try:
                    return process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    stop.check()
                    tick()
        finally:
            if process.poll() is None:
                if hasattr(os, "killpg"):
                    end_group(process.pid, stop, partial(_wait, process))
                process.kill()
                process.wait()


_PR_SET_PDEATHSIG = 1
"""Option of Linux's ``prctl(2)`` to set the signal for a process when its parent has ended."""


def _prctl() -> Callable[[int, int], int] | None:
    """Return Linux's ``prctl``, looked up before any fork; ``None`` on other systems."""
    if not sys.platform.startswith("linux"):
        return None
    prctl: Callable[[int, int], int] = ctypes.CDLL(None).prctl
    return prctl


_PRCTL = _prctl()


def end_with_parent() -> None:
    """Let the system kill this process when its parent ends, because a parent that ``kill -9`` ended cannot kill its
    children.
    """
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_group(leader: int, stop: Stop, wait: Callable[[float], object]) -> None:
    """End a process and its children with the received signal, or with SIGTERM. After 3 s they are killed.

    pytest reacts to the signal and reports its measurements so far.

    Args:
        leader: The id of the process and its process group.
        stop: The recorded signal.
        wait: Waits for the end of the process. The argument is the most seconds to wait.
    """
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGTERM if stop.signum is None else stop.signum)
    wait(GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
