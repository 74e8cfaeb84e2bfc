"""Suites that exist are marked from outside: by hooks of a conftest, or by patterns in the settings."""

from __future__ import annotations

import pytest

EMPTY = "def test_small(): ...\n\n\ndef test_large(): ...\n"
PLAIN = """
def test_small():
    torch.ones(1_000)


def test_large():
    torch.ones(1_000_000)
"""
MARKS = """
{decorator}
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.gpumem(max_memory="1 MB"))
"""
WRAPS = """
@pytest.hookimpl(wrapper=True{order})
def pytest_collection_modifyitems(items):
    yield
    for item in items:
        item.add_marker(pytest.mark.gpumem(max_memory="1 MB"))
"""
MARKING = {
    "plain": MARKS.format(decorator=""),
    "first": MARKS.format(decorator="@pytest.hookimpl(tryfirst=True)"),
    "last": MARKS.format(decorator="@pytest.hookimpl(trylast=True)"),
    "around": WRAPS.format(order=""),
    "around everybody": WRAPS.format(order=", tryfirst=True"),
    "each": "def pytest_itemcollected(item):\n    item.add_marker(pytest.mark.gpumem(max_memory='1 MB'))\n",
}


def conftest(project, source, folder=""):
    path = project.path / folder / "conftest.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"import pytest\n\n\n{source}", encoding="utf-8")


# Hooks of a conftest


@pytest.mark.parametrize("marking", MARKING)
def test_markers_that_a_conftest_adds_measure_and_hold(project, marking):
    project.write(PLAIN)
    conftest(project, MARKING[marking])
    result = project.run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["gpumem: 2 gated, 1 over budget"])


def test_a_conftest_of_a_folder_marks_its_tests(project):
    project.write(PLAIN)
    project.write(PLAIN, "models/test_models.py")
    conftest(
        project,
        """
from pathlib import Path


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("gpumem")
""",
        "models/",
    )
    result = project.run("--gpumem-update=new")
    result.assert_outcomes(passed=4)
    assert [path.partition("/")[2] for path in project.stored()] == ["models/test_models.py.toml"]


@pytest.mark.parametrize(
    ("option", "selected"), [(["-m", "gpumem"], "1 gated"), (["-k", "small"], "1 gated"), (["-m", "not gpumem"], None)]
)
def test_tests_are_selected_by_markers_that_a_conftest_added(project, option, selected):
    project.write(PLAIN)
    conftest(project, MARKING["plain"].replace("in items:", "in items[:1]:"))
    result = project.run(*option)
    result.assert_outcomes(passed=1, deselected=1)
    assert [line for line in result.outlines if line.startswith("gpumem: ")] == (
        [f"gpumem: {selected}"] if selected else []
    )


# One that marks last is given those tests that are selected.
@pytest.mark.parametrize(("marking", "selected"), [("last", "small"), ("first", "nobody")])
def test_a_wrong_marker_of_a_conftest_is_a_usage_error_also_for_a_deselected_test(project, marking, selected):
    (project.path / "test_it.py").write_text(EMPTY)
    conftest(project, MARKING[marking].replace("max_memory", "max_memry"))
    result = project.run("-k", selected)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: test_it.py::test_small: unknown argument 'max_memry'; did you mean 'max_memory'?"]
    )


def test_a_marker_that_a_conftest_takes_away_measures_nothing(project):
    project.write("@pytest.mark.gpumem(max_memory='1 B')\ndef test_it():\n    torch.ones(10)\n")
    conftest(
        project,
        "def pytest_collection_modifyitems(items):\n    for item in items:\n        item.own_markers.clear()\n",
    )
    project.run().assert_outcomes(passed=1)


DOCTESTS = "def number():\n    '''\n    >>> int(torch.ones(1_000).sum())\n    1000\n    '''\n\n\n"


def test_doctests_and_tests_of_unittest_that_a_conftest_marks_run(project):
    project.write(
        f"{DOCTESTS}\n\nimport unittest\n\n\nclass Tests(unittest.TestCase):\n    def test_it(self):\n        torch.ones(10)\n"
    )
    conftest(project, MARKING["plain"])
    result = project.run("--doctest-modules", "-v", "--gpumem-update=all", "--gpumem-explain=always")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["gpumem: 2 recorded, new"])


# Too late

IN_A_FIXTURE = "@pytest.fixture(autouse=True)\ndef late(request):\n    request.node.add_marker(pytest.mark.gpumem(max_memory='1 B'))\n\n\n"
IN_SET_UP = "def pytest_runtest_setup(item):\n    item.add_marker(pytest.mark.gpumem(max_memory='1 B'))\n"
LATE = "@pytest.mark.gpumem was added to this test when it was already running, so it has no effect; *"


@pytest.mark.parametrize(
    ("test", "hook", "option"),
    [(IN_A_FIXTURE, "", "--gpumem-baseline"), ("", IN_SET_UP, "--gpumem-strict")],
    ids=["fixture", "hook"],
)
def test_a_marker_that_comes_too_late_fails_its_test_under_a_gate(project, test, hook, option):
    project.write(f"{test}def test_it():\n    torch.ones(10)\n")
    conftest(project, hook)
    result = project.run(option)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([LATE])


def test_a_budget_that_comes_too_late_for_a_measured_test_fails_it_under_a_gate(project):
    project.write(f"{IN_A_FIXTURE}@pytest.mark.gpumem\ndef test_it():\n    torch.ones(10)\n")
    result = project.run("--gpumem-baseline")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([LATE])


def test_without_a_gate_a_marker_that_comes_too_late_is_warned_of(project):
    project.write(f"{IN_A_FIXTURE}def test_it():\n    torch.ones(10)\n")
    # This suite makes errors of warnings, in its own process.
    result = project.run(separate=True)
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines([f"*PytestWarning: test_it.py::test_it: {LATE}"])


def test_a_test_that_fails_by_itself_is_told_its_own_failure_and_no_other(project):
    project.write(f"{IN_A_FIXTURE}def test_it():\n    assert 1 == 2\n")
    result = project.run("--gpumem-strict")
    result.stdout.fnmatch_lines(["E * assert 1 == 2"])
    result.stdout.no_fnmatch_line(LATE)


# Patterns in the settings


def measure(project, *patterns, more=""):
    project.settings(f"[tool.gpumem]\nmark = {list(patterns)}\n{more}")


@pytest.fixture
def suite(project):
    project.write(PLAIN, "tests/models/deep/test_gpt.py")
    project.write(PLAIN, "tests/models/test_mlp.py")
    project.write(PLAIN, "tests/test_other.py")
    return project


def test_tests_that_a_pattern_matches_are_measured_and_held_by_budgets(suite):
    measure(suite, "tests/models/**", more="[[tool.gpumem.budget]]\ntests = '*::test_large'\nmax_memory = '1 MB'\n")
    result = suite.run()
    result.assert_outcomes(passed=4, failed=2)
    result.stdout.fnmatch_lines(["gpumem: 2 gated, 2 over budget, 2 recorded *"])


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("tests/test_other.py::test_small", 1),
        ("tests/models/*/test_gpt.py", 2),
    ],
)
def test_a_pattern_is_that_of_a_budget(suite, pattern, count):
    measure(suite, pattern)
    suite.run().stdout.fnmatch_lines([f"gpumem: 0 gated, {count} recorded *"])


def test_tests_that_a_pattern_matches_are_selected_by_the_marker(suite):
    measure(suite, "tests/models/**")
    suite.run("-m", "gpumem").assert_outcomes(passed=4, deselected=2)


def test_a_pattern_marks_doctests(project):
    project.write(f"{DOCTESTS}{PLAIN}")
    measure(project, "test_it.py::test_it.*")
    project.run("--doctest-modules", "-m", "gpumem").assert_outcomes(passed=1, deselected=2)


@pytest.mark.parametrize("wrong", ["'tests/**'", "[1]", "['']"])
def test_what_is_no_array_of_patterns_is_a_usage_error_with_file_and_key(project, wrong):
    project.settings(f"[tool.gpumem]\nmark = {wrong}\n")
    result = project.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: pyproject.toml: [[]tool.gpumem]: mark is *, expected an array of patterns of tests"]
    )


TOLD = "gpumem: mark = 'tests/gone/**' marks nothing: it matches no test; *"
BUDGET_TOLD = "gpumem: the budget for tests = 'tests/gone/*' has no effect: it matches no test; *"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["tests/models", "tests"], True),
        (["-n1"], True),
        (["-k", "small"], True),
        (["tests/models"], False),
        (["tests/test_other.py::test_small"], False),
        (["--ignore=tests/gone"], False),
    ],
    ids=str,
)
def test_a_pattern_that_matches_no_test_is_told_where_all_of_it_was_collected(suite, arguments, told):
    for path in suite.path.rglob("test_*.py"):
        path.write_text(EMPTY)
    measure(suite, "tests/gone/**", more="[[tool.gpumem.budget]]\ntests = 'tests/gone/*'\nmax_gb = 1\n")
    result = suite.run(*arguments, separate="-n1" in arguments)
    assert result.ret == 0
    if told:
        result.stdout.fnmatch_lines([TOLD, BUDGET_TOLD])
    else:
        result.stdout.no_fnmatch_line("gpumem: *matches no test*")


def test_in_a_run_of_the_testpaths_every_pattern_is_looked_at(suite):
    suite.settings(
        "[tool.pytest.ini_options]\ntestpaths = ['tests']\n[tool.gpumem]\nmark = ['test_*']\n"
        "[[tool.gpumem.budget]]\ntests = '*_huge'\nmax_gb = 1\n"
    )
    lines = [line for line in suite.run().outlines if "matches no test" in line]
    assert [line.partition(";")[0] for line in lines] == [
        "gpumem: mark = 'test_*' marks nothing: it matches no test",
        "gpumem: the budget for tests = '*_huge' has no effect: it matches no test",
    ]
