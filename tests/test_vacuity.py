"""Never green because nothing was measured. This machine is made one without a GPU by hiding what there is."""

from __future__ import annotations

import pytest
import torch

from pytest_gpumem.judging.gate.verdict import SKIPPED, TestVerdict
from pytest_gpumem.reporting.reports.results import TestResult, nothing_recorded

pytestmark = pytest.mark.usefixtures("no_gpu")

BOTH = """
@pytest.mark.gpumem
def test_marked():
    torch.ones(1000)


def test_fixture(gpumem):
    gpumem.measure(lambda: torch.ones(1000))
"""


HIDING = torch.cuda.is_available()
"""A GPU can be hidden from another process only. Where there is none, this one has none, either."""


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_without_a_gpu_a_fixture_skips_and_a_marked_test_runs_unmeasured(project):
    project.write(BOTH)
    result = project.run("-rs", device=None, separate=HIDING)
    assert result.ret == 0
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(
        ["gpumem: 0 gated, 2 unmeasured (no CUDA device: *)", "SKIPPED*gpumem: no CUDA device: torch *"]
    )


def test_a_gate_that_gated_nothing_ends_red_with_one_sentence(project):
    project.write(BOTH)
    result = project.run("--gpumem-baseline", device=None, separate=HIDING)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["gpumem: nothing was gated: 2 tests unmeasured, no CUDA device: *"])


def test_strict_fails_each_test_that_could_not_be_measured(project):
    project.write(BOTH)
    result = project.run("--gpumem-strict", device=None, separate=HIDING)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["Not measured (required by --gpumem-strict): no CUDA device: *"])


def test_the_body_of_a_test_with_the_fixture_does_not_run_without_a_device(project):
    project.write("def test_it(gpumem):\n    open('ran', 'w').close()\n")
    project.run("--gpumem-strict", device=None, separate=HIDING).assert_outcomes(failed=1)
    assert not (project.path / "ran").exists()


def test_a_marked_test_that_fails_by_itself_still_fails(project):
    project.write("@pytest.mark.gpumem\ndef test_it():\n    assert False\n")
    project.run(device=None, separate=HIDING).assert_outcomes(failed=1)


def test_a_fixture_that_measured_nothing_is_unmeasured(project):
    project.write("def test_it(gpumem): ...\n")
    result = project.run()
    result.stdout.fnmatch_lines(
        ["gpumem: 0 gated, 1 unmeasured (it has the gpumem fixture but measured nothing with it)"]
    )
    project.run("--gpumem-strict").assert_outcomes(failed=1)


def test_a_recording_that_another_profiler_ended_is_not_taken_for_a_measurement(project):
    project.write(
        "@pytest.mark.gpumem(max_gb=1)\ndef test_it():\n    torch.ones(1_000_000)\n"
        "    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):\n        torch.ones(10)\n"
    )
    result = project.run("--gpumem-baseline", separate=True)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["gpumem: nothing was gated: 1 test unmeasured, the recording of host allocations was cut short*"]
    )


def test_a_fixture_that_ends_the_recording_leaves_its_test_unmeasured_and_not_broken(project):
    project.write(
        "@pytest.fixture\ndef profiled():\n"
        "    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):\n        torch.ones(10)\n\n\n"
        "@pytest.mark.gpumem\ndef test_it(profiled):\n    torch.ones(10)\n\n\n"
        "@pytest.mark.gpumem\ndef test_next():\n    torch.ones(10)\n"
    )
    result = project.run(separate=True)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["gpumem: 0 gated, 1 unmeasured (*cut short*(in fixture profiled)), 1 recorded*"])


def test_a_budget_that_matches_only_unmeasured_tests_is_pointed_out(project):
    project.settings("[[tool.gpumem.budget]]\ntests = 'test_it.py'\nmax_gb = 1\n")
    project.write("def test_it(): ...\n")
    result = project.run()
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["gpumem: the budget for tests = 'test_it.py' has no effect: *give them @pytest.mark.gpumem, or *"]
    )


def test_a_budget_of_times_that_matches_only_tests_without_a_step_is_pointed_out(project):
    project.settings(
        "[[tool.gpumem.budget]]\ntests = 'test_it.py'\nmax_gb = 1\nmin_throughput = '8 steps/s'\nmax_slowdown = '5 %'\n"
    )
    project.write("@pytest.mark.gpumem\ndef test_it():\n    torch.ones(1000)\n")
    result = project.run()
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            f"gpumem: {limit} of the budget for tests = 'test_it.py' has no effect: no step is timed in the tests that it "
            "matches; measure a step with the gpumem fixture"
            for limit in ("max_slowdown", "min_throughput")
        ]
    )
    project.write("def test_step(gpumem):\n    gpumem.measure(lambda: torch.ones(1000))\n", "test_it.py")
    result = project.run()
    result.stdout.no_fnmatch_line("*has no effect*")


def test_a_gate_without_any_measured_test_says_so_and_strict_ends_red(project):
    project.write("def test_it(): ...\n")
    result = project.run("--gpumem-baseline")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["gpumem: nothing to gate: no measured test was selected"])
    strict = project.run("--gpumem-baseline", "--gpumem-strict")
    assert strict.ret == pytest.ExitCode.TESTS_FAILED
    strict.stdout.fnmatch_lines(["gpumem: nothing was gated: no measured test was selected"])


def test_a_budget_does_not_make_up_for_a_store_that_is_gone(project):
    project.write("@pytest.mark.gpumem(max_gb=1)\ndef test_it():\n    torch.ones(1000)\n")
    result = project.run("--gpumem-baseline")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "gpumem: no baseline was compared: 1 test new, there is no baseline for *",
            "gpumem: 1 gated, 1 new (also gated)",
        ]
    )


def test_a_test_that_held_no_tensor_on_the_device_is_unmeasured(project):
    project.write("@pytest.mark.gpumem(max_gb=1)\ndef test_it():\n    assert 1 + 1 == 2\n")
    project.run().stdout.fnmatch_lines(
        [
            "gpumem: 0 gated, 1 unmeasured (call held no tensor on cpu: *; put the model * on gpumem.device, or set the device *"
        ]
    )
    project.run("--gpumem-strict").assert_outcomes(failed=1)


def test_strict_fails_a_test_that_asks_for_the_fixture_at_run_time(project):
    project.write("@pytest.mark.gpumem\ndef test_it(request):\n    request.getfixturevalue('gpumem').device\n")
    project.run(device=None, separate=HIDING).assert_outcomes(skipped=1)
    project.run("--gpumem-strict", device=None, separate=HIDING).assert_outcomes(failed=1)


REFUSED = """
import contextlib, unittest, pytest, torch

pytestmark = pytest.mark.gpumem(max_memory="1 GB")  # met, so that nothing fails but what was refused


def refused(gpumem):
    gpumem.train_step(torch.nn.Linear(2, 2), torch.ones(4, 2), config="tf32", loss=lambda out, _: out.sum())


def other(gpumem):
    gpumem.measure(lambda: torch.ones(1000))


def test_of_a_subtest(gpumem, subtests):
    with subtests.test():
        refused(gpumem)
    other(gpumem)


def test_that_goes_on(gpumem):
    with contextlib.suppress(BaseException):
        refused(gpumem)
    other(gpumem)


class TestOfUnittest(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def _gpumem(self, gpumem):
        self.gpumem = gpumem

    def test_it(self):
        refused(self.gpumem)
"""


def test_strict_fails_what_was_refused_though_the_test_caught_it(project):
    project.write(REFUSED)
    result = project.run("--gpumem-strict", "--no-gpumem-time")
    assert result.ret == 1
    for name in ("test_of_a_subtest", "test_that_goes_on", "TestOfUnittest::test_it"):
        assert any("FAILED" in line and name in line for line in result.outlines), name
    assert any("required by --gpumem-strict" in line and "TF32" in line.upper() for line in result.outlines)


def test_without_strict_what_was_refused_is_skipped(project):
    project.write(REFUSED)
    result = project.run("--no-gpumem-time")
    assert result.ret == 0


@pytest.mark.parametrize("where", ["marker", "settings"])
def test_a_budget_of_a_metric_that_this_device_lacks_is_told(project, where):
    marker = '@pytest.mark.gpumem(max_reserved="8 GB")' if where == "marker" else "@pytest.mark.gpumem"
    if where == "settings":
        project.settings('[[tool.gpumem.budget]]\ntests = "test_it.py"\nmax_reserved = "8 GB"\n')
    project.write(f"{marker}\ndef test_it():\n    torch.ones(1_000_000).sum()\n")
    result = project.run()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "note: test_it.py::test_it: max_reserved = 8.00 GB has no effect: there is no peak_reserved on *",
            "gpumem: 0 gated, 1 recorded *",
        ]
    )
    project.run("--gpumem-strict").assert_outcomes(failed=1)


# Recorded nothing

MARKED = "@pytest.mark.gpumem\ndef test_it():\n    torch.ones(1000)\n"


@pytest.mark.parametrize("mode", ["new", "improved", "all"])
@pytest.mark.parametrize("quiet", [(), ("-q",)], ids=["by default", "quiet"])
def test_a_session_that_was_to_record_and_measured_nothing_is_red(project, mode, quiet):
    project.write(MARKED)
    result = project.run(f"--gpumem-update={mode}", *quiet, device="cuda", separate=HIDING)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["gpumem: nothing was recorded: 1 test unmeasured, no CUDA device: *"])
    assert not project.stored()


def test_a_session_that_records_some_tests_or_only_skips_them_is_green(project):
    project.write(MARKED + "@pytest.mark.gpumem(device='cuda')\ndef test_on_a_gpu(): ...\n")
    assert project.run("--gpumem-update=new").ret == 0
    project.write("@pytest.mark.gpumem\ndef test_it():\n    pytest.skip('not here')\n")
    assert project.run("--gpumem-update=new").ret == 0
    assert project.run(device="cuda", separate=HIDING).ret == 0


def test_nothing_recorded_counts_tests_by_their_reasons():
    lost, failed = unmeasured("no CUDA device"), unmeasured("it has failed", failed=True)
    skipped = unmeasured(SKIPPED)
    assert nothing_recorded([lost, lost, failed, skipped]) == "nothing was recorded: 2 tests unmeasured, no CUDA device"
    assert nothing_recorded([skipped, failed]) is None
    assert nothing_recorded([]) is None


def unmeasured(why: str, *, failed: bool = False) -> TestResult:
    verdict = TestVerdict("a.py", "test_a", unmeasured=why, failed_by_itself=failed)
    return TestResult(verdict, passed=not failed, failed=failed)
