"""Names from before the first release: each is refused with the name that it has now, and does nothing else."""

from __future__ import annotations

import sys

import pytest

from pytest_gpumem.config import renamed
from pytest_gpumem.config.errors import SettingsError
from pytest_gpumem.config.marker_arguments import MARKER_ARGUMENTS
from pytest_gpumem.config.options import OPTIONS
from pytest_gpumem.config.settings import KEYS, settings_from_table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MEASURED = """
def test_it(gpumem):
    gpumem.measure(lambda: torch.ones(10))
"""


def test_what_is_renamed_is_gone_and_what_it_is_called_now_is_there():
    flags = {flag for option in OPTIONS for flag in (option.flag, option.negated)}
    for old_names, known in ((renamed.ARGUMENTS, MARKER_ARGUMENTS), (renamed.KEYS, KEYS), (renamed.OPTIONS, flags)):
        assert not old_names.keys() & set(known)
        assert set(old_names.values()) <= set(known)


@pytest.mark.parametrize(("old", "now"), renamed.OPTIONS.items())
def test_an_option_of_pytest(project, old, now):
    project.write(MEASURED)
    result = project.run(old)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*error: {old} is called {now} now"])


@pytest.mark.parametrize(("old", "now"), renamed.KEYS.items())
def test_a_key_of_the_settings(project, old, now):
    project.settings(f"[tool.gpumem]\n{old} = true\n")
    project.write(MEASURED)
    result = project.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [f"ERROR: pyproject.toml: [[]tool.gpumem]: unknown key '{old}'; it is called '{now}' now"]
    )


def test_a_key_in_place_of_which_another_has_the_other_value():
    with pytest.raises(SettingsError, match=r"unknown key 'no_time'; write time = false$"):
        settings_from_table({"no_time": True}, "pyproject.toml")
    assert not settings_from_table(tomllib.loads(renamed.REPLACED["no_time"]), "pyproject.toml").time


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("--gpumem-no-strict", "did you mean '--no-gpumem-strict'?"),
        ("--gpumem-basline", "did you mean '--gpumem-baseline'?"),
        ("--no-gpumem-store=x", "did you mean '--gpumem-store'?"),
    ],
)
def test_an_option_that_no_plugin_has_is_told_with_the_one_that_is_near(project, typed, near):
    result = project.run(typed, "--gpumem-device=cpu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: no such option: {typed.partition('=')[0]}; {near}"])


def test_an_option_that_a_conftest_adds_may_begin_as_this_plugins_do(project):
    add = "def pytest_addoption(parser):\n    parser.addoption('--gpumem-own')\n"
    (project.path / "conftest.py").write_text(add, encoding="utf-8")
    project.write("def test_it(): ...\n")
    project.run("--gpumem-own=3").assert_outcomes(passed=1)


@pytest.mark.parametrize("where", ["marker", "budget"])
@pytest.mark.parametrize(("old", "now"), renamed.ARGUMENTS.items())
def test_an_argument_of_the_marker_and_of_budgets(project, old, now, where):
    project.write(MEASURED if where == "budget" else f"@pytest.mark.gpumem({old}='2 %'){MEASURED}")
    if where == "budget":
        project.settings(f"[[tool.gpumem.budget]]\ntests = '*'\n{old} = '2 %'\n")
    result = project.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*unknown argument '{old}'; it is called '{now}' now"])


def test_a_method_of_the_fixture(project):
    project.write("def test_it(gpumem):\n    with gpumem.steps():\n        pass\n")
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*AttributeError: *'steps'; it is called 'loop' now*"])


@pytest.mark.parametrize(
    ("call", "now"),
    [
        ("train_step(model, x, checkpoint='blocks')", 'it is a part of the step config: config="checkpoint=blocks"'),
        ("infer_step(model, x, precision='bf16')", 'it is a part of the step config: config="bf16"'),
        ("estimate(model, x, accumulate=2)", 'it is a part of the step config: config="accumulate=2"'),
        ("train_step(model, x, losses=None)", "did you mean 'loss'?"),
    ],
)
def test_a_part_of_the_step_config_that_is_given_as_an_argument(project, call, now):
    project.write(f"def test_it(gpumem):\n    model, x = torch.nn.Linear(2, 2), torch.ones(2, 2)\n    gpumem.{call}\n")
    result = project.run()
    result.assert_outcomes(failed=1)
    name = call.rpartition(", ")[2].partition("=")[0]
    assert f"TypeError: gpumem.{call.partition('(')[0]}() has no argument '{name}'; {now}" in result.stdout.str()


def test_a_flag_of_the_settings_is_switched_off_where_it_is_typed(project):
    project.settings("[tool.gpumem]\nstrict = true\nbaseline = true\n")
    project.write(MEASURED)
    assert project.run().ret == 1
    assert project.run("--no-gpumem-strict", "--no-gpumem-baseline").ret == 0
