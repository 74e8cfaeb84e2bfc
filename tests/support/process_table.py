"""A table of ways to start a process and faults of this process: a test is red exactly if its cell says so.

It is imported by a file for an emulated GPU and a file for the CPU. The fixture `processes` runs sessions on the device.

Example:
    The diagonal 0 has a clean process for the first way, a grown process for the second way, and a killed process for the third
    way. The diagonal 1 begins with a grown process. All diagonals together are the whole table.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from tests.conftest import figures_of, verdicts_of
from tests.support.programs import JOB

TEST = """
import contextlib
import json
import os
import pathlib
import socket
import threading
import time

import pytest
import torch

import job
from pytest_gpumem.measuring.jobs import windows

CELLS = json.loads(os.environ["CELLS"])
FAULTS = json.loads(os.environ["FAULTS"])


@pytest.fixture(scope="session", autouse=True)
def fault_file(tmp_path_factory):
    os.environ["FAULT"] = str(tmp_path_factory.getbasetemp() / "fault")
    return pathlib.Path(os.environ["FAULT"])


class Child:
    def __init__(self, way, fault_file):
        self.announced = lambda: list(fault_file.parent.glob("fault-of-*"))
        for path in self.announced():
            path.unlink()
        self.way, self.error = way, None
        self.thread = threading.Thread(target=self.run, daemon=True)
        job.DONE.clear()

    def run(self):
        start, _, of_child = self.way.partition(" from ")
        try:
            job.python(job.__file__, start, env=os.environ) if of_child else job.WAYS[start]()
        except BaseException as error:
            self.error = error

    def pid_and_port(self):
        while not self.announced():
            assert self.thread.is_alive(), self.error
            time.sleep(0.01)
        (path,) = self.announced()
        return int(path.name.rpartition("-")[2]), int(path.read_text())

    def end(self):
        for path in self.announced():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.name.rpartition("-")[2]), 9)
        job.DONE.set()
        self.thread.join()


def state_of(pid):
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


@pytest.fixture
def child(way, kind, fault_file, monkeypatch):
    fault_file.write_text(FAULTS.get(way, kind))
    if FAULTS.get(way) == "hangs":
        monkeypatch.setattr(windows, "ANSWER_SECONDS", 1.0)
    child = Child(way, fault_file)
    yield child
    child.end()


@pytest.mark.gpumem
@pytest.mark.parametrize(("way", "kind"), CELLS)
def test_cell(way, kind, child):
    kept = torch.ones(1000, device=job.DEVICE)
    child.thread.start()
    fault = FAULTS.get(way, kind)
    if fault in ("killed", "hangs"):
        pid, _ = child.pid_and_port()
        while state_of(pid) not in ("ZX" if fault == "killed" else "T"):
            time.sleep(0.01)
    elif kind == "serves":
        connection = socket.create_connection(("127.0.0.1", child.pid_and_port()[1]))
        for _ in range(30):
            connection.sendall(b"request\\n")
            assert connection.recv(100)
        child.connection = connection
    else:
        child.thread.join()
        assert child.error is None, child.error
"""
"""A test for each way. Its process ends by itself or serves 30 requests, and has the fault that the variable `FAULTS` says."""


class Way(NamedTuple):
    """A way to start a process."""

    name: str
    """The name in `JOB`. After ``from``, it says that the test's child starts the process in this way."""
    keeps_environment: str = ""
    """The reason why a process that is started in this way cannot have a cleared environment."""


MEMORY = "a fork has its parent's memory, and with it the recorder"
INHERITED = "multiprocessing gives a process no other environment than its parent's"
WAYS = (
    Way("child"),
    Way("os.fork from a child", MEMORY),
    Way("spawn", INHERITED),
    Way("grandchild"),
    Way("fork from a child", MEMORY),
    Way("forkserver", INHERITED),
    Way("shell"),
    Way("module"),
    Way("executor", INHERITED),
    Way("fork of a fork from a child", MEMORY),
    Way("pool", INHERITED),
    Way("torchrun", "torchrun loads torch, which an emulated GPU's build of torch does only with its variables"),
    Way("torch.multiprocessing", INHERITED),
    Way("exec from a child"),
    Way("code"),
    Way("posix_spawn"),
    Way("thread of a pool"),
    Way("asyncio"),
)
FEWEST_WAYS = 14
"""The other ways run a program as `child` does, by another function of Python. They are thorough."""


class Fault(NamedTuple):
    """A fault of a process. The baseline has a process without a fault."""

    name: str
    kind: str
    """The process of the baseline: it ``ends`` by itself, or ``serves`` 30 requests."""
    outcome: str = "green"
    """The outcome that `outcome_of` returns."""


FAULTS = (
    Fault("ends", "ends"),
    Fault("grown", "ends", "regressed: peak_allocated"),
    Fault("killed", "ends", "killed"),
    Fault("serves", "serves"),
    Fault("leaks", "serves", "regressed: peak_allocated, retained"),
    Fault("hangs", "ends", "no answer"),
    Fault("cleared", "ends", "missing"),
)
UNMEASURED = {
    "killed": "was killed before it could report its memory",
    "no answer": r"did not report its memory within [0-9]+ seconds, so its memory is not known\. It is stopped, or",
    "missing": r"Measurement missing: .* no longer takes: call: .*\n  note: not seen: `.*` loads torch or CUDA, ",
}
"""Outcomes of processes whose memory is not known, each with the failure's text."""


def diagonal(number: int, ways: tuple[Way, ...]) -> dict[Way, Fault]:
    """Return a fault for each way. A way that cannot have its fault is clean."""
    cells = {way: FAULTS[(index + number) % len(FAULTS)] for index, way in enumerate(ways)}
    return {
        way: FAULTS[0] if way.keeps_environment and fault.name == "cleared" else fault for way, fault in cells.items()
    }


def outcome_of(case: ElementTree.Element, verdict, figures, baseline) -> str:
    """Return a test's outcome. It is green only if its figures are equal to the baseline's to the byte.

    Reserved bytes are left out of a regression, because they come in segments: 16 MB takes a larger one than 12 MB.
    """
    failure = "".join(text for part in case if part.tag in ("failure", "error") for text in part.itertext())
    regressed = {
        part["measurement"]["name"]: sorted(
            metric["metric"]
            for metric in part["metrics"]
            if metric["outcome"] == "regressed" and metric["metric"] != "peak_reserved"
        )
        for part in verdict["verdicts"]
        if part["measurement"]["name"] not in ("call", "call: all processes")
    }
    if not failure:
        return "green" if figures == baseline else "green with other figures"
    if any(regressed.values()):
        return "; ".join(f"regressed: {', '.join(metrics)}" for metrics in regressed.values())
    return next((outcome for outcome, text in UNMEASURED.items() if re.search(text, failure)), failure)


def test_the_first_diagonal_has_each_fault():
    assert set(diagonal(0, WAYS[:FEWEST_WAYS]).values()) == set(FAULTS)


@pytest.mark.parametrize(
    ("number", "ways", "workers"),
    [
        pytest.param(0, WAYS[:FEWEST_WAYS], ("-n", "2"), id="first"),
        *(
            pytest.param(number, WAYS, workers, id=f"{number}, {len(workers)}", marks=pytest.mark.thorough)
            for number in range(len(FAULTS))
            for workers in ((), ("-n", "2"))
        ),
    ],
)
def test_a_test_is_red_exactly_if_its_process_has_a_fault(processes, tmp_path, number, ways, workers):
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(TEST, encoding="utf-8")
    report, cells = tmp_path / "report.xml", diagonal(number, ways)

    def run(ways, faults, *options):
        cases = json.dumps([(way.name, cells[way].kind) for way in ways])
        words = ("--junitxml=report.xml", "--gpumem-explain=never", *options)
        return processes.pytest(*words, new=True, timeout=1200, CELLS=cases, FAULTS=json.dumps(faults), COUNT=1)

    recorded = run(ways, {}, "--gpumem-update=new")
    assert recorded.returncode == 0, recorded.stdout
    first = figures_of(report)
    faults = {way.name: fault.name for way, fault in cells.items()}
    assert run(ways[::-1], faults, "--gpumem-baseline", *workers).returncode == 1
    figures, verdicts = figures_of(report), verdicts_of(report)
    outcomes = {
        name: outcome_of(case, verdicts[name], figures.get(name), first[name])
        for case in ElementTree.parse(report).iter("testcase")
        for name in [str(case.get("name"))]
    }
    expected = {f"test_cell[{way.name}-{fault.kind}]": fault.outcome for way, fault in cells.items()}
    assert outcomes.keys() == expected.keys()
    assert {name: outcome for name, outcome in outcomes.items() if outcome != expected[name]} == {}, outcomes
