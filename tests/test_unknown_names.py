"""Options and arguments that there are not: each is refused with the one that is near."""

from __future__ import annotations

import pytest

MEASURED = """
def test_it(gpumem):
    gpumem.measure(lambda: torch.ones(10))
"""


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
