"""The recipe docs/development/add-an-option.md: typed, as a key, in help, and with wrong values."""

from __future__ import annotations

import pytest

from tests.recipes.recipes import copy_of_the_package, files_of, write_tests

TESTS = """
    import pytest
    import torch


    @pytest.mark.gpumem
    def test_ones():
        torch.ones(1000)
"""
SHOWN = "test_steps.py::test_ones"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    assert len(files_of("add-an-option")) == 5
    return copy_of_the_package(tmp_path_factory.mktemp("package"), "add-an-option")


@pytest.mark.thorough
def test_it_acts_typed_and_as_a_key_and_what_is_typed_wins(package, tmp_path):
    write_tests(tmp_path, TESTS)
    assert package.pytest(tmp_path, "--gpumem-update=new").returncode == 0
    for key, typed, shown in (
        ("verbosity = 1", (), True),
        ("verbosity = 1", ("--gpumem-verbosity=0",), False),
    ):
        (tmp_path / "pyproject.toml").write_text(f"[tool.gpumem]\n{key}\n")
        done = package.pytest(tmp_path, "--gpumem-baseline", *typed)
        assert "1 passed" in done.stdout, done.stdout + done.stderr
        assert (SHOWN in done.stdout) == shown, (key, typed)


@pytest.mark.parametrize(
    ("key", "typed", "message"),
    [
        ("", "--gpumem-verbosity=much", "--gpumem-verbosity is 'much', expected a whole number, 0 or more"),
        pytest.param(
            "verbosity = true",
            "-q",
            "[tool.gpumem]: verbosity is True, expected a whole number",
            marks=pytest.mark.thorough,
        ),
        ("verbosity = -1", "-q", "[tool.gpumem]: verbosity is -1, expected a whole number, 0 or more"),
    ],
)
def test_a_wrong_value_is_a_usage_error(package, tmp_path, key, typed, message):
    write_tests(tmp_path, TESTS)
    (tmp_path / "pyproject.toml").write_text(f"[tool.gpumem]\n{key}\n")
    wrong = package.pytest(tmp_path, typed)
    assert wrong.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in wrong.stderr


def test_the_help_of_pytest_and_of_gpumem_run_has_it(package, tmp_path):
    write_tests(tmp_path, TESTS)
    for words in (("-m", "pytest", "--help"), ("-m", "pytest_gpumem.tools.main", "run", "--help")):
        said = " ".join(package.run(tmp_path, *words).stdout.split())
        assert "How much the end of the run shows, whatever -v says." in said
