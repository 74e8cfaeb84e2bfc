"""Sets of requirements as they are given: read, named, and whether the same is installed next year."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpumem.base.errors import RequirementError
from pytest_gpumem.base.requirements.environments import _key
from pytest_gpumem.base.requirements.installers import reason_in
from pytest_gpumem.base.requirements.releases import releases_between
from pytest_gpumem.base.requirements.requirement_set import requirement_set


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


def test_a_file_of_constraints_that_a_file_names_is_read_as_one_that_is_given(tmp_path):
    (tmp_path / "reqs").mkdir()
    (tmp_path / "reqs" / "new.txt").write_text("-c ../limits.txt\neinops==0.8.0\n", encoding="utf-8")
    limits = tmp_path / "limits.txt"
    limits.write_text("numpy<2  # not yet\n-c more.txt\n-r more.txt\n", encoding="utf-8")
    (tmp_path / "more.txt").write_text("jax<1\n", encoding="utf-8")
    found = requirement_set([f"-r {tmp_path / 'reqs' / 'new.txt'}"])
    assert found.lines == ("einops==0.8.0",)
    assert found.constraints == requirement_set([], [limits]).constraints == ("numpy<2", "jax<1", "jax<1")


def test_constraints_at_an_address_are_not_the_same_next_year(tmp_path):
    (tmp_path / "new.txt").write_text("-c https://example.org/limits.txt\neinops==0.8.0\n", encoding="utf-8")
    found = requirement_set([f"-r {tmp_path / 'new.txt'}"])
    assert found.lines == ("-c https://example.org/limits.txt", "einops==0.8.0")
    assert not found.is_exact


def test_an_environment_with_other_constraints_is_another_one(tmp_path):
    new, limits = tmp_path / "new.txt", tmp_path / "limits.txt"
    new.write_text("-c limits.txt\neinops==0.8.0\n", encoding="utf-8")
    keys = set()
    for text in ("numpy<2\n", "numpy<3\n"):
        limits.write_text(text, encoding="utf-8")
        keys.add(_key(requirement_set([f"-r {new}"]), emulated=False))
    assert len(keys) == 2


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A file of requirements in ``project/reqs``, and ``project`` as the current folder."""
    (tmp_path / "project" / "reqs" / "wheels").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-f wheels", "-f {0}/project/reqs/wheels"),
        ("-fwheels", "-f {0}/project/reqs/wheels"),
        ("--find-links=wheels", "--find-links {0}/project/reqs/wheels"),
        ("--no-index --find-links wheels", "--no-index --find-links {0}/project/reqs/wheels"),
        ("-f here", "-f {0}/project/here"),
        ("-f https://example.org/wheels", "-f https://example.org/wheels"),
        ("--find-links 'my wheels'", "--find-links '{0}/project/my wheels'"),
        ("-f nowhere", "-f nowhere"),
        ("-e ../x", "-e {0}/x"),
        ("--editable=../x[more]", "--editable {0}/x[more]"),
        ("-e git+https://example.org/x.git", "-e git+https://example.org/x.git"),
        ("--index-url https://example.org/simple", "--index-url https://example.org/simple"),
        ("../x", "{0}/x"),
        ("./x-1.0-py3-none-any.whl", "x @ file://{0}/project/x-1.0-py3-none-any.whl"),
        ("x-1.0-py3-none-any.whl", "x @ file://{0}/project/x-1.0-py3-none-any.whl"),
        (
            "./x-1.0.tar.gz[more]; python_version > '3'",
            "x[more] @ file://{0}/project/x-1.0.tar.gz ; python_version > '3'",
        ),
        ("./x-1.0.tar.gz --hash=sha256:12", "x @ file://{0}/project/x-1.0.tar.gz --hash=sha256:12"),
        ("x @ https://example.org/x-1.0.tar.gz", "x @ https://example.org/x-1.0.tar.gz"),
    ],
)
def test_paths_in_a_file_are_taken_from_where_pip_takes_them(folders, line, expected):
    for name in ("x", "project/here", "project/my wheels"):
        (folders / name).mkdir()
    for name in ("x-1.0-py3-none-any.whl", "x-1.0.tar.gz"):
        (folders / "project" / name).touch()
    Path("reqs", "new.txt").write_text(f"{line}\n", encoding="utf-8")
    found = requirement_set(["-r reqs/new.txt"])
    assert found.lines == (expected.format(folders),)
    assert [one.name for one in found.requirements] in ([], ["x"])


def test_what_lies_at_a_path_may_be_another_thing_next_year(folders):
    (folders / "x").mkdir()
    Path("x-1.0-py3-none-any.whl").touch()
    assert not requirement_set(["../x"]).is_exact
    assert not requirement_set(["./x-1.0-py3-none-any.whl"]).is_exact


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
        ("transformers=4.38", "'transformers=4.38' is not a valid requirement, like 'transformers==4.38.2'"),
        ("--pre", "'--pre' is neither a requirement, like 'transformers==4.38.2', nor a file, like '-r old.txt'"),
        ("-r nowhere.txt", "nowhere.txt cannot be read: No such file or directory"),
        ("-r wrong.txt", "'torch=2' in wrong.txt is not a valid requirement"),
        ("-r itself.txt", "itself.txt includes itself"),
        ("-r limited.txt", "gone.txt cannot be read: No such file or directory"),
        ("./gone.whl", "'./gone.whl' is a path, but "),
        (
            "./models.whl",
            "'./models.whl' is not a valid requirement, like 'transformers==4.38.2': Invalid wheel filename",
        ),
    ],
)
def test_what_is_no_requirement_is_told_with_its_place(given, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("wrong.txt").write_text("torch=2\n", encoding="utf-8")
    Path("limited.txt").write_text("-c gone.txt\n", encoding="utf-8")
    Path("models.whl").touch()
    Path("itself.txt").write_text("-r itself.txt\n", encoding="utf-8")
    with pytest.raises(RequirementError) as raised:
        requirement_set([given])
    assert said in str(raised.value)


def test_releases_between_two_are_in_their_order_and_pre_releases_only_as_ends():
    listed = ["4.36.0", "4.37.2", "4.38.0rc1", "4.38.0", "4.37.0", "4.38.2", "4.9.0", "not-a-version"]
    assert releases_between(listed, "4.37.0", "4.38.2") == ["4.37.0", "4.37.2", "4.38.0", "4.38.2"]
    assert releases_between(listed, "4.38.0rc1", "4.38.2") == ["4.38.0rc1", "4.38.0", "4.38.2"]
    # A release that mended something: what was worse came earlier.
    assert releases_between(listed, "4.38.0", "4.37.0") == ["4.38.0", "4.37.2", "4.37.0"]


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
