"""What tests/gpu is made of, as far as it works without a GPU: skipping, keeping figures, projects of their own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_gpumem.facts.measurement import Environment
from tests import preloaded
from tests.gpu.figures import Figures
from tests.gpu.project import REPOSITORY, GpuProject, without_chance

if TYPE_CHECKING:
    from pathlib import Path

SUITE = REPOSITORY / "tests" / "gpu"
A_GPU = Environment(
    "some-gpu", "Some GPU", {"torch": "2.11.0", "cuda": "13.0", "driver": "1.2", "allocator": "default"}
)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_figures_are_kept_by_device_with_the_environment_that_gave_them(tmp_path: Path) -> None:
    figures = Figures()
    figures.add("tests/gpu/test_it.py::test_step", "gpt2", {"peak_allocated": 123, "step_time": 0.5})
    path = figures.write(tmp_path, A_GPU)
    assert path == tmp_path / "some-gpu" / "tests.json"
    assert read(path) == {
        "format": 1,
        "environment": {
            "device": "Some GPU",
            "torch": "2.11.0",
            "cuda": "13.0",
            "driver": "1.2",
            "allocator": "default",
        },
        "tests": {"tests/gpu/test_it.py::test_step": {"gpt2": {"peak_allocated": 123, "step_time": 0.5}}},
    }


def test_a_run_of_some_tests_leaves_the_figures_of_the_others(tmp_path: Path) -> None:
    for test, peak in (("test_b", 1), ("test_a", 2), ("test_b", 3)):
        figures = Figures()
        figures.add(test, "call", {"peak_allocated": peak})
        path = figures.write(tmp_path, A_GPU)
    tests = read(path)["tests"]
    assert list(tests.items()) == [
        ("test_a", {"call": {"peak_allocated": 2}}),
        ("test_b", {"call": {"peak_allocated": 3}}),
    ]


def test_figures_of_another_environment_are_not_mixed_in(tmp_path: Path) -> None:
    figures = Figures()
    figures.add("test_a", "call", {"peak_allocated": 1})
    figures.write(tmp_path, Environment("some-gpu", "Some GPU", {"torch": "2.10.0"}))
    figures = Figures()
    figures.add("test_b", "call", {"peak_allocated": 2})
    assert read(figures.write(tmp_path, A_GPU))["tests"] == {"test_b": {"call": {"peak_allocated": 2}}}


def test_a_failed_tests_figures_are_forgotten(tmp_path: Path) -> None:
    figures = Figures()
    figures.add("test_a", "call", {"peak_allocated": 1})
    figures.forget("test_a")
    figures.forget("test_b")
    assert read(figures.write(tmp_path, A_GPU))["tests"] == {}


def test_times_and_segments_are_not_expected_to_repeat() -> None:
    metrics = {"peak_allocated": 1, "peak_reserved": 2, "retained": 0, "step_time": 0.1, "throughput": 10.0}
    assert without_chance(metrics) == {"peak_allocated": 1, "retained": 0}


ON_THE_CPU = ("--gpumem-device=cpu",)
ALLOCATES = """
@pytest.mark.gpumem
def test_allocates():
    torch.empty(1_000_001, dtype=torch.uint8)


@pytest.mark.gpumem
def test_allocates_more():
    torch.empty(2_000_001, dtype=torch.uint8)
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> GpuProject:
    return GpuProject(pytester, monkeypatch)


def test_a_project_of_its_own_finds_the_plugin_and_gives_its_figures(project: GpuProject) -> None:
    project.write(ALLOCATES)
    figures = project.figures("test_allocates_more", arguments=ON_THE_CPU)
    assert figures.keys() == {"test_allocates_more"}
    assert figures["test_allocates_more"]["call.peak_allocated"] == 2_000_001


def test_a_project_whose_tests_fail_has_no_figures(project: GpuProject) -> None:
    project.write("def test_it():\n    assert torch is pytest\n")
    with pytest.raises(AssertionError, match="assert torch is pytest"):
        project.figures(arguments=ON_THE_CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, so that nothing is skipped")
def test_without_a_gpu_every_test_of_the_suite_is_skipped_with_the_reason(
    tmp_path: Path,
) -> None:
    result = preloaded.run_pytest(
        tmp_path,
        *("-p", "no:randomly", "-p", "no:cacheprovider", "-c", str(REPOSITORY / "pyproject.toml")),
        *("--rootdir", str(REPOSITORY), "-rs", str(SUITE)),
    )
    assert result.ret == 0
    outcomes = result.parseoutcomes()
    assert outcomes.keys() == {"skipped"}
    reasons = [line for line in result.outlines if line.startswith("SKIPPED")]
    assert reasons
    assert all(line.endswith("needs a CUDA device") for line in reasons)
