"""The thread of a measured process that answers the test's requests."""

from __future__ import annotations

import fcntl
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pytest_gpumem.emulating.emulated_process.control import answer_from, connect, listen, request_line
from pytest_gpumem.emulating.emulated_process.threads import other_threads
from pytest_gpumem.emulating.emulated_process.usage import ProcessUsage
from pytest_gpumem.emulating.emulated_process.usage_thread import _answered


class Recorder:
    """Gives these results for a new window, one for each call."""

    def __init__(self, *results: ProcessUsage | None) -> None:
        self.results = list(results)

    def write_if_changed(self) -> None:
        raise AssertionError

    def begin_window(self, window: int) -> ProcessUsage | None:
        return self.results.pop(0)


USAGE = ProcessUsage(began=5, ended=None)


@pytest.fixture
def ends():
    """The test's end and the process's end of a connection."""
    test, process = socket.socketpair()
    process.settimeout(0.05)
    with test, process:
        yield test, process


def test_the_answer_has_the_number_of_the_last_request(ends):
    test, process = ends
    test.sendall(request_line(6) + request_line(7))
    assert _answered(Recorder(USAGE), process)
    assert answer_from(test.recv(1 << 16).rstrip()) == (7, USAGE)


def test_without_a_request_the_connection_stays(ends):
    assert _answered(Recorder(), ends[1])


def test_a_closed_connection_is_given_up(ends):
    test, process = ends
    test.close()
    assert not _answered(Recorder(), process)


def test_an_ending_process_does_not_answer_until_it_goes_on_after_a_failed_exec(ends):
    test, process = ends
    test.sendall(request_line(1))
    recorder = Recorder(None, None, USAGE)
    assert _answered(recorder, process)
    assert recorder.results == []
    assert answer_from(test.recv(1 << 16).rstrip()) == (1, USAGE)


def test_a_process_with_many_open_files_answers(ends):
    """``select`` takes no file with a number above 1023."""
    test, process = ends
    with socket.socket(fileno=fcntl.fcntl(process.fileno(), fcntl.F_DUPFD, 1100)) as high:
        high.settimeout(0.05)
        test.sendall(request_line(1))
        assert _answered(Recorder(USAGE), high)


FORKS = """
import os
import socket
import sys
import threading
import time
from pathlib import Path

at_fork = []
os.register_at_fork(before=lambda: at_fork.append(threading.active_count()))

from pytest_gpumem.emulating.emulated_process.control import answer_from, listen, request_line
from pytest_gpumem.emulating.emulated_process.usage import ProcessUsage
from pytest_gpumem.emulating.emulated_process.usage_thread import start_reporting


class Recorder:
    def write_if_changed(self):
        pass

    def begin_window(self, window):
        return ProcessUsage(began=5, ended=None)


listener = listen(Path(sys.argv[1]))
listener.settimeout(60)
start_reporting(Recorder(), Path(sys.argv[1]), 50.0)  # the longest wait for a request
test, _ = listener.accept()
for number in range(3):
    pid = os.fork()
    if pid == 0:
        os._exit(threading.active_count())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    test.sendall(request_line(number))
    print(answer_from(test.recv(1 << 16).rstrip())[0])
print(at_fork, threading.active_count())
"""


@pytest.mark.parametrize("options", [(), ("-W", "error")])
def test_the_thread_pauses_while_the_process_forks_and_answers_afterwards(tmp_path, options):
    command = [sys.executable, *options, "-c", FORKS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=40)
    assert (done.stdout.splitlines(), done.stderr) == (["0", "1", "2", "[1, 1, 1] 2"], "")


def test_nobody_listens_in_a_folder_that_is_empty_or_removed(tmp_path):
    assert connect(tmp_path, 1.0) is None
    assert connect(tmp_path / "removed", 1.0) is None
    listen(tmp_path).close()
    assert connect(tmp_path, 1.0) is None, "the listener has ended"


@pytest.mark.parametrize("folder", ["short", "long" * 50])
def test_a_process_connects_whatever_the_length_of_the_path(tmp_path, folder):
    (tmp_path / folder).mkdir()
    with listen(tmp_path / folder) as listener, connect(tmp_path / folder, 1.0) as process:
        accepted, _ = listener.accept()
        with accepted:
            process.sendall(b"1")
            assert accepted.recv(1) == b"1"


def test_a_thread_with_a_name_that_is_no_text_is_listed():
    """Linux cuts a name after 15 bytes, also within a character."""
    named, may_end = threading.Event(), threading.Event()

    def run():
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_bytes("aaaaaaaaaaaaaaé".encode())
        named.set()
        may_end.wait()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        named.wait()
        assert str(thread.native_id) in other_threads()
        assert list(other_threads(b"aaaa")) == [str(thread.native_id)]
    finally:
        may_end.set()
        thread.join()
