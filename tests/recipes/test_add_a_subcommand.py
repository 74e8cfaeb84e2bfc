"""The recipe docs/development/add-a-subcommand.md: the command runs, is in the help, and has its exit statuses."""

from __future__ import annotations

import pytest

from tests.recipes.recipes import copy_of_the_package, files_of, write_tests

TESTS = """
    import pytest
    import torch


    @pytest.mark.gpumem
    @pytest.mark.parametrize("size", [10, 100])
    def test_ones(size):
        torch.ones(size)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    assert len(files_of("add-a-subcommand")) == 2
    return copy_of_the_package(tmp_path_factory.mktemp("package"), "add-a-subcommand")


def gpumem(package, folder, *words):
    return package.run(folder, "-m", "pytest_gpumem.tools.main", *words)


def test_it_counts_the_baselines(package, tmp_path):
    write_tests(tmp_path, TESTS)
    assert package.pytest(tmp_path, "--gpumem-update=new").returncode == 0
    (slug,) = (path.name for path in (tmp_path / "gpumem-baselines").iterdir() if path.is_dir())
    counted = gpumem(package, tmp_path, "count")
    assert (counted.returncode, counted.stdout) == (0, f"{slug}: 2\n"), counted.stderr


def test_without_baselines_it_is_wrong_input(package, tmp_path):
    write_tests(tmp_path, TESTS)
    (tmp_path / "empty").mkdir()
    counted = gpumem(package, tmp_path, "count", "--store", "empty")
    assert (counted.returncode, counted.stdout) == (2, "")
    assert "there are no baselines; `pytest --gpumem-update=new` writes them" in counted.stderr


def test_help_lists_it_and_a_mistyped_name_is_told_of_it(package, tmp_path):
    everything = gpumem(package, tmp_path, "--help").stdout
    assert "Count the baselines of each device." in everything
    assert "gpumem count --store gpumem-baselines" in gpumem(package, tmp_path, "count", "--help").stdout
    assert "No such command 'cuont'; did you mean 'count'?" in gpumem(package, tmp_path, "cuont").stderr
