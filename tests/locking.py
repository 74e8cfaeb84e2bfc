"""A log in which processes write when they measure and when they are timed, and what of it overlaps."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

HEADER = """
import os, signal, sys, time
from contextlib import nullcontext
from pathlib import Path
from pytest_gpumem.measuring.devices import device_lock

folder, me = Path(sys.argv[1]), sys.argv[2]
lock = device_lock.DeviceLock("GPU-0", folder=folder / "locks")


def note(event):
    # One short line is appended in one piece. Written within the stretch that it tells of, lines are in true order.
    with open(folder / "log", "a") as log:
        log.write(f"{event} {me}\\n")


def wait_for(line):
    deadline = time.monotonic() + 60
    while line not in (folder / "log").read_text().splitlines():
        assert time.monotonic() < deadline, f"{me} waited in vain for {line!r}"
        time.sleep(0.005)


"""

STATE = """
import fcntl, sys
file = open(sys.argv[1], "r+")
def free_for(kind):
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB, 1, int(sys.argv[2]))
    except OSError:
        return False
    fcntl.lockf(file, fcntl.LOCK_UN, 1, int(sys.argv[2]))
    return True
print("free" if free_for(fcntl.LOCK_EX) else "shared" if free_for(fcntl.LOCK_SH) else "alone")
"""
GATE, ROOM = 0, 1


def start(script: str, folder: Path, name: str) -> subprocess.Popen[str]:
    """A process called ``name`` that has a ``lock`` in ``folder / "locks"``, and runs ``script``."""
    (folder / "log").touch()
    source = HEADER + textwrap.dedent(script)
    return subprocess.Popen([sys.executable, "-c", source, str(folder), name])


def log_of(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


def wait_for(line: str, folder: Path) -> None:
    deadline = time.monotonic() + 60
    while line not in log_of(folder):
        assert time.monotonic() < deadline, f"waited in vain for {line!r}, and there is {log_of(folder)}"
        time.sleep(0.005)


def state_of(folder: Path, byte: int = ROOM) -> str:
    """How another process finds the only lock in ``folder``: free, shared, or held by one alone."""
    (file,) = folder.glob("*.lock")
    command = [sys.executable, "-S", "-E", "-c", STATE, str(file), str(byte)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def overlaps(log: list[str]) -> list[str]:
    """What should not have been, by a log of ``shares``, ``waits`` (has given up its share), ``alone``, ``leaves``."""
    sharing: set[str] = set()
    alone: set[str] = set()
    wrong: list[str] = []
    for line in log:
        event, _, who = line.partition(" ")
        others = (alone if event == "shares" else alone | sharing) - {who}
        if event in {"shares", "alone"} and others:
            wrong.append(f"{line}, and so is {', '.join(sorted(others))}")
        alone.discard(who)
        sharing.discard(who)
        if event in {"shares", "alone"}:
            (sharing if event == "shares" else alone).add(who)
    return wrong
