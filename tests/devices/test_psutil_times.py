"""CPU times by psutil, from the fields that it has on each system, and the choice between /proc and psutil."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from pytest_gpumem.measuring.devices import load_source as sources
from pytest_gpumem.measuring.devices import proc, psutil_times
from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.measuring.devices.proc import CpuTimes
from tests.support.psutil_shapes import Linux, MacOS, OfProcess, Windows, fake_psutil


@pytest.mark.parametrize(
    ("times", "busy", "stolen"),
    [
        (Linux(100.0, 5.0, 20.0, 900.0, 40.0, 1.0, 2.0, 3.0, 50.0, 5.0), 128.0, 3.0),
        (MacOS(100.0, 0.0, 20.0, 900.0), 120.0, None),
        # The time of interrupts and of deferred procedure calls is part of the system's.
        (Windows(100.0, 20.0, 900.0, 4.0, 6.0), 120.0, None),
    ],
    ids=["Linux", "macOS", "Windows"],
)
def test_busy_is_what_ran_for_any_process_on_each_system(times, busy, stolen):
    assert psutil_times.cpu_times_of(times, 8) == CpuTimes(busy, stolen, 8)


def test_an_unknown_number_of_cores_tells_nothing():
    assert psutil_times.cpu_times_of(MacOS(1.0, 1.0, 1.0, 1.0), None) is None


def test_without_psutil_there_is_no_reading(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert psutil_times.cpu_times() is None


@pytest.mark.parametrize("error", [PermissionError("/proc/stat"), RuntimeError("no cpu line")])
def test_counters_that_are_hidden_tell_nothing(monkeypatch, error):
    def hidden():
        raise error

    monkeypatch.setattr(psutil, "cpu_times", hidden)
    assert psutil_times.cpu_times() is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has both sources")
def test_both_sources_read_the_same_counters():
    before, by_psutil, after = proc.cpu_times(), psutil_times.cpu_times(), proc.cpu_times()
    assert before.cores == by_psutil.cores == after.cores
    assert before.busy - 1e-6 <= by_psutil.busy <= after.busy + 1e-6
    assert before.stolen - 1e-6 <= by_psutil.stolen <= after.stolen + 1e-6


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has both sources")
def test_both_sources_know_the_same_children():
    with subprocess.Popen(
        [sys.executable, "-c", "sum(range(10**7)); print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        child.stdout.readline()
        before, by_psutil, after = (
            proc.seconds_of_children(),
            psutil_times.seconds_of_children(),
            proc.seconds_of_children(),
        )
        assert 0 < before - 1e-6 <= by_psutil <= after + 1e-6
        assert psutil_times.seconds_of([child.pid]) <= proc.seconds_of([child.pid]) + 1e-6
        child.communicate(b"\n")
    assert psutil_times.seconds_of([child.pid]) == 0.0


@pytest.mark.parametrize(
    ("parent", "variable", "siblings"),
    [(os.getpid(), "MASTER_PORT", True), (1, "NOT_SET", False)],
    ids=["set", "not set"],
)
def test_ranks_are_the_launchers_processes_with_the_same_port(monkeypatch, parent, variable, siblings):
    monkeypatch.setenv("MASTER_PORT", "29500")
    wait = [sys.executable, "-S", "-c", "print(flush=True); input()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        subprocess.Popen(wait, **pipes) as rank,
        subprocess.Popen(wait, env={**os.environ, "MASTER_PORT": "29501"}, **pipes) as other_job,
    ):
        for process in (rank, other_job):
            process.stdout.readline()
        monkeypatch.setattr("os.getppid", lambda: parent)
        assert psutil_times.siblings_with(variable) == ((rank.pid,) if siblings else ())
        for process in (rank, other_job):
            process.communicate(b"\n")


# The choice


@pytest.fixture
def undecided():
    sources.load_source.cache_clear()
    yield
    sources.load_source.cache_clear()


@pytest.mark.parametrize(
    ("proc_reads", "psutil_reads", "name"),
    [(True, True, "/proc"), (False, True, "psutil"), (False, False, None)],
)
def test_proc_comes_first_and_psutil_is_used_without_it(undecided, monkeypatch, proc_reads, psutil_reads, name):
    times = CpuTimes(30.0, None, 2)
    monkeypatch.setattr(proc, "cpu_times", lambda: times if proc_reads else None)
    monkeypatch.setattr(psutil_times, "cpu_times", lambda: times if psutil_reads else None)
    source = sources.load_source()
    assert (None if source is None else source.NAME) == name
    if name is None:
        assert sources.siblings_with("PATH") == ()


@pytest.mark.parametrize(
    "times", [MacOS(20.0, 4.0, 6.0, 900.0), Windows(20.0, 10.0, 900.0, 1.0, 2.0)], ids=["macOS", "Windows"]
)
def test_without_proc_conditions_are_what_psutil_tells(undecided, monkeypatch, times):
    monkeypatch.setitem(sys.modules, "psutil", fake_psutil(lambda: times, 8, (OfProcess(3.0, 1.0),)))
    monkeypatch.setattr(proc, "_text", lambda *_, **__: None)
    monkeypatch.setattr("os.times", lambda: os.times_result((9.0, 9.0, 0.0, 0.0, 99.0)))
    monkeypatch.setattr("time.process_time", lambda: 10.0)
    monkeypatch.setattr("time.thread_time", lambda: 5.0)
    monkeypatch.setattr("time.perf_counter", lambda: 7.0)
    conditions = CpuDevice().conditions()
    assert (conditions.waited, conditions.off_core, conditions.stolen) == (None, 2.0, None)
    assert (conditions.other_cpu_seconds, conditions.cores) == (30.0 - 10.0 - 4.0, 8)
