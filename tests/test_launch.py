"""``gpumem.launch`` where it cannot measure, and wrong calls of it."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pytest_gpumem.base.errors import JobError, MeasuringError
from pytest_gpumem.emulating.emulated_process.usage import DeviceUsage, ProcessIdentity, ProcessUsage
from pytest_gpumem.measuring.devices.contract import Peak
from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.measuring.jobs.figures import JobFigures, job_figures
from pytest_gpumem.measuring.jobs.processes import Unseen
from pytest_gpumem.measuring.jobs.run import FinishedJob
from pytest_gpumem.measuring.jobs.windows import WindowUsage
from pytest_gpumem.measuring.measure.reading import Figures
from pytest_gpumem.plugin.runtest.child_processes import (
    check_processes,
    figures_of_processes,
    unmeasured_processes,
    without_rank_in,
)
from pytest_gpumem.plugin.runtest.launching import check_job

TEST = """
def test_it(gpumem):
    gpumem.launch({command})
"""


def test_without_a_compiler_a_launched_job_on_the_cpu_is_skipped(project, tmp_path, monkeypatch):
    monkeypatch.setenv("GPUMEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", "/no/cc")
    project.write(TEST.format(command='["python", "-c", "1"]'))
    reason = "*the C compiler /no/cc cannot be run: No such file or directory; install /no/cc, or set CC*"
    project.run("-rs", separate=True).stdout.fnmatch_lines([f"*SKIPPED{reason}"])
    strict = project.run("--gpumem-strict", separate=True)
    assert strict.ret == 1
    strict.stdout.fnmatch_lines([reason])


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ('"python train.py --lr 1"', "needs a list of words, got a text; write *python', 'train.py', '--lr', '1'*"),
        ('"serve --api-key abc"', "needs a list of words, got a text; write *'serve', '--api-key', '[*][*][*]'*"),
        (
            '["serve", "--api-key", "abc", 1]',
            "needs a list with a program and its arguments as texts, got int at index 3; write str(...)",
        ),
        ('["python"], timeout="5"', "needs a number of seconds above 0 as timeout, got '5'"),
        ('["python"], ranks="2"', "needs a whole number of 1 or more as ranks, got '2'"),
        ('["python"], env={"X": 1}', "needs texts in env, got int for 'X'; write str(...)"),
        ('["python"], rank=2', "*launch() got an unexpected keyword argument 'rank'*"),
    ],
)
def test_a_wrong_command_is_answered_with_the_right_one(project, command, message):
    project.write(TEST.format(command=command))
    result = project.run()
    assert result.ret == 1
    result.stdout.fnmatch_lines([f"*TypeError: *{message}"])


ONE = DeviceUsage(0, 4_000_000, 8_000_000, 0)


def job(*usages: ProcessUsage, **more: object) -> FinishedJob:
    return FinishedJob(**{"status": 0, "output": "", "errors": "", "usages": usages, "unseen": (), **more})


def usage(rank: int | None = None, ended: int | None = 2, devices: tuple[DeviceUsage, ...] = (ONE,), **more: object):
    identity = ProcessIdentity(
        1, command=("python", "train.py"), rank=rank, rank_variable="" if rank is None else "RANK"
    )
    return ProcessUsage(began=1, **{"ended": ended, "devices": devices, "process": identity, **more})


@pytest.mark.parametrize(
    ("finished", "ranks", "message"),
    [
        pytest.param(
            job(usage(), unseen=(Unseen("python -I x.py"),)),
            None,
            "does not report its memory: python -I x.py",
            id="unseen",
        ),
        pytest.param(
            job(usage(), unseen=(Unseen("run it", "it runs with python -I (start it without -I)"),)),
            None,
            r"^`run it` loads torch or CUDA and does not report its memory\. It runs with python -I \(start it without -I\)$",
            id="unseen itself",
        ),
        pytest.param(
            job(usage(), invalid=("`python z.py` runs pytest-gpumem 9.9",)),
            None,
            "`run it`: `python z.py` runs",
            id="invalid",
        ),
        pytest.param(
            job(usage(), alive=("python y.py",)), None, "its process still runs, .*: python y.py", id="left running"
        ),
        pytest.param(
            job(usage(), usage(ended=None)), None, "train.py was killed .* at least 4.00 MB, and may", id="killed"
        ),
        pytest.param(
            job(usage(), usage(ended=None, devices=())), None, "killed .*, so its peak is not known", id="at once"
        ),
        pytest.param(job(usage(without_statistics=True)), None, "an allocator without statistics", id="no statistics"),
        pytest.param(job(), None, "no process of `run it` allocated memory", id="no GPU"),
        pytest.param(job(usage(devices=())), None, "no process of `run it` allocated memory", id="nothing reserved"),
        pytest.param(job(usage(0)), 2, "ranks=2, but no process with rank 1 used the device", id="a rank"),
        pytest.param(job(usage()), 2, "rank 0 or 1 used the device, only a process without a rank", id="no ranks"),
        pytest.param(job(usage(0), usage(1), usage(2)), 2, "ranks=2, but 3 ranks used the device", id="too many ranks"),
    ],
)
def test_a_job_whose_figures_cannot_be_trusted_is_refused_with_the_reason(finished, ranks, message):
    with pytest.raises(JobError, match=message):
        check_job(["run", "it"], finished, job_figures(finished.usages), ranks)


def test_a_job_whose_processes_all_reported_is_accepted():
    finished = job(usage(0), usage(1))
    check_job(["run", "it"], finished, job_figures(finished.usages), 2)


SHOWS_ENVIRONMENT = """
import os
import subprocess
import sys

import pytest


@pytest.mark.gpumem
def test_it():
    torch.ones(1000)
    shown = {name for name in os.environ if name.startswith(("GPUMEM_USAGE", "TORCH_SYMBOLIZE_MODE"))}
    path = subprocess.run(
        [sys.executable, "-c", "import os; print(os.environ.get('PYTHONPATH', ''))"], capture_output=True, text=True
    )
    print("SET", "TORCH_SYMBOLIZE_MODE" in shown and len(shown) > 1, len(shown) > 0, "startup" in path.stdout)
"""


@pytest.mark.parametrize(("option", "is_set"), [("--gpumem-processes", True), ("--no-gpumem-processes", False)])
def test_other_processes_get_variables_unless_the_option_is_off(project, option, is_set):
    before = os.environ.get("PYTHONPATH")
    project.write(SHOWS_ENVIRONMENT)
    result = project.run("--gpumem-device=cpu", option, "-s")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"*SET {is_set} {is_set} {is_set}*"])
    assert os.environ.get("PYTHONPATH") == before
    assert not any(name.startswith(("GPUMEM_USAGE", "TORCH_SYMBOLIZE_MODE")) for name in os.environ)


def test_in_a_session_for_gpus_a_test_on_the_cpu_counts_no_other_processes():
    window = WindowUsage((usage(),), killed=(usage(ended=None),), importing=("python train.py",))
    assert figures_of_processes(window, CpuDevice(), {}, {}) == JobFigures({}, ())
    (note,) = unmeasured_processes(window, CpuDevice(), {})
    assert note == (
        "not counted: `python train.py` loads torch, and other processes of this session report only their GPU memory, "
        "because not all tests are measured on the CPU"
    )


def test_a_process_that_cannot_count_its_memory_is_noted_with_the_reason():
    device = CpuDevice()
    window = WindowUsage(importing=("python train.py",), uncounted=(("python train.py", "it has another allocator"),))
    (note,) = unmeasured_processes(window, device, device.variables_of_processes())
    assert note == "not counted: `python train.py` loads torch, and it has another allocator"


GPU = SimpleNamespace(torch_device=torch.device("cuda", 0), lacks={}.get, variables_of_processes=dict)
GPU.everywhere = (GPU,)


def test_a_process_that_inherits_the_tests_rank_is_named_without_it(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    figures = figures_of_processes(WindowUsage((usage(0), usage(1))), GPU, {}, {})
    assert [process.name for process in figures.processes] == ["train.py", "train.py rank 0"]


def test_a_test_that_changes_the_visible_gpus_is_still_on_its_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    own = {"cuda:0": Figures(0, 0, None, Peak(30), None, 0)}
    window = WindowUsage((usage(devices=(DeviceUsage(1, 12, 12, 0, 12, 0, 0, 1),)),))
    figures = figures_of_processes(window, GPU, own, {"CUDA_VISIBLE_DEVICES": "1"})
    assert figures.by_gpu["cuda:0"]["peak_allocated"] == 42, figures


def test_a_rank_from_another_launcher_than_the_tests_is_kept():
    """The test runs as a task of srun, and starts torchrun."""
    inherited = replace(usage(1).process, rank_variable="SLURM_PROCID", local_rank=1)
    environment = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}
    usages = [*without_rank_in(environment, (usage(0), usage(1), replace(usage(), process=inherited)))]
    assert [entry.process.rank for entry in usages] == [0, 1, None]
    assert usages[-1].process.local_rank is None


@pytest.mark.parametrize(
    ("name", "shown", "mend"),
    [
        ("SpawnPoolWorker-1", "multiprocessing SpawnPoolWorker-1", "end its pool by close() and join()"),
        ("SpawnProcess-1", "multiprocessing SpawnProcess-1", "end it by terminate() and not by kill()"),
    ],
)
def test_a_killed_process_is_named_with_advice_that_fits_its_kind(name, shown, mend):
    command = ("python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()", "--multiprocessing-fork")
    killed = usage(ended=None, process=ProcessIdentity(1, command=command, name=name))
    device = SimpleNamespace(lacks={}.get, variables_of_processes=dict)
    with pytest.raises(
        MeasuringError, match=rf"`{shown}` was killed .*, {re.escape(mend)} instead\. .* no memory was free"
    ):
        check_processes(WindowUsage(killed=(killed,)), device, device.variables_of_processes())
