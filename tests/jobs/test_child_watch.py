"""Descendants of a test's process that do not report are seen while they run, however they were started."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from pytest_gpumem.base.errors import MeasuringError
from pytest_gpumem.emulating.emulated_process import pausing_thread
from pytest_gpumem.measuring.jobs import child_watch
from pytest_gpumem.measuring.jobs.processes import own_children
from pytest_gpumem.measuring.jobs.windows import ProcessWindows
from tests.jobs.mapped import maps_torch


@pytest.fixture
def windows():
    opened = ProcessWindows()
    yield opened
    opened.close()


def unseen(window):
    """Return the commands of unseen processes, without the suite's own process from which others are forked."""
    return [process.command for process in window.usage.unseen if "multiprocessing.forkserver" not in process.command]


def spawn(code):
    return os.posix_spawn(sys.executable, [sys.executable, "-c", code], {})


def fork_and_exec(code):
    pid = os.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-c", code], {})
    return pid


class Gate:
    """Lets a process wait until it has been looked at twice."""

    def __init__(self, path):
        self.path = path
        self.code = f"open({str(path)!r}).read()"
        """Code that waits."""
        self._writer = None
        self._looks = 0
        self._lock = threading.Lock()
        os.mkfifo(path)

    def look(self, _pids=()):
        """Count a look, if a process waits."""
        with self._lock:
            if self._writer is None:
                with suppress(OSError):  # no process waits
                    self._writer = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
            else:
                self._looks += 1
                if self._looks == 2:
                    os.close(self._writer)


@pytest.fixture
def gate(tmp_path):
    gate = Gate(tmp_path / "gate")

    def let_pass():
        for _ in range(3):
            gate.look()

    # The process ends, and the test fails, if nobody looks.
    timer = threading.Timer(60, let_pass)
    timer.start()
    yield gate
    timer.cancel()


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
def test_a_short_process_with_torch_that_does_not_report_is_named(windows, gate, start):
    with windows.window(look=gate.look) as window:
        start(maps_torch(gate.code))
    (command,) = unseen(window)
    assert "libtorch_cpu.so" in command
    with windows.window() as later:
        pass
    assert unseen(later) == []


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([sys.executable, "-c", "{code}"], id="Python without torch"),
        pytest.param(["git", "--version"], id="git"),
        pytest.param(["cat", "{path}"], id="cat"),
    ],
)
def test_a_process_without_torch_is_not_named_and_no_thread_remains(windows, gate, command):
    words = [word.format(code=gate.code, path=gate.path) for word in command]
    with windows.window(look=gate.look) as window:
        subprocess.run(words, env={"PATH": os.environ["PATH"]}, check=True)
    assert unseen(window) == []
    assert not any(thread.name == "gpumem-watch" for thread in threading.enumerate())


def test_a_fork_of_the_tests_process_that_uses_no_cuda_is_not_named(windows, gate):
    pytest.importorskip("torch")
    with windows.window(look=gate.look) as window:
        pid = os.fork()
        if pid == 0:
            gate.path.read_bytes()
            os._exit(0)
        os.waitpid(pid, 0)
    assert unseen(window) == []


def test_a_process_that_nobody_waits_for_is_named_once(windows, gate):
    with windows.window(look=gate.look) as window:
        pid = spawn(maps_torch(gate.code))
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert len(unseen(window)) == 1
    with windows.window() as later:
        pass
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


FORKS_IN_THREADS = """
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pytest_gpumem.measuring.jobs.child_watch import ChildWatch

most = 0


def watching():
    return [thread.name for thread in threading.enumerate()].count("gpumem-watch")


def fork(_):
    global most
    pid = os.fork()
    if pid == 0:
        inner = os.fork()  # a fork of the fork has no watch either
        if inner == 0:
            os._exit(watching())
        os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) + watching())
    most = max(most, watching())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


with ChildWatch(Path(), ()):
    with ThreadPoolExecutor(4) as pool:
        codes = set(pool.map(fork, range(64)))
    print(codes, most <= 1, watching())
print(watching())
"""


def test_several_threads_may_fork_at_the_same_time():
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKS_IN_THREADS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert (done.stdout.splitlines(), done.stderr) == (["{0} True 1", "0"], "")


LEAVES_THE_CONTEXT = """
import os
import sys
from pathlib import Path

from pytest_gpumem.measuring.jobs.child_watch import ChildWatch

with ChildWatch(Path(), ()):
    pid = os.fork()
    if pid == 0:
        sys.exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_fork_that_leaves_the_context_ends_with_its_own_code():
    done = subprocess.run([sys.executable, "-c", LEAVES_THE_CONTEXT], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("7\n", "")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_look_that_is_stuck_delays_forks_and_the_end_only_once(monkeypatch, tmp_path):
    is_stuck, goes_on, waits = threading.Event(), threading.Event(), []
    join = threading.Thread.join

    def look(_):
        is_stuck.set()
        goes_on.wait()

    def noted_join(thread, timeout=None):
        waits.append(timeout)
        join(thread, timeout)

    monkeypatch.setattr(pausing_thread, "MOST_SECONDS", 0.2)
    monkeypatch.setattr(child_watch.ChildWatch, "_look", look)
    monkeypatch.setattr(threading.Thread, "join", noted_join)
    watch = child_watch.ChildWatch(tmp_path, ())
    try:
        with watch:
            assert is_stuck.wait(10)
            for _ in range(3):
                pid = os.fork()
                if pid == 0:
                    os._exit(0)
                os.waitpid(pid, 0)
        assert watch.unseen() == ()
        assert waits == [0.2, 0, 0, 0]
    finally:
        goes_on.set()


def test_a_function_sees_the_pids_of_all_descendants_while_they_run(windows, gate):
    seen = set()

    def look(pids):
        seen.update(pids)
        gate.look()

    with windows.window(look=look):
        child = f"import os; print(os.getpid(), flush=True); {gate.code}"
        grandchild = (
            f"import os, subprocess, sys; print(os.getpid()); subprocess.run([sys.executable, '-c', {child!r}])"
        )
        done = subprocess.run([sys.executable, "-c", grandchild], capture_output=True, text=True, check=True)
    assert seen >= {int(pid) for pid in done.stdout.split()}
    assert len(done.stdout.split()) == 2


def test_if_the_folder_was_removed_this_is_said_instead_of_another_cause(windows, gate):
    with windows.window(look=gate.look) as window:
        shutil.rmtree(windows._folder)
        subprocess.run([sys.executable, "-c", maps_torch(gate.code)], env=windows.variables(os.environ), check=True)
    (sentence,) = window.usage.unknown
    assert f"the folder {windows._folder} was removed while the session ran" in sentence
    assert unseen(window) == []
    with pytest.raises(MeasuringError, match="was removed while the session ran"), windows.window(record=True):
        pass


def test_a_window_without_other_processes_ends_well_if_the_folder_was_removed(windows):
    with windows.window() as window:
        shutil.rmtree(windows._folder)
    assert window.usage.unknown == ()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_thread_that_was_stuck_while_the_process_forked_goes_on(monkeypatch, tmp_path):
    is_stuck, goes_on, looks_again = threading.Event(), threading.Event(), threading.Event()

    def look(_):
        if is_stuck.is_set():
            looks_again.set()
        is_stuck.set()
        goes_on.wait()

    monkeypatch.setattr(pausing_thread, "MOST_SECONDS", 0.01)
    monkeypatch.setattr(child_watch.ChildWatch, "_look", look)
    with child_watch.ChildWatch(tmp_path, ()):
        assert is_stuck.wait(10)
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        goes_on.set()
        assert looks_again.wait(10)


def test_a_process_that_began_just_before_the_end_has_time_to_report(monkeypatch, tmp_path):
    waits = "import sys; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", maps_torch(waits)]

    def report(_):
        (tmp_path / f"{started[0].pid}.seen").write_bytes("\0".join(command).encode() + b"\0")

    started = []
    with child_watch.ChildWatch(tmp_path, own_children()) as watch:
        pass
    monkeypatch.setattr(child_watch.time, "sleep", report)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}) as process:
        started.append(process)
        process.stdout.readline()
        # Nothing is named afterwards either, so the first look had seen the process without its report.
        assert (watch.unseen(), len(list(tmp_path.iterdir()))) == ((), 1)
