"""Jobs of several ranks: started as torchrun starts them, or by torchrun itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import TCPStore

from tests import preloaded
from tests.conftest import _LEFT_OUT
from tests.heap import hide_what_is_loaded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
    program: tuple[str, ...] = ("pytest", *_LEFT_OUT),
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
