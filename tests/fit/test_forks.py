"""Runs of a program that are forks, and those that are processes: made up here, real in tests/emulated."""

from __future__ import annotations

import shutil
import sys
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from pytest_gpumem.base.processes import Stop
from pytest_gpumem.emulating.emulated_process.usage import DeviceUsage, ProcessUsage
from pytest_gpumem.emulating.emulation.gpus import Gpu, emulated_gpu
from pytest_gpumem.tools.fit import forks
from pytest_gpumem.tools.fit.forks import ProgramRuns, can_be_forked, forks_pay
from pytest_gpumem.tools.fit.outcome import ProgramRun

COMMAND = (sys.executable, "train.py")
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
CARDS = ("h100", "l4", "t4", "b200x2", "a10")


def run(allocated: int = 100, *, expandable: bool = False, processes: int = 1) -> ProgramRun:
    usage = ProcessUsage(10**18, 10**18 + 1, (DeviceUsage(0, allocated, 200, 0),), expandable=expandable)
    return ProgramRun(0, "", (replace(usage, imported=("torch",)),) * processes)


def word_of(gpu: Gpu) -> str:
    return gpu.device.removeprefix("emulated:")


@dataclass
class World:
    """Results of processes and forks, and where each run was."""

    first: ProgramRun = field(default_factory=run)
    fork: ProgramRun | None = field(default_factory=run)
    ran: list[str] = field(default_factory=list)

    def run_on(
        self, gpu: Gpu, command: object, environment: dict[str, str], stop: Stop, steps: int | None
    ) -> ProgramRun:
        self.ran.append(f"process {word_of(gpu)}" + "+" * ("PYTORCH_CUDA_ALLOC_CONF" in environment))
        return self.first

    def all_of(self, *more: dict[str, str], command: tuple[str, ...] = COMMAND, cards: tuple[str, ...] = CARDS) -> str:
        first, *others = map(emulated_gpu, cards)
        with closing(ProgramRuns(command, {}, None, 1, Stop())) as runs:
            runs.on(first, {})
            runs.prepare(others)
            for settings in more[1:]:
                runs.on(first, settings)
            for gpu in others:
                for settings in more or ({},):
                    runs.on(gpu, settings)
        return ", ".join(self.ran)


@pytest.fixture
def world(monkeypatch) -> World:
    found = World()

    class Server:
        def __init__(self, gpu, program, environment, jobs, stop):
            found.ran.append(f"server {word_of(gpu)} of {program.imported}")

        def run(self, gpu, more, steps):
            found.ran.append(f"fork {word_of(gpu)}" + "+" * bool(more))
            return found.fork

        def close(self):
            found.ran.append("closed")

    monkeypatch.setattr(forks, "run_on", found.run_on)
    monkeypatch.setattr(forks, "ForkServer", Server)
    return found


def test_all_but_the_first_are_forks_where_the_first_comes_out_the_same(world):
    assert world.all_of() == (
        "process h100, server l4 of ('torch',), fork h100, fork l4, fork t4, process b200x2, fork a10, closed"
    )


@pytest.mark.parametrize("fork", [run(101), None, replace(run(), status=1)])
def test_none_is_a_fork_where_the_first_comes_out_otherwise(world, fork):
    world.fork = fork
    assert world.all_of(cards=("h100", "l4", "t4", "a10")) == (
        "process h100, server l4 of ('torch',), fork h100, closed, process l4, process t4, process a10, closed"
    )


def test_settings_that_a_fork_does_not_take_up_are_for_a_process(world):
    world.fork = world.first = run()
    ran = world.all_of({}, EXPANDABLE, cards=("h100", "l4", "t4", "a10"))
    assert "fork h100+, process h100+, fork l4, fork l4+, process l4+" in ran
    world.ran.clear()
    world.fork = world.first = run(expandable=True)
    assert "process h100+" not in world.all_of({}, EXPANDABLE, cards=("h100", "l4", "t4", "a10"))


@pytest.mark.parametrize(
    ("first", "command"),
    [
        (run(processes=2), COMMAND),
        (ProgramRun(1, "", ()), COMMAND),
        (run(), ("env", *COMMAND)),
    ],
)
def test_a_program_of_several_processes_or_another_command_is_not_forked(world, first, command):
    world.first = first
    assert "server" not in world.all_of(command=command)


@pytest.mark.parametrize(
    ("before_cuda", "whole", "others", "jobs", "pay"),
    [
        (8, 9, 3, 1, True),
        (8, 9, 2, 1, False),
        (8, 600, 15, 1, False),
        (8, 60, 15, 1, True),
        (8, 9, 0, 1, False),
        (8, 9, 5, 2, True),
        (8, 9, 4, 2, False),
    ],
)
def test_forks_pay_where_imports_are_most_of_many_runs(before_cuda, whole, others, jobs, pay):
    assert forks_pay(before_cuda, whole, others, jobs) == pay


def test_only_this_python_with_a_file_or_a_module_can_be_forked(tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(Path(sys.executable).resolve())
    beside, other = python.with_name("python3"), tmp_path / "python"
    for link in (beside, other):
        link.symlink_to(python)
    assert can_be_forked((str(python), "train.py"), str(python))
    assert can_be_forked((str(beside), "-m", "train", "--batch"), str(python))
    assert can_be_forked((str(tmp_path / "bin" / ".." / "bin" / "python"), "train.py"), str(python))
    assert not can_be_forked((str(other), "train.py"), str(python)), "of another environment"
    (tmp_path / "lib").symlink_to(tmp_path / "elsewhere" / "lib")
    elsewhere = tmp_path / "elsewhere" / "bin" / "python"
    for folder in (elsewhere.parent, tmp_path / "elsewhere" / "lib"):
        folder.mkdir(parents=True)
    elsewhere.symlink_to(python)
    assert not can_be_forked((str(tmp_path / "lib" / ".." / "bin" / "python"), "train.py"), str(python)), "elsewhere's"
    for command in (("-u", "train.py"), ("-c", "pass"), ("-m",), (), ("train",)):
        assert not can_be_forked((str(python), *command), str(python))
    assert not can_be_forked((shutil.which("env") or "", str(python), "train.py"), str(python))
    assert not can_be_forked(("/nowhere/python", "train.py"), str(python))
