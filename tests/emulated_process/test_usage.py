"""What processes leave of what they took."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from pytest_gpumem import __version__
from pytest_gpumem.emulating.emulated_process.marks import (
    SEEN,
    UNCOUNTED,
    mark_as_reporting,
    mark_as_uncounted,
    uncounted_in,
    unmark_as_reporting,
)
from pytest_gpumem.emulating.emulated_process.usage import (
    DeviceUsage,
    InvalidReport,
    OutOfMemory,
    ProcessUsage,
    Recorded,
    RecordedBlocks,
    among_all,
    no_kernels,
    rank_in,
    read_usages,
    write_usage,
)
from pytest_gpumem.emulating.emulated_process.usage_recorder import name_of_process

BLOCKS = RecordedBlocks(
    8, 2, "parameter", "fc", "float32[1]", (("/srv/serve.py", 9, "ask"), ("/srv/serve.py", 20, "main"))
)
RETAINED = RecordedBlocks(4, 1, "other", "", "", holder="serve.cache[...]", operator="mm")
RECORDED = Recorded((BLOCKS,), (BLOCKS, RETAINED), ("fc", "norm"))
FULL = ProcessUsage(
    began=5,
    ended=9,
    devices=(DeviceUsage(0, 10, 20, 1), DeviceUsage(3, 30, 40, 0, recorded=RECORDED)),
    times_out_of_memory=2,
    ran_out=OutOfMemory(3, 100, 30, 40, "/mine/train.py:7 step", 20),
    expandable=True,
    unknown="a value is read",
    lacking="workspaces are taken as 0",
    no_kernels="torch has none",
    unrecorded="the program records them itself",
)
KILLED = ProcessUsage(began=1, ended=None)


def test_all_processes_of_a_folder_are_read_in_the_order_in_which_they_began(tmp_path):
    write_usage(tmp_path, "1-5", FULL)
    write_usage(tmp_path, "2-1", KILLED)
    (tmp_path / "errors").write_text("not a process", encoding="utf-8")
    (tmp_path / ".1-5.json.x.draft").write_text("{", encoding="utf-8")
    assert read_usages(tmp_path) == (KILLED, FULL)


def test_a_report_is_written_without_waiting_for_the_disk(tmp_path, monkeypatch):
    def fsync(_):
        raise OSError("the disk is busy")

    monkeypatch.setattr(os, "fsync", fsync)
    write_usage(tmp_path, "1-5", FULL)
    assert read_usages(tmp_path) == (FULL,)


def test_a_report_from_another_release_is_an_error_with_both_releases(tmp_path):
    write_usage(tmp_path, "1-5", FULL)
    report = tmp_path / "1-5.json"
    report.write_text(report.read_text(encoding="utf-8").replace(f'"{__version__}"', '"9.9"', 1), encoding="utf-8")
    with pytest.raises(
        InvalidReport, match=f"process 1 runs pytest-gpumem 9.9, and this session {__version__}. Install"
    ):
        read_usages(tmp_path)


@pytest.mark.parametrize(
    ("device", "visible", "number"),
    [(1, None, 1), (1, "", 1), (1, "4, 6", 6), (2, "4,6", 2), (0, "GPU-1234", 0)],
)
def test_a_device_has_its_number_among_all_whatever_a_process_may_see(device, visible, number):
    assert among_all(device, visible) == number


@pytest.mark.parametrize(
    ("architectures", "capability", "there"),
    [
        (["sm_75", "sm_80", "sm_86", "sm_90"], (8, 9), True),
        (["sm_75", "sm_80", "sm_86", "sm_90"], (7, 0), False),
        (["sm_75", "sm_80", "sm_86", "sm_90"], (10, 0), False),
        (["sm_80", "compute_90"], (12, 0), True),
        (["compute_90"], (8, 0), False),
        (["sm_100", "sm_120a"], (12, 0), True),
        (["gfx90a"], (7, 0), True),
        ([], (7, 0), True),
    ],
)
def test_a_gpu_has_kernels_of_its_major_version_or_those_that_the_driver_compiles(architectures, capability, there):
    assert (no_kernels("2.13.0", architectures, capability) is None) == there


def test_which_kernels_there_are_is_told():
    assert no_kernels("2.13.0", ["sm_80", "sm_75", "sm_100"], (7, 0)) == (
        "torch 2.13.0 has kernels for compute capability 7.5, 8.0, 10.0, and none for 7.0"
    )


BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "200505"}
"""Slurm's variables in a batch script with four tasks, which all children inherit."""


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, None),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, 3),
        ({"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"}, 1),  # of Lightning
        ({"LOCAL_RANK": "1", "OMPI_COMM_WORLD_RANK": "3"}, 3),
        ({"LOCAL_RANK": "one"}, None),
        ({"RANK": "", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, 2),
        ({"RANK": "5", "OMPI_COMM_WORLD_RANK": "1"}, 5),  # mpirun starts torchrun on each machine
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, 1),
        ({"PMIX_RANK": "1"}, 1),
        (BATCH_SCRIPT, None),
        ({**BATCH_SCRIPT, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0"}, None),  # srun --pty bash
        ({**BATCH_SCRIPT, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2"}, 2),
        ({**BATCH_SCRIPT, "RANK": "1"}, 1),
        ({"RANK": "-1"}, None),
        ({"RANK": "9" * 5000}, None),
    ],
)
def test_the_rank_comes_from_the_launchers_variable(environment, rank):
    found, variable = rank_in(environment)
    assert found == rank
    assert (variable in environment) == (rank is not None)


@pytest.fixture
def marking(tmp_path):
    """Marks that are written into a folder. They raise nothing, whatever the folder is."""

    def mark(folder):
        mark_as_uncounted(folder, "no counter")
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        return pid

    folder = tmp_path / "session"
    folder.mkdir()
    mark_as_reporting(folder)  # also writes the mark of each later fork
    yield folder, mark
    shutil.rmtree(folder, ignore_errors=True)


needs_linux = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="only Linux has /proc")


@needs_linux
def test_a_process_and_its_forks_mark_themselves_until_the_mark_is_removed(marking):
    folder, mark = marking
    pids = {os.getpid(), mark(folder)}
    assert {path.name for path in folder.glob(f"*{SEEN}")} == {f"{pid}{SEEN}" for pid in pids}
    unmark_as_reporting(folder)
    assert not (folder / f"{os.getpid()}{SEEN}").exists()


@needs_linux
def test_a_mark_is_not_written_through_a_link(marking, tmp_path):
    folder, _ = marking
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for suffix in (SEEN, UNCOUNTED):
        (folder / f"{os.getpid()}{suffix}").unlink(missing_ok=True)
        (folder / f"{os.getpid()}{suffix}").symlink_to(victim)
    mark_as_reporting(folder)
    mark_as_uncounted(folder, "no counter")
    assert victim.read_text() == "mine"


@needs_linux
@pytest.mark.parametrize("is_link", [True, False], ids=["link", "other user"])
def test_nothing_is_written_or_removed_in_a_folder_that_is_not_ours(marking, tmp_path, monkeypatch, is_link):
    folder, mark = marking
    shutil.rmtree(folder)
    target = tmp_path / "target" if is_link else folder
    target.mkdir()
    if is_link:
        folder.symlink_to(target)
    else:
        monkeypatch.setattr("os.getuid", lambda: target.stat().st_uid + 1)
    (target / f"{os.getpid()}{SEEN}").write_text("mine")
    mark(folder)
    unmark_as_reporting(folder)
    mark_as_reporting(folder)
    assert [(path.name, path.read_text()) for path in target.iterdir()] == [(f"{os.getpid()}{SEEN}", "mine")]
    if is_link:
        folder.unlink()


@needs_linux
def test_the_mark_of_a_command_that_is_not_utf_8_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.orig_argv", ["python", "caf\udce9.py"])
    mark_as_uncounted(tmp_path, "no counter")
    assert uncounted_in(tmp_path / f"{os.getpid()}{UNCOUNTED}") == ("python 'caf\\udce9.py'", "no counter")


class Encoder(multiprocessing.get_context("spawn").Process):
    """A program's own class of processes."""


@pytest.mark.parametrize(
    ("process", "name"),
    [
        (Encoder(), "Encoder"),
        (Encoder(name="Encoder"), "Encoder"),
        (Encoder(name="worker-3"), "worker-3"),
        (multiprocessing.get_context("spawn").Process(name="SpawnProcess-3"), "SpawnProcess-3"),
    ],
)
def test_a_process_is_called_after_its_class_without_pythons_number(process, name):
    assert name_of_process(process) == name
