"""Tests of the bytes that several processes hold at the same time: they are exact, a budget limits them, and no baseline has them.

They are imported by a file for an emulated GPU and a file for the CPU. The fixture `processes` runs sessions on the device.
"""

from __future__ import annotations

import pytest

from tests.conftest import figures_of, verdicts_of

MIB = 1 << 20
PROGRAM = """
import multiprocessing
import os
import sys

CONTEXT = multiprocessing.get_context("spawn")


def block(mib):
    import torch

    return torch.empty(mib << 20, dtype=torch.uint8, device=os.environ.get("DEVICE", "cuda"))


def work(barrier, turn, size, together):
    kept = block(2)
    for number in range(4):
        barrier.wait()
        more = block(size) if together or number % 2 == turn else None
        barrier.wait()
        del more
        barrier.wait()


def two(together):
    barrier = CONTEXT.Barrier(2)
    sizes = (8, 6)
    processes = [CONTEXT.Process(target=work, args=(barrier, turn, sizes[turn], together)) for turn in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


def serve(pipe):
    kept = block(4)
    while size := pipe.recv():
        block(size)
        pipe.send(size)


class Server:
    def __init__(self, name):
        self.pipe, other = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve, args=(other,), name=name)
        self.process.start()
        self.ask(2)

    def ask(self, size):
        self.pipe.send(size)
        self.pipe.recv()


if __name__ == "__main__":
    two("together" in sys.argv)
"""
TEST = """
import os
import subprocess
import sys

import pytest
import torch

import parts

LIMITED = pytest.mark.gpumem(max_memory=os.environ.get("LIMIT", "1 GB"))


@LIMITED
@pytest.mark.parametrize("how", ["by turns", "together"])
def test_job(gpumem, how):
    gpumem.launch([sys.executable, "parts.py", how], timeout=200)


@LIMITED
@pytest.mark.parametrize("how", ["by turns", "together"])
def test_call(how):
    parts.two(how == "together")
"""
SERVER_TEST = """
import os
import sys

import pytest
import torch

import parts


@pytest.fixture(scope="module")
def server():
    servers = [parts.Server(name) for name in ("server", "idle", "killed")]
    servers[2].process.kill()
    servers[2].process.join()
    yield servers[0]
    for server in servers[:2]:
        server.pipe.send(0)
        server.process.join()


@pytest.mark.gpumem
def test_server(server):
    child = parts.CONTEXT.Process(target=parts.block, args=(2,))
    child.start()
    child.join()
    server.ask(6)


def test_step(gpumem, server):
    def step():
        child = parts.CONTEXT.Process(target=parts.block, args=(2,))
        child.start()
        child.join()
        server.ask(6)

    gpumem.measure(step)
"""


@pytest.fixture
def session(processes, tmp_path):
    (tmp_path / "parts.py").write_text(PROGRAM, encoding="utf-8")

    def run(test, *arguments, **variables):
        (tmp_path / "test_it.py").write_text(test, encoding="utf-8")
        words = ("--no-gpumem-time", "--junitxml=report.xml", "--gpumem-explain=never", *arguments)
        return processes.pytest(*words, new=True, timeout=1200, **variables)

    return run


def of_all(report):
    """The sum of the peaks and the most bytes at the same time in MiB, for all processes of each test."""
    found = {}
    for test, verdict in verdicts_of(report).items():
        parts = [part["measurement"] for part in verdict["verdicts"]]
        for whole in (part for part in parts if part["workload"]["step"] in ("launch", "processes")):
            (held,) = whole["simultaneous"].values()
            found[test] = whole["metrics"]["peak_allocated"] / MIB, held / MIB
    return found


@pytest.mark.thorough
def test_bytes_held_at_the_same_time_are_exact_and_in_no_baseline(session, tmp_path):
    recorded = session(TEST, "--gpumem-update=new")
    assert recorded.returncode == 0, recorded.stdout
    expected = {"by turns": (18, 12), "together": (18, 18)}
    held = of_all(tmp_path / "report.xml")
    assert held == {f"{test}[{how}]": expected[how] for test in ("test_job", "test_call") for how in expected}
    first = figures_of(tmp_path / "report.xml")
    stored = "".join(path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.toml"))
    assert "peak_allocated" in stored
    assert "simultaneous" not in stored
    assert session(TEST, "--gpumem-baseline").returncode == 0
    assert figures_of(tmp_path / "report.xml") == first


@pytest.mark.parametrize(
    ("workers", "other_workers"),
    [
        pytest.param((), ("-n", "2"), id="quick"),
        pytest.param(("-n", "2"), (), id="exchanged", marks=pytest.mark.thorough),
    ],
)
def test_a_budget_limits_the_bytes_held_at_the_same_time_and_not_the_sum(session, workers, other_workers):
    between = session(TEST, "-k", "turns", *workers, LIMIT="12 MiB")
    assert between.returncode == 0, between.stdout
    below = session(TEST, *other_workers, LIMIT="12582911 B")
    assert "4 failed" in below.stdout, below.stdout
    for name in ("launch", "call: all processes"):
        assert f"In {name}: " in below.stdout
    assert below.stdout.count("peak at the same time 12.58 MB, budget 12.58 MB: +1 B") == 2, below.stdout
    assert "  peak allocated at the same time  " in below.stdout, below.stdout


@pytest.mark.thorough
def test_idle_and_killed_servers_do_not_count(session, tmp_path):
    done = session(SERVER_TEST)
    assert done.returncode == 0, done.stdout
    assert of_all(tmp_path / "report.xml") == {"test_server": (12, 10), "test_step": (12, 10)}


OWN_TEST = """
import pytest
import torch

import parts

@pytest.fixture(scope="module")
def of_another_test():
    return parts.block(3)


@pytest.fixture(scope="module")
def model():
    return parts.block(1)


@pytest.fixture(scope="module")
def server():
    server = parts.Server("server")
    yield server
    server.pipe.send(0)
    server.process.join()


@pytest.mark.gpumem
def test_without_a_server(of_another_test):
    parts.block(20)


def work(server, how):
    mine = parts.block(7)
    if how == "by turns":
        del mine
    server.ask(6)
    return parts.block(2)


BOTH = pytest.mark.parametrize("how", ["by turns", "together"])


@pytest.mark.gpumem
@BOTH
def test_call(server, model, how):
    work(server, how)


@BOTH
def test_region(gpumem, server, model, how):
    with gpumem.track("region"):
        work(server, how)


@BOTH
def test_step(gpumem, server, model, how):
    gpumem.measure(lambda: (model, work(server, how)))


@BOTH
def test_loading(gpumem, server, model, how):
    gpumem.load(lambda: (model, work(server, how)))
"""


def test_the_own_process_counts_with_the_bytes_that_it_holds(session, tmp_path):
    """It holds 8 MiB, and by turns 1 MiB while the server holds 10 MiB instead of 4 MiB. Together, it holds 10 MiB at the end."""
    done = session(OWN_TEST, "--gpumem-update=new")
    assert done.returncode == 0, done.stdout
    expected = {"by turns": (18, 12), "together": (20, 18)}
    tests = ("test_call", "test_region", "test_step", "test_loading")
    assert of_all(tmp_path / "report.xml") == {f"{test}[{how}]": expected[how] for test in tests for how in expected}
    first = figures_of(tmp_path / "report.xml")
    assert session(OWN_TEST, "--gpumem-baseline", "-p", "no:randomly").returncode == 0
    assert figures_of(tmp_path / "report.xml") == first
