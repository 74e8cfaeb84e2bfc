"""The recipe docs/development/add-a-report-format.md: a session writes the new format, and help lists it."""

from __future__ import annotations

import csv

import pytest

from tests.recipes.recipes import copy_of_the_package, files_of, write_tests

TESTS = """
    import sys

    import pytest
    import torch


    @pytest.mark.gpumem(max_memory="1kB")
    @pytest.mark.parametrize("size", ["small, and quiet", "large"])
    def test_sizes(size):
        torch.ones(10 if size != "large" else 1000)
        assert "pytest_gpumem.reporting.reports.csv_report" not in sys.modules
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    assert len(files_of("add-a-report-format")) == 2
    return copy_of_the_package(tmp_path_factory.mktemp("package"), "add-a-report-format")


def test_a_session_writes_the_new_format(package, tmp_path):
    write_tests(tmp_path, TESTS)
    done = package.pytest(tmp_path, "--gpumem-report=new/gpumem.csv", "--gpumem-report=gpumem.json")
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    with (tmp_path / "new" / "gpumem.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    peaks = {
        line["test"]: (int(line["value"]), line["outcome"]) for line in lines if line["metric"] == "peak_allocated"
    }
    assert peaks == {
        "test_sizes[large]": (4000, "over_budget"),
        "test_sizes[small, and quiet]": (40, "ok"),
    }

    merged = package.run(tmp_path, "-m", "pytest_gpumem.tools.main", "merge", "gpumem.json", "--report", "merged.csv")
    assert merged.returncode == 1, merged.stdout + merged.stderr
    assert (tmp_path / "merged.csv").read_text() == (tmp_path / "new" / "gpumem.csv").read_text()


def test_help_and_the_message_about_a_wrong_suffix_list_it(package, tmp_path):
    write_tests(tmp_path, TESTS)
    options = " ".join(package.pytest(tmp_path, "--help").stdout.split())
    assert (
        ".json for programs and `gpumem merge`, .csv for spreadsheets, .sarif for code scanning. May be repeated"
        in options
    )
    merge = " ".join(package.run(tmp_path, "-m", "pytest_gpumem.tools.main", "merge", "--help").stdout.split())
    assert "The suffix selects the format: .html, .md, .json, .csv or .sarif;" in merge
    wrong = package.pytest(tmp_path, "--gpumem-report=gpumem.txt")
    assert wrong.returncode == pytest.ExitCode.USAGE_ERROR
    assert "'gpumem.txt' has to end with .sarif, .csv, .json, .md or .html" in wrong.stderr
