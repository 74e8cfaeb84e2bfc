"""The branch that a repository's changes go to: its remote's, a usual one, or the one that is checked out."""

from __future__ import annotations

import pytest

from pytest_gpumem.base.git import default_branch
from tests.git_store import Repository


@pytest.fixture
def repository(tmp_path) -> Repository:
    made = Repository(tmp_path / "project")
    made.git("commit", "--quiet", "--allow-empty", "--message=first")
    return made


def test_changes_go_to_the_branch_of_the_remote(repository, tmp_path):
    repository.git("branch", "trunk/2")
    repository.git("clone", "--quiet", "--branch=trunk/2", ".", str(tmp_path / "there"))
    there = tmp_path / "there"
    assert default_branch(there) == "main", "which its remote has checked out, and not what is checked out here"
    repository.git("checkout", "--quiet", "trunk/2")
    repository.git("clone", "--quiet", ".", str(tmp_path / "another"))
    assert default_branch(tmp_path / "another") == "trunk/2"


@pytest.mark.parametrize(
    ("branches", "expected"),
    [(["main", "master", "topic"], "main"), (["master", "topic"], "master"), (["dev", "topic"], "topic")],
)
def test_without_a_remote_they_go_to_the_usual_branch_or_what_is_checked_out(repository, branches, expected):
    repository.git("checkout", "--quiet", "-b", "topic")
    repository.git("branch", "--delete", "--force", "main")
    for name in {*branches} - {"topic"}:
        repository.git("branch", name)
    assert default_branch(repository.path) == expected


def test_a_repository_without_a_commit_has_the_branch_that_its_first_goes_to(tmp_path):
    empty = Repository(tmp_path / "empty")
    empty.git("symbolic-ref", "HEAD", "refs/heads/develop")
    assert default_branch(empty.path) == "develop"
