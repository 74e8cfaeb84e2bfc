"""Who may run beside whom on a device, by the bytes that each reserves: between real processes, by the order of what they tell."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager

import pytest

from pytest_gpumem.measuring.devices import memory_ledger
from pytest_gpumem.measuring.devices.memory_ledger import DeviceMemory, Entry, MemoryLedger, State, may_begin
from tests.support.processes import log_of, start_holder, wait_for_line

RESTS, SHARES, ALONE = State.RESTS, State.SHARES, State.ALONE
EMPTY = DeviceMemory(total=16, free=16, held=0)
LEDGER = """
from pytest_gpumem.measuring.devices.memory_ledger import DeviceMemory, MemoryLedger

ledger = MemoryLedger("GPU-0", folder=folder / "ledger")
now = lambda: DeviceMemory(total=16, free=16, held=1)


def run(wanted, seconds=0.1):
    with ledger.reserved(wanted, now):
        note(f"begins {wanted}")
        time.sleep(seconds)
        note(f"ends {wanted}")


def until_released():
    while not (folder / "released").exists():
        time.sleep(0.005)


def run_until_released(wanted):
    with ledger.reserved(wanted, now):
        note(f"begins {wanted}")
        until_released()
        note(f"ends {wanted}")


"""


def now(memory=EMPTY):
    return lambda: memory


def start(script, folder, name):
    """A process called ``name`` that has a ``ledger`` in ``folder / "ledger"``, and runs ``script``."""
    return start_holder(LEDGER + textwrap.dedent(script), folder, name)


@contextmanager
def somebody_who_holds_14(folder):
    process = start("run(14, seconds=600)", folder, "holds")
    wait_for_line("begins 14 holds", folder)
    yield process
    process.kill()
    process.wait()


def finished(*processes):
    assert [process.wait(60) for process in processes] == [0] * len(processes)


# The rule


@pytest.mark.parametrize(
    ("wanted", "others", "begins"),
    [
        (Entry(1, 5, SHARES), [Entry(1, 9, SHARES)], True),
        (Entry(1, 6, SHARES), [Entry(1, 9, SHARES)], False),
        (Entry(1, 6, SHARES), [Entry(1, 4, SHARES), Entry(1, 4, SHARES)], False),
        # What a process holds between tests is gone, too.
        (Entry(1, 5, SHARES), [Entry(1, 8, SHARES), Entry(2, 0, RESTS)], False),
        # But where only such are left, waiting would not help.
        (Entry(1, 99, SHARES), [Entry(9, 0, RESTS)], True),
        (Entry(1, 0, ALONE), [Entry(1, 1, SHARES)], False),
        (Entry(1, 0, ALONE), [Entry(1, 0, RESTS)], True),
        (Entry(1, 1, SHARES), [Entry(1, 0, ALONE)], False),
    ],
)
def test_a_test_begins_where_all_that_is_reserved_fits(wanted, others, begins):
    assert may_begin(wanted, others, now()) is begins


def test_what_programs_without_an_entry_hold_is_not_there():
    others = [Entry(1, 4, SHARES)]
    assert may_begin(Entry(1, 5, SHARES), others, now(DeviceMemory(16, free=6, held=0)))
    assert not may_begin(Entry(1, 5, SHARES), others, now(DeviceMemory(16, free=5, held=0)))
    # Its own part of what is not free is in its entry.
    assert may_begin(Entry(1, 5, SHARES), others, now(DeviceMemory(16, free=5, held=1)))


# Between processes


def together(log):
    """The bytes of tests that ran at once, the most, by a log of ``begins`` and ``ends``."""
    running, most = {}, 0
    for line in log:
        event, wanted, who = line.split()
        if event == "begins":
            running[who] = 16 if wanted == "None" else int(wanted) + 1
        else:
            del running[who]
        most = max(most, sum(running.values()))
    return most


def released(folder, events, *processes):
    """Let processes go on once all that is in ``events`` has happened, and wait for their ends."""
    for event in events:
        wait_for_line(event, folder)
    (folder / "released").touch()
    finished(*processes)


def test_tests_run_at_once_as_far_as_they_fit_and_no_further(tmp_path):
    sizes = {"a": 7, "b": 6, "c": 5, "d": 3, "e": None}
    script = """
        note("ready 0")
        until_released()
        for _ in range(4):
            run({})
    """
    processes = [start(script.format(size), tmp_path, name) for name, size in sizes.items()]
    released(tmp_path, [f"ready 0 {name}" for name in sizes], *processes)
    log = log_of(tmp_path)[len(sizes) :]
    assert len(log) == 40
    assert together(log) <= 16
    # More than the largest, which is 8 with what its process holds.
    assert together(line for line in log if not line.endswith(" e")) > 8


def test_without_a_ledger_they_do_not_fit_and_it_is_seen(tmp_path):
    script = "ledger.reserved = lambda wanted, now: nullcontext()\nrun_until_released(9)"
    released(tmp_path, ["begins 9 a", "begins 9 b"], *(start(script, tmp_path, name) for name in "ab"))
    assert together(log_of(tmp_path)) == 20


def test_eight_small_ones_run_at_once(tmp_path):
    processes = [start("run_until_released(1)", tmp_path, name) for name in "abcdefgh"]
    released(tmp_path, [f"begins 1 {name}" for name in "abcdefgh"], *processes)
    assert together(log_of(tmp_path)) == 16


@pytest.mark.parametrize("wanted", ["15", "None"])
def test_small_ones_that_come_later_cannot_starve_a_large_one(tmp_path, wanted):
    small = [
        start("while 'large' not in open(folder / 'log').read().split(): run(2, 0.02)", tmp_path, name) for name in "ab"
    ]
    wait_for_line("begins 2 a", tmp_path)
    wait_for_line("begins 2 b", tmp_path)
    finished(start(f"run({wanted})", tmp_path, "large"), *small)


def test_a_process_that_is_killed_gives_its_bytes_back(tmp_path):
    with somebody_who_holds_14(tmp_path):
        waits = start("run(14)", tmp_path, "waits")
        with pytest.raises(subprocess.TimeoutExpired):
            waits.wait(0.5)
    finished(waits)


def test_the_last_process_removes_the_file_and_earlier_ones_leave_it(tmp_path):
    script = """
        note("ready 0")
        until_released()
        for _ in range(40):
            run(9, 0.002)
            ledger.leave()
    """
    processes = [start(script, tmp_path, name) for name in "abcd"]
    released(tmp_path, [f"ready 0 {name}" for name in "abcd"], *processes)
    log = log_of(tmp_path)[4:]
    assert len(log) == 320
    # Two of them would take 20.
    assert together(log) == 10
    assert list((tmp_path / "ledger").iterdir()) == []


def test_a_file_that_was_removed_while_a_process_came_is_made_anew(tmp_path, monkeypatch):
    file, opened = tmp_path / "ledger" / "GPU-0.memory", []

    class Removed(memory_ledger.LockFile):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            opened.append(self)
            if len(opened) == 1:
                file.unlink()  # by the last one that left

    monkeypatch.setattr(memory_ledger, "LockFile", Removed)
    ledger = MemoryLedger("GPU-0", folder=tmp_path / "ledger")
    ledger.enter(1)
    assert len(opened) == 2
    assert os.fstat(opened[1].descriptor).st_ino == file.stat().st_ino
    ledger.leave()


def test_a_process_leaves_only_when_it_runs_no_test_and_may_enter_again(tmp_path):
    ledger = MemoryLedger("GPU-0", folder=tmp_path / "ledger")
    file = tmp_path / "ledger" / "GPU-0.memory"
    ledger.leave()
    with ledger.reserved(5, now()):
        ledger.leave()
        assert file.exists()
    # Another one that is there keeps the file.
    other = start("ledger.enter(1)\nnote('entered')\nuntil_released()\nledger.leave()", tmp_path, "other")
    wait_for_line("entered other", tmp_path)
    ledger.leave()
    assert file.exists()
    released(tmp_path, [], other)
    assert not file.exists()
    with ledger.reserved(5, now()):
        assert file.exists()
    ledger.leave()
    assert not file.exists()


def test_ctrl_c_while_waiting_leaves_the_queue_to_others(tmp_path):
    script = """
        try:
            note("waits")
            run(13)
        except KeyboardInterrupt:
            note("interrupted")
            sys.stdin.read()
    """
    with somebody_who_holds_14(tmp_path):
        interrupted = start(script, tmp_path, "waits")
        wait_for_line("waits waits", tmp_path)
        interrupted.send_signal(signal.SIGINT)
        wait_for_line("interrupted waits", tmp_path)
        finished(start("run(0)", tmp_path, "small"))
    interrupted.kill()
    interrupted.wait()


# Of one process


def test_a_session_within_a_test_waits_for_nobody(tmp_path):
    ledger = MemoryLedger("GPU-0", folder=tmp_path)
    with ledger.reserved(None, now()) as outer, MemoryLedger("GPU-0", folder=tmp_path).reserved(9, now()) as inner:
        assert (outer.limit, inner.limit) == (None, None)


def test_what_is_reserved_is_exchanged_for_the_whole_device(tmp_path):
    readings = itertools.count(1)
    ledger = MemoryLedger("GPU-0", folder=tmp_path)
    with ledger.reserved(9, lambda: DeviceMemory(16, 16, next(readings))) as reservation:
        assert reservation.limit == 10
        reservation.take_all()
        assert (reservation.needed, reservation.limit) == (None, None)


def test_a_test_begins_in_any_case_once_whoever_holds_the_memory_must_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_ledger, "MOST_SECONDS", 0.2)
    ledger = MemoryLedger("GPU-0", folder=tmp_path / "ledger")
    with somebody_who_holds_14(tmp_path), ledger.reserved(14, now()) as reservation:
        assert reservation.limit == 14


def test_a_device_that_tells_nothing_any_more_keeps_what_was_reserved(tmp_path):
    readings = iter([EMPTY])

    def broken():
        try:
            return next(readings)
        except StopIteration:
            raise RuntimeError("CUDA error: an illegal memory access was encountered") from None

    ledger = MemoryLedger("GPU-0", folder=tmp_path / "ledger")
    with ledger.reserved(9, broken):
        pass
    process = memory_ledger._process_ledger(tmp_path / "ledger", "GPU-0.memory", os.getpid())
    assert process.entry == Entry(9, 0, RESTS)
    # Beside one that leaves no room: nothing more can be taken.
    with somebody_who_holds_14(tmp_path), ledger.reserved(2, broken) as reservation:
        assert reservation.limit == 11
    assert process.entry == Entry(11, 0, RESTS)


def test_a_system_without_record_locks_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(OSError, match="this system has no POSIX record locks"):
        MemoryLedger("GPU-0", folder=tmp_path).enter(1)
