"""A server between two tests, on an emulated GPU: a test is not blamed for growth that the server had before."""

from __future__ import annotations

import shutil

import pytest

from tests.conftest import verdicts_of
from tests.emulated.processes import Processes

SERVER = """
import http.server
import os

weights, kept, cache = [], [], []


def tensor(mib):
    import torch

    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")


def load():
    if not weights:
        weights.append(tensor(int(os.environ.get("WEIGHTS", "100"))))


def fill():
    if not cache and os.environ.get("CACHE"):
        cache.append(tensor(int(os.environ["CACHE"])))


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        _, action, mib = self.path.split("/")
        if int(mib):
            load()
            block = tensor(int(mib))
            if action == "keep":
                kept.append(block)
            elif action == "fill":
                fill()
            elif action == "free":
                cache.clear()
                kept.clear()
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments):
        pass


if os.environ["LOADS"] == "at once":
    load()
    fill()
elif os.environ["LOADS"] == "later":
    tensor(1)  # CUDA begins
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""
TESTS = """
import os
import subprocess
import sys
import urllib.request

import pytest


@pytest.fixture(scope="session")
def ask():
    process = subprocess.Popen([sys.executable, "server.py"], stdout=subprocess.PIPE, text=True)
    port = int(process.stdout.readline())
    yield lambda action, mib: urllib.request.urlopen(f"http://127.0.0.1:{port}/{action}/{mib}").read()
    process.terminate()
    process.wait()


@pytest.fixture
def loads(ask):
    ask("keep", os.environ.get("FIXTURE_KEEPS", "0"))


@pytest.fixture(autouse=True)
def empties_cache(ask):
    yield
    ask("free", os.environ.get("FIXTURE_FREES", "0"))


@pytest.mark.gpumem
def test_a(ask):
    ask("work", 10)
    ask("keep", os.environ.get("A_KEEPS", "0"))
    ask("free", os.environ.get("A_FREES", "0"))


@pytest.mark.gpumem
def test_b(ask, loads):
    ask("fill", os.environ.get("B_FILLS", "0"))
    ask("work", os.environ.get("B_WORKS", "10"))
"""
GREEN, NOTED, DOUBTED, RED = "green", "green with a note", "doubted", "red"


@pytest.fixture(scope="module")
def recordings():
    """Folders with recorded baselines."""
    return {}


@pytest.fixture
def gate(recordings, tmp_path_factory):
    """Record tests, run them again with other variables, and return how each test ended."""

    def run(folder, option, tests, variables):
        names = [f"test_it.py::test_{test}" for test in tests]
        done = Processes(folder).pytest(option, "--junitxml=report.xml", *names, **variables)
        assert done.returncode in (0, 1), done.stdout
        return verdicts_of(folder / "report.xml")

    def record(sessions, variables):
        folder = tmp_path_factory.mktemp("recorded")
        (folder / "server.py").write_text(SERVER, encoding="utf-8")
        (folder / "test_it.py").write_text(TESTS, encoding="utf-8")
        for tests in sessions:
            run(folder, "--gpumem-update=new", tests, variables)
        return folder

    def gated(recorded, tests, loads, recorded_with, **variables):
        sessions = tuple(recorded.split(", "))
        variables_then = {"LOADS": loads, **recorded_with}
        key = (sessions, *variables_then.items())
        if key not in recordings:
            recordings[key] = record(sessions, variables_then)
        folder = tmp_path_factory.mktemp("gated") / "project"
        shutil.copytree(recordings[key], folder)
        verdicts = run(folder, "--gpumem-baseline", tests, {**variables_then, **variables})
        return {test.removeprefix("test_"): ended(verdict) for test, verdict in verdicts.items()}

    return gated


def ended(verdict):
    """Return the word for a test's end."""
    outcomes = {metric["outcome"] for measured in verdict["verdicts"] for metric in measured["metrics"]}
    if "regressed" in outcomes:
        return RED
    if "uncertain" in outcomes:
        return DOUBTED
    assert outcomes == {"ok"}, verdict
    notes = " ".join(note for measured in verdict["verdicts"] for note in measured["measurement"]["notes"])
    return NOTED if "more when this measurement began than when the session first saw" in notes else GREEN


thorough = pytest.mark.thorough


@pytest.mark.parametrize(
    ("recorded", "tests", "loads", "recorded_with", "variables", "expected"),
    [
        pytest.param("ab", "ab", "at once", {}, {"A_KEEPS": 40}, {"a": RED, "b": NOTED}, id="a leaks"),
        pytest.param("ab", "ba", "at once", {}, {"A_KEEPS": 40}, {"a": RED, "b": GREEN}, id="b, a leaks", marks=thorough),
        pytest.param("ab", "ab", "at once", {}, {"A_KEEPS": 40, "B_WORKS": 30}, {"a": RED, "b": RED}, id="b grew after a leak"),
        pytest.param("ab", "ab", "at once", {}, {"WEIGHTS": 120}, {"a": RED, "b": RED}, id="larger weights", marks=thorough),
        pytest.param(
            "ab", "ab", "at once", {}, {"FIXTURE_KEEPS": 40}, {"a": GREEN, "b": RED}, id="a fixture loads more",
            marks=thorough,
        ),
        pytest.param(
            "a, b", "ab", "at once", {"A_KEEPS": 40}, {}, {"a": GREEN, "b": NOTED}, id="a's workspace", marks=thorough
        ),
        pytest.param("a, b", "ab", "later", {}, {}, {"a": GREEN, "b": GREEN}, id="recorded alone", marks=thorough),
        pytest.param("a, b", "ba", "later", {}, {}, {"a": GREEN, "b": GREEN}, id="recorded alone, b first", marks=thorough),
        pytest.param("ab", "b", "later", {}, {}, {"b": GREEN}, id="recorded in full", marks=thorough),
        pytest.param("ab", "ba", "later", {}, {}, {"a": GREEN, "b": GREEN}, id="in full, b first", marks=thorough),
        pytest.param(
            "a, b", "ab", "later", {}, {"WEIGHTS": 120}, {"a": RED, "b": NOTED}, id="larger weights, loaded by a", marks=thorough
        ),
        pytest.param("a, b", "ab", "later", {}, {"B_WORKS": 30}, {"a": GREEN, "b": DOUBTED}, id="b grew", marks=thorough),
        pytest.param("ab", "ab", "later", {}, {"B_WORKS": 30}, {"a": GREEN, "b": RED}, id="b grew, in full", marks=thorough),
        pytest.param(
            "a, b", "ab", "with CUDA", {}, {"A_KEEPS": 40}, {"a": RED, "b": NOTED}, id="CUDA begins in a", marks=thorough
        ),
        pytest.param("ab", "b", "with CUDA", {}, {}, {"b": GREEN}, id="CUDA begins in b", marks=thorough),
        # Test a frees the server's cache of 40 MiB. Alone, in either order, and however recorded, both tests are green.
        *(
            pytest.param(
                recorded, tests, "at once", {"CACHE": 40, "A_FREES": 1, **fills}, {}, "green",
                id=f"a frees a cache, recorded {recorded}, run {tests}{', b fills it' * bool(fills)}",
                marks=() if (recorded, tests, fills) == ("b, a", "ab", {"B_FILLS": 1}) else thorough,
            )
            for fills in ({}, {"B_FILLS": 1})
            for recorded in ("ab", "ba", "b, a")
            for tests in ("ab", "ba", "b")
        ),
        *(
            pytest.param(
                recorded, tests, "at once", {"A_KEEPS": 40}, {}, "green",
                id=f"a leaks, recorded {recorded}, run {tests}", marks=thorough,
            )
            for recorded in ("ab", "ba", "b, a")
            for tests in ("ab", "ba", "b")
        ),
        pytest.param(
            "ab", "b", "at once", {"CACHE": 40, "A_KEEPS": 40}, {"B_WORKS": 30}, {"b": DOUBTED}, id="b grew, run alone"
        ),
        pytest.param(
            "ab", "ba", "at once", {"A_KEEPS": 40, "FIXTURE_FREES": 1}, {"B_WORKS": 30}, {"a": GREEN, "b": RED},
            id="b grew, a fixture empties the cache", marks=thorough,
        ),
        pytest.param(
            "ab", "ab", "at once", {"A_KEEPS": 40, "FIXTURE_FREES": 1}, {"B_WORKS": 30}, {"a": GREEN, "b": RED},
            id="b grew, a fixture empties the cache, the same order", marks=thorough,
        ),
    ],
)  # fmt: skip
def test_only_the_test_that_makes_a_server_grow_is_red(
    gate, recorded, tests, loads, recorded_with, variables, expected
):
    ends = gate(recorded, tests, loads, recorded_with, **variables)
    if expected == "green":
        ends = "green" if set(ends.values()) <= {GREEN, NOTED} and sorted(ends) == sorted(tests) else ends
    assert ends == expected
