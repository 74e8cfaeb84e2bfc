"""Tests of processes that a plain test, its fixtures or its session start: each is measured, gated, and missed.

They are imported by a file for an emulated GPU and a file for the CPU. The fixture `processes` runs sessions on the device.
"""

from __future__ import annotations

import importlib.util
import re
from xml.etree import ElementTree

import pytest

from pytest_gpumem import __version__
from tests.conftest import figures_of, verdicts_of
from tests.support.programs import JOB, SERVER

TEST = """
import re

import pytest

import job


@pytest.mark.gpumem
@pytest.mark.parametrize("way", {ways!r})
def test_way(way, capfd, record_property):
    start, _, of_child = way.partition(" from ")
    job.python(job.__file__, start) if of_child else job.WAYS[way]()
    record_property("printed", " ".join(sorted(re.findall(r"PEAK (\\d+)", capfd.readouterr().out), key=int)))
"""
SERVER_TEST = """
import http.client
import subprocess
import sys

import pytest
import torch

import job


@pytest.fixture(scope="session")
def server():
    with subprocess.Popen([sys.executable, "server.py"], stdout=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline())

        def ask(word):
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("GET", f"/{{word}}")
            return connection.getresponse().read().decode()

        yield ask
        process.terminate()


@pytest.mark.gpumem
@pytest.mark.parametrize("size", {sizes!r})
def test_requests(server, size, record_property):
    server("reset")
    for _ in range(30):
        server(size)
    record_property("printed", server("peak"))


@pytest.mark.gpumem
def test_without_a_request(server):
    torch.ones(1000, device=job.DEVICE)
"""
UNKNOWN_TEST = """
import os

import pytest
import torch

import job


@pytest.fixture
def children():
    started = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.gpumem
@pytest.mark.parametrize("way", {ways!r})
def test_way(way, children):
    kept = torch.ones(1000, device=job.DEVICE)
    process = job.LEFT[os.environ.get("WAY", way)]()
    children.append(process)
    if os.environ.get("WAY", way) in ("ended", "of another release"):
        os.waitpid(process.pid, os.WUNTRACED)
"""
WAYS = (
    ("terminated", "exec after CUDA", "exit function", "one after the other", "executor from a child")
    + (("accelerate",) if importlib.util.find_spec("accelerate") else ()),
    ("spawn", "torch.multiprocessing", "torchrun", "forkserver from a child", "fork after import from a child"),
    ("forks that all use CUDA from a child", "fork of a fork without torch from a child"),
    ("pool of forks that restarts from a child", "forkserver pool that restarts"),
    ("forkserver pool that restarts from a child",),
)
"""Ways beside those of `process_table`: several processes, other ends, and the same functions in a child."""


@pytest.fixture
def session(processes, tmp_path):
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    (tmp_path / "server.py").write_text(SERVER, encoding="utf-8")

    def run(test, *arguments, new=False, **variables):
        (tmp_path / "test_it.py").write_text(test, encoding="utf-8")
        words = ("--junitxml=report.xml", "--gpumem-explain=never", *arguments)
        return processes.pytest(*words, new=new, timeout=1200, **variables)

    return run


def printed_of(report):
    """The peaks that the processes of each test printed."""
    return {
        case.get("name"): [int(word) for word in str(entry.get("value")).split()]
        for case in ElementTree.parse(report).iter("testcase")
        for entry in case.iter("property")
        if entry.get("name") == "printed"
    }


def failing_of(verdict):
    """The metrics that fail a test, each with its measurement's name."""
    return {
        f"{part['measurement']['name']}.{metric['metric']}"
        for part in verdict["verdicts"]
        for metric in part["metrics"]
        if metric["outcome"] == "regressed"
    }


def peaks_of(figures):
    """The peaks of the processes of a test, and of all of them."""
    peaks = {name: value for name, value in figures.items() if name.endswith(".peak_allocated")}
    whole = peaks.pop("call: all processes.peak_allocated")
    return whole, sorted(peaks.values())


@pytest.mark.parametrize(
    ("ways", "workers"),
    [
        pytest.param(ways, workers, id=f"{ways[0]}, {len(workers)}", marks=pytest.mark.thorough)
        for ways in WAYS
        for workers in ((), ("-n", "2"))
    ],
)
def test_each_way_to_start_a_process_is_measured_and_a_grown_process_is_red(session, tmp_path, ways, workers):
    recorded = session(TEST.format(ways=ways), "--gpumem-update=new", *workers, new=True)
    assert recorded.returncode == 0, recorded.stdout
    first, printed = figures_of(tmp_path / "report.xml"), printed_of(tmp_path / "report.xml")
    assert len(printed) == len(ways)
    for test, peaks in printed.items():
        assert peaks
        whole = (max if "one after the other" in test or "restarts" in test else sum)(peaks)
        assert peaks_of(first[test]) == (whole, peaks), test
    gated = session(TEST.format(ways=ways[::-1]), "--gpumem-baseline", *workers, new=True)
    assert gated.returncode == 0, gated.stdout
    assert figures_of(tmp_path / "report.xml") == first
    grown = session(TEST.format(ways=ways), "--gpumem-baseline", *workers, new=True, GROWN="2")
    assert grown.returncode == 1
    assert f"{len(ways)} failed" in grown.stdout, grown.stdout
    assert "call: " in grown.stdout


def test_a_server_has_the_peak_that_it_computes_and_its_leak_and_growth_are_red(session, tmp_path):
    test = SERVER_TEST.format(sizes=(1, 4))
    recorded = session(test, "--gpumem-update=new")
    assert recorded.returncode == 0, recorded.stdout
    first, printed = figures_of(tmp_path / "report.xml"), printed_of(tmp_path / "report.xml")
    assert set(printed) == {"test_requests[1]", "test_requests[4]"}
    for name, (peak,) in printed.items():
        assert first[name] == {
            "call: all processes.peak_allocated": peak,
            "call: server.py.peak_allocated": peak,
            "call: server.py.retained": 0,
        }
    assert {key.partition(".")[0] for key in first["test_without_a_request"]} == {"call"}
    gated = session(SERVER_TEST.format(sizes=(4, 1)), "--gpumem-baseline")
    assert gated.returncode == 0, gated.stdout
    assert figures_of(tmp_path / "report.xml") == first
    worse = session(test, "--gpumem-baseline", GROWN="1", LEAK="1")
    assert "2 failed, 1 passed" in worse.stdout, worse.stdout
    failed = {name: failing_of(verdict) for name, verdict in verdicts_of(tmp_path / "report.xml").items()}
    of_server = {"call: server.py.peak_allocated", "call: server.py.retained"}
    assert failed["test_requests[1]"] >= of_server
    assert failed["test_requests[4]"] >= of_server


POOL_TEST = """
import os

import pytest

import job


@pytest.mark.gpumem
def test_pool():
    for number in map(int, os.environ["TASKS"].split()):
        job.python("-c", f"import job; job.work({number})")
"""
"""A pool deals the tasks of a run to its workers in another order than in the run before. Here the workers are subprocesses."""


def test_workers_that_change_places_are_green_and_a_grown_worker_is_the_only_red_one(session, tmp_path):
    recorded = session(POOL_TEST, "--gpumem-update=new", TASKS="0 2")
    assert recorded.returncode == 0, recorded.stdout
    first = figures_of(tmp_path / "report.xml")
    changed = session(POOL_TEST, "--gpumem-baseline", TASKS="2 0")
    assert changed.returncode == 0, changed.stdout
    assert figures_of(tmp_path / "report.xml") == first
    grown = session(POOL_TEST, "--gpumem-baseline", TASKS="3 0")
    assert grown.returncode == 1
    (verdict,) = verdicts_of(tmp_path / "report.xml").values()
    peaks = {
        metric for metric in failing_of(verdict) if metric.endswith(".peak_allocated")
    }  # reserved bytes come in segments
    assert peaks == {"call: python -c.peak_allocated", "call: all processes.peak_allocated"}
    assert "its peak fits the baseline of python -c, so these processes may have changed places" in grown.stdout


SILENT = r"did not report its memory within 10 seconds, so its memory is not known\. It is stopped, or in a long call"
OTHER_RELEASE = (
    rf"`.*` runs pytest-gpumem 9\.9, and this session {re.escape(__version__)}\. Install the same release in both"
)
MISSING = r"Measurement missing: .* no longer takes: call: -c, call: all processes\n  note: not seen: `.*` loads torch or CUDA, .*"
NO_PATH = rf"{MISSING}because its environment has no PYTHONPATH \(start it with env=\{{\*\*os.environ, \.\.\.\}}\)"
UNKNOWN = {
    "hanging": SILENT,
    "cleared": NO_PATH,
    "isolated": rf"{MISSING}because it runs with python -I \(start it without -I\)",
    "of another release": OTHER_RELEASE,
    "of another release, running": OTHER_RELEASE,
}
"""Ways to leave a process whose memory is not known, each with the reason in the gate's message."""


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param(("of another release", "of another release, running"), id="release"),
        pytest.param(("hanging", "isolated", "cleared"), id="others", marks=pytest.mark.thorough),
    ],
)
def test_a_process_whose_memory_is_not_known_fails_the_gate_with_the_reason(session, tmp_path, ways):
    test = UNKNOWN_TEST.format(ways=ways)
    recorded = session(test, "--gpumem-update=new", WAY="ended")
    assert recorded.returncode == 0, recorded.stdout
    gated = session(test, "--gpumem-baseline")
    assert f"{len(ways)} failed" in gated.stdout
    for way in ways:
        assert re.search(rf"_ test_way\[{way}\] _+\n.*{UNKNOWN[way]}", gated.stdout), (way, gated.stdout)
