"""Whose turn it is on a device: between real processes, by the order of what they tell."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from pytest_gpumem.base.errors import DeviceUnavailable
from pytest_gpumem.measuring.devices import device_lock
from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.measuring.devices.cuda import CudaDevice
from pytest_gpumem.measuring.devices.device_lock import DeviceLock
from pytest_gpumem.measuring.devices.readers_writer_locks import (
    RecordReadersWriterLock,
    SqliteReadersWriterLock,
)
from pytest_gpumem.measuring.devices.registry import make_cpu, make_cuda
from tests.devices.test_cuda import SyntheticCuda, in_place_of_torchs
from tests.support.processes import GATE, SQLITE, log_of, overlaps, start_holder, state_of, wait_for_line

NO_LOCK = "no lock keeps other measured tests off the GPU "


@pytest.fixture
def locks(tmp_path):
    return tmp_path / "locks"


@pytest.fixture
def lock(locks):
    return DeviceLock("GPU-0", folder=locks)


@pytest.fixture(autouse=True)
def in_a_worker():
    """As in a worker of pytest-xdist, beside which others are at work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_XDIST_WORKER", "gw0")
        yield


@pytest.fixture(params=["record locks", "SQLite"])
def each_kind(request):
    """The test runs with the locks of POSIX, and once more with those that Windows has."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "SQLite":
            patch.setenv(SQLITE, "1")
            patch.setattr(device_lock, "open_readers_writer_lock", SqliteReadersWriterLock)
        yield


of_each_kind = pytest.mark.usefixtures("each_kind")


def interrupted(_seconds):
    raise KeyboardInterrupt


def unlockable(*_):
    raise OSError(errno.ENOLCK, "No locks available")


def finished(*processes):
    codes = [process.wait(30) for process in processes]
    assert codes == [0] * len(codes)


# What is held


@of_each_kind
def test_the_gate_is_open_for_whoever_comes_next(lock, locks):
    with lock.shared():
        assert state_of(locks, GATE) == "free"
        with lock.exclusive():
            assert state_of(locks, GATE) == "free"


@of_each_kind
def test_a_process_does_not_wait_for_itself(lock, locks):
    # As when a test of this very suite, while it is measured, runs another session within its own process.
    inner = DeviceLock("GPU-0", folder=locks)
    with lock.shared(), inner.shared():
        with inner.exclusive() as refused, lock.exclusive() as refused_again:
            assert (refused, refused_again) == (None, None)
            with lock.shared():
                assert state_of(locks) == "alone"
            assert state_of(locks) == "alone"
        assert state_of(locks) == "shared"


@of_each_kind
def test_the_share_is_kept_until_the_last_of_a_process_leaves(lock, locks):
    with lock.shared():
        with DeviceLock("GPU-0", folder=locks).shared():
            pass
        assert state_of(locks) == "shared"
    assert state_of(locks) == "free"


@of_each_kind
def test_a_device_that_is_closed_while_alone_is_free_afterwards(lock, locks):
    share = lock.shared()
    share.__enter__()
    with lock.exclusive():
        share.__exit__(None, None, None)
        assert state_of(locks) == "alone"
    assert state_of(locks) == "free"


def test_the_name_of_a_gpu_cannot_lead_out_of_the_folder(locks):
    with DeviceLock("../../MIG-8f2c/0", folder=locks).shared():
        assert len(list(locks.iterdir())) == 1


# Between processes

MEASURES_AND_TIMES = """
for _ in range(3):
    with lock.shared():
        note("shares")
        time.sleep(0.01)
        note("waits")
        with lock.exclusive() as refused:
            assert refused is None
            note("alone")
            time.sleep(0.01)
            note("waits")
        note("shares")
        note("leaves")
"""


@of_each_kind
def test_processes_that_measure_and_time_never_overlap(tmp_path):
    finished(*(start_holder(MEASURES_AND_TIMES, tmp_path, name) for name in "abc"))
    assert len(log_of(tmp_path)) == 54
    assert overlaps(log_of(tmp_path)) == []


def test_without_a_lock_they_do_overlap_and_it_is_seen(tmp_path):
    broken = """
        note("shares")
        wait_for_line("shares " + ("b" if me == "a" else "a"))
        note("waits")
        with nullcontext():
            note("alone")
            wait_for_line("alone " + ("b" if me == "a" else "a"))
        note("leaves")
    """
    finished(*(start_holder(broken, tmp_path, name) for name in "ab"))
    assert overlaps(log_of(tmp_path)) != []


@of_each_kind
def test_two_that_share_and_both_want_to_be_alone_both_get_their_turn(tmp_path):
    both = """
        with lock.shared():
            note("shares")
            wait_for_line("shares " + ("b" if me == "a" else "a"))
            note("waits")
            with lock.exclusive() as refused:
                assert refused is None
                note("alone")
            note("leaves")
    """
    finished(*(start_holder(both, tmp_path, name) for name in "ab"))
    assert overlaps(log_of(tmp_path)) == []
    assert {"alone a", "alone b"} <= set(log_of(tmp_path))


@of_each_kind
def test_whoever_waits_to_be_alone_comes_before_those_who_come_later(tmp_path, lock):
    waits = """
        with lock.shared():
            note("waits")
            with lock.exclusive() as refused:
                assert refused is None
                note("alone")
    """
    comes = """
        note("comes")
        with lock.shared():
            note("shares")
    """
    with lock.shared():
        writer = start_holder(waits, tmp_path, "writer")
        wait_for_line("waits writer", tmp_path)
        deadline = time.monotonic() + 30
        while state_of(tmp_path / "locks", GATE) == "free":
            assert time.monotonic() < deadline, "whoever waits keeps nobody out"
        later = start_holder(comes, tmp_path, "later")
        wait_for_line("comes later", tmp_path)
        with pytest.raises(subprocess.TimeoutExpired):
            later.wait(0.2)
    finished(writer, later)
    order = [line for line in log_of(tmp_path) if line in {"alone writer", "shares later"}]
    assert order == ["alone writer", "shares later"]


@pytest.mark.parametrize(
    "doing",
    [
        "with lock.shared(), lock.exclusive(): note('there'); time.sleep(60)",
        # A worker of a DataLoader, say, that has inherited what the killed process had open.
        "with lock.shared(), lock.exclusive(): os.fork() or time.sleep(5) or os._exit(0); note('there'); time.sleep(60)",
    ],
    ids=["alone", "with a child that lives on"],
)
@of_each_kind
def test_a_holder_that_is_killed_blocks_nobody(tmp_path, lock, locks, doing):
    holder = start_holder(doing, tmp_path, "holder")
    wait_for_line("there holder", tmp_path)
    assert state_of(locks) == "alone"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert state_of(locks) == "free"
    with lock.shared(), lock.exclusive() as refused:
        assert refused is None


@of_each_kind
def test_one_that_is_killed_while_waiting_to_be_alone_leaves_the_gate_open(tmp_path, lock, locks):
    with lock.shared():
        waiting = start_holder("with lock.shared(): \n with lock.exclusive(): pass", tmp_path, "waiting")
        while not list(locks.iterdir()) or state_of(locks, GATE) == "free":
            assert waiting.poll() is None
        waiting.send_signal(signal.SIGKILL)
        waiting.wait()
        assert state_of(locks, GATE) == "free"


def test_a_forked_child_takes_nothing_from_its_parent(tmp_path):
    forks = """
        share = lock.shared()
        share.__enter__()
        with lock.exclusive():
            child = os.fork()
        share.__exit__(None, None, None)
        if child:
            assert os.waitpid(child, 0)[1] == 0
        with lock.shared(), lock.exclusive() as refused:
            assert refused is None
        note("done")
    """
    finished(start_holder(forks, tmp_path, "it"))
    assert log_of(tmp_path) == ["done it", "done it"]


def test_a_child_that_is_forked_while_its_parent_is_alone_holds_nothing(tmp_path, locks):
    forks = """
        with lock.shared(), lock.exclusive():
            child = os.fork()
            if child == 0:
                device_lock.MOST_SECONDS_FOR_SHARED = device_lock.MOST_SECONDS_FOR_EXCLUSIVE = 0.05
                with lock.exclusive() as refused:
                    note(refused.replace(" ", "_")[:20])
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    """
    finished(start_holder(forks, tmp_path, "it"))
    assert log_of(tmp_path) == ["another_measured_tes it"]


def test_a_forked_child_does_not_wait_for_a_thread_that_it_has_not(tmp_path):
    forks = """
        import threading

        def waits():
            with lock.exclusive():
                pass

        with lock.shared():
            thread = threading.Thread(target=waits)
            thread.start()
            while thread.is_alive() and not device_lock._process_lock.cache_info().currsize:
                pass
            time.sleep(0.1)
            child = os.fork()
            if child == 0:
                signal.alarm(50)
        if child == 0:
            note("left")
            os._exit(0)
        os.waitpid(child, 0)
        thread.join()
    """
    with somebody("lock.shared()", tmp_path):
        parent = start_holder(forks, tmp_path, "it")
        wait_for_line("left it", tmp_path)
    finished(parent)


# Waiting


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(device_lock, "time", clock)
    monkeypatch.setattr(device_lock, "SECONDS_BETWEEN_TRIES", 0.5)  # a try by SQLite takes a millisecond
    return clock


@contextmanager
def somebody(doing, folder):
    """Another process that shares, or is alone, meanwhile."""
    process = start_holder(f"with {doing}: note('there'); wait_for_line('enough test')", folder, "somebody")
    wait_for_line("there somebody", folder)
    try:
        yield
    finally:
        with (folder / "log").open("a") as log:
            log.write("enough test\n")
        finished(process)


@of_each_kind
def test_waiting_to_be_alone_ends_and_the_share_is_had_again(tmp_path, lock, locks, clock):
    with lock.shared(), ExitStack() as other:
        other.enter_context(somebody("lock.shared()", tmp_path))
        with lock.exclusive() as refused:
            assert refused == "another measured test kept the GPU busy for 60 s"
            assert state_of(locks, GATE) == "free"
            other.close()
            assert state_of(locks) == "shared"


def test_after_a_wait_in_vain_the_next_is_short_until_one_succeeds(clock):
    patience = device_lock._Timeout(60)
    waited = []
    for success in (False, False, True, False):
        began = clock.now
        assert patience.wait_for(lambda success=success: success, lambda: None) is success
        waited.append(round(clock.now - began))
    assert waited == [60, 5, 0, 60]


@of_each_kind
def test_somebody_who_is_alone_for_ever_is_not_waited_for_for_ever(tmp_path, lock, clock):
    with somebody("lock.shared(), lock.exclusive()", tmp_path), lock.shared():
        assert round(clock.now) == 600
        with lock.exclusive() as refused:
            assert refused == "another measured test kept the GPU busy for 60 s"


@of_each_kind
def test_ctrl_c_while_waiting_to_be_alone_gives_the_share_back_and_opens_the_gate(tmp_path, lock, locks, monkeypatch):
    with lock.shared():
        with somebody("lock.shared()", tmp_path):
            monkeypatch.setattr(device_lock.time, "sleep", interrupted)
            with pytest.raises(KeyboardInterrupt), lock.exclusive():
                raise AssertionError
            monkeypatch.undo()
            assert state_of(locks, GATE) == "free"
        assert state_of(locks) == "shared"
    assert state_of(locks) == "free"


def test_ctrl_c_while_waiting_for_a_share_leaves_nothing_held(tmp_path, lock, locks, monkeypatch):
    with somebody("lock.shared(), lock.exclusive()", tmp_path):
        monkeypatch.setattr(device_lock.time, "sleep", interrupted)
        with pytest.raises(KeyboardInterrupt), lock.shared():
            raise AssertionError
        monkeypatch.undo()
        assert not any(os.path.samestat(status, (locks / "GPU-0.lock").stat()) for status in open_files())
    with lock.shared(), lock.exclusive() as refused:
        assert refused is None
    assert state_of(locks) == "free"


def open_files():
    for file in Path("/dev/fd").iterdir():
        with suppress(OSError):
            yield os.fstat(int(file.name))


# Folders that cannot be used


def refused_by(lock):
    with lock.shared(), lock.shared(), lock.exclusive() as refused:
        return refused


@of_each_kind
def test_a_folder_that_cannot_be_made_is_told_and_fails_nothing(tmp_path):
    folder = tmp_path / "missing" / "locks"
    assert refused_by(DeviceLock("GPU-0", folder=folder)) == (
        f"{NO_LOCK}([Errno {errno.ENOENT}] No such file or directory: '{folder}')"
    )


def test_where_no_lock_can_be_had_a_process_counts_as_alone_unless_it_is_a_worker(lock, locks, monkeypatch):
    locks.touch()
    assert refused_by(lock) == f"{NO_LOCK}([Errno {errno.ENOTDIR}] Not a directory: '{locks}')"
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    assert refused_by(lock) is None


def test_a_process_that_others_keep_from_being_alone_is_told_so_worker_or_not(tmp_path, lock, clock, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    with lock.shared(), somebody("lock.shared()", tmp_path), lock.exclusive() as refused:
        assert refused == "another measured test kept the GPU busy for 60 s"


@of_each_kind
def test_a_link_in_the_folder_s_place_is_not_followed(tmp_path, lock, locks):
    (tmp_path / "elsewhere").mkdir()
    locks.symlink_to(tmp_path / "elsewhere")
    assert str(refused_by(lock)).startswith(NO_LOCK)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_link_in_the_lock_s_place_is_not_followed(tmp_path, lock, locks):
    locks.mkdir()
    (locks / "GPU-0.lock").symlink_to(tmp_path / "elsewhere")
    assert f"({locks}/GPU-0.lock is a symbolic link, which is not followed; remove it)" in str(refused_by(lock))
    assert not (tmp_path / "elsewhere").exists()


def test_another_user_s_folder_is_not_used(lock, locks, monkeypatch):
    locks.mkdir()
    me = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: me + 1)
    assert refused_by(lock) == f"{NO_LOCK}([Errno {errno.EPERM}] the folder belongs to another user: '{locks}')"
    assert list(locks.iterdir()) == []


@of_each_kind
def test_nobody_else_may_enter_the_folder(lock, locks):
    with lock.shared():
        assert locks.stat().st_mode & 0o777 == 0o700
    locks.chmod(0o777)
    with lock.shared():
        assert locks.stat().st_mode & 0o777 == 0o700


def test_a_system_without_record_locks_takes_those_of_sqlite(lock, locks, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    assert refused_by(lock) is None
    assert sorted(file.name for file in locks.iterdir()) == ["GPU-0.lock.db", "GPU-0.lock.turnstile.db"]


def test_a_system_that_has_neither_is_told(lock, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setattr("filelock.ReadWriteLock", None)
    assert refused_by(lock) == (
        f"{NO_LOCK}([Errno {errno.ENOSYS}] this system has neither POSIX record locks nor SQLite)"
    )


def test_a_database_that_cannot_be_locked_is_told(lock, locks, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    locks.mkdir()
    (locks / "GPU-0.lock.db").write_text("no database")
    assert str(refused_by(lock)).startswith(f"{NO_LOCK}([Errno {errno.ENOLCK}] ")


# Record locks, and those of SQLite beside them: the reasons for which record locks are taken where there are any


@pytest.fixture(params=[RecordReadersWriterLock, SqliteReadersWriterLock], ids=["record locks", "SQLite"])
def kind(request, monkeypatch):
    if request.param is SqliteReadersWriterLock:
        monkeypatch.setenv(SQLITE, "1")
    return request.param


def test_only_record_locks_name_the_process_that_others_wait_for(tmp_path, locks, kind):
    with somebody("lock.shared()", tmp_path):
        waiting = kind(locks, "GPU-0.lock")
        assert not waiting.acquire_exclusive()
        said = waiting.kept_by(alone=True)
        waiting.close()
    assert (said is not None and said.startswith("process ")) is (kind is RecordReadersWriterLock)


def test_only_record_locks_are_shared_again_while_another_process_waits(tmp_path, locks, kind):
    timed = kind(locks, "GPU-0.lock")
    assert timed.acquire_exclusive()
    timed.admit_others()
    waits_to_be_alone = """
        other = device_lock.open_readers_writer_lock(folder / "locks", "GPU-0.lock")
        assert not other.acquire_exclusive()
        note("waits")
        wait_for_line("shares test")
    """
    waits = start_holder(waits_to_be_alone, tmp_path, "other")
    wait_for_line("waits other", tmp_path)
    timed.downgrade()
    assert state_of(locks) == ("shared" if kind is RecordReadersWriterLock else "alone")
    with (tmp_path / "log").open("a") as log:
        log.write("shares test\n")
    finished(waits)
    timed.downgrade()
    assert state_of(locks) == "shared"
    timed.close()
    assert state_of(locks) == "free"


def test_only_record_locks_can_be_taken_by_the_fork_of_a_holder(tmp_path, kind):
    forks = """
        with lock.shared():
            child = os.fork()
            if child == 0:
                device_lock.MOST_SECONDS_FOR_SHARED = device_lock.MOST_SECONDS_FOR_EXCLUSIVE = 0.05
                with lock.shared():
                    note("no lock" if lock._of_this_process()._broken else "shares")
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """
    finished(start_holder(forks, tmp_path, "it"))
    assert log_of(tmp_path) == ["shares it" if kind is RecordReadersWriterLock else "no lock it"]


def test_a_file_system_that_has_no_locks_is_told(lock, monkeypatch):
    monkeypatch.setattr(fcntl, "lockf", unlockable)
    assert refused_by(lock) == f"{NO_LOCK}([Errno {errno.ENOLCK}] No locks available)"


def test_a_lock_that_fails_later_is_told_and_tried_again_by_the_next_test(lock, locks, monkeypatch):
    with lock.shared():
        monkeypatch.setattr(fcntl, "lockf", unlockable)
        with lock.exclusive() as refused:
            assert str(refused).startswith(NO_LOCK)
        monkeypatch.undo()
        with lock.exclusive() as refused:
            assert str(refused).startswith(NO_LOCK)
    assert refused_by(lock) is None
    assert state_of(locks) == "free"


def test_a_user_has_a_folder_of_their_own_by_number(tmp_path, monkeypatch):
    def nobody():
        # As in a container that runs under a number that /etc/passwd does not have.
        raise KeyError("getpwuid(): uid not found: 1000650000")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("getpass.getuser", nobody)
    assert refused_by(DeviceLock("GPU-0")) is None
    assert [folder.name for folder in tmp_path.iterdir()] == [f"pytest-gpumem-{os.getuid()}"]


# Devices


@pytest.fixture(params=["cpu", "cuda"])
def device(request, lock, monkeypatch):
    if request.param == "cpu":
        return CpuDevice(lock)
    return CudaDevice(in_place_of_torchs(monkeypatch, SyntheticCuda()), lock)


def test_an_open_device_is_shared_and_a_closed_one_is_free(device, locks):
    device.open()
    assert state_of(locks) == "shared"
    with device.exclusive() as refused:
        assert refused is None
        assert state_of(locks) == "alone"
    assert state_of(locks) == "shared"
    for _ in range(2):
        device.close()
        assert state_of(locks) == "free"
    device.open()
    assert state_of(locks) == "shared"
    device.close()


def test_only_an_open_device_can_be_had_alone(device):
    with pytest.raises(RuntimeError, match=re.escape(f"the {device.name} device is not open")), device.exclusive():
        raise AssertionError


def test_a_device_that_cannot_be_opened_is_free(lock, locks, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no profiler")

    monkeypatch.setattr(CpuDevice, "_start", fails)
    for device in (CpuDevice(lock), CudaDevice(SyntheticCuda(counts=False), lock)):
        with pytest.raises(DeviceUnavailable):
            device.open()
        assert state_of(locks) == "free"


def test_a_device_that_is_open_already_keeps_its_one_share(device, locks):
    device.open()
    with pytest.raises(RuntimeError, match="already open"):
        device.open()
    assert state_of(locks) == "shared"
    device.close()
    assert state_of(locks) == "free"


@pytest.mark.parametrize(("make", "name"), [(make_cpu, "cpu.lock"), (make_cuda, "gpu-GPU-0.lock")])
def test_there_is_one_lock_for_each_gpu_and_one_for_the_cpu(tmp_path, monkeypatch, make, name):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("pytest_gpumem.measuring.devices.cuda_runtime.TorchCuda", SyntheticCuda)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda _device=None: None)
    device = make()
    device.open()
    (folder,) = tmp_path.iterdir()
    assert [file.name for file in folder.iterdir()] == [name]
    assert state_of(folder) == "shared"
    device.close()


# Who waits is told for whom

HOLDS = """
    os.environ["PYTEST_CURRENT_TEST"] = "tests/test_gpt.py::test_a[x (y)] (setup)"
    with lock.shared(), lock.exclusive():
        note("alone")
        {then}
"""


@pytest.fixture
def told(lock, monkeypatch):
    monkeypatch.setattr(device_lock, "SECONDS_UNTIL_TOLD", 0.05)
    said: list[str] = []
    lock.tell = said.append
    return said


def held_by(tmp_path, then):
    holder = start_holder(HOLDS.format(then=then), tmp_path, "holder")
    wait_for_line("alone holder", tmp_path)
    return holder


def test_who_waits_is_told_once_who_holds_the_device_and_how_to_avoid_it(tmp_path, lock, told):
    holder = held_by(tmp_path, 'wait_for_line("told")')

    def tell(sentence):
        told.append(sentence)
        with (tmp_path / "log").open("a") as log:
            log.write("told\n")

    lock.tell = tell
    with lock.shared():
        pass
    finished(holder)
    (sentence,) = told
    assert sentence == (
        f"waiting for the GPU, which is held by process {holder.pid} (tests/test_gpt.py::test_a[x (y)]): timed steps are alone "
        "on a device. To avoid the wait, run one session after the other, or with --no-gpumem-time"
    )


def test_who_does_not_wait_is_told_nothing(tmp_path, lock, told):
    holder = held_by(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert holder.wait(30) == -signal.SIGKILL
    with lock.shared(), lock.exclusive() as refused:
        assert refused is None
    assert told == []
