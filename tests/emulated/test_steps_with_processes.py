"""Steps of a test that use other processes, on an emulated GPU: each process has a settled peak and a growth per step."""

from __future__ import annotations

import re

import pytest

from tests.conftest import figures_of

SERVER = """
import http.server
import os
import sys

import torch

EVERY = int(os.environ.get("LEAK", "0"))
model = torch.nn.Linear(256, 1024, bias=False, device="cuda")
cache = []
number = 0


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global number
        number += 1
        with torch.no_grad():
            hidden = model(torch.ones(512, 256, device="cuda"))
        if EVERY and number % EVERY == 0 and "leaks" in sys.argv:
            cache.append(hidden)  # the leak
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments):
        pass


server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
FORKS = """
import os
import sys

import torch

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        torch.ones(int(line), device="cuda")
        os._exit(0)
    os.waitpid(pid, 0)
    print("done", flush=True)
"""
TESTS = """
import os
import subprocess
import sys
import urllib.request

import pytest
import torch


@pytest.fixture(scope="session")
def start():
    started = []

    def start(*words):
        process = subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()
        process.communicate()


@pytest.fixture(scope="session")
def ask(start):
    port = int(start("server.py", "leaks").stdout.readline())
    return lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}").read()


@pytest.fixture(scope="session")
def ask_second(start):
    port = int(start("server.py").stdout.readline())
    return lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}").read()


@pytest.fixture(scope="session")
def fork(start):
    process = start("forks.py")

    def fork():
        process.stdin.write(os.environ.get("CHILD", "1048576") + "\\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\\n"

    return fork


@pytest.mark.gpumem
def test_call(ask):
    ask()


def test_measure(gpumem, ask):
    measurement = gpumem.measure(ask)
    assert measurement.name == "measure: all processes"


def test_two(gpumem, ask, ask_second):
    gpumem.measure(lambda: (ask(), ask_second()), name="both")


def test_own(gpumem, ask):
    measurement = gpumem.measure(lambda: (torch.ones(1 << 20, device="cuda"), ask()))
    assert measurement.name == "measure"


def test_child(gpumem, fork):
    gpumem.measure(fork)


def test_child_and_server(gpumem, fork, ask):
    gpumem.measure(lambda: (fork(), ask(), fork()))


def test_train(gpumem, ask):
    def loss(output, _):
        ask()
        return output.sum()

    gpumem.train_step(lambda: torch.nn.Linear(8, 8), torch.ones(4, 8), loss=loss)


def test_loop(gpumem, ask):
    with gpumem.loop() as training:
        while not training.step_ended():
            ask()


def test_no_growth(gpumem, ask, fork):
    gpumem.assert_no_growth(lambda: (ask(), fork()), steps=6)
"""
NAMES = {
    "test_call": {"call: server.py", "call: all processes"},
    "test_measure": {"measure: server.py", "measure: all processes"},
    "test_two": {"both: server.py", "both: server.py 2", "both: all processes"},
    "test_own": {"measure", "measure: server.py", "measure: all processes"},
    "test_child": {"measure: forks.py", "measure: all processes"},
    "test_child_and_server": {
        *("measure: forks.py", "measure: forks.py 2"),
        *("measure: server.py", "measure: all processes"),
    },
    "test_train": {"train_step", "train_step: server.py", "train_step: all processes"},
    "test_loop": {"loop: server.py", "loop: all processes"},
}
"""The measurements of each test."""
LEAK = 512 * 1024 * 4


@pytest.fixture
def session(processes, tmp_path):
    for name, source in {"server.py": SERVER, "forks.py": FORKS, "test_it.py": TESTS}.items():
        (tmp_path / name).write_text(source, encoding="utf-8")

    def run(*arguments, **variables):
        done = processes.pytest("--junitxml=report.xml", *arguments, timeout=900, **variables)
        return done, figures_of(tmp_path / "report.xml")

    return run


def names_in(figures):
    """The names of a test's measurements, without the metrics."""
    return {name.rpartition(".")[0] for name in figures}


@pytest.mark.parametrize(
    "tests",
    [
        pytest.param(("test_call", "test_own", "test_child_and_server"), id="quick"),
        pytest.param(tuple(NAMES), id="all", marks=pytest.mark.thorough),
    ],
)
def test_bytes_of_processes_in_steps_repeat_and_a_leak_is_red_with_its_line(session, tests):
    words = [f"test_it.py::{test}" for test in (*tests, "test_no_growth")]
    recorded, figures = session("--gpumem-update=new", *words)
    assert recorded.returncode == 0, recorded.stdout
    assert {test: names_in(of_test) for test, of_test in figures.items()} == {test: NAMES[test] for test in tests}
    peak = figures["test_call"]["call: server.py.peak_allocated"]
    of_server = {name: value for test in figures.values() for name, value in test.items() if "server.py" in name}
    assert {value for name, value in of_server.items() if name.endswith("peak_allocated")} == {peak}
    assert {value for name, value in of_server.items() if name.endswith(("growth", "retained"))} == {0}
    assert figures["test_own"]["measure: all processes.peak_allocated"] == peak + (4 << 20)
    # The two forks of a step do not run at the same time.
    assert figures["test_child_and_server"]["measure: forks.py 2.peak_allocated"] == 4 << 20
    assert figures["test_child_and_server"]["measure: all processes.peak_allocated"] == peak + (4 << 20)

    gated, again = session("--gpumem-baseline", "-n", "2", *words)
    assert gated.returncode == 0, gated.stdout
    assert again == figures
    grown, figures = session("--gpumem-baseline", "-vv", *reversed(words), LEAK="1", CHILD=str(2 << 20))
    failed = set(re.findall(r"^FAILED test_it.py::(\w+)", grown.stdout, re.MULTILINE))
    assert failed == {*tests, "test_no_growth"}, grown.stdout
    steps = set(tests) - {"test_call", "test_child"}
    for test in steps:
        growth = {name: value for name, value in figures[test].items() if name.endswith(".growth") and value}
        assert len(growth) == 2, (test, growth)  # the server and all processes
        assert {*growth.values()} == {LEAK}
    line = 1 + next(number for number, code in enumerate(SERVER.splitlines()) if "model(torch.ones" in code)
    row = rf"other +2\.10 MB .* server\.py:{line} .*1 x float32\[512, 1024\]"
    kept = rf"kept by each step +bytes +module +line +operator +tensors\n +{row}"
    assert len(re.findall(kept, grown.stdout)) == len(steps), grown.stdout
    assert re.search(
        rf"memory grows in server.py: 2.10 MB a step, 6.29 MB in 3 steps\n.*server.py:{line}", grown.stdout
    )


@pytest.mark.thorough
def test_a_leak_in_every_third_request_is_red_with_its_line(session):
    assert session("--gpumem-update=new", "-k", "test_measure")[0].returncode == 0
    grown, figures = session("--gpumem-baseline", "-k", "test_measure", LEAK="3")
    assert grown.returncode == 1
    assert figures["test_measure"]["measure: server.py.growth"] == round(LEAK / 3)
    assert re.search(r"kept by each step .*\n +other +2.10 MB .*server.py:\d+ ", grown.stdout), grown.stdout
