"""Sets of requirements as they are given: read, named, and whether the same is installed next year."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpumem.requirements.errors import RequirementError
from pytest_gpumem.requirements.installers import reason_in
from pytest_gpumem.requirements.releases import between
from pytest_gpumem.requirements.requirement_set import requirement_set


def test_requirements_and_files_of_them_are_one_set(tmp_path):
    (tmp_path / "more.txt").write_text("einops==0.8.0\n", encoding="utf-8")
    file = tmp_path / "old.txt"
    file.write_text(
        "# pinned\ntorch==2.13.0 \\\n    --hash=sha256:1234\n-r more.txt\n--pre\nnumpy  # any\n", encoding="utf-8"
    )
    found = requirement_set(["transformers==4.37.2", f"-r {file}"])
    assert [str(one.specifier) for one in found.requirements] == ["==4.37.2", "==2.13.0", "==0.8.0", ""]
    assert found.names == {"transformers", "torch", "einops", "numpy"}
    assert "--pre" in found.lines
    assert str(found) == f"transformers==4.37.2, -r {file}"


def test_a_file_of_constraints_that_a_file_names_lies_beside_it(tmp_path):
    (tmp_path / "new.txt").write_text("-c limits.txt\neinops\n", encoding="utf-8")
    assert requirement_set([f"-r {tmp_path / 'new.txt'}"]).lines == (
        f"--constraint {tmp_path / 'limits.txt'}",
        "einops",
    )


@pytest.mark.parametrize(
    ("given", "is_exact"),
    [
        (["a==1.0"], True),
        (["a===1.0", "b==2"], True),
        (["a==1.*"], False),
        (["a>=1"], False),
        (["a"], False),
        (["a==1.0", "b"], False),
        (["a @ git+https://example.org/a.git@main"], False),
    ],
)
def test_only_releases_that_are_named_exactly_are_the_same_next_year(given, is_exact):
    assert requirement_set(given).is_exact is is_exact


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("transformers=4.38", "'transformers=4.38' is no requirement, like 'transformers==4.38.2'"),
        ("--pre", "'--pre' is neither a requirement, like 'transformers==4.38.2', nor a file, like '-r old.txt'"),
        ("-r nowhere.txt", "nowhere.txt cannot be read: No such file or directory"),
        ("-r wrong.txt", "'torch=2' in wrong.txt is no requirement"),
        ("-r itself.txt", "itself.txt names itself"),
    ],
)
def test_what_is_no_requirement_is_told_with_its_place(given, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("wrong.txt").write_text("torch=2\n", encoding="utf-8")
    Path("itself.txt").write_text("-r itself.txt\n", encoding="utf-8")
    with pytest.raises(RequirementError) as raised:
        requirement_set([given])
    assert said in str(raised.value)


def test_releases_between_two_are_in_their_order_and_pre_releases_only_as_ends():
    listed = ["4.36.0", "4.37.2", "4.38.0rc1", "4.38.0", "4.37.0", "4.38.2", "4.9.0", "not-a-version"]
    assert between(listed, "4.37.0", "4.38.2") == ["4.37.0", "4.37.2", "4.38.0", "4.38.2"]
    assert between(listed, "4.38.0rc1", "4.38.2") == ["4.38.0rc1", "4.38.0", "4.38.2"]
    # A release that mended something: what was worse came earlier.
    assert between(listed, "4.38.0", "4.37.0") == ["4.38.0", "4.37.2", "4.37.0"]


def test_the_reason_of_pip_is_its_errors_with_the_latest_releases_only():
    output = (
        "Looking\nERROR: Could not find a version (from versions: 1, 2, 3, 4, 5)\nERROR: No matching distribution.\n"
    )
    assert reason_in(output) == "Could not find a version (from versions: ..., 3, 4, 5); No matching distribution"
    assert reason_in("one\n\ntwo\n") == "one; two"


def test_an_index_that_was_not_reached_is_told_before_what_pip_makes_of_it():
    retrying = "WARNING: Retrying (Retry(total={}, connect=None)) after connection broken by 'NewConnectionError('<pip.x>: Failed')': /six/\n"
    output = f"{retrying.format(1)}{retrying.format(0)}ERROR: No matching distribution found for six\n"
    reached = "the package index cannot be reached (NewConnectionError)"
    assert reason_in(output) == f"{reached}; No matching distribution found for six"


def test_the_reason_of_uv_has_its_cause_in_either_form():
    plain = "error: No solution found when resolving dependencies\n  cause: Because there is no version of a==99.\n"
    drawn = "  \u00d7 No solution found when resolving dependencies:\n  \u2570\u2500\u25b6 Because there is no version of a==99.\n"
    for output in (plain, drawn):
        assert reason_in(output).endswith("; Because there is no version of a==99")


def test_a_set_with_a_python_of_its_own_is_named_with_it():
    assert str(requirement_set(["a==1"], python="python3.12")) == "a==1 on python3.12"
    assert str(requirement_set([], python="python3.12")) == "python3.12"
