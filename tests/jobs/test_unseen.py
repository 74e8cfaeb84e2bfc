"""Processes that use a GPU and do not report."""

from __future__ import annotations

import os

import pytest

from pytest_gpumem.measuring.jobs.unseen import UnseenProcesses, descendants

TORCH = b"7f00-7f01 r-xp 0 08:01 42   /venv/lib/python3.11/site-packages/torch/lib/libtorch_cpu.so\n"
DRIVER = b"7f00-7f01 r-xp 0 08:01 42   /usr/lib/x86_64-linux-gnu/libcuda.so.550.54\n"
OTHER = b"7f00-7f01 r-xp 0 08:01 42   /usr/lib/libtorch_like/libm.so.6\n"


@pytest.fixture
def machine(tmp_path):
    """Files of the kernel about processes, and the folder of reports."""
    proc, reports = tmp_path / "proc", tmp_path / "usage"
    reports.mkdir()

    def add(pid: int, parent: int, maps: bytes = b"", command: bytes = b"python\0train.py\0"):
        (proc / str(pid)).mkdir(parents=True)
        (proc / str(pid) / "stat").write_bytes(b"%d (a) name) S %d 1 1" % (pid, parent))
        (proc / str(pid) / "maps").write_bytes(maps)
        (proc / str(pid) / "cmdline").write_bytes(command)

    return proc, reports, add


def test_descendants_are_children_and_their_children(machine):
    proc, _, add = machine
    for pid, parent in ((10, 1), (11, 10), (12, 11), (13, 1), (14, 12)):
        add(pid, parent)
    assert descendants(10, proc) == [11, 12, 14]


@pytest.mark.parametrize(("maps", "unseen"), [(TORCH, True), (DRIVER, True), (OTHER, False), (b"", False)])
def test_a_descendant_with_torch_or_the_driver_that_does_not_report_is_found(machine, maps, unseen):
    proc, reports, add = machine
    add(77, os.getpid(), maps)
    watch = UnseenProcesses(reports, proc)
    watch.look()
    assert watch.commands() == (("python train.py",) if unseen else ())


def test_a_process_that_reports_is_not_unseen_even_if_it_begins_late(machine):
    proc, reports, add = machine
    add(77, os.getpid(), TORCH)
    add(78, os.getpid(), TORCH)
    (reports / "78.seen").touch()
    watch = UnseenProcesses(reports, proc)
    watch.look()
    (reports / "77.seen").touch()
    assert watch.commands() == ()


def test_processes_of_others_are_not_looked_at(machine):
    proc, reports, add = machine
    add(77, 1, TORCH)
    watch = UnseenProcesses(reports, proc)
    watch.look()
    assert watch.commands() == ()


def test_without_the_files_of_linux_nothing_is_found(tmp_path):
    watch = UnseenProcesses(tmp_path, tmp_path / "no-proc")
    watch.look()
    assert watch.commands() == ()
