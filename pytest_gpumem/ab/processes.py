"""Runs a command as a process group of its own, which is ended whole when the end is asked for."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pytest_gpumem.ab.stopping import Stop

POLL_SECONDS = 0.2
GRACE_SECONDS = 3.0
"""How long a process may take to end by itself before it is killed."""


def run(
    command: Sequence[str] | str,
    *,
    folder: Path,
    environment: Mapping[str, str],
    output: Path,
    stop: Stop,
    tick: Callable[[], None] = lambda: None,
) -> int:
    """The exit status of ``command`` (a text is for the shell); negative when a signal ended it.

    What it prints is added to ``output``; ``tick`` is called a few times a second. Raises `Stopped`.
    """
    with output.open("ab") as file:
        stop.check()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            shell=isinstance(command, str),
            # Ctrl-C in the terminal is for us; what runs is ended by us.
            start_new_session=True,
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
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and those that it has started."""
    if not hasattr(os, "killpg"):
        process.kill()
        process.wait()
        return
    _signal_group(process.pid, signal.SIGTERM)
    until = time.monotonic() + GRACE_SECONDS
    while process.poll() is None and time.monotonic() < until:
        time.sleep(POLL_SECONDS / 4)
    _signal_group(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def _signal_group(group: int, signum: int) -> None:
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        pass
