"""Processes that tests start, and what the suite's own process holds meanwhile.

A test that needs a process of its own chooses the cheapest kind that still shows its claim:

- `tests.preloaded.run` and `start` give a child with torch loaded, in a tenth of a second.
- `fork_runs` makes the runs of ``gpumem ab``, ``bisect`` and ``init`` such children.
- `run_job` starts the ranks of a distributed job, side by side or by torchrun, and names processes that outlive the job.
- `start_holder` starts a process with a lock on a device, which writes a log; `overlaps` reads from the log whether two
  processes measured at once although one of them was being timed.
- `wait_until_ended` waits for processes that got a signal.

Every measurement collects garbage several times. Half a million objects of torch and of the suite would take a quarter of a
second each time, so `own_objects_out_of_sight` hides them from the collector. A child calls `hide_what_is_loaded` as its
``before``.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from pytest_gpumem.base.processes import POLL_SECONDS, run
from tests import preloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import ModuleType

    import pytest

    from pytest_gpumem.base.processes import Stop

THE_SUITES = [f"-pno:{plugin}" for plugin in ("hypothesispytest", "benchmark", "memray")]
"""Plugins that are installed for the suite, and are none of a project's: the last two are for docs/migrate, and load rich."""
LEFT_OUT = ["-pno:randomly", "-pno:cacheprovider", *THE_SUITES]


# The suite's own objects

_freeze = gc.freeze


@contextmanager
def own_objects_out_of_sight() -> Iterator[None]:
    """Hide what this process holds from the collections within, of which there are several in every measurement.

    Each would go through all of it, for a quarter of a second; those of all objects then go through what was made within.
    A session within, or the one that runs the suite, neither thaws the objects nor freezes others.
    """
    if are_out_of_sight():
        gc.collect()
        _freeze()  # what the test has made since
        yield
        return
    gc.freeze()
    try:
        with (
            patch.object(gc, "freeze", _do_nothing),
            patch.object(gc, "unfreeze", _do_nothing),
            # Counting them goes through all of them, too.
            patch.object(gc, "get_freeze_count", lambda: sys.maxsize),
        ):
            yield
    finally:
        gc.collect()
        gc.unfreeze()


def are_out_of_sight() -> bool:
    """Return whether this process's own objects are hidden."""
    return gc.freeze is _do_nothing


def hide_what_is_loaded() -> None:
    """Hide what this process has loaded from collections until it ends: for `tests.preloaded`, as ``before``."""
    hidden = own_objects_out_of_sight()
    hidden.__enter__()
    atexit.register(hidden.__exit__, None, None, None)


def _do_nothing() -> None:
    pass


# Processes that end


def is_alive(pid: int) -> bool:
    """Return whether a process runs: one that waits for being reaped has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_ended(pids: Iterable[int], seconds: float = 60) -> None:
    """Wait until processes have ended: what a signal was sent to has not yet."""
    until = time.monotonic() + seconds
    left = list(pids)
    while left and time.monotonic() < until:
        left = [pid for pid in left if is_alive(pid)]
        time.sleep(0.02)
    assert not left, f"processes that still run: {left}"


# Runs of commands


def fork_runs(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Have what modules run be forks, pytest or a command of the package: what `gpumem ab` runs if no module is given."""
    preloaded.load()  # not in the threads that start them
    from pytest_gpumem.tools.ab import runs

    for module in modules or (runs,):
        monkeypatch.setattr(module, "run", _run_forked)


def _packages(python: Path) -> Path:
    (found,) = python.parents[1].glob("lib/python*/site-packages")
    return found


def _run_forked(
    command: Sequence[str] | str,
    *,
    folder: Path,
    environment: Mapping[str, str],
    output: Path,
    stop: Stop,
    tick: Callable[[], None] = lambda: None,
) -> int:
    if isinstance(command, str):
        return run(command, folder=folder, environment=environment, output=output, stop=stop, tick=tick)
    output.touch()
    python, *arguments = command
    assert arguments[0] == "-m"
    path = os.pathsep.join([environment["PYTHONPATH"], str(_packages(Path(python)))])
    process = preloaded.start(
        *arguments, cwd=folder, env={**environment, **preloaded.ALONE, "PYTHONPATH": path}, before=hide_what_is_loaded
    )
    try:
        while process.poll() is None:
            stop.check()
            tick()
            process.wait(POLL_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
        said = process.communicate()
    with output.open("a", encoding="utf-8") as file:
        file.writelines(said)
    assert process.returncode is not None
    return process.returncode


# Locks on a device

HOLDER = """
import os, signal, sys, time
from contextlib import nullcontext
from pathlib import Path
from pytest_gpumem.measuring.devices import device_lock

folder, me = Path(sys.argv[1]), sys.argv[2]
if "GPUMEM_SQLITE_LOCKS_OF_A_TEST" in os.environ:
    from pytest_gpumem.measuring.devices.readers_writer_locks import SqliteReadersWriterLock
    device_lock.open_readers_writer_lock = SqliteReadersWriterLock
lock = device_lock.DeviceLock("GPU-0", folder=folder / "locks")


def note(event):
    # One short line is appended in one piece. Written within the stretch that it tells of, lines are in true order.
    with open(folder / "log", "a") as log:
        log.write(f"{event} {me}\\n")


def wait_for_line(line):
    deadline = time.monotonic() + 60
    while line not in (folder / "log").read_text().splitlines():
        assert time.monotonic() < deadline, f"{me} waited in vain for {line!r}"
        time.sleep(0.005)


"""

LOCK_STATE = """
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
SQLITE_LOCK_STATE = """
import sys
from filelock import ReadWriteLock, Timeout
def free_for(kind):
    lock = ReadWriteLock(sys.argv[1], is_singleton=False)
    try:
        getattr(lock, f"acquire_{kind}")(blocking=False)
    except Timeout:
        return False
    lock.release()
    return True
print("free" if free_for("write") else "shared" if free_for("read") else "alone")
"""
GATE, ROOM = 0, 1
SQLITE = "GPUMEM_SQLITE_LOCKS_OF_A_TEST"
"""Set in a test whose processes take locks of SQLite, as on Windows."""


def start_holder(script: str, folder: Path, name: str) -> subprocess.Popen[str]:
    """A process called ``name`` that has a ``lock`` in ``folder / "locks"``, and runs ``script``."""
    (folder / "log").touch()
    source = HOLDER + textwrap.dedent(script)
    return subprocess.Popen([sys.executable, "-c", source, str(folder), name])


def log_of(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


def wait_for_line(line: str, folder: Path) -> None:
    deadline = time.monotonic() + 60
    while line not in log_of(folder):
        assert time.monotonic() < deadline, f"waited in vain for {line!r}, and there is {log_of(folder)}"
        time.sleep(0.005)


def state_of(folder: Path, byte: int = ROOM) -> str:
    """How another process finds the only lock in ``folder``: free, shared, or held by one alone."""
    if SQLITE in os.environ:
        (file,) = folder.glob("*.turnstile.db" if byte == GATE else "*.lock.db")
        command = [sys.executable, "-c", SQLITE_LOCK_STATE, str(file)]
    else:
        (file,) = folder.glob("*.lock")
        command = [sys.executable, "-S", "-E", "-c", LOCK_STATE, str(file), str(byte)]
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


# Jobs of several ranks

MOST_SECONDS = 240
JOB = "GPUMEM_JOB_OF_A_TEST"


@dataclass(frozen=True)
class Job:
    """A job that has ended."""

    status: int
    output: str
    left: tuple[str, ...]
    """Processes of it that are still there."""


def run_job(
    folder: Path,
    ranks: int,
    *arguments: str,
    torchrun: bool = False,
    ends_others: bool = False,
    device: str = "cpu",
    before: Callable[[], None] = hide_what_is_loaded,
    program: tuple[str, ...] = ("pytest", *LEFT_OUT),
    **variables: str,
) -> Job:
    """Run a ``program``, a module and its first arguments, on some ranks in a folder, and return what became of it.

    Each rank begins with torch loaded, then calls ``before``, and has the variables and the store that torchrun gives it. With
    ``ends_others`` the other ranks are ended once one has ended, as torchrun does. A job as a whole needs ``torchrun`` itself.
    """
    mark = uuid.uuid4().hex
    # Locks on devices of its own: other tests may be timing.
    with tempfile.TemporaryDirectory(prefix="gpumem-job-") as places:
        environment = {**os.environ, JOB: mark, "TMPDIR": places, **variables}
        words = ["-m", *program, f"--gpumem-device={device}", *arguments]
        if torchrun:
            status, output = _by_torchrun(folder, ranks, words, environment)
        else:
            status, output = _side_by_side(folder, ranks, words, environment, before, ends_others=ends_others)
        return Job(status, output, processes_of(mark, folder))


def _by_torchrun(folder: Path, ranks: int, words: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [sys.executable, *launch, *words],
        cwd=folder,
        env={"OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=MOST_SECONDS,
    )
    return done.returncode, done.stdout


def _side_by_side(
    folder: Path,
    ranks: int,
    words: Sequence[str],
    environment: Mapping[str, str],
    before: Callable[[], None],
    *,
    ends_others: bool,
) -> tuple[int, str]:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    each = [{**environment, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    started = [preloaded.start(*words, cwd=folder, env=one, before=before) for one in each]
    try:
        until = time.monotonic() + MOST_SECONDS
        while ends_others and all(one.poll() is None for one in started):
            assert time.monotonic() < until, "no rank has ended"
            time.sleep(0.1)
        for one in started:
            if ends_others and one.poll() is None:
                os.kill(one.pid, signal.SIGTERM)
        said = ["".join(one.communicate(MOST_SECONDS)) for one in started]
    finally:
        for one in started:
            one.kill()
    return max(abs(one.returncode or 0) for one in started), "".join(said)


def processes_of(mark: str, folder: Path) -> tuple[str, ...]:
    """The command lines of the processes of a job, after those that are ending had time to.

    They have the job's variable, or, where they were forked and began with another environment, work in its folder.
    """
    found: list[str] = []
    for _ in range(40):
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if process.name != str(os.getpid()) and (
                    f"{JOB}={mark}".encode() in (process / "environ").read_bytes()
                    or (process / "cwd").readlink() == folder.resolve()
                ):
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        if not found:
            break
        time.sleep(0.1)
    return tuple(found)
