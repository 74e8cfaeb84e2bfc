"""Commands in process groups of their own, which end as a whole when a signal asks for it.

Ctrl-C and other signals are noted, and checked while a command runs, so that it ends in order, also when they come twice.
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


class Stopped(Exception):
    """A signal asked for the end."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"ended by {signal.Signals(signum).name}")
        self.signum = signum
        self.exit_status = 128 + signum
        """The one that shells have for it."""


class Stop:
    """The first signal that asked for the end, if there was one."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def note(self, signum: int, _frame: FrameType | None = None) -> None:
        """Take note of a signal; the first counts."""
        if self.signum is None:
            self.signum = signum

    def check(self) -> None:
        """Raise `Stopped` if the end was asked for."""
        if self.signum is not None:
            raise Stopped(self.signum)


@contextmanager
def noted_signals() -> Iterator[Stop]:
    """Note signals that ask for the end, so that they interrupt nothing."""
    stop = Stop()
    # Only the main thread gets signals, and what is ignored (nohup) stays so.
    mine = threading.current_thread() is threading.main_thread()
    noted = [signum for signum in _SIGNALS if mine and signal.getsignal(signum) is not signal.SIG_IGN]
    earlier = {signum: signal.signal(signum, stop.note) for signum in noted}
    try:
        yield stop
    finally:
        for signum, handler in earlier.items():
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
    """Run ``command`` (a text is for the shell) and return its exit status, negative when a signal ended it.

    Its output is added to ``output``, and to ``errors``, if that is given, what it writes on standard error; ``tick`` is called
    a few times a second. Raises `Stopped`.
    """
    with output.open("ab") as file, nullcontext(subprocess.STDOUT) if errors is None else errors.open("ab") as beside:
        stop.check()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=beside,
            shell=isinstance(command, str),
            # Ctrl-C in the terminal is for us; what runs is ended by us.
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
"""Of Linux's ``prctl(2)``: the signal that a process gets when the one that started it has ended."""


def _prctl() -> Callable[[int, int], int] | None:
    """Return Linux's ``prctl``, looked up before any fork; ``None`` on other systems."""
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[[int, int], int] = ctypes.CDLL(None).prctl
    return found


_PRCTL = _prctl()


def end_with_parent() -> None:
    """Have this process killed when its parent is, as ``kill -9`` leaves nobody to end it."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_group(leader: int, stop: Stop, wait: Callable[[float], object]) -> None:
    """End a process and those that it has started, by the signal that asked for the end: pytest keeps what it has then.

    Args:
        leader: The process's id, which is that of its process group.
        stop: The signal.
        wait: Waits for the end of the process, for so many seconds at most.
    """
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGTERM if stop.signum is None else stop.signum)
    wait(GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
