"""Windows over running processes: asked over the real socket, or read from the files that ended processes leave."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_gpumem import __version__
from pytest_gpumem.base.shown_command import shown_command
from pytest_gpumem.emulating.emulated_process.control import answer_line, listen
from pytest_gpumem.emulating.emulated_process.marks import SEEN
from pytest_gpumem.emulating.emulated_process.usage import DeviceUsage, ProcessIdentity, ProcessUsage, usage_text
from pytest_gpumem.measuring.jobs import windows as windows_module
from pytest_gpumem.measuring.jobs.windows import ProcessWindows, WindowUsage, first_live, joined

REPOSITORY = Path(__file__).parents[2]
CHILD = '''
"""A process with a GPU, without torch. Lines on its standard input say what it does."""

import os
import sys
import threading
import time
from pathlib import Path

from pytest_gpumem.emulating.emulated_process.usage import DeviceUsage, ProcessIdentity, ProcessUsage, write_usage
from pytest_gpumem.emulating.emulated_process.usage_thread import start_reporting

FOLDER = Path(os.environ["GPUMEM_USAGE"])
STARTED = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


class Recorder:
    def __init__(self):
        self.began = time.monotonic_ns()
        self.lock = threading.RLock()
        self.live = self.peak = self.before = self.allocations = 0
        self.window = None
        self.write()

    def usage(self, ended=None):
        device = DeviceUsage(0, self.peak, self.peak, 0, self.peak, self.live, self.before, self.allocations)
        identity = ProcessIdentity(os.getpid(), STARTED, ("python", "server.py"))
        return ProcessUsage(self.began, ended, (device,), process=identity, window=self.window)

    def write(self, ended=None):
        if FOLDER.is_dir():
            write_usage(FOLDER, f"{os.getpid()}-{self.began}", self.usage(ended))

    def write_if_changed(self):
        pass

    def begin_window(self, window):
        with self.lock:
            usage = self.usage()
            self.window, self.before, self.peak, self.allocations = window, self.live, self.live, 0
            self.write()
            return usage

    def take(self, nbytes):
        with self.lock:
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            self.allocations += nbytes > 0
            self.write()


recorder = Recorder()
start_reporting(recorder, FOLDER, 0.05)
print("began", flush=True)
for line in sys.stdin:
    word, _, number = line.strip().partition(" ")
    if word == "take":
        recorder.take(int(number))
    elif word == "end":
        with recorder.lock:
            recorder.write(time.monotonic_ns())
            print("ended", flush=True)
            os._exit(0)
    print("done", flush=True)
'''


class Child:
    """A process that reports to windows."""

    def __init__(self, windows):
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        environment |= {"GPUMEM_USAGE": windows.variables(environment)["GPUMEM_USAGE"]}
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.pid = self._process.pid
        assert self._process.stdout.readline() == "began\n"

    def do(self, *lines):
        for line in lines:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
            self._process.stdout.readline()

    def end(self):
        self.do("end")
        self._process.wait(30)

    def kill(self):
        self._process.kill()
        self._process.wait(30)

    def stop(self):
        self.signal(signal.SIGSTOP)
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            pass

    def signal(self, number):
        os.kill(self.pid, number)

    def wait(self):
        return self._process.wait(30)

    def close(self):
        """End it, and return its text on the standard error."""
        if self._process.poll() is None:
            self.signal(signal.SIGCONT)
        self._process.stdin.close()
        errors = self._process.stderr.read()
        self._process.stdout.close()
        self._process.stderr.close()
        self._process.wait(30)
        return errors


@pytest.fixture
def windows():
    opened = ProcessWindows()
    yield opened
    opened.close()


@pytest.fixture
def start():
    children = []

    def begin(windows):
        children.append(Child(windows))
        return children[-1]

    yield begin
    for child in children:
        assert child.close() == ""


def figures(usage: ProcessUsage) -> tuple[int, int, int, int]:
    (device,) = usage.devices
    return device.allocated, device.live_before, device.live, device.allocations


def folder_of(windows) -> Path:
    return Path(windows.variables({})["GPUMEM_USAGE"])


def test_a_running_process_answers_with_its_figures_in_the_window(windows, start):
    child = start(windows)
    child.do("take 100", "take -70")
    with windows.window() as window:
        child.do("take 20", "take -15")
    (usage,) = window.usage.usages
    assert (figures(usage), usage.ended, usage.process.pid) == ((50, 30, 35, 1), None, child.pid)
    assert usage.window is not None
    with windows.window() as next_window:
        pass
    assert figures(next_window.usage.usages[0]) == (35, 35, 35, 0)


def test_a_process_that_began_in_the_window_has_no_window_of_its_own(windows, start):
    with windows.window() as window:
        child = start(windows)
        child.do("take 100", "take -70")
    (usage,) = window.usage.usages
    assert (figures(usage), usage.window) == ((100, 0, 30, 1), None)


def test_an_ended_process_is_in_its_window_only_and_leaves_no_file(windows, start):
    before = start(windows)
    before.do("take 5")
    before.end()
    with windows.window() as window:
        child = start(windows)
        child.do("take 100")
        child.end()
    assert [(one.process.pid, figures(one), one.ended is None) for one in window.usage.usages] == [
        (child.pid, (100, 0, 100, 1), False)
    ]
    assert list(folder_of(windows).glob("*.json")) == []
    with windows.window() as next_window:
        pass
    assert next_window.usage == WindowUsage()


def test_a_window_within_a_window_has_a_part_of_its_figures(windows, start):
    child = start(windows)
    child.do("take 10")
    with windows.window() as outer:
        child.do("take 100", "take -100")
        with windows.window() as inner:
            child.do("take 50")
        child.do("take 1")
    assert figures(inner.usage.usages[0]) == (60, 10, 60, 1)
    assert figures(outer.usage.usages[0]) == (110, 10, 61, 3)


def test_a_stopped_process_is_silent_and_its_late_answer_is_not_of_the_next_window(windows, start, monkeypatch):
    child = start(windows)
    child.do("take 10")
    monkeypatch.setattr(windows_module, "ANSWER_SECONDS", 0.5)
    with windows.window() as window:
        child.do("take 100")
        child.stop()
    (sentence,) = window.usage.silent
    assert "did not report its memory within 0.5 seconds" in sentence
    assert window.usage.usages == ()
    monkeypatch.setattr(windows_module, "ANSWER_SECONDS", 10.0)
    child.signal(signal.SIGCONT)
    with windows.window() as next_window:
        child.do("take 1")
    assert next_window.usage.silent == ()
    assert [figures(one) for one in next_window.usage.usages] == [(111, 110, 111, 1)]


def test_a_process_that_is_silent_at_the_begin_makes_the_windows_figures_unknown(windows, start, monkeypatch):
    child = start(windows)
    child.stop()
    monkeypatch.setattr(windows_module, "ANSWER_SECONDS", 0.5)
    with windows.window() as window:
        child.signal(signal.SIGCONT)
        monkeypatch.setattr(windows_module, "ANSWER_SECONDS", 10.0)
        child.do("take 1")
    (sentence,) = window.usage.silent
    assert "did not report its memory within 0.5 seconds" in sentence


def test_a_process_has_longer_to_answer_at_both_ends_of_a_recorded_window(windows, monkeypatch):
    seconds = []
    monkeypatch.setattr(windows, "_divide", lambda most: seconds.append(most) or WindowUsage())
    for record in (True, False):
        with windows.window(record=record):
            pass
    assert seconds[0] == seconds[1] > seconds[2] == seconds[3]


def test_a_killed_process_leaves_its_last_report(windows, start):
    child = start(windows)
    with windows.window() as window:
        child.do("take 100")
        child.kill()
    assert [figures(one) for one in window.usage.killed] == [(100, 0, 100, 1)]
    assert window.usage.usages == ()
    with windows.window() as next_window:
        pass
    assert next_window.usage == WindowUsage()


def test_a_process_that_was_killed_but_not_waited_for_does_not_run(windows, start):
    child = start(windows)
    with windows.window() as window:
        child.signal(signal.SIGKILL)
    assert [one.process.pid for one in window.usage.killed] == [child.pid]


def test_an_error_in_a_test_ends_its_window_and_the_next_one_is_as_always(windows, start):
    child = start(windows)
    opened = []

    def interrupted():
        with windows.window() as window:
            opened.append(window)
            child.do("take 100", "take -100")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert opened[0].usage == WindowUsage()
    with windows.window() as next_window:
        child.do("take 1")
    assert figures(next_window.usage.usages[0]) == (1, 0, 1, 1)
    assert len(opened[0].parts) == 1, "the part before the error"


def test_two_sessions_in_a_process_see_their_own_processes(windows, start):
    other = ProcessWindows()
    children = [start(windows), start(other)]
    with windows.window() as window, other.window() as others:
        for nbytes, child in enumerate(children, 1):
            child.do(f"take {nbytes}")
    assert [figures(one)[0] for one in window.usage.usages] == [1]
    assert [figures(one)[0] for one in others.usage.usages] == [2]
    other.close()
    with windows.window() as window:
        pass
    assert [one.process.pid for one in window.usage.usages] == [children[0].pid]


def test_a_process_outlives_its_session_whose_folder_is_removed(start):
    windows = ProcessWindows()
    folder, child = folder_of(windows), start(windows)
    with windows.window():
        child.do("take 1")
    windows.close()
    assert not folder.exists()
    child.do("take 1", "take 1")
    child.end()
    assert not folder.exists()


def test_a_folder_with_a_long_name_can_have_the_socket(tmp_path, monkeypatch, start):
    """Linux allows 107 bytes for the path of a socket."""
    long = tmp_path / ("temporary-files-" * 8)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    windows = ProcessWindows()
    child = start(windows)
    with windows.window() as window:
        child.do("take 7")
    assert figures(window.usage.usages[0]) == (7, 0, 7, 1)
    windows.close()
    assert list(long.iterdir()) == []


def test_a_fork_of_the_tests_process_leaves_the_connections_to_the_test(windows, start):
    child = start(windows)
    with windows.window() as window:
        child.do("take 3")
        pid = os.fork()
        if pid == 0:
            with windows.window() as forked:
                pass
            windows.close()
            os._exit(0 if forked.usage == WindowUsage() else 1)
        assert os.waitpid(pid, 0)[1] == 0
    assert figures(window.usage.usages[0]) == (3, 0, 3, 1)
    assert folder_of(windows).is_dir()


def usage(pid: int = 1, window: int | None = None, ended: int | None = None, **device: int | None) -> ProcessUsage:
    values = {"allocated": 0, "reserved": 0, "retries": 0, **device}
    return ProcessUsage(pid, ended, (DeviceUsage(0, **values),), process=ProcessIdentity(pid), window=window)


def test_only_answers_to_the_current_request_count_also_if_they_come_in_pieces(windows):
    late, current = usage(allocated=1), usage(allocated=2)
    sent = answer_line(6, late) + answer_line(7, current)
    test, process = socket.socketpair()
    with process:
        test.setblocking(False)
        windows._connections[test] = bytearray()
        windows._number = 7
        assert windows._received(test) == []
        answers = []
        for piece in (sent[:5], sent[5:-9], sent[-9:]):
            process.sendall(piece)
            answers += windows._received(test)
        assert answers == [current]
    assert windows._received(test) == []
    assert test not in windows._connections, "the process has ended"


def test_parts_of_a_window_are_joined_by_process():
    first = usage(allocated=5, reserved=9, requested=4, live=3, live_before=1, allocations=2)
    second = usage(allocated=7, reserved=8, requested=2, live=2, live_before=3, allocations=1, window=4, ended=6)
    other = usage(pid=2, allocated=1)
    whole = joined([WindowUsage((first, other)), WindowUsage((second,))])
    expected = usage(allocated=7, reserved=9, requested=4, live=2, live_before=1, allocations=3, ended=6)
    assert whole.usages == (expected, other)


def test_a_gpu_that_a_process_used_in_one_part_only_is_in_the_joined_window():
    first, second = usage(allocated=5), replace(usage(window=2), devices=(DeviceUsage(1, 6, 6, 0),))
    (both,) = joined([WindowUsage((first,)), WindowUsage((second,))]).usages
    assert [(device.device, device.allocated) for device in both.devices] == [(0, 5), (1, 6)]


class Sums:
    """The highest sums of all processes, as `SharedBytes` returns them one after the other."""

    def __init__(self, *sums):
        self._sums = iter(sums)
        self.is_running = None

    def restart(self):
        return {0: next(self._sums)}

    def remove_ended(self, is_running):
        self.is_running = is_running

    def close(self):
        pass


def test_a_peak_while_processes_are_asked_is_in_the_windows_on_both_sides(windows, start, monkeypatch):
    monkeypatch.setattr(windows, "shared", Sums(1, 30, 20, 25, 10, 5, 2, 3))
    start(windows)
    simultaneous = []
    for _ in range(2):
        with windows.window() as window:
            pass
        simultaneous.append(window.usage.simultaneous)
    assert simultaneous == [{0: 30}, {0: 5}]


def test_a_process_that_answers_runs_also_if_its_pid_is_from_another_namespace(windows, start, monkeypatch):
    shared = Sums(0, 0, 0, 0)
    monkeypatch.setattr(windows, "shared", shared)
    child = start(windows)
    monkeypatch.setattr(windows_module, "is_running", lambda pid, started: False)
    with windows.window() as window:
        child.do("take 10")
    (usage,) = window.usage.usages
    assert shared.is_running(child.pid, usage.process.started)
    assert not shared.is_running(child.pid, usage.process.started + 1)


def test_processes_that_start_in_a_context_end_and_earlier_ones_go_on(windows, start):
    """An earlier process may use a device for the first time in the context, as a worker of a pool does."""
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as worker:
        with windows.ending_new_processes():
            identity = ProcessIdentity(worker.pid, started_at(worker.pid), tuple(command))
            report = ProcessUsage(time.monotonic_ns(), None, process=identity)
            (folder_of(windows) / f"{worker.pid}-1.json").write_text(usage_text(report), encoding="utf-8")
            new = start(windows)
        assert new.wait() == -signal.SIGTERM
        assert worker.poll() is None
        worker.communicate(b"\n")
        assert worker.returncode == 0


def started_at(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])


def test_joined_parts_have_the_most_bytes_held_at_the_same_time_in_any_part():
    parts = [WindowUsage(simultaneous={0: 5, 1: 7}), WindowUsage(), WindowUsage(simultaneous={0: 6, 1: 2})]
    assert joined(parts).simultaneous == {0: 6, 1: 7}


@pytest.mark.parametrize(("first", "later", "whole"), [(1, 2, 2), (None, 2, None), (1, None, None)])
def test_a_process_that_did_not_publish_in_a_part_did_not_publish(first, later, whole):
    parts = [WindowUsage((usage(published=published),)) for published in (first, later)]
    assert joined(parts).usages == (usage(published=whole),)


def test_a_later_process_with_the_same_pid_is_another_process():
    first = usage(allocated=5, ended=2)
    later = replace(first, began=first.began + 1)
    assert len(joined([WindowUsage((first,)), WindowUsage((later,))]).usages) == 2


def test_joined_parts_name_each_unknown_process_once():
    killed, silent = usage(pid=3), usage(pid=4)
    part = WindowUsage((), (killed,), (silent,), ("`python` is strange",), ("python a.py",), ("python b.py",))
    assert joined([part, part]) == part
    assert joined([]) == WindowUsage()


def test_running_out_of_memory_counts_over_all_parts():
    parts = [WindowUsage((replace(usage(window=number), times_out_of_memory=number),)) for number in (1, 2)]
    assert joined(parts).usages[0].times_out_of_memory == 3


def test_processes_that_imported_torch_in_the_window_are_named_once(windows):
    folder = folder_of(windows)
    (folder / f"1{SEEN}").write_bytes(b"python\0before.py\0")
    with windows.window() as window:
        (folder / f"2{SEEN}").write_bytes(b"python\0within.py\0")
        (folder / f"3{SEEN}").write_bytes(Path("/proc/self/cmdline").read_bytes())  # a fork of the test's process
    assert window.usage.importing == ("python within.py",)


def test_folders_of_killed_sessions_are_removed_after_a_day_and_others_are_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    alive = ProcessWindows()
    killed = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os; from pytest_gpumem.measuring.jobs.windows import ProcessWindows; ProcessWindows(); os.kill(os.getpid(), 9)",
        ],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=False,
        cwd=REPOSITORY,
    )
    assert killed.returncode == -9
    (tmp_path / "gpumem-processes-linked").symlink_to(tmp_path)
    killed_job, running_job, unknown_job = (
        tmp_path / f"gpumem-job-{name}" for name in ("killed", "running", "unknown")
    )
    for folder in (killed_job, running_job, unknown_job):
        folder.mkdir()
    listen(killed_job).close()
    listener = listen(running_job)
    (abandoned,) = set(tmp_path.glob("gpumem-processes-*")) - {folder_of(alive), tmp_path / "gpumem-processes-linked"}
    ProcessWindows().close()
    assert abandoned.exists()
    for folder in (abandoned, folder_of(alive), killed_job, running_job, unknown_job):
        os.utime(folder, (0, 0))
    ProcessWindows().close()
    assert not abandoned.exists()
    assert not killed_job.exists()
    assert running_job.is_dir()
    assert unknown_job.is_dir()
    listener.close()
    assert folder_of(alive).is_dir()
    assert (tmp_path / "gpumem-processes-linked").is_symlink()
    alive.close()


def test_in_a_fork_of_pytest_the_processes_with_torch_are_not_counted(windows):
    """As in a test under pytest-forked: a server of a fixture, and a process that the test starts."""
    code = (
        "import pathlib, sys; from pytest_gpumem.emulating.emulated_process.marks import mark_as_reporting; "
        "mark_as_reporting(pathlib.Path(sys.argv[1])); print(1, flush=True); input()"
    )

    def marked(name):
        command = [sys.executable, "-c", code, str(folder_of(windows)), name]
        process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process.stdout.readline()
        return process

    server = marked("server")
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            with windows.window() as window:
                marked("child").communicate(b"\n")
            os.write(writing, json.dumps(window.usage.uncounted).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        uncounted = json.load(pipe)
    server.communicate(b"\n")
    reason = "this test runs in a fork of pytest, which cannot ask other processes"
    assert sorted((command.rpartition(" ")[2], why) for command, why in uncounted) == [
        ("child", reason),
        ("server", reason),
    ]


OTHER_RELEASE = usage_text(ProcessUsage(1, 2)).replace(f'"{__version__}"', '"9.9"')
INVALID = {
    "runs pytest-gpumem 9.9, and this session": OTHER_RELEASE,
    "`release` is missing": OTHER_RELEASE.replace('"release"', '"of"'),
    "the report is not JSON, or is truncated": usage_text(ProcessUsage(1, 2))[:40],
    "wrote an invalid report on its GPU memory: it must be an object": "[]",
    "the report is not JSON": "[" * 100_000,
    "`devices[0]": usage_text(ProcessUsage(1, 2)).replace('"devices": []', '"devices": [7]'),
    "is not a known key": usage_text(ProcessUsage(1, 2)).replace('"began": 1', '"began": 1, "begun": 1'),
    "is not JSON, or is truncated": "\udcff\udcfe",
}


@pytest.mark.parametrize("clause", INVALID)
def test_an_invalid_report_is_a_sentence_and_other_processes_keep_their_figures(windows, start, clause):
    child = start(windows)
    path = folder_of(windows) / f"{2**22 + 1}-5.json"
    with windows.window() as window:
        child.do("take 5")
        path.write_text(INVALID[clause], encoding="utf-8", errors="surrogateescape")
    assert [usage.process.pid for usage in window.usage.usages] == [child.pid]
    (sentence,) = window.usage.unknown
    assert sentence.startswith(f"process {2**22 + 1} ")
    assert clause.replace("`", "") in sentence.replace("`", "")
    assert "\n" not in sentence
    assert not path.exists()
    with windows.window() as window:
        pass
    assert window.usage.unknown == ()


def test_an_invalid_report_names_its_process_and_stays_while_it_runs(windows):
    (folder_of(windows) / f"{os.getpid()}{SEEN}").write_bytes(b"python\0serve.py\0\n0")
    path = folder_of(windows) / f"{os.getpid()}-1.json"
    path.write_text(OTHER_RELEASE, encoding="utf-8")
    for _ in range(2):
        with windows.window() as window:
            pass
        assert window.usage.unknown == (
            f"`python serve.py` runs pytest-gpumem 9.9, and this session {__version__}. Install the same release in both",
        )


@pytest.mark.parametrize("name", ["x.json", f"{10**30}-1.json"])
def test_a_strange_file_among_the_reports_is_told_once(windows, name):
    with windows.window() as window:
        (folder_of(windows) / name).mkdir()
    (sentence,) = window.usage.unknown
    assert "wrote a report that cannot be read" in sentence
    assert not (folder_of(windows) / name).exists()


@pytest.fixture
def peer(windows):
    with socket.socket(socket.AF_UNIX) as connection:

        def send(content):
            connection.connect(str(folder_of(windows) / "control"))
            connection.sendall(content)

        yield send


@pytest.mark.parametrize(
    "garbage", [b"x\n", b"1 {}\n", b"\xff\xfe\n", b"1\n2\n" * 1000, b"99999999999999999999 []\n", b"\n"]
)
def test_garbage_from_a_peer_is_a_sentence_and_other_processes_keep_their_figures(windows, start, peer, garbage):
    child = start(windows)
    with windows.window() as window:
        child.do("take 5")
        peer(garbage)
    assert [usage.process.pid for usage in window.usage.usages] == [child.pid]
    (sentence,) = window.usage.unknown
    own_command = Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0")
    assert sentence.startswith(f"`{shown_command(own_command)}` wrote")
    assert "\n" not in sentence


def test_an_answer_without_end_does_not_keep_the_test_waiting(windows, start, peer, monkeypatch):
    monkeypatch.setattr(windows_module, "ANSWER_SECONDS", 0.5)
    child = start(windows)
    with windows.window() as window:
        child.do("take 5")
        peer(b"3 {")
    assert [usage.process.pid for usage in window.usage.usages] == [child.pid]


def test_an_endless_answer_is_cut(windows, start, peer, monkeypatch):
    monkeypatch.setattr(windows_module, "MOST_BYTES", 1 << 20)
    child = start(windows)

    def send():
        with suppress(OSError):
            peer(b"x" * (1 << 22))

    sender = threading.Thread(target=send, daemon=True)
    with windows.window() as window:
        child.do("take 5")
        sender.start()
    windows.close()
    sender.join(30)
    assert [usage.process.pid for usage in window.usage.usages] == [child.pid]
    (sentence,) = window.usage.unknown
    assert "the report has more than 256 MiB" in sentence


@pytest.fixture
def without_sockets(monkeypatch, tmp_path):
    """A folder for temporary files without sockets, as on some network mounts. Return a folder whose socket works."""
    mount, other = tmp_path / "mount", tmp_path / "other"
    mount.mkdir()
    other.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(mount))
    monkeypatch.setattr(windows_module, "_OTHER_PARENTS", ())
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)

    def listen_outside_the_mount(folder):
        return None if folder.is_relative_to(mount) else listen(folder)

    monkeypatch.setattr(windows_module, "listen", listen_outside_the_mount)
    return other


def test_a_folder_without_sockets_is_replaced_by_another(without_sockets, monkeypatch, start):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(without_sockets))
    windows = ProcessWindows()
    assert folder_of(windows).parent == without_sockets
    assert list(Path(tempfile.gettempdir()).iterdir()) == []
    child = start(windows)
    with windows.window() as window:
        child.do("take 5")
    assert [usage.devices[0].requested for usage in window.usage.usages] == [5]
    windows.close()
    assert list(without_sockets.iterdir()) == []


def test_without_any_socket_a_running_process_is_told_and_an_ended_one_counts(without_sockets, start):
    windows = ProcessWindows()
    with windows.window() as window:
        child = start(windows)
        child.do("take 5")
        child.end()
    assert [usage.devices[0].requested for usage in window.usage.usages] == [5]
    assert window.usage.unknown == ()
    start(windows)
    with windows.window() as window:
        pass
    (sentence,) = window.usage.unknown
    assert sentence == (
        "`python server.py` runs, and cannot be asked for its GPU memory, because no folder for temporary files has Unix "
        "sockets. Set TMPDIR to a folder on a local disk"
    )
    windows.close()


def test_a_server_that_ends_in_a_window_without_any_socket_does_not_count_as_new(without_sockets, start):
    windows = ProcessWindows()
    child = start(windows)
    child.do("take 5")
    with windows.window() as window:
        child.end()
    assert len(window.usage.unknown) == 1
    windows.close()


def held(live: int, window: int) -> ProcessUsage:
    device = DeviceUsage(0, 100, 200, 0, requested=90, live=live, live_before=0, allocations=1)
    return ProcessUsage(1, None, (device,), process=ProcessIdentity(7), window=window)


@pytest.mark.parametrize(
    ("last", "current", "expected"),
    [
        pytest.param(100, 100, 100, id="no change"),
        pytest.param(100, 400, 400, id="a fixture loads more"),
        pytest.param(100, 60, 60, id="a fixture frees some"),
        pytest.param(130, 100, 100, id="a fixture frees what tests left"),
        pytest.param(130, 110, 100, id="a fixture frees some of what tests left"),
        pytest.param(130, 90, 90, id="a fixture frees more than tests left"),
        pytest.param(130, 530, 500, id="a fixture loads more than tests left"),
        pytest.param(60, 100, 100, id="a fixture loads what tests freed"),
        pytest.param(60, 90, 100, id="a fixture loads some of what tests freed"),
        pytest.param(60, 150, 150, id="a fixture loads more than tests freed"),
        pytest.param(60, 50, 90, id="a fixture frees more than tests freed"),
    ],
)  # fmt: skip
def test_a_change_between_windows_first_undoes_the_growth_in_windows(last, current, expected):
    assert first_live(100, last, current) == expected


def test_growth_between_windows_is_not_growth_before_the_test(windows):
    """A test makes the server keep 30 bytes. Later a fixture lets it load 400 bytes more."""

    def first(live, *, within):
        windows._open = [object()] if within else []
        return windows._with_live_first(held(live, 1)).devices[0].live_first

    assert first(1000, within=False) == 1000
    assert first(1030, within=True) == 1000
    assert first(1430, within=False) == 1400, "the 30 bytes are growth before this test, and the 400 bytes are not"
    assert first(1430, within=True) == 1400
    windows._open = []
