"""Which steps a gate times: those whose times it compares, that are limited, recorded, read or asked for."""

from __future__ import annotations

import pytest

STEP = """
def test_it(gpumem):
    gpumem.measure(lambda: torch.ones(1000))
"""
READS = """
def test_it(gpumem):
    m = gpumem.measure(lambda: torch.ones(1000))
    assert m.step_time < 60
"""
LIMITED = """
@pytest.mark.gpumem(min_throughput="0.001 steps/s")
def test_it(gpumem):
    gpumem.measure(lambda: torch.ones(1000))
"""
HOOK = """
def pytest_gpumem_measurement(item, measurement):
    pass
"""
NOT_TIMED = "*it was not timed: its baseline has no time to compare with; --gpumem-update=new adds one*"


@pytest.fixture
def recorded(project):
    """A project whose baseline has no times, and whose steps are timed briefly."""
    project.settings('[tool.gpumem]\ntime_budget = "20 ms"\n')
    project.write(STEP)
    assert project.run("--gpumem-update=new").ret == 0
    return project


def is_timed(project, *options: str) -> bool:
    assert project.run("--gpumem-baseline", "--junitxml=report.xml", *options, timed=True).ret == 0
    (verdict,) = project.verdicts()["test_it"]["verdicts"]
    return "step_time" in verdict["measurement"]["metrics"]


def test_a_gate_takes_no_time_where_the_baseline_has_none_and_says_so_once(recorded):
    result = recorded.run("--gpumem-baseline", timed=True)
    assert result.ret == 0
    result.stdout.fnmatch_lines([NOT_TIMED, "gpumem: 1 gated"])
    assert result.stdout.str().count("it was not timed") == 1


HELPER = """
from helpers import check

def test_it(gpumem):
    check(gpumem.measure(lambda: torch.ones(1000)))
"""
MODULE = """
import helpers

def test_it(gpumem):
    helpers.check(gpumem.measure(lambda: torch.ones(1000)))
"""
FIXTURE = """
@pytest.fixture
def fast():
    def check(measurement):
        assert measurement.step_time < 60
    return check

def test_it(gpumem, fast):
    fast(gpumem.measure(lambda: torch.ones(1000)))
"""
COSTS = """
def test_it(gpumem):
    m = gpumem.measure(lambda: torch.ones(1000))
    assert m.costs(m) < 5
"""


READING = {"reads": READS, "limited": LIMITED, "costs": COSTS, "helper": HELPER, "module": MODULE, "fixture": FIXTURE}


def test_times_that_a_test_reads_or_limits_are_taken_and_no_others(recorded):
    for name in READING:
        recorded.write(STEP.replace("test_it", f"test_{name}"), f"test_{name}.py")
    assert recorded.run("--gpumem-update=new").ret == 0
    recorded.write("def check(measurement):\n    assert measurement.step_time < 60\n", "helpers.py")
    for name, source in READING.items():
        recorded.write(source.replace("test_it", f"test_{name}"), f"test_{name}.py")
    assert recorded.run("--gpumem-baseline", "--junitxml=report.xml", timed=True).ret == 0
    verdicts = {test: one["verdicts"][0]["measurement"]["metrics"] for test, one in recorded.verdicts().items()}
    assert {test for test, metrics in verdicts.items() if "step_time" in metrics} == {
        f"test_{name}" for name in READING
    }
    assert "test_it" in verdicts


def test_a_test_without_a_baseline_is_timed(recorded):
    recorded.write(STEP.replace("test_it", "test_new"))
    recorded.run("--gpumem-baseline", "--junitxml=report.xml", timed=True)
    (verdict,) = recorded.verdicts()["test_new"]["verdicts"]
    assert "step_time" in verdict["measurement"]["metrics"]


def test_times_are_taken_for_a_hook_that_is_given_measurements(recorded):
    recorded.write(HOOK, name="conftest.py")
    assert is_timed(recorded)


def test_times_are_taken_where_they_are_asked_for(recorded):
    assert is_timed(recorded, "--gpumem-time")


def test_strict_mode_fails_a_step_without_a_time_to_compare_with(recorded):
    result = recorded.run("--gpumem-baseline", "--gpumem-strict", timed=True)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*Not compared (required by --gpumem-strict): new*"])
