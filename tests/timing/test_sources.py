"""The same machine, as /proc shows it and as psutil does on each system: planted slowdowns have the same verdict."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from pytest_gpumem.judging.times.comparison import Runs, compare
from pytest_gpumem.measuring.devices import load_source, proc
from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.measuring.timing.sampling import sample_step
from tests.support.psutil_shapes import Linux, MacOS, Windows, fake_psutil

TICK = 0.01
CORES = 2
STEP_SECONDS = 0.030


class Machine(CpuDevice):
    """A machine of two cores whose time passes only in steps, and whose clock stays the same.

    A step runs for its seconds, times ``slower``, and then sleeps. The thread waits for a share of the time, and other processes
    use ``others`` cores.
    """

    seconds_between_readings = 0.1

    def __init__(self, slower: float = 1.0, others: float = 0.0, waits: float = 0.0, sleeps: float = 0.0) -> None:
        super().__init__()
        self.slower, self.others, self.waits, self.sleeps = slower, others, waits, sleeps
        self.now = self.ran = self.waited = 0.0

    def time(self, run) -> float:
        before = self.now
        run()
        return self.now - before

    def step(self) -> None:
        runs = STEP_SECONDS * self.slower
        waited = runs * self.waits / (1 - self.waits)
        self.ran += runs
        self.waited += waited
        self.now += runs + waited + self.sleeps

    def pace(self) -> float:
        return 2000.0

    @property
    def user(self) -> float:
        """The seconds of all processes, in whole ticks."""
        return int((self.ran + self.others * self.now) / TICK) * TICK

    def text(self, path, most: int = -1) -> str | None:
        """The contents of the files that Linux has under /proc."""
        ticks = round(self.user / TICK)
        return {
            "/proc/stat": f"cpu  {ticks} 0 0 0 0 0 0 0 0 0\n" + "cpu0 0 0\ncpu1 0 0\n",
            "/proc/thread-self/schedstat": f"{self.ran * 1e9 + 1:.0f} {self.waited * 1e9:.0f} 1\n",
        }.get(str(path))


def by_proc(machine, monkeypatch):
    monkeypatch.setattr(proc, "_text", machine.text)


def by_psutil(times_of):
    def use(machine, monkeypatch):
        monkeypatch.setattr(proc, "_text", lambda *_, **__: None)
        monkeypatch.setitem(sys.modules, "psutil", fake_psutil(lambda: times_of(machine.user), CORES))

    return use


SOURCES = {
    "/proc": by_proc,
    "psutil on Linux": by_psutil(lambda user: Linux(user, iowait=9.0)),
    "psutil on macOS": by_psutil(MacOS),
    "psutil on Windows": by_psutil(lambda user: Windows(user, interrupt=7.0, dpc=8.0)),
}


@pytest.fixture(params=SOURCES.values(), ids=SOURCES.keys())
def sampled(request, monkeypatch):
    """Samples a machine's step by one of the sources."""

    def sample(machine: Machine):
        clock = SimpleNamespace(
            perf_counter=lambda: machine.now, process_time=lambda: machine.ran, thread_time=lambda: machine.ran
        )
        monkeypatch.setattr("pytest_gpumem.measuring.devices.contract.time", clock)
        monkeypatch.setattr("pytest_gpumem.measuring.devices.load_source.time", clock)
        monkeypatch.setattr("os.times", lambda: os.times_result((0.0, 0.0, 0.0, 0.0, 0.0)))
        request.param(machine, monkeypatch)
        load_source.load_source.cache_clear()
        return sample_step(machine.step, machine, 1.0)

    yield sample
    load_source.load_source.cache_clear()


def baseline() -> Runs:
    seconds = (STEP_SECONDS,) * 10
    return Runs(seconds, tuple(2000.0 * each for each in seconds))


HOG = {"others": 1.5, "waits": 0.5}
"""Other processes need more cores than are left, and the step gets its core half the time."""
NEIGHBOUR = {"others": 0.9}
"""A process that stays on the other core."""


@pytest.mark.parametrize(
    ("machine", "outcome"),
    [
        ({}, "not slower"),
        ({"slower": 1.2}, "slower"),
        (HOG, "uncertain"),
        ({"slower": 1.1, **HOG}, "uncertain"),
        ({"slower": 20.0, **HOG}, "slower"),
        ({"slower": 1.1, **NEIGHBOUR}, "uncertain"),
        ({"slower": 1.6, **NEIGHBOUR}, "slower"),
        # Nobody else takes a core, so a thread that does not run has slept, which is the step's own time.
        ({"sleeps": 0.02}, "slower"),
    ],
)
def test_planted_slowdowns_have_the_same_verdict_by_each_source(sampled, machine, outcome):
    sample = sampled(Machine(**machine))
    assert compare([sample], baseline(), 0.025).outcome == outcome


def test_a_step_beside_a_cpu_hog_is_invalid_by_each_source_and_says_why(sampled):
    assert "waited" in sampled(Machine(**HOG)).invalid
    assert sampled(Machine(**NEIGHBOUR)).invalid.startswith("other processes used 0.9")
    assert sampled(Machine()).invalid is None


def test_only_proc_distinguishes_sleep_from_waiting_beside_other_work(sampled, request):
    """psutil's bound is wider: while the thread slept, other processes may have had its core."""
    sample = sampled(Machine(sleeps=0.02, **NEIGHBOUR))
    assert compare([sample], baseline(), 0.025).outcome == ("slower" if "/proc" in request.node.name else "uncertain")
