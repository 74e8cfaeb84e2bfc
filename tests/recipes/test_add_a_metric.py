"""The recipe docs/development/add-a-metric.md: the metric is measured, shown, reported, stored and gated."""

from __future__ import annotations

import json

import jsonschema
import pytest

from tests.recipes.recipes import copy_of_the_package, files_of, write_tests

IN_PARTS = """
import pytest
import torch


@pytest.mark.gpumem
def test_logits(gpumem):
    measured = gpumem.measure(lambda: [torch.ones(1_000_000), torch.ones(1_000_000)])
    assert measured.largest_allocation == 4_000_000
"""
AT_ONCE = IN_PARTS.replace("[torch.ones(1_000_000), torch.ones(1_000_000)]", "torch.ones(2_000_000)").replace(
    "== 4", "== 8"
)
VALID = """
import importlib.resources, pathlib
from pytest_gpumem.reporting.reports.json_report import from_json

from_json(pathlib.Path("report.json").read_text(), "report.json")
print(importlib.resources.files("pytest_gpumem.reporting.reports").joinpath("report.schema.json").read_text())
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return copy_of_the_package(tmp_path_factory.mktemp("package"), "add-a-metric")


def run(package, project, code, *arguments):
    """Run pytest on this code with the package; gives the exit status and what it said."""
    write_tests(project, code)
    done = package.pytest(project, "--no-gpumem-time", *arguments)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def recorded(package, tmp_path_factory):
    """A project with a baseline and reports, and what the session said that wrote them."""
    project = tmp_path_factory.mktemp("project")
    reports = ("--gpumem-report=report.json", "--gpumem-report=report.md")
    status, said = run(package, project, IN_PARTS, "--gpumem-update=new", *reports)
    assert status == 0, said
    return project, said


def test_the_recipe_touches_four_files():
    assert len(files_of("add-a-metric")) == 4


def test_the_metric_is_measured_and_shown(recorded):
    header, row = [line for line in recorded[1].splitlines() if line.startswith(("test ", "test_steps.py::"))]
    assert header.split() == ["test", "peak", "largest", "verdict"]
    assert row.split()[1:5] == ["8.00", "MB", "4.00", "MB"]


def test_the_metric_is_reported(package, recorded):
    project, _ = recorded
    report = json.loads((project / "report.json").read_text())
    verdict = report["results"][0]["verdict"]["verdicts"][0]
    assert verdict["measurement"]["metrics"]["largest_allocation"] == 4_000_000
    read = package.run(project, "-c", VALID)
    assert read.returncode == 0, read.stderr
    jsonschema.Draft202012Validator(json.loads(read.stdout)).validate(report)
    assert "| largest allocation |" in (project / "report.md").read_text()


def test_the_metric_is_stored_and_gated(package, recorded):
    project, _ = recorded
    (stored,) = project.glob("gpumem-baselines/*/test_steps.py.toml")
    assert "largest_allocation = 4000000\n" in stored.read_text()
    status, said = run(package, project, IN_PARTS, "--gpumem-baseline")
    assert status == 0, said
    status, said = run(package, project, AT_ONCE, "--gpumem-baseline")
    assert status == 1, said
    assert "Memory regressed: largest allocation 8.00 MB" in said


def test_the_metric_has_a_budget(package, tmp_path):
    status, said = run(package, tmp_path, IN_PARTS.replace("mark.gpumem", "mark.gpumem(max_allocation='3 MB')"))
    assert status == 1, said
    assert "Memory over budget: largest allocation 4.00 MB" in said
    assert "max_allocation=..." in run(package, tmp_path, IN_PARTS, "--markers")[1]
