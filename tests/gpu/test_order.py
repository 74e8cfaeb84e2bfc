"""A test's figure on a GPU depends on neither what ran before it, nor the process, nor the allocator's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.gpu.project import GpuProject

SIDE = 1024
TESTS = """
HOARD = []


@pytest.fixture(scope="module")
def model():
    layers = torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)
    return torch.nn.Sequential(*layers).cuda()


def test_hoards():
    HOARD.append(torch.empty(300_000_001, dtype=torch.uint8, device="cuda"))


def multiply():
    matrix = torch.ones(1024, 1024, device="cuda")
    return matrix @ matrix


@pytest.mark.gpumem
def test_multiplies():
    multiply()


@pytest.mark.gpumem
def test_multiplies_again():
    multiply()


@pytest.mark.gpumem
def test_trains(model):
    model(torch.ones(64, 512, device="cuda")).sum().backward()


@pytest.mark.gpumem
def test_infers(model):
    with torch.inference_mode():
        model(torch.ones(64, 512, device="cuda"))
"""
MEASURED = ["test_multiplies", "test_multiplies_again", "test_trains", "test_infers"]


@pytest.fixture
def tests(gpu_project: GpuProject) -> GpuProject:
    gpu_project.write(TESTS)
    return gpu_project


def test_tests_measure_the_same_alone_and_in_every_order(
    tests: GpuProject, keep: Callable[[str, Mapping[str, float]], None]
) -> None:
    alone = {test: tests.figures(test)[test] for test in MEASURED}
    for test, figures in alone.items():
        keep(test, figures)
    assert alone["test_multiplies"] == alone["test_multiplies_again"]
    assert alone["test_multiplies"]["call.peak_allocated"] >= 2 * SIDE * SIDE * 4
    assert alone["test_multiplies"]["call.retained"] == 0
    assert alone["test_trains"]["call.retained"] == 0
    assert tests.figures(*MEASURED) == alone
    assert tests.figures(*MEASURED[::-1]) == alone
    assert tests.figures("test_hoards", *MEASURED) == alone


@pytest.mark.hardware("each process has an emulated one to itself")
def test_tests_measure_the_same_on_two_workers_that_share_a_gpu(tests: GpuProject) -> None:
    pytest.importorskip("xdist", reason="needs pytest-xdist: this is a test of several workers")
    assert tests.figures(arguments=("-p", "xdist", "-n", "2")) == tests.figures()


def test_the_allocators_segments_do_not_show_in_a_figure(tests: GpuProject, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = tests.figures(*MEASURED)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert tests.figures(*MEASURED) == usual


HAND_MADE = """
@pytest.mark.gpumem
def test_it():
    torch.empty(100_000_001, dtype=torch.uint8, device="cuda")
"""


def test_the_drivers_own_allocator_is_measured_too(gpu_project: GpuProject, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_project.write(HAND_MADE)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    peak = gpu_project.figures()["test_it"]["call.peak_allocated"]
    assert 100_000_001 <= peak < 100_000_001 + 2 * 2**20


def test_an_allocator_without_statistics_gates_nothing_and_says_so(
    gpu_project: GpuProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_project.write(HAND_MADE)
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    result = gpu_project.run("--gpumem-baseline")
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*nothing was gated: 1 test unmeasured, the CUDA allocator keeps no statistics*"])
