"""Launched jobs on an emulated GPU: each process of a job is measured, gated, and missed by name."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.conftest import figures_of

JOB = '''
import concurrent.futures
import multiprocessing
import os
import subprocess
import sys

# Without the stand-ins of the emulated GPU, torch's build for CUDA cannot be imported; its library can be mapped.
LOADS_TORCH = """
import importlib.util, mmap, pathlib, time
library = pathlib.Path(importlib.util.find_spec("torch").origin).parent / "lib" / "libtorch_cpu.so"
file = library.open("rb")
mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
time.sleep(1)
"""
# The program goes on after a failed exec, takes more, and is killed before it could report that.
FAILS_TO_EXEC = """
import contextlib, job, os
job.work()
with contextlib.suppress(OSError):
    os.execv("/none", ["none"])
job.work(1)
os.kill(os.getpid(), 9)
"""
GROWN = int(os.environ.get("GROWN", "1"))


def work(number=0):
    """Take 4 MB, or more for a grown job, and print the peak as a program does."""
    import torch

    torch.ones((GROWN + number) << 20, device="cuda")
    print(f"PEAK {torch.cuda.max_memory_allocated()}\\n", end="", flush=True)


def python(*words, **more):
    subprocess.run([sys.executable, *words], check=True, **more)


def by_multiprocessing(method):
    context = multiprocessing.get_context(method)
    processes = [context.Process(target=work, args=(number,)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def by_executor():
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        executor.submit(work).result()


def by_torch():
    import torch.multiprocessing

    torch.multiprocessing.spawn(work, nprocs=2)


def by_fork():
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    os.waitpid(pid, 0)


def by_pool():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(work)


WAYS = {
    "script": work,
    "child": lambda: python(__file__, "script"),
    "grandchild": lambda: python(__file__, "child"),
    "shell": lambda: subprocess.run(f"{sys.executable} {__file__} script", shell=True, check=True),
    "module": lambda: python("-m", "job", "script"),
    "code": lambda: python("-c", "import job; job.work()"),
    "thread of a pool": lambda: concurrent.futures.ThreadPoolExecutor().submit(python, __file__, "script").result(),
    "posix_spawn": lambda: os.waitpid(os.posix_spawn(sys.executable, [sys.executable, __file__, "script"], os.environ), 0),
    "exec": lambda: os.execv(sys.executable, [sys.executable, __file__, "script"]),
    "os.fork": by_fork,
    "fork": lambda: by_multiprocessing("fork"),
    "spawn": lambda: by_multiprocessing("spawn"),
    "forkserver": lambda: by_multiprocessing("forkserver"),
    "executor": by_executor,
    "torch.multiprocessing": by_torch,
    "torchrun": lambda: python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, "script"),
    "accelerate": lambda: python("-m", "accelerate.commands.launch", "--num_processes=1", __file__, "script"),
    "cleared": lambda: python("-c", LOADS_TORCH, env={"PATH": os.environ["PATH"]}),
    "isolated": lambda: python("-I", "-c", LOADS_TORCH),
    "own session": lambda: python("-c", LOADS_TORCH, env={"PATH": os.environ["PATH"]}, start_new_session=True),
    "killed": lambda: subprocess.run(
        [sys.executable, "-c", "import job, os, time; job.work(); time.sleep(1); os.kill(os.getpid(), 9)"]
    ),
    "killed at once": lambda: subprocess.run(
        [sys.executable, "-c", "import os, torch; torch.cuda.init(); os.kill(os.getpid(), 9)"]
    ),
    "left": lambda: subprocess.Popen([sys.executable, "-c", "import job, time; job.work(); time.sleep(30)"]) and work(),
    "terminated": lambda: subprocess.run([sys.executable, "-c", "import job, os; job.work(); os.kill(os.getpid(), 15)"]),
    "pool": by_pool,
    "exec after CUDA": lambda: subprocess.run(
        [sys.executable, "-c", "import job, os, sys; job.work(); os.execv(sys.executable, [sys.executable, '-c', '1'])"]
    ),
    "failed exec": lambda: subprocess.run([sys.executable, "-c", FAILS_TO_EXEC]),
    "exit function": lambda: python("-c", "import atexit, job, torch; atexit.register(job.work)"),
    "one after the other": lambda: [python(__file__, "script") for _ in range(2)],
    "hanging": lambda: python("-c", "import job, time; job.work(); time.sleep(600)"),
}
if __name__ == "__main__":
    WAYS[sys.argv[1]]()
'''
TEST = """
import re
import sys

import pytest


@pytest.mark.parametrize("way", {ways!r})
def test_job(gpumem, way):
    job = gpumem.launch([sys.executable, "job.py", way], timeout={timeout})
    printed = sorted(map(int, re.findall(r"PEAK (\\d+)", job.stdout)))
    assert printed
    assert sorted(process.peak_allocated for process in job.processes.values()) == printed
    assert job.measurement.peak_allocated == sum(printed)
"""
QUICK = ("grandchild", "os.fork", "spawn", "torchrun", "pool", "exit function")
WAYS = (
    *QUICK,
    *(
        "script",
        "child",
        "shell",
        "module",
        "code",
        "thread of a pool",
        "posix_spawn",
        "exec",
        "fork",
        "forkserver",
        "executor",
    ),
    *("torch.multiprocessing", "terminated", "exec after CUDA", "one after the other"),
    *(("accelerate",) if importlib.util.find_spec("accelerate") else ()),
)
NAMES = {
    *("launch", "launch: job.py", "launch: job.py rank 0", "launch: job.py rank 1"),
    *("launch: multiprocessing", "launch: multiprocessing 2"),
}
"""The names of measurements of the quick ways."""


@pytest.fixture
def session(processes, tmp_path):
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")

    def run(*arguments, ways=QUICK, timeout=300, **variables):
        (tmp_path / "test_it.py").write_text(TEST.format(ways=tuple(ways), timeout=timeout), encoding="utf-8")
        return processes.pytest("--junitxml=report.xml", *arguments, timeout=1200, **variables)

    return run


@pytest.mark.parametrize(
    ("ways", "workers"),
    [
        pytest.param(QUICK, (), id="quick"),
        pytest.param(WAYS, (), id="all", marks=pytest.mark.thorough),
        pytest.param(WAYS, ("-n", "2"), id="all in workers", marks=pytest.mark.thorough),
    ],
)
def test_each_process_has_the_peak_that_it_prints_and_a_grown_process_is_red(session, tmp_path, ways, workers):
    recorded = session("--gpumem-update=new", *workers, ways=ways)
    assert recorded.returncode == 0, recorded.stdout
    first = figures_of(tmp_path / "report.xml")
    assert {key.removesuffix(".peak_allocated") for test in first.values() for key in test} >= NAMES
    gated = session("--gpumem-baseline", *workers, ways=ways[::-1])
    assert gated.returncode == 0, gated.stdout
    assert figures_of(tmp_path / "report.xml") == first
    grown = session("--gpumem-baseline", *workers, ways=ways, GROWN="2")
    assert grown.returncode == 1
    assert f"{len(ways)} failed" in grown.stdout, grown.stdout
    assert "launch: " in grown.stdout


UNKNOWN = {
    **dict.fromkeys(("cleared", "isolated", "own session"), "does not report its memory: "),
    "killed": r"was killed before it could report its memory\. Its peak was at least 4\.19 MB, and may have been larger",
    "killed at once": "was killed before it could report its memory, so its peak is not known",
    "failed exec": r"was killed before it could report its memory\. Its peak was at least [\d.]+ MB, and may",
    "left": "has ended, but its process still runs, so the memory is not known: ",
    "hanging": "did not end within timeout=30 seconds",
}
"""Ways whose figures would be too low, each with the reason."""


def test_a_job_whose_figures_would_be_too_low_fails_with_the_reason(session):
    done = session(ways=tuple(UNKNOWN), timeout=30)
    assert f"{len(UNKNOWN)} failed" in done.stdout, done.stdout
    for way, reason in UNKNOWN.items():
        assert re.search(rf"JobError: `[^`]*{way}'?`.*{reason}", done.stdout), (way, done.stdout)
