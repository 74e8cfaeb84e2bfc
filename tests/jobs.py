"""Jobs of several ranks, started as users start them: by torchrun."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

MOST_SECONDS = 240
JOB = "GPUMEM_JOB_OF_A_TEST"
_TORCHRUN = "import sys; from torch.distributed.run import main; sys.exit(main())"
_PLUGINS = [word for name in ("randomly", "hypothesispytest", "cacheprovider") for word in ("-p", f"no:{name}")]


@dataclass(frozen=True)
class Job:
    """A job that has ended."""

    status: int
    output: str
    seconds: float
    left: tuple[str, ...]
    """Processes of it that are still there."""


def run_job(
    folder: Path,
    ranks: int,
    *arguments: str,
    python: str,
    device: str = "cpu",
    program: tuple[str, ...] = ("pytest", *_PLUGINS),
    **variables: str,
) -> Job:
    """Run a ``program``, a module and its first arguments, on some ranks in a folder, and return what became of it.

    ``python`` runs torchrun and each rank.
    """
    mark = uuid.uuid4().hex
    # Locks on devices of its own: other tests may be timing.
    with tempfile.TemporaryDirectory(prefix="gpumem-job-") as places:
        environment = {**os.environ, JOB: mark, "TMPDIR": places, "PYTHON_EXEC": python}
        environment.setdefault("OMP_NUM_THREADS", "1")
        launch = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}", "-m", *program]
        begin = ["-X", "forked", "-c", _TORCHRUN] if python != sys.executable else ["-m", "torch.distributed.run"]
        began = time.monotonic()
        done = subprocess.run(
            [python, *begin, *launch, f"--gpumem-device={device}", *arguments],
            cwd=folder,
            env={**environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=MOST_SECONDS,
        )
        return Job(done.returncode, done.stdout, time.monotonic() - began, processes_of(mark, folder))


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
