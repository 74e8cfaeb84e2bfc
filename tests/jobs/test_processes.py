"""The processes of a job: which do not report, and which still run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pytest_gpumem.emulating.emulated_process.start import STARTUP
from pytest_gpumem.measuring.jobs import processes
from pytest_gpumem.measuring.jobs.processes import JobProcesses, Unseen, own_children, why_unseen
from tests.jobs.mapped import maps_torch
from tests.support.processes import wait_until_ended

TORCH = b"7f00-7f01 r-xp 0 08:01 42   /venv/lib/python3.11/site-packages/torch/lib/libtorch_cpu.so\n"
DRIVER = b"7f00-7f01 r-xp 0 08:01 42   /usr/lib/x86_64-linux-gnu/libcuda.so.550.54\n"
OTHER = b"7f00-7f01 r-xp 0 08:01 42   /usr/lib/libtorch_like/libm.so.6\n"
TRAIN = b"python\0train.py\0"


class Machine:
    """Files of the kernel about processes, and the folder of reports. The job's command is process 10."""

    def __init__(self, folder):
        self.proc, self.reports = folder / "proc", folder / "usage"
        self.reports.mkdir()
        self.add(10, 1, command=b"run\0")
        self.job = JobProcesses(self.reports, self.proc)
        self.job.begin(10)

    def add(self, pid, parent, maps=b"", command=TRAIN, start=100, state="S", stack=b"0"):
        folder = self.proc / str(pid)
        folder.mkdir(parents=True, exist_ok=True)
        fields = b" ".join(b"0" for _ in range(17))
        (folder / "stat").write_bytes(
            b"%d (a) name) %s %d %s %d 0 0 0 0 0 %s" % (pid, state.encode(), parent, fields, start, stack)
        )
        (folder / "task" / str(pid)).mkdir(parents=True, exist_ok=True)
        children = self.proc / str(parent) / "task" / str(parent) / "children"
        if children.parent.exists():
            pids = children.read_text().split() if children.exists() else []
            children.write_text(" ".join(dict.fromkeys([*pids, str(pid)])))
        (folder / "maps").write_bytes(maps)
        (folder / "cmdline").write_bytes(command)

    def end(self, pid):
        (self.proc / str(pid) / "stat").unlink()
        for children in self.proc.glob("*/task/*/children"):
            children.write_text(" ".join(child for child in children.read_text().split() if child != str(pid)))

    def report(self, pid, command=TRAIN):
        (self.reports / f"{pid}.seen").write_bytes(command)

    def unseen(self, looks=2):
        for _ in range(looks):
            self.job.look()
        return tuple(process.command for process in self.job.unseen())


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize(("maps", "unseen"), [(TORCH, True), (DRIVER, True), (OTHER, False), (b"", False)])
def test_a_descendant_with_torch_or_the_driver_that_does_not_report_is_unseen(machine, maps, unseen):
    machine.add(20, 10)
    machine.add(21, 20, maps)
    assert machine.unseen() == (("python train.py",) if unseen else ())


@pytest.mark.parametrize(
    ("maps", "files", "unseen"),
    [
        pytest.param(DRIVER, ["/dev/nvidiactl", "/dev/nvidia0"], False, id="nvidia-smi"),
        pytest.param(DRIVER, ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"], True, id="a CUDA context"),
        pytest.param(DRIVER, ["/dev/dxg"], True, id="another driver"),
        pytest.param(DRIVER + TORCH, ["/dev/nvidiactl"], True, id="torch without a context"),
    ],
)
def test_a_program_that_only_reads_the_drivers_state_is_not_unseen(machine, maps, files, unseen):
    machine.add(20, 10, maps)
    folder = machine.proc / "20" / "fd"
    folder.mkdir()
    for number, file in enumerate(files):
        (folder / str(number)).symlink_to(file)
    assert machine.unseen() == (("python train.py",) if unseen else ())


def test_a_process_that_reports_is_not_unseen_even_if_it_begins_late(machine):
    machine.add(20, 10, TORCH)
    machine.add(21, 10, TORCH)
    machine.report(21)
    assert machine.unseen() == ("python train.py",)
    machine.report(20)
    assert machine.job.unseen() == ()


def test_a_later_program_in_a_process_that_reported_is_unseen(machine):
    machine.add(20, 10, TORCH)
    machine.report(20)
    assert machine.unseen() == ()
    machine.add(20, 10, TORCH, command=b"python\0-I\0other.py\0")
    assert machine.unseen() == ("python -I other.py",)


def test_a_process_that_changes_its_title_before_each_look_is_unseen(machine):
    for number in range(3):
        machine.add(20, 10, TORCH, command=b"step-%d\0" % number, stack=b"7fff00")
        machine.job.look()
    assert [process.command for process in machine.job.unseen()] == ["step-2"]


def test_a_process_from_before_the_collection_and_its_children_have_that_cause(tmp_path):
    machine = Machine(tmp_path)
    machine.job = JobProcesses(machine.reports, machine.proc, first_tick=100)
    machine.add(20, 1, TORCH, start=99)
    machine.add(21, 20, TORCH, start=101, command=b"python\0-I\0late.py\0")
    machine.add(22, 10, TORCH, start=101, command=b"python\0-I\0other.py\0")
    for pid in (10, 20):
        machine.job.begin(pid)
    machine.unseen()
    causes = {process.command: process.cause for process in machine.job.unseen()}
    early = "it, or the process that started it, began before the tests were collected (start it in a fixture)"
    assert causes == {
        "python train.py": early,
        "python -I late.py": early,
        "python -I other.py": "it runs with python -I (start it without -I)",
    }


def test_workers_that_compile_before_the_collection_are_not_unseen(tmp_path):
    machine = Machine(tmp_path)
    machine.job = JobProcesses(machine.reports, machine.proc, first_tick=100)
    command = b"python\0/lib/torch/_inductor/compile_worker/__main__.py\0"
    machine.add(20, 1, TORCH, start=99, command=command)
    machine.job.begin(20)
    assert machine.unseen() == ()


def test_a_kernel_without_lists_of_children_has_all_processes_looked_at(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    listed = own_children()
    monkeypatch.setattr(processes, "_HAS_LISTS", False)
    assert child.pid in listed
    assert sorted(own_children()) == sorted(listed)
    child.communicate(b"\n")


RENAMES_ITSELF = """
import ctypes, os, pathlib, sys
from pytest_gpumem.emulating.emulated_process.marks import mark_as_reporting
mark_as_reporting(pathlib.Path(sys.argv[1]))
first, end = map(int, pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
ctypes.memset(first, ord("x"), end - first - 1)
print("renamed", flush=True)
input()
os.execv(sys.executable, [sys.executable, "-c", os.environ["NEXT"]])
"""


def test_a_program_with_a_new_title_reports_and_a_later_program_does_not(tmp_path):
    """vLLM's processes are called ``VLLM::EngineCore``."""
    program = subprocess.Popen(
        [sys.executable, "-c", maps_torch(f"exec({RENAMES_ITSELF!r})"), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "NEXT": maps_torch("print('next', flush=True); input()")},
    )
    job = JobProcesses(tmp_path)
    job.begin(program.pid)
    with program:
        assert program.stdout.readline() == "renamed\n"
        job.look()
        job.look()
        assert job.unseen() == ()
        assert [command.strip("x.") for command in job.alive()] == [""]
        program.stdin.write("\n")
        program.stdin.flush()
        assert program.stdout.readline() == "next\n"
        job.look()
        job.look()
        assert len(job.unseen()) == 1
        program.communicate("\n")


def test_a_process_between_vfork_and_exec_is_not_unseen(machine):
    machine.add(20, 10, TORCH)
    machine.report(20)
    machine.add(30, 20, TORCH)
    machine.job.look()
    machine.add(30, 20, command=b"gcc\0a.c\0")
    assert machine.unseen() == ()


def test_a_process_whose_parent_ended_stays_in_the_job(machine):
    machine.add(20, 10)
    machine.add(21, 20)
    machine.job.look()
    machine.end(20)
    machine.add(21, 1, TORCH)
    assert machine.unseen() == ("python train.py",)


def test_a_process_that_has_ended_was_unseen_all_the_same(machine):
    machine.add(20, 10, TORCH)
    assert machine.unseen() == ("python train.py",)
    machine.end(20)
    assert machine.unseen() == ("python train.py",)
    assert machine.job.alive() == ()


def test_processes_of_others_and_a_reused_pid_are_not_of_the_job(machine):
    machine.add(20, 1, TORCH)
    machine.add(21, 10)
    machine.job.look()
    machine.end(21)
    machine.job.look()
    machine.add(21, 1, TORCH, start=999)
    assert machine.unseen() == ()
    assert machine.job.alive() == ()


def test_a_process_that_still_runs_is_alive_unless_it_is_a_zombie_or_uses_no_gpu(machine):
    for pid, maps, state in ((20, TORCH, "S"), (21, TORCH, "Z"), (22, b"", "S"), (23, b"", "S")):
        machine.add(pid, 10, maps, command=b"python\0%d\0" % pid)
        machine.job.look()
        machine.add(pid, 10, maps, command=b"python\0%d\0" % pid, state=state)
    machine.report(23, b"python\x0023\x00")
    assert machine.job.alive() == ("python 20", "python 23")


def test_a_job_that_is_killed_has_no_process_left(tmp_path):
    code = (
        "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
    )
    code += "start_new_session=True).pid, flush=True); time.sleep(600)"
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(command.stdout.readline())
    job = JobProcesses(tmp_path)
    job.begin(command.pid)
    job.look()
    job.kill()
    command.wait(30)
    command.stdout.close()
    wait_until_ended([child])


def test_without_the_files_of_linux_nothing_is_found(tmp_path):
    job = JobProcesses(tmp_path, tmp_path / "no-proc")
    job.begin(10)
    job.look()
    assert (job.unseen(), job.alive()) == ((), ())
    job.kill()


REPORTING = [b"PYTHONPATH=" + os.fsencode(STARTUP) + b":/lib", b"GPUMEM_USAGE=/tmp/usage"]


@pytest.mark.parametrize(
    ("command", "variables", "cause"),
    [
        (["/usr/bin/python3", "-I", "serve.py"], None, "it runs with python -I (start it without -I)"),
        (["python", "-uE", "serve.py"], REPORTING, "it runs with python -E (start it without -E)"),
        (["python", "-BSc", "import torch"], REPORTING, "it runs with python -S (start it without -S)"),
        (["python", "serve.py", "-I"], REPORTING, ""),
        (["python", "-m", "serve", "-S"], REPORTING, ""),
        (["python", "-cS"], REPORTING, ""),
        (["python", "serve.py"], [], "its environment has no PYTHONPATH (start it with env={**os.environ, ...})"),
        (
            ["python", "serve.py"],
            REPORTING[:1],
            "its environment has no GPUMEM_USAGE (start it with env={**os.environ, ...})",
        ),
        (
            ["python", "serve.py"],
            [b"PYTHONPATH=src", REPORTING[1]],
            'its PYTHONPATH was replaced (add os.environ["PYTHONPATH"] to it)',
        ),
        (["python", "serve.py"], None, ""),
        (["serve"], [], ""),
    ],
)
def test_the_cause_is_in_the_options_or_the_environment_or_is_not_guessed(command, variables, cause):
    assert why_unseen(command, variables) == cause


@pytest.mark.parametrize(
    ("environ", "cause"),
    [
        (
            b"PATH=/bin\0PYTHONPATH=src\0GPUMEM_USAGE=/usage\0",
            'its PYTHONPATH was replaced (add os.environ["PYTHONPATH"] to it)',
        ),
        (b"", "its environment has no PYTHONPATH (start it with env={**os.environ, ...})"),
        pytest.param(b"ython train.py\0\0\0\0", "", id="overwritten by a title"),
        pytest.param(None, "", id="of another user"),
    ],
)
def test_the_environment_is_read_while_the_process_runs(machine, environ, cause):
    machine.add(20, 10, TORCH)
    if environ is not None:
        (machine.proc / "20" / "environ").write_bytes(environ)
    machine.unseen()
    machine.end(20)
    machine.job.look()
    assert machine.job.unseen() == (Unseen("python train.py", cause),)


def test_a_fork_of_the_tests_process_is_not_said_to_have_another_environment(machine):
    own = b"python\0-m\0pytest\0"
    machine.add(os.getpid(), 1, command=own)
    machine.add(20, 10, TORCH, command=own)
    (machine.proc / "20" / "environ").write_bytes(b"PATH=/bin\0")
    machine.unseen()
    assert machine.job.unseen() == (Unseen("python -m pytest", ""),)
