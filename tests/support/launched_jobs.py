"""Tests of launched jobs: each process of a job is measured, gated, and missed by name.

They are imported by a file for an emulated GPU and a file for the CPU. The fixture `processes` runs sessions on the device.
"""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.conftest import figures_of
from tests.support.programs import JOB

TEST = """
import os
import re
import subprocess
import sys

import pytest


def alone(way):
    # What the same program prints without a recorder.
    environment = {{name: value for name, value in os.environ.items() if not name.startswith("GPUMEM_USAGE")}}
    words = [sys.executable, "job.py", way]
    return subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("way", {ways!r})
def test_job(gpumem, way):
    job = gpumem.launch([sys.executable, "job.py", way], timeout=10 if way == "hanging" else 300)
    printed = sorted(map(int, re.findall(r"PEAK (\\d+)", job.stdout)))
    assert printed
    assert sorted(process.peak_allocated for process in job.processes.values()) == printed
    if "ALONE" in os.environ:
        assert printed == sorted(map(int, re.findall(r"PEAK (\\d+)", alone(way))))
    assert job.measurement.peak_allocated == (max if way == "one after the other" else sum)(printed)
    imbalance = job.measurement.metrics.get("imbalance")
    assert imbalance == (printed[1] / printed[0] if way == "torchrun" else None)
"""
QUICK = ("spawn", "torchrun")
WAYS = (
    *QUICK,
    *(
        "grandchild",
        "pool",
        "os.fork",
        "exit function",
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
    *("torch.multiprocessing", "terminated", "terminated after a thread", "exec after CUDA", "one after the other"),
    *(("accelerate",) if importlib.util.find_spec("accelerate") else ()),
)
NAMES = {
    *("launch", "launch: job.py rank 0", "launch: job.py rank 1"),
    *("launch: multiprocessing", "launch: multiprocessing 2"),
}
"""The names of measurements of the quick ways."""

NAMED = "job.py rank 1 has the largest peak of all ranks, 12.58 MB, and job.py rank 0 the smallest, 8.39 MB"


@pytest.fixture
def session(processes, tmp_path):
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")

    def run(*arguments, ways=QUICK, **variables):
        (tmp_path / "test_it.py").write_text(TEST.format(ways=tuple(ways)), encoding="utf-8")
        words = ("--junitxml=report.xml", "--gpumem-explain=never", *arguments)
        return processes.pytest(*words, timeout=1200, **variables)

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
    recorded = session("--gpumem-update=new", *workers, ways=ways, ALONE=1)
    assert recorded.returncode == 0, recorded.stdout
    first = figures_of(tmp_path / "report.xml")
    assert {key.removesuffix(".peak_allocated") for test in first.values() for key in test} >= NAMES
    gated = session("--gpumem-baseline", *workers, ways=ways[::-1])
    assert gated.returncode == 0, gated.stdout
    assert figures_of(tmp_path / "report.xml") == first
    grown = session("--gpumem-baseline", *workers, ways=ways, GROWN="2", LARGEST_RANK="1")
    assert grown.returncode == 1
    assert f"{len(ways)} failed" in grown.stdout, grown.stdout
    assert "launch: " in grown.stdout
    assert re.search(r"imbalance over ranks +1\.00 +1\.50 +\+50\.0 % +\+2\.0 % +regressed", grown.stdout), grown.stdout
    assert NAMED in grown.stdout, grown.stdout


UNKNOWN = {
    **dict.fromkeys(("cleared", "isolated", "own session"), "does not report its memory: "),
    "killed": r"was killed before it could report its memory\. Its peak was at least 4\.19 MB, and may have been larger",
    "killed at once": r"was killed before it could report its memory(, so its peak is not known|\. Its peak was at least 4 B)",
    "failed exec": r"was killed before it could report its memory\. Its peak was at least [\d.]+ MB, and may",
    "left": "has ended, but its process still runs, so the memory is not known: ",
    "hanging": "did not end within timeout=10 seconds",
}
"""Ways whose figures would be too low, each with the reason."""


def test_a_job_whose_figures_would_be_too_low_fails_with_the_reason(session):
    done = session(ways=tuple(UNKNOWN))
    assert f"{len(UNKNOWN)} failed" in done.stdout, done.stdout
    for way, reason in UNKNOWN.items():
        assert re.search(rf"JobError: `[^`]*{way}'?`.*{reason}", done.stdout), (way, done.stdout)
