"""Every kind of test that pytest runs can be measured, with the marker and without changing how it is called."""

from __future__ import annotations

import glob

import pytest


def test_unittest_methods(project):
    project.write(
        """
import unittest


@pytest.mark.gpumem(max_gb=1)
class TestCase(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.shared = torch.empty(500_000)

    def setUp(self):
        self.own = torch.empty(250_000)

    def test_method(self):
        torch.empty(250_000)
"""
    )
    # 2 MB of the class, 1 MB of the instance, 1 MB of the method.
    assert project.figures()["test_method"]["call.peak_allocated"] == 4_000_000


def test_a_marked_test_with_the_fixture_is_judged_by_what_the_fixture_measured(project):
    project.write(
        """
@pytest.mark.gpumem(max_memory="5 MB")
def test_it(gpumem):
    torch.empty(10_000_000)
    with gpumem.track("region") as region:
        torch.empty(1_000_000)
    assert region.measurement.peak_allocated == 4_000_000
"""
    )
    result = project.run()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["gpumem: 1 gated"])


def test_the_fixture_through_another_fixture(project):
    project.write(
        """
@pytest.fixture
def measured(gpumem):
    return lambda: gpumem.measure(lambda: torch.empty(1_000_000), name="it")


def test_it(measured):
    assert measured().peak_allocated == 4_000_000
"""
    )
    project.run().assert_outcomes(passed=1)


def test_the_fixture_at_run_time_needs_a_marker(project):
    project.write(
        """
@pytest.mark.gpumem
def test_marked(request):
    gpumem = request.getfixturevalue("gpumem")
    assert gpumem.measure(lambda: torch.empty(1_000_000)).peak_allocated == 4_000_000


def test_unmarked(request):
    request.getfixturevalue("gpumem")
"""
    )
    result = project.run("--junitxml=report.xml")
    result.assert_outcomes(passed=1, errors=0, failed=1)
    result.stdout.fnmatch_lines(
        ["*MeasuringError: test_it.py::test_unmarked requested the gpumem fixture only by getfixturevalue(),*"]
    )


def test_a_marked_test_keeps_its_return_value_and_its_own_arguments(project):
    project.write(
        "@pytest.mark.gpumem\ndef test_it(tmp_path, capsys):\n    print('seen')\n    assert capsys.readouterr().out == 'seen\\n'\n"
    )
    project.run().assert_outcomes(passed=1)


def test_budgets_of_the_settings_apply_by_pattern_to_measured_tests(project):
    project.settings(
        """
[[tool.gpumem.budget]]
tests = "test_it.py::test_small*"
max_memory = "1 MB"

[[tool.gpumem.budget]]
tests = "test_*"
max_memory = "5 MB"
"""
    )
    project.write(
        """
@pytest.mark.gpumem
def test_small():
    torch.empty(1_000_000)


@pytest.mark.gpumem
def test_other():
    torch.empty(1_000_000)


@pytest.mark.gpumem(max_gb=1)
def test_small_but_its_marker_allows_more():
    torch.empty(1_000_000)
"""
    )
    result = project.run()
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*over budget: peak 4.00 MB, budget 1.00 MB*"])


@pytest.mark.parametrize(
    ("marks", "outcomes"),
    [
        ("@pytest.mark.skip(reason='no')", {"skipped": 1}),
        ("@pytest.mark.xfail(run=False)", {"xfailed": 1}),
    ],
)
def test_a_skipped_test_is_accounted_for_as_unmeasured(project, marks, outcomes):
    project.write(f"{marks}\n@pytest.mark.gpumem\ndef test_it():\n    torch.empty(1_000_000)\n")
    result = project.run("--gpumem-update=all")
    result.assert_outcomes(**outcomes)
    result.stdout.fnmatch_lines(["gpumem: 0 gated, 1 unmeasured (*)"])
    assert project.stored() == {}


def test_a_default_device_that_is_not_the_cpu_does_not_spoil_the_recording(project):
    project.write(
        "@pytest.mark.gpumem\ndef test_it():\n    kept = torch.empty(1_000_000)\n    with torch.device('meta'):\n        torch.empty(5)\n\n\n"
        "def test_steps(gpumem):\n    with torch.device('meta'):\n"
        "        assert gpumem.measure(lambda: torch.empty(1_000_000, device='cpu')).peak_allocated == 4_000_000\n"
    )
    project.run().assert_outcomes(passed=2)


NESTED = """
def step():
    torch.ones(1_000_000)


def trained(gpumem, name=None):
    gpumem.train_step(lambda: torch.nn.Linear(8, 8), torch.ones(4, 8), loss=lambda output, _: output.sum(), name=name)


def in_steps(gpumem, inner):
    with gpumem.loop() as steps:
        while not steps.step_ended():
            step()
            inner()


def in_region(gpumem, inner):
    with gpumem.track("whole"):
        inner()


def in_loss(gpumem, inner):
    def loss(output, _):
        inner()
        return output.sum()

    gpumem.train_step(lambda: torch.nn.Linear(8, 8), torch.ones(4, 8), loss=loss)


def swallowing(gpumem, inner):
    def both():
        try:
            inner()
        except Exception:
            pass
        step()

    gpumem.measure(both, name="outer")
"""


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            "in_steps(gpumem, lambda: gpumem.measure(step, name='inner'))",
            "gpumem.measure('inner') is called within gpumem.loop()",
        ),
        (
            "in_steps(gpumem, lambda: in_region(gpumem, step))",
            "gpumem.track('whole') is called within gpumem.loop()",
        ),
        ("in_region(gpumem, lambda: gpumem.measure(step))", "gpumem.measure() is called within gpumem.track('whole')"),
        ("in_loss(gpumem, lambda: gpumem.measure(step))", "gpumem.measure() is called within gpumem.train_step()"),
        ("swallowing(gpumem, lambda: trained(gpumem))", "gpumem.train_step() is called within gpumem.measure('outer')"),
        (
            "gpumem.assert_no_growth(lambda: gpumem.measure(step))",
            "gpumem.measure() is called within gpumem.assert_no_growth()",
        ),
    ],
)
def test_a_measurement_within_another_is_an_error_that_names_both(project, call, said):
    project.write(
        f"""
{NESTED}

def test_it(gpumem):
    {call}


def test_next(gpumem):
    gpumem.measure(step)
    in_region(gpumem, step)
"""
    )
    result = project.run()
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines([f"*MeasuringError: {glob.escape(said)}: * measure one after the other, *"])


def test_a_region_may_be_within_a_region(project):
    project.write(
        """
def test_it(gpumem):
    with gpumem.track("outer") as outer:
        torch.ones(2_000_000)
        with gpumem.track("inner") as inner:
            torch.ones(1_000_000)
    assert (outer.measurement.peak_allocated, inner.measurement.peak_allocated) == (8_000_000, 4_000_000)
"""
    )
    project.run().assert_outcomes(passed=1)
