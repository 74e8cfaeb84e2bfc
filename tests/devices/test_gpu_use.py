"""Listed processes of other programs, and the bytes of this process beside torch's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_gpumem.facts.values.gpu_use import GpuProcess, GpuUse
from pytest_gpumem.measuring.devices import proc
from pytest_gpumem.measuring.devices.gpu_use import gpu_use_of

OWN, CHILD, OTHER, SMALL, SILENT = 4711, 4712, 900, 901, 902
PROGRAMS = {OWN: "pytest", CHILD: "pytest", OTHER: "python", SMALL: "ollama", SILENT: "Xorg"}
GB = 10**9


def use_of(bytes_by_pid, workers=1, reserved=0, programs=PROGRAMS) -> GpuUse:
    return gpu_use_of("cuda:0", bytes_by_pid, OWN, {OWN, CHILD}.__contains__, workers, reserved, programs.get)


def test_other_programs_are_listed_by_name_and_the_largest_is_first():
    use = use_of({SILENT: None, SMALL: GB, OWN: 2 * GB, CHILD: 3 * GB, OTHER: 24 * GB})
    assert use.processes == (
        GpuProcess(OTHER, 24 * GB, "python"),
        GpuProcess(SMALL, GB, "ollama"),
        GpuProcess(SILENT, None, "Xorg"),
    )
    assert not use.may_include_own


def test_own_bytes_minus_those_that_torch_reserved_are_beside_torch():
    assert use_of({OWN: 2 * GB + 545}, reserved=2 * GB).beside_torch == 545


@pytest.mark.parametrize(
    ("bytes_by_pid", "why"),
    [
        ({}, "nothing is listed"),
        ({OTHER: 3 * GB}, "this process is not listed"),
        ({OWN: None}, "its bytes are not reported"),
        ({OWN: 2 * GB - 1}, "another process has this pid on the host"),
    ],
)
def test_own_bytes_that_are_not_known_are_not_seen_and_never_0(bytes_by_pid, why):
    assert use_of(bytes_by_pid, reserved=2 * GB).beside_torch is None, why


@pytest.mark.parametrize(("workers", "shown"), [(1, [8, 1]), (2, [])])
def test_pids_from_a_host_are_shown_without_names_if_there_are_more_than_workers(workers, shown):
    """In the container, 900 and 901 are other programs by chance."""
    use = use_of({SMALL: GB, OTHER: 8 * GB}, workers)
    assert [process.nbytes for process in use.processes] == [nbytes * GB for nbytes in shown]
    assert {process.program for process in use.processes} <= {None}
    assert use.may_include_own == bool(shown)


def test_without_a_context_of_this_process_each_listed_process_is_shown():
    assert use_of({OTHER: 8 * GB}, workers=0).processes == (GpuProcess(OTHER, 8 * GB),)


def test_a_process_that_is_not_visible_here_may_be_this_one():
    """A container on an old driver: by chance another process on the host has this process's pid, and 77123 is this process."""
    use = use_of({OWN: 9 * GB, 77123: GB})
    assert use.processes == (GpuProcess(77123, GB),)
    assert use.may_include_own


def test_a_program_has_its_name_without_arguments_and_an_unknown_pid_has_none():
    assert proc.program_of(os.getpid()) == Path("/proc/self/comm").read_text(encoding="utf-8").strip()
    assert proc.program_of(2**22 + 1) is None
