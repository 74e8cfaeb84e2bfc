"""A measured process at SIGTERM: it reports and dies, unless the program handles the signal."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pytest_gpumem.emulating.emulated_process.marks import is_own
from pytest_gpumem.emulating.emulated_process.start import STARTUP, with_startup

BEGIN = """
import ctypes
import os
import signal
import time
from pathlib import Path

from pytest_gpumem.emulating.emulated_process.before_torch import _watch_sigterm
from pytest_gpumem.emulating.emulated_process.usage_thread import start_reporting


class Recorder:
    def write_if_changed(self):
        pass

    def end(self, status=None):
        os.write(1, b"reported %d\\n" % status)


recorder = Recorder()
start_reporting(recorder, Path("/no/folder"), 0.05, _watch_sigterm([recorder.end]))
"""
WAITS_IN_C = """
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
library.pthread_mutex_lock(mutex)
print("ready", flush=True)
library.pthread_mutex_lock(mutex)  # no signal interrupts this
"""
WAITS_IN_PYTHON = """
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""
HANDLES_IT = """
previous = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *arguments: previous(*arguments))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1)
print("goes on", flush=True)
"""


@pytest.mark.parametrize("waits", [WAITS_IN_C, WAITS_IN_PYTHON], ids=["in C", "in Python"])
def test_a_process_reports_and_dies_by_sigterm_wherever_its_main_thread_waits(waits):
    process = subprocess.Popen([sys.executable, "-c", BEGIN + waits], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (rest, process.returncode) == ("reported -15\n", -15)


def test_a_process_reports_at_sigterm_if_another_thread_began_to_use_cuda():
    """As a server whose thread loads the model at the first request, while the main thread waits for requests."""
    begin, watch = BEGIN.rsplit("start_reporting(", 1)
    code = f"""{begin}
import http.server
import threading

thread = threading.Thread(target=lambda: start_reporting({watch.strip()})
thread.start()
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)


def get_ready():
    thread.join()
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.01)
    print("ready", flush=True)


threading.Thread(target=get_ready).start()
server.serve_forever()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        rest, _ = process.communicate(timeout=60)
    assert (rest, process.returncode) == ("reported -15\n", -15)


def test_a_program_that_handles_the_signal_and_calls_the_earlier_handler_goes_on():
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + HANDLES_IT], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "goes on\n"


@pytest.mark.parametrize(
    ("earlier", "parts"),
    [(None, []), ("", []), ("src", ["src"]), (":src", ["", "src"]), (f"src:{STARTUP}", ["src"])],
)
def test_the_current_folder_stays_in_the_path_of_a_process(earlier, parts):
    environment = {} if earlier is None else {"PYTHONPATH": earlier}
    assert with_startup(environment)["PYTHONPATH"].split(":") == [str(STARTUP), *parts]


def test_a_folder_is_ours_only_if_this_user_has_made_it(tmp_path, monkeypatch):
    assert is_own(tmp_path)
    assert not is_own(tmp_path / "removed")
    (tmp_path / "file").touch()
    assert not is_own(tmp_path / "file")
    monkeypatch.setattr("os.getuid", lambda: tmp_path.stat().st_uid + 1)
    assert not is_own(tmp_path)


TERMINATES_A_FORK = """
pid = os.fork()
if pid == 0:
    print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)
    signal.signal(signal.SIGTERM, lambda *arguments: os._exit(5))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
time.sleep(1)
print("goes on", flush=True)
"""


def test_a_signal_to_a_fork_does_not_end_its_parent():
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + TERMINATES_A_FORK], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split("\n")[:3] == ["True", "5", "goes on"]


IS_TOLD_OF_SIGNALS = """
import os
import signal
import socket

from pytest_gpumem.emulating.emulated_process.before_torch import _end_at_sigterm

own, other = socket.socketpair()
own.setblocking(False)
signal.set_wakeup_fd(own.fileno())
before = os.listdir("/dev/fd")
print(_end_at_sigterm([]), os.listdir("/dev/fd") == before, signal.set_wakeup_fd(-1) == own.fileno())
"""


def test_a_program_that_is_told_of_signals_itself_keeps_its_files():
    """As a program with asyncio."""
    done = subprocess.run([sys.executable, "-c", IS_TOLD_OF_SIGNALS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "True", "True"]
