"""Processes from ``subprocess`` that will not report are looked at while they run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from pytest_gpumem.measuring.jobs.popen_watch import PopenWatch, will_report
from pytest_gpumem.measuring.jobs.windows import ProcessWindows
from tests.jobs.mapped import maps_torch

VARIABLES = {"GPUMEM_USAGE": "/tmp/folder", "PYTHONPATH": "/startup"}
INHERITED = {**VARIABLES, "PATH": "/bin", "PYTHONPATH": f"/mine{os.pathsep}/startup"}
TRAIN = ["python", "train.py", "-I"]


@pytest.mark.parametrize(
    ("command", "environment", "reports"),
    [
        pytest.param(TRAIN, None, True, id="the environment of this process"),
        pytest.param(TRAIN, INHERITED, True, id="an extended environment"),
        pytest.param(TRAIN, {os.fsencode(k): os.fsencode(v) for k, v in INHERITED.items()}, True, id="bytes"),
        pytest.param(TRAIN, {**INHERITED, "GPUMEM_USAGE": "/other"}, True, id="a launched job"),
        pytest.param(TRAIN, {"PATH": "/bin"}, False, id="cleared"),
        pytest.param(TRAIN, {**INHERITED, "PYTHONPATH": "src"}, False, id="another PYTHONPATH"),
        pytest.param(["/usr/bin/python3.11", "-u", "-I", "train.py"], None, False, id="-I"),
        pytest.param(["python", "-uE", "-m", "train"], None, False, id="-E"),
        pytest.param(["python", "-c", "print()", "-S"], None, True, id="an option of the program"),
        pytest.param(["python", "-Werror", "train.py"], None, True, id="a value with E"),
        pytest.param(["python", "-W", "ignore", "-I", "train.py"], None, False, id="an option after a value"),
        pytest.param(["grep", "-E", "a"], None, True, id="another program"),
        pytest.param("python -I train.py", None, True, id="a text for a shell"),
        pytest.param([], None, True, id="nothing"),
    ],
)
def test_a_process_reports_if_its_python_reads_the_variables(command, environment, reports, monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    assert will_report(command, environment, VARIABLES) == reports


def test_a_process_does_not_report_if_the_test_changed_its_own_environment(monkeypatch):
    monkeypatch.setenv("GPUMEM_USAGE", "/tmp/folder")
    monkeypatch.setenv("PYTHONPATH", "src")
    assert not will_report(TRAIN, None, VARIABLES)


@pytest.fixture
def windows():
    opened = ProcessWindows()
    yield opened
    opened.close()


def unseen(window):
    """Return the commands of unseen processes, without the suite's own process from which others are forked."""
    return [command for command in window.usage.unseen if "multiprocessing.forkserver" not in command]


ENDS = "import time; time.sleep(0.7)"


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(lambda code: subprocess.run([sys.executable, "-c", code], env={}, check=True), id="cleared"),
        pytest.param(lambda code: subprocess.check_call([sys.executable, "-I", "-c", code]), id="isolated"),
        pytest.param(
            lambda code: subprocess.run(
                [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"],
                env={},
                check=True,
            ),
            id="a child of it",
        ),
    ],
)
def test_a_short_process_with_torch_that_does_not_report_is_named(windows, start):
    with windows.window() as window:
        start(maps_torch(ENDS))
    (command,) = unseen(window)
    assert "libtorch_cpu.so" in command
    with windows.window() as later:
        pass
    assert unseen(later) == []


def test_a_process_without_torch_is_not_named_and_no_thread_remains(windows):
    with windows.window() as window:
        subprocess.run([sys.executable, "-c", ENDS], env={}, check=True)
    assert unseen(window) == []
    while any(thread.name == "gpumem-watch" for thread in threading.enumerate()):
        time.sleep(0.01)


def test_a_process_that_reports_is_not_looked_at(windows):
    with windows.window():
        subprocess.run([sys.executable, "-c", "pass"], env={**os.environ, **windows.variables(os.environ)}, check=True)
        assert windows._watch._thread is None


def test_popen_is_as_before_after_the_end_also_of_two_watches(tmp_path):
    before = subprocess.Popen.__init__
    first = PopenWatch(tmp_path, VARIABLES)
    second = PopenWatch(tmp_path, VARIABLES)
    second.close()
    first.close()
    assert subprocess.Popen.__init__ is before
