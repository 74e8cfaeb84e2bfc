"""What is read from /proc, from texts as Linux writes them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pytest_gpumem.measuring.devices import proc

STAT = """cpu  3441627 102074 209740 3196132 4871 7 1400 1537 50 60
cpu0 1523455 51331 90799 1808449 1745 0 233 764 0 0
cpu1 1918171 50743 118940 1387683 3125 0 1167 772 0 0
intr 8021 0 0
ctxt 12
procs_running 2
"""
EPYC = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel\t\t: 2\nmodel name\t: AMD  EPYC 9575F \nstepping\t: 1\n\n"
GRACE = "processor\t: 0\nBogoMIPS\t: 2000.00\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd4f\n\n"


def test_waiting_is_the_second_number_in_nanoseconds():
    assert proc.waited_of("493957 47140000 2\n") == 0.04714


@pytest.mark.parametrize("text", [None, "0 0 0\n", "what is this\n"])
def test_a_kernel_that_does_not_count_waiting_tells_nothing(text):
    assert proc.waited_of(text) is None


def test_busy_is_what_ran_for_any_process_and_guests_count_once():
    times = proc.cpu_times_of(STAT, 0.01)
    assert times.busy == pytest.approx((3441627 + 102074 + 209740 + 7 + 1400) / 100)
    assert (times.stolen, times.cores) == (pytest.approx(15.37), 2)


@pytest.mark.parametrize("text", [None, "cpu  1 2 3 4\ncpu0 1 2 3 4\n", "cpu  1 2 3 4 5 6 7 8 9 10\n"])
def test_a_stat_without_the_counters_tells_nothing(text):
    assert proc.cpu_times_of(text, 0.01) is None


def test_a_parent_is_found_behind_any_name():
    assert proc.parent_in("4711 (a) S 1 (b) R 99 4711 0\n") == 99
    assert proc.parent_in(None) is None
    assert proc.parent_in("") is None


def test_the_time_of_a_process_is_its_own_and_that_of_the_children_it_waited_for():
    stat = "4711 (a) S 1 (b) R 99 4711 0 34816 0 4194304 5 6 7 8 100 20 3 4 20 0 1 0 555\n"
    assert proc.seconds_in(stat, 0.01) == pytest.approx(1.27)
    assert proc.seconds_in(None, 0.01) == proc.seconds_in("", 0.01) == 0.0


@pytest.fixture
def process(monkeypatch, tmp_path):
    """Makes a process in ``tmp_path`` as in /proc, with ticks of 0.01 seconds."""
    monkeypatch.setattr(proc, "tick_seconds", lambda: 0.01)

    def make(pid: int, ticks: int, *environ: str, parent: int = 1, children: tuple[int, ...] = ()) -> None:
        (tmp_path / f"{pid}/task/{pid}").mkdir(parents=True)
        (tmp_path / f"{pid}/task/{pid}/children").write_text("".join(f"{child} " for child in children))
        (tmp_path / f"{pid}/stat").write_text(f"{pid} (a) S 1) R {parent} 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1\n")
        (tmp_path / f"{pid}/environ").write_text("\0".join([*environ, ""]))

    return make


def test_the_time_of_children_is_that_of_ended_and_live_ones_and_their_children(process, monkeypatch, tmp_path):
    # Of 13 there is nothing but its number: it has just ended.
    process(10, 100_000, children=(11, 13))
    process(11, 300, children=(12,))
    process(12, 50)
    process(20, 7000)
    monkeypatch.setattr("os.getpid", lambda: 10)
    monkeypatch.setattr("os.times", lambda: os.times_result((9.0, 9.0, 2.0, 0.25, 99.0)))
    assert proc.seconds_of_children(tmp_path) == pytest.approx(2.25 + 3.5)
    assert proc.seconds_of_children(tmp_path / "none") == 2.25


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_the_time_of_a_live_child_counts_on_this_kernel():
    works = "import time\nwhile time.process_time() < 0.1: pass\nprint(flush=True)\ninput()"
    before = proc.seconds_of_children()
    with subprocess.Popen([sys.executable, "-c", works], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert proc.seconds_of_children() - before >= 0.08  # in ticks
        child.kill()


def test_ranks_are_the_launchers_processes_with_the_same_port(process, monkeypatch, tmp_path):
    process(100, 100, "MASTER_PORT=29500", parent=50)  # this one
    process(101, 101, "RANK=1", "MASTER_PORT=29500", "A=b", parent=50, children=(104,))
    process(102, 102, "MASTER_PORT=295001", parent=50)  # of another job
    process(103, 103, "B=MASTER_PORT=29500", parent=50)
    process(104, 104, "MASTER_PORT=29500", parent=101)  # a rank's child
    (tmp_path / "105").mkdir()  # it has just ended
    monkeypatch.setattr("os.getpid", lambda: 100)
    monkeypatch.setattr("os.getppid", lambda: 50)
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert proc.siblings_with("MASTER_PORT", tmp_path) == (101,)
    assert proc.seconds_of([101, 105], tmp_path) == pytest.approx(1.01 + 1.04)
    monkeypatch.delenv("MASTER_PORT")
    assert proc.siblings_with("MASTER_PORT", tmp_path) == ()


@pytest.mark.parametrize(("text", "model"), [(EPYC * 2, "AMD EPYC 9575F"), (None, None)])
def test_the_model_is_the_cpus_name(text, model):
    assert proc.model_of(text) == model


def test_arm_has_no_name_and_is_told_by_its_numbers(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert proc.model_of(GRACE) == "aarch64 0x41/0xd4f"


@pytest.mark.parametrize(("cores", "said"), [(1, "AMD EPYC 9575F, 1 core"), (8, "AMD EPYC 9575F, 8 cores")])
def test_a_machine_is_its_model_and_the_cores_that_may_be_used(monkeypatch, tmp_path, cores, said):
    (tmp_path / "cpuinfo").write_text(EPYC)
    monkeypatch.setattr(proc, "usable_cores", lambda: cores)
    assert proc.machine(tmp_path / "cpuinfo") == said


def test_without_proc_the_machine_is_what_the_platform_says(monkeypatch, tmp_path):
    monkeypatch.setattr(proc, "usable_cores", lambda: 8)
    monkeypatch.setattr("platform.system", lambda: "Windows")
    monkeypatch.setattr("platform.processor", lambda: "Intel64 Family 6")
    assert proc.machine(tmp_path / "none") == "Intel64 Family 6, 8 cores"
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "")
    assert proc.machine(tmp_path / "none") == "unknown CPU, 8 cores"


def test_without_proc_there_is_no_reading(tmp_path):
    assert proc.waited_seconds(tmp_path / "none") is None
    assert proc.cpu_times(tmp_path / "none") is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_readings_only_grow():
    before, after = proc.cpu_times(), proc.cpu_times()
    assert before.cores == after.cores >= 1
    assert after.busy >= before.busy > 0
    assert after.stolen >= before.stolen >= 0


def test_workers_of_pytest_xdist_are_of_the_session_and_other_siblings_are_not(monkeypatch):
    # In a container the suite's own parent may be the process with the number 1.
    monkeypatch.setattr(os, "getppid", lambda: 50)
    parents = {100: 50, 200: os.getpid(), 300: 1}
    monkeypatch.setattr(proc, "parent_of", parents.get)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    assert [proc.is_of_session(pid) for pid in (os.getpid(), 100, 200, 300, 400)] == [True, False, True, False, False]
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert [proc.is_of_session(pid) for pid in (os.getpid(), 100, 200, 300, 400)] == [True, True, True, False, False]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_a_process_that_this_one_started_is_of_the_session():
    with subprocess.Popen(["sleep", "60"]) as child:
        assert proc.is_of_session(child.pid)
        child.kill()


@pytest.mark.parametrize(("told", "workers"), [("4", 4), ("", 1)])
def test_as_many_measure_as_pytest_xdist_has_workers(monkeypatch, told, workers):
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", told)
    assert proc.workers_of_session() == workers
