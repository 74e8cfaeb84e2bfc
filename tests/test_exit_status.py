"""The exit status under ``--gpumem-baseline`` is 0 only if the session's report passed, whatever other plugins do."""

from __future__ import annotations

import json
import os

import pytest

MARKED = """
@pytest.mark.gpumem
def test_step():
    torch.ones({count})
"""
SMALL, LARGE = MARKED.format(count=1_000_000), MARKED.format(count=2_000_000)

REWRITES_OUTCOME = """
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        report.outcome, report.longrepr = "{outcome}", None
    return report
"""
SWALLOWS_IN_THE_CALL = """
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item):
    try:
        yield
    except BaseException:
        pass
"""
DROPS_PROPERTIES = """
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.user_properties, report.outcome, report.longrepr = [], "passed", None
    return report
"""
LOGS_NO_REPORT = """
from _pytest.runner import runtestprotocol


def pytest_runtest_protocol(item, nextitem):
    runtestprotocol(item, log=False, nextitem=nextitem)
    return True
"""
RUNS_NO_TEST = "def pytest_runtestloop(session):\n    return True\n"
CLEARS_THE_COUNT = """
@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    session.testsfailed = 0
    session.exitstatus = 0
"""
CLEARS_IT_LAST = """
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    yield
    session.exitstatus = 0
"""
EXITS_AT_THE_END = "def pytest_sessionfinish(session):\n    pytest.exit('done', returncode=0)\n"
EXITS_AT_LAST = "def pytest_unconfigure(config):\n    raise SystemExit(0)\n"
CLEARS_IT_AFTER_ALL = """
def pytest_sessionfinish(session):
    session.config.kept = session


def pytest_unconfigure(config):
    config.kept.exitstatus = 0
"""
ATTACKS = {
    "failed becomes passed": REWRITES_OUTCOME.format(outcome="passed"),
    "failed becomes skipped": REWRITES_OUTCOME.format(outcome="skipped").replace("None", "('f', 1, 'no')"),
    "the call swallows it": SWALLOWS_IN_THE_CALL,
    "properties dropped": DROPS_PROPERTIES,
    "no report logged": LOGS_NO_REPORT,
    "no test run": RUNS_NO_TEST,
    "the count cleared": CLEARS_THE_COUNT,
    "the status cleared last": CLEARS_IT_LAST,
    "the status cleared after all": CLEARS_IT_AFTER_ALL,
    "exit at the end": EXITS_AT_THE_END,
    "SystemExit": EXITS_AT_LAST,
}


def conftest(project, source):
    project.write(source, "conftest.py")


def gated(project, *args, separate=False):
    return project.run("--gpumem-baseline", "-q", "--gpumem-report=report.json", *args, separate=separate)


def reported(project):
    return json.loads((project.path / "report.json").read_text(encoding="utf-8"))


@pytest.fixture
def grown(project):
    """A project whose test needs more memory than its baseline."""
    project.write(SMALL)
    project.run("--gpumem-update=new")
    project.write(LARGE)
    return project


def test_strict_alone_is_a_gate_as_well(project):
    project.write(SMALL.replace("gpumem", "gpumem(max_gb=1)", 1))
    assert project.run("--gpumem-strict").ret == 0
    conftest(project, CLEARS_THE_COUNT + LOGS_NO_REPORT)
    assert project.run().ret == 0
    assert project.run("--gpumem-strict").ret == 1


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_regression_ends_red_whatever_a_conftest_does_to_its_report(grown, attack):
    conftest(grown, ATTACKS[attack])
    # pytester takes no SystemExit for the end of a run within this process.
    result = gated(grown, separate=attack == "SystemExit")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert reported(grown)["passed"] is False
    said = [line for line in (*result.outlines, *result.errlines) if line.startswith("gpumem: ")]
    assert said


@pytest.mark.parametrize(
    "attack", ["properties dropped", pytest.param("the status cleared last", marks=pytest.mark.thorough)]
)
def test_a_regression_ends_red_under_workers_whatever_a_conftest_does(grown, attack):
    conftest(grown, ATTACKS[attack])
    result = gated(grown, "-n1", separate=True)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert reported(grown)["passed"] is False
    if attack == "properties dropped":
        result.stdout.fnmatch_lines(["gpumem: nothing was gated: *"])


def test_a_failure_that_was_reported_as_passed_is_told_and_never_written(grown):
    conftest(grown, ATTACKS["failed becomes passed"])
    result = gated(grown)
    result.stdout.fnmatch_lines(
        ["gpumem: test_it.py::test_step failed, but a plugin or conftest.py changed its outcome: *"]
    )
    (told,) = reported(grown)["results"]
    assert (told["failed"], told["passed"]) == (True, False)
    before = grown.stored()
    grown.write("@pytest.mark.gpumem(max_memory='1 MB')\ndef test_step():\n    torch.ones(3_000_000)\n")
    assert grown.run("--gpumem-update=all").ret == pytest.ExitCode.TESTS_FAILED
    assert grown.stored() == before


def test_a_test_that_fails_by_itself_and_is_reported_as_passed_is_red_in_a_gate(grown):
    grown.write(
        "@pytest.mark.gpumem\ndef test_step():\n    assert torch.ones(1_000_000).sum() == 0\n\n\n"
        + SMALL.replace("step", "other")
    )
    grown.run("--gpumem-update=new")
    conftest(grown, ATTACKS["failed becomes passed"])
    assert grown.run().ret == 0
    assert gated(grown).ret == pytest.ExitCode.TESTS_FAILED
    assert reported(grown)["passed"] is False


def test_an_expected_failure_stays_one(grown):
    grown.write("@pytest.mark.xfail\n" + LARGE.lstrip() + SMALL.replace("step", "other"))
    grown.run("--gpumem-update=new")
    result = gated(grown)
    assert result.ret == 0
    result.assert_outcomes(passed=1, xfailed=1)
    assert reported(grown)["passed"] is True


@pytest.mark.parametrize("workers", [[], ["-n1"]], ids=["alone", "workers"])
def test_another_test_that_ends_the_session_with_status_0_ends_it_red(project, workers):
    ends = "\n\ndef test_ends():\n    pytest.exit('enough', returncode=0)\n"
    project.write(SMALL + SMALL.replace("step", "other"))
    project.run("--gpumem-update=new")
    project.write(SMALL + ends + SMALL.replace("step", "other"))
    result = gated(project, *workers, separate=bool(workers))
    # pytest-xdist itself takes a worker that leaves a test behind for an internal error.
    assert result.ret == (pytest.ExitCode.INTERNAL_ERROR if workers else pytest.ExitCode.TESTS_FAILED)
    assert reported(project)["passed"] is False


@pytest.mark.parametrize("option", ["--setup-only", "--setup-plan", "--fixtures"])
def test_a_session_that_runs_no_test_ends_red_and_says_so(grown, option):
    grown.write(SMALL)
    result = grown.run("--gpumem-baseline", "-q", option)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    said = [line for line in (*result.outlines, *result.errlines) if line.startswith("gpumem: ")]
    assert said


@pytest.mark.parametrize("option", ["--help", "--markers"])
def test_who_asks_pytest_for_help_gets_it(project, option):
    assert project.run("--gpumem-baseline", option).ret == 0


def test_collecting_only_is_red_where_the_gate_was_typed_and_else_green(project):
    project.write(SMALL)
    typed = project.run("--gpumem-baseline", "-q", "--collect-only")
    assert typed.ret == pytest.ExitCode.TESTS_FAILED
    typed.stderr.fnmatch_lines(["gpumem: the exit status is 1: --gpumem-baseline has no effect with --collect-only"])
    project.settings("[tool.gpumem]\nbaseline = true\n")
    found = project.run("--collect-only", "-q")
    assert found.ret == 0
    found.stdout.fnmatch_lines(["test_it.py::test_step"])
    project.settings("[tool.pytest.ini_options]\naddopts = '--gpumem-baseline'\n")
    assert project.run("--collect-only", "-q").ret == 0


@pytest.mark.parametrize(
    "hook", ["pytest_configure(config)", "pytest_sessionstart(session)", "pytest_collection(session)"]
)
def test_a_session_that_is_ended_before_any_test_is_red(project, hook):
    project.write(SMALL)
    conftest(project, f"@pytest.hookimpl(tryfirst=True)\ndef {hook}:\n    pytest.exit('no', returncode=0)\n")
    assert project.run("--gpumem-baseline").ret == pytest.ExitCode.TESTS_FAILED


NOTHING_IS_FINE = (
    "def pytest_sessionfinish(session, exitstatus):\n    if exitstatus == 5:\n        session.exitstatus = 0\n"
)


def test_no_test_at_all_is_red_also_where_a_conftest_takes_that_for_success(project):
    conftest(project, NOTHING_IS_FINE)
    assert project.run().ret == 0
    assert gated(project).ret == pytest.ExitCode.TESTS_FAILED
    assert reported(project)["passed"] is False


def test_a_shard_without_a_measured_test_of_its_own_may_be_green(project):
    conftest(project, NOTHING_IS_FINE)
    project.write(SMALL)
    assert gated(project, "-k", "nothing").ret == 0
    assert reported(project)["passed"] is True


def test_maxfail_ends_red_also_where_the_count_is_cleared(grown):
    grown.write("def test_fails():\n    assert False\n\n\n" + SMALL)
    conftest(grown, CLEARS_THE_COUNT)
    result = gated(grown, "--maxfail=1")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert reported(grown)["not_run"] == [["test_it.py", "test_step"]]


def test_a_session_that_another_plugin_makes_red_at_last_has_a_red_report(grown):
    grown.write(SMALL)
    conftest(grown, "def pytest_sessionfinish(session):\n    session.exitstatus = 7\n")
    assert gated(grown).ret == 7
    report = reported(grown)
    assert report["passed"] is False
    assert report["errors"] == ["pytest ended with exit status 7, although no test failed"]


def test_a_session_whose_report_passed_ends_green(grown):
    grown.write(SMALL)
    result = gated(grown)
    assert result.ret == 0
    assert reported(grown)["passed"] is True
    assert result.errlines == []


def test_without_a_gate_nobody_meddles_with_the_exit_status(grown):
    grown.write("def test_ends():\n    pytest.exit('enough', returncode=0)\n\n\n" + LARGE)
    assert grown.run().ret == 0


LEAVES = "import os\n\n\ndef test_leaves():\n    os._exit(0)\n"


def test_os_exit_in_a_test_ends_a_gate_red_with_what_was_gated_and_a_report(project):
    project.write(SMALL, "test_a.py")
    project.write(SMALL, "test_c.py")
    project.run("--gpumem-update=new")
    project.write(LEAVES, "test_b.py")
    result = gated(project, separate=True)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "gpumem: 1 gated, 1 did not finish",
            "gpumem: os._exit(0) in test_b.py::test_leaves (call) ended the process before the session's end, and *",
        ]
    )
    assert (reported(project)["passed"], reported(project)["not_run"]) == (False, [["test_c.py", "test_step"]])


POSIX = pytest.mark.skipif(os.name != "posix", reason="of POSIX")


@POSIX
@pytest.mark.parametrize("leaves", ["posix._exit(0)", "posix.execv('/bin/true', ['true'])"], ids=["_exit", "execv"])
def test_the_function_by_its_other_name_ends_a_gate_red_too(project, leaves):
    project.write(SMALL)
    project.run("--gpumem-update=new")
    project.write(f"{SMALL}\n\ndef test_leaves():\n    import posix\n\n    {leaves}\n")
    assert gated(project, separate=True).ret == pytest.ExitCode.TESTS_FAILED
    assert reported(project)["passed"] is False


ENDS = {
    "unconfigure": "def pytest_unconfigure(config):\n    os._exit(0)\n",
    "atexit": "import atexit\n\natexit.register(lambda: os._exit(0))\n",
    "atexit, the function itself": "import atexit\n\natexit.register(os._exit, 0)\n",
    "atexit, within the session": (
        "import atexit\n\nleave = os._exit\n\n\ndef pytest_sessionfinish():\n    atexit.register(leave, 0)\n"
    ),
    "atexit, by its other name": "import atexit\nimport posix\n\natexit.register(posix._exit, 0)\n",
}


@POSIX
@pytest.mark.parametrize("leaves", ENDS.values(), ids=ENDS)
def test_os_exit_after_the_tests_ends_red_as_the_report_says(grown, leaves):
    conftest(grown, f"import os\n\n\n{leaves}")
    assert gated(grown, separate=True).ret == pytest.ExitCode.TESTS_FAILED


def test_os_exit_after_the_tests_ends_green_where_the_report_passed(grown):
    grown.write(SMALL)
    conftest(grown, f"import os\n\n\n{ENDS['atexit, within the session']}")
    assert gated(grown, separate=True).ret == 0


def test_children_of_a_gated_test_leave_as_they_like(grown):
    grown.write(
        f"{SMALL}\n\ndef test_child():\n    import os\n    child = os.fork()\n    if not child:\n        os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
    )
    assert gated(grown, separate=True).ret == 0
