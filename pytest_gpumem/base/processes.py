"""Run each command in its own process group, and end the whole group after a signal.

A signal such as Ctrl-C is only recorded, and interrupts nothing. While a command runs, the program checks several times a
second whether a signal was recorded. If so, the program ends the command and cleans up. A second Ctrl-C cannot interrupt the
cleanup.
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

from pytest_gpumem.base.errors import StopSignal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import FrameType

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name))
POLL_SECONDS = 0.2
GRACE_SECONDS = 3.0
"""Seconds in which a process can end by itself after a signal. Afterwards the process is killed."""


def signal_name(number: int) -> str:
    """Return the name of a signal, for example ``"SIGTERM"``, or ``"signal 40"`` for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Stop:
    """The recorded signal that asks the program to end, if any has come."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def record(self, signum: int, _frame: FrameType | None = None) -> None:
        """Record a signal. Later signals are ignored."""
        if self.signum is None:
            self.signum = signum

    def check(self) -> None:
        """Raise `StopSignal` if a signal has come."""
        if self.signum is not None:
            raise StopSignal(self.signum)


@contextmanager
def recorded_signals() -> Iterator[Stop]:
    """Within the context, record signals that ask the program to end, instead of letting them interrupt the code."""
    stop = Stop()
    # Only the main thread can handle signals. Ignored signals stay ignored. For example, nohup ignores SIGHUP.
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
    started: Callable[[int], None] = lambda _: None,
) -> int:
    """Run a command to its end, or until a signal comes.

    Args:
        command: The command as a list of words, or as a text for the shell.
        folder: The folder in which the command runs.
        environment: The environment of the command.
        output: The file to which the command's output is appended.
        stop: The recorded signals.
        errors: The file to which the command's standard error is appended; by default ``output``.
        tick: A function called a few times a second while the command runs.
        started: A function called once with the pid of the command.

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
            # In a new session, the command does not get Ctrl-C from the terminal. Only this process gets the signal, and
            # then ends the command.
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - it makes one system call and takes no lock
        )
        try:
            started(process.pid)
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(POLL_SECONDS)
                stop.check()
                tick()
        finally:
            if process.poll() is None:
                if hasattr(os, "killpg"):
                    end_group(process.pid, stop, partial(_wait, process))
                process.kill()
                process.wait()


_PR_SET_PDEATHSIG = 1
"""An option of Linux's ``prctl(2)``: the process gets a signal when its parent ends."""


def _prctl() -> Callable[[int, int], int] | None:
    """Return Linux's ``prctl``, or ``None`` on other systems.

    The function is looked up at import, because a forked process must not load a library.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl: Callable[[int, int], int] = ctypes.CDLL(None).prctl
    return prctl


_PRCTL = _prctl()


def end_with_parent() -> None:
    """Let Linux kill this process when its parent ends, because a parent that gets ``kill -9`` cannot kill its children."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_group(leader: int, stop: Stop, wait: Callable[[float], object]) -> None:
    """End a process and its children with the recorded signal, or with SIGTERM. If they still run after 3 s, kill them.

    During the 3 s, a pytest process can report its measurements so far.

    Args:
        leader: The id of the process and its process group.
        stop: The recorded signal; SIGTERM is sent if no signal was recorded.
        wait: Waits for the end of the process. Its argument is the maximum number of seconds.
    """
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGTERM if stop.signum is None else stop.signum)
    wait(GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
