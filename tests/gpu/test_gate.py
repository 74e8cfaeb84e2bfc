"""The gate on a GPU, from end to end: regressions, budgets, out of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.gpu.project import repeatable_bytes

if TYPE_CHECKING:
    from tests.gpu.project import GpuProject

ALLOCATES = """
@pytest.mark.gpumem
def test_it():
    torch.empty({nbytes}, dtype=torch.uint8, device="cuda")
"""


def test_a_regression_fails_against_what_was_recorded_before(gpu_project: GpuProject) -> None:
    pytest.importorskip("tomli_w", reason="needs tomli-w: it writes the store")
    gpu_project.write(ALLOCATES.format(nbytes=100_000_000))
    assert gpu_project.run("--gpumem-update=new").ret == 0
    assert gpu_project.run("--gpumem-baseline").ret == 0
    gpu_project.write(ALLOCATES.format(nbytes=150_000_000))
    result = gpu_project.run("--gpumem-baseline")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*GPU memory regressed: peak 150.00 MB, baseline 100.00 MB: +50.00 MB (+50.0 %), allowed +0.5 %",
            "gpumem: 1 gated, 1 regressed*",
        ]
    )


LIMITS = """
KEPT = []


@pytest.mark.gpumem(max_gb=0.1)
def test_peak():
    torch.empty(150_000_000, dtype=torch.uint8, device="cuda")


@pytest.mark.gpumem(max_retained=0)
def test_leak():
    KEPT.append(torch.empty(10_000_000, dtype=torch.uint8, device="cuda"))


@pytest.mark.gpumem(max_reserved="1 GB", max_gb=0.1, max_retained=0)
def test_modest():
    torch.empty(50_000_000, dtype=torch.uint8, device="cuda")
"""


def test_budgets_hold_on_a_gpu(gpu_project: GpuProject) -> None:
    gpu_project.write(LIMITS)
    result = gpu_project.run()
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        ["*GPU memory over budget: peak 150.00 MB, budget 100.00 MB: +50.00 MB (+50.0 %)"], consecutive=False
    )
    result.stdout.fnmatch_lines(["*GPU memory over budget: retained 10.00 MB, budget 0 B: +10.00 MB"])
    result.stdout.fnmatch_lines(["gpumem: 3 gated, 2 over budget*"])


OUT_OF_MEMORY = """
def too_much():
    total = torch.cuda.get_device_properties(0).total_memory
    return torch.empty(2 * total, dtype=torch.uint8, device="cuda")


def multiply():
    matrix = torch.ones(1024, 1024, device="cuda")
    return matrix @ matrix


@pytest.mark.gpumem
def test_call_runs_out_of_memory():
    held = torch.ones(64 * 2**20, device="cuda")
    too_much()


def test_step_runs_out_of_memory(gpumem):
    held = torch.ones(64 * 2**20, device="cuda")

    def step():
        more = torch.ones(64 * 2**20, device="cuda")
        too_much()

    gpumem.measure(step)


def test_nothing_is_left():
    assert torch.cuda.memory_allocated() == 0


@pytest.mark.gpumem
def test_multiplies():
    multiply()
"""


def test_running_out_of_memory_fails_that_test_alone_and_frees_its_tensors(gpu_project: GpuProject) -> None:
    gpu_project.write(OUT_OF_MEMORY)
    alone = gpu_project.figures("test_multiplies")
    result = gpu_project.run("--no-gpumem-time", "--junitxml=report.xml")
    result.assert_outcomes(failed=2, passed=2)
    result.stdout.fnmatch_lines(["*OutOfMemoryError*"])
    result.stdout.fnmatch_lines(["gpumem: *2 failed by themselves*"])
    assert repeatable_bytes(gpu_project.path / "report.xml")["test_multiplies"] == alone["test_multiplies"]
