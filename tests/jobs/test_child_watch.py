"""Descendants of a test's process that do not report are seen while they run, however they were started."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import sys
import threading
import time

import pytest

from pytest_gpumem.measuring.jobs.windows import ProcessWindows
from tests.jobs.mapped import maps_torch


@pytest.fixture
def windows():
    opened = ProcessWindows()
    yield opened
    opened.close()


def unseen(window):
    """Return the commands of unseen processes, without the suite's own process from which others are forked."""
    return [command for command in window.usage.unseen if "multiprocessing.forkserver" not in command]


def spawn(code):
    return os.posix_spawn(sys.executable, [sys.executable, "-c", code], {})


def fork_and_exec(code):
    pid = os.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-c", code], {})
    return pid


ENDS = "import time; time.sleep(2)"


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
        pytest.param(lambda code: os.waitpid(spawn(code), 0), id="posix_spawn"),
        pytest.param(lambda code: os.waitpid(fork_and_exec(code), 0), id="fork and exec"),
        pytest.param(lambda code: os.system(f"env -i {sys.executable} -c {shlex.quote(code)}"), id="a shell"),
        pytest.param(
            lambda code: ctypes.CDLL(None).system(f"env -i {sys.executable} -c {shlex.quote(code)}".encode()), id="C"
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


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([sys.executable, "-c", ENDS], id="Python without torch"),
        pytest.param(["git", "--version"], id="git"),
        pytest.param(["sleep", "0.5"], id="sleep"),
    ],
)
def test_a_process_without_torch_is_not_named_and_no_thread_remains(windows, command):
    with windows.window() as window:
        subprocess.run(command, env={"PATH": os.environ["PATH"]}, check=True)
    assert unseen(window) == []
    assert not any(thread.name == "gpumem-watch" for thread in threading.enumerate())


def test_a_fork_of_the_tests_process_that_uses_no_cuda_is_not_named(windows):
    pytest.importorskip("torch")
    with windows.window() as window:
        pid = os.fork()
        if pid == 0:
            time.sleep(0.5)
            os._exit(0)
        os.waitpid(pid, 0)
    assert unseen(window) == []


def test_a_process_that_nobody_waits_for_is_named_once(windows):
    with windows.window() as window:
        pid = spawn(maps_torch(ENDS))
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert len(unseen(window)) == 1
    with windows.window() as later:
        time.sleep(0.3)
    os.waitpid(pid, 0)
    assert unseen(later) == []


def test_an_error_in_the_window_ends_the_thread(windows):
    with pytest.raises(ZeroDivisionError), windows.window():
        1 / 0  # noqa: B018
    assert not any(thread.name == "gpumem-watch" for thread in threading.enumerate())


WITH_A_FORK = """
import os
import threading

at_fork = []
os.register_at_fork(before=lambda: at_fork.append(threading.active_count()))

from pathlib import Path

from pytest_gpumem.measuring.jobs.child_watch import ChildWatch

with ChildWatch(Path(), ()):
    before = threading.active_count()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    print(before, *at_fork, threading.active_count())
print(threading.active_count())
"""


def test_the_thread_pauses_while_the_process_forks():
    done = subprocess.run([sys.executable, "-c", WITH_A_FORK], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "1", "2", "1"]
