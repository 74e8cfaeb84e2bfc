"""The lines on memory outside a test's allocator, literally."""

from __future__ import annotations

import pytest

from pytest_gpumem.facts.values.gpu_use import GpuProcess, GpuUse
from pytest_gpumem.reporting.reports.gpu_use import gpu_use_lines

GB = 10**9
PYTHON, OLLAMA, SILENT = GpuProcess(4712, 24 * GB, "python"), GpuProcess(811, 5 * GB, "ollama"), GpuProcess(900)
BESIDE = "beside torch: 545.26 MB on cuda:0 (CUDA context, libraries)"


def use(*others, may_include_own=False, beside_torch=545_259_520, gpu="cuda:0") -> GpuUse:
    return GpuUse(gpu, others, may_include_own, beside_torch)


@pytest.mark.parametrize(
    ("others", "listed"),
    [
        ([PYTHON], "python (pid 4712) 24.00 GB"),
        ([PYTHON, OLLAMA], "python (pid 4712) 24.00 GB, ollama (pid 811) 5.00 GB"),
        ([PYTHON, SILENT], "python (pid 4712) 24.00 GB, pid 900 bytes unknown"),
        ([PYTHON] * 3 + [OLLAMA] * 2, ", ".join(["python (pid 4712) 24.00 GB"] * 3) + ", 2 more 10.00 GB"),
        ([PYTHON] * 4 + [SILENT], ", ".join(["python (pid 4712) 24.00 GB"] * 3) + ", 2 more at least 24.00 GB"),
        ([PYTHON] * 3 + [SILENT], ", ".join(["python (pid 4712) 24.00 GB"] * 3) + ", 1 more bytes unknown"),
        ([GpuProcess(7, GB, "a\x1b[2Jb")], "a\\x1b[2Jb (pid 7) 1.00 GB"),
    ],
)
def test_the_three_largest_processes_are_listed_and_the_others_counted(others, listed):
    assert gpu_use_lines([use(*others)], "si") == [
        f"other processes on cuda:0 when the test began: {listed}",
        BESIDE,
    ]


def test_processes_that_may_be_the_tests_own_are_not_called_others():
    lines = gpu_use_lines([use(GpuProcess(645400, GB), SILENT, may_include_own=True)], "iec")
    assert lines[0] == (
        "processes, perhaps this test's own among them, on cuda:0 when the test began: pid 645400 953.67 MiB, pid 900 bytes "
        "unknown"
    )


def test_bytes_that_nvml_does_not_report_are_not_seen():
    unseen = "not seen on cuda:1, because NVML does not report this process's bytes"
    assert gpu_use_lines([use(beside_torch=None, gpu="cuda:1")], "si") == [f"beside torch: {unseen}"]
    assert gpu_use_lines([use(), use(beside_torch=None, gpu="cuda:1")], "si") == [f"{BESIDE}; {unseen}"]


def test_a_launched_process_has_a_lower_bound_or_is_not_seen():
    assert gpu_use_lines([], "si", {"launch: train.py rank 0": 545_259_520, "launch: train.py rank 1": None}) == [
        "beside torch in launch: train.py rank 0: at least 545.26 MB",
        "beside torch in launch: train.py rank 1: not seen",
    ]


def test_without_nvml_there_is_no_line():
    assert gpu_use_lines([], "si") == []
