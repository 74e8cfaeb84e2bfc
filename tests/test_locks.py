"""Tests that are timed at once, in workers of one session and in two sessions: by the order of what their device tells."""

from __future__ import annotations

import pytest

from tests import preloaded
from tests.support.processes import log_of, overlaps, start_holder, wait_for_line

LOGGED = """
import os
from contextlib import contextmanager
from pathlib import Path

import pytest

from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.measuring.devices.device_lock import DeviceLock

here = Path(__file__).parent


def note(event):
    # One short line is appended in one piece. Written within the stretch that it tells of, lines are in true order.
    with open(here / "log", "a") as log:
        log.write(f"{event} {os.getpid()}\\n")


class Logged(CpuDevice):
    is_open = False

    def open(self):
        note("opens")
        super().open()
        self.is_open = True
        note("shares")

    def close(self):
        if self.is_open:
            self.is_open = False
            note("leaves")
        super().close()

    @contextmanager
    def exclusive(self):
        note("waits")
        with super().exclusive() as refused:
            assert refused is None
            note("alone")
            yield refused
            note("waits")
        note("shares")


@pytest.fixture
def logged():
    return made[0]


made = []


def make():
    made.append(Logged(DeviceLock("GPU-0", folder=here / "locks")))
    return made[0]


def pytest_gpumem_devices(config):
    return {"cpu": make}
"""
TOGETHER = """
import os
import time


def wait_for_another(event, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        lines = [line.split() for line in open("log")]
        if {process for what, process in lines if what == event} - {str(os.getpid())}:
            return
        time.sleep(0.005)
    raise AssertionError(f"no other process {event}")


"""
STEPS = """
@pytest.mark.parametrize("number", range(2))
def test_steps(gpumem, number):
    wait_for_another("shares")
    gpumem.infer_step(lambda: torch.nn.Linear(4, 4), torch.ones(1, 4))
"""
INNER = """
INNER = '''
import torch


def test_inner(gpumem):
    gpumem.infer_step(lambda: torch.nn.Linear(4, 4), torch.ones(1, 4))
'''


class Outcomes:
    passed = 0

    def pytest_runtest_logreport(self, report):
        self.passed += report.when == "call" and report.passed


def test_outer(gpumem, logged, tmp_path):
    (tmp_path / "test_inner.py").write_text(INNER)
    outcomes = Outcomes()
    with logged.exclusive():
        pytest.main([str(tmp_path), "-p", "no:cacheprovider", "--gpumem-device=cpu"], [outcomes])
    assert outcomes.passed == 1
"""


HOLDER = """
with lock.shared(), lock.exclusive():
    note("alone")
    while "opens" not in open("log").read():
        time.sleep(0.05)
    time.sleep(0.5)
"""


@pytest.fixture
def logged(project):
    project.settings('[tool.gpumem]\ntime_budget = "0.1 s"\n')
    (project.path / "log").touch()
    return project


def write(project, tests):
    (project.path / "conftest.py").write_text(LOGGED)
    project.write(TOGETHER + tests)


def processes_that_were_alone(log):
    return {line.split()[1] for line in log if line.startswith("alone")}


@pytest.mark.thorough
def test_workers_that_time_steps_on_one_device_never_overlap(logged):
    write(logged, STEPS)
    logged.run("-n2", separate=True, timed=True).assert_outcomes(passed=2)
    log = log_of(logged.path)
    assert len(processes_that_were_alone(log)) == 2
    assert overlaps(log) == []


def test_two_sessions_that_time_steps_on_one_device_never_overlap(logged):
    write(logged, STEPS)
    command = ["-m", "pytest", "-p", "no:randomly", "-p", "no:cacheprovider", "--gpumem-device=cpu"]
    sessions = [preloaded.start(*command, cwd=logged.path) for _ in range(2)]
    for session in sessions:
        session.communicate(timeout=120)
    assert [session.returncode for session in sessions] == [0, 0]
    log = log_of(logged.path)
    assert len(processes_that_were_alone(log)) == 2
    assert overlaps(log) == []


def test_a_session_within_a_test_that_is_alone_waits_for_nobody(logged):
    # As in this very suite, whose tests run sessions in their own process, and may be measured themselves.
    write(logged, INNER)
    logged.run(timed=True).assert_outcomes(passed=1)


@pytest.mark.parametrize(
    "workers", [pytest.param([], id="alone"), pytest.param(["-n1"], id="workers", marks=pytest.mark.thorough)]
)
def test_a_test_that_waits_for_its_device_says_so_at_once_past_the_capture(logged, workers):
    conftest = LOGGED.replace(
        "made = []",
        "from pytest_gpumem.measuring.devices import device_lock\n\ndevice_lock.SECONDS_UNTIL_TOLD = 0.1\nmade = []",
    )
    (logged.path / "conftest.py").write_text(conftest)
    logged.write("def test_it(gpumem):\n    gpumem.infer_step(lambda: torch.nn.Linear(4, 4), torch.ones(1, 4))\n")
    holder = start_holder(HOLDER, logged.path, "holder")
    wait_for_line("alone holder", logged.path)
    result = logged.run(*workers, separate=True, timed=True)
    assert holder.wait(30) == 0
    result.assert_outcomes(passed=1)
    result.stderr.fnmatch_lines(
        [f"gpumem: waiting for the GPU, which is held by process {holder.pid}*: timed steps are alone *"]
    )
