"""Worktrees of a repository, which leave it as it was."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from pytest_gpumem.base.errors import GitError, StopSignal
from pytest_gpumem.base.processes import Stop
from pytest_gpumem.tools.checkout import Checkout, clear_leftovers, temporary_folder, worktrees

IDENTITY = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.org", "-c", "commit.gpgsign=false")


def git(folder, *arguments):
    command = ["git", *IDENTITY, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def commit(folder, **files):
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "some")


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "a project"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    commit(folder, model="first")
    return folder


@pytest.fixture
def checkout(repository):
    return Checkout.around(repository)


def both(checkout, base="HEAD", head="HEAD"):
    return {"base": checkout.revision(base), "head": checkout.revision(head)}


def test_both_worktrees_exist_within_the_block_and_the_checkout_stays_unchanged(repository, checkout, tmp_path):
    commit(repository, model="second")
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch '{tmp_path / 'hooked'}'\n")
    hook.chmod(0o755)
    (repository / "model").write_text("third")
    before = git(repository, "status"), git(repository, "branch", "--all"), (repository / ".git/index").read_bytes()
    with temporary_folder() as folder:
        with worktrees(checkout, both(checkout, "HEAD~1"), folder, Stop()) as (made, notes):
            assert [(made[side] / "model").read_text() for side in ("base", "head")] == ["first", "second"]
            assert notes == []
            assert set(checkout.checkouts()) == {repository, *made.values()}
        assert checkout.checkouts() == [repository]
    assert not folder.exists()
    after = git(repository, "status"), git(repository, "branch", "--all"), (repository / ".git/index").read_bytes()
    assert after == before
    assert not (tmp_path / "hooked").exists()


def test_an_interrupt_after_the_first_worktree_removes_it_and_makes_no_second(repository, tmp_path):
    checkout, stop = Checkout.around(repository), Stop()
    stop.record(2)
    with pytest.raises(StopSignal), worktrees(checkout, both(checkout), tmp_path, stop):
        pass
    assert checkout.checkouts() == [repository]


def test_a_worktree_that_is_damaged_meanwhile_is_removed_all_the_same(repository, checkout, tmp_path):
    with worktrees(checkout, both(checkout), tmp_path, Stop()) as (made, _):
        (made["base"] / ".git").unlink()
        (made["head"] / "new").write_text("untracked")
    assert checkout.checkouts() == [repository]
    assert not any(path.exists() for path in made.values())


def test_a_worktree_that_stayed_locked_when_git_was_killed_is_removed_all_the_same(repository, checkout, tmp_path):
    with worktrees(checkout, both(checkout), tmp_path, Stop()) as (made, _):
        for path in made.values():
            git(repository, "worktree", "lock", "--reason", "initializing", str(path))
        (made["base"] / ".git").unlink()
    assert checkout.checkouts() == [repository]
    assert not any(path.exists() for path in made.values())


def test_another_worktree_that_is_not_there_at_the_moment_is_not_forgotten(repository, checkout, tmp_path):
    git(repository, "worktree", "add", "--quiet", "--detach", str(tmp_path / "on a disk"))
    (tmp_path / "on a disk").rename(tmp_path / "in a drawer")
    with worktrees(checkout, both(checkout), tmp_path, Stop()) as (made, _):
        (made["base"] / ".git").unlink()
    assert checkout.checkouts() == [repository, tmp_path / "on a disk"]


def test_worktrees_whose_temporary_folder_is_gone_are_forgotten(repository, checkout, tmp_path):
    for side in ("base", "head"):
        git(repository, "worktree", "add", "--quiet", "--detach", str(tmp_path / "gpumem-ab-1" / side))
    git(repository, "worktree", "lock", str(tmp_path / "gpumem-ab-1" / "base"))
    shutil.rmtree(tmp_path / "gpumem-ab-1")
    assert clear_leftovers(checkout) == 2
    assert checkout.checkouts() == [repository]
    assert clear_leftovers(checkout) == 0


@pytest.mark.skipif(os.name != "posix", reason="links need permissions on other systems")
@pytest.mark.parametrize("theirs", ["link", "writable"])
def test_a_folder_that_another_user_may_have_put_there_is_left_alone(checkout, tmp_path, monkeypatch, theirs):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    target = tmp_path / ("elsewhere" if theirs == "link" else "gpumem-ab-1")
    target.mkdir()
    (target / "running.lock").write_text("precious", encoding="utf-8")
    if theirs == "link":
        (tmp_path / "gpumem-ab-1").symlink_to(target)
    else:
        target.chmod(0o777)
    clear_leftovers(checkout)
    # Taking a lock empties the file.
    assert (target / "running.lock").read_text(encoding="utf-8") == "precious"


def test_a_worktree_of_ones_own_is_left_alone_whatever_its_folder_is_called(repository, checkout, tmp_path):
    mine = tmp_path / "gpumem-ab-experiments" / "base"
    git(repository, "worktree", "add", "--quiet", "--detach", str(mine))
    assert clear_leftovers(checkout) == 0
    assert checkout.checkouts() == [repository, mine]


def test_where_git_cannot_check_out_it_says_why(checkout, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "occupied").touch()
    with (
        pytest.raises(GitError, match=r"HEAD \(.*\) could not be checked out: .*already exists"),
        worktrees(checkout, both(checkout), tmp_path, Stop()),
    ):
        pass


def test_it_is_entered_from_a_sub_folder_whatever_a_git_hook_has_set(repository, monkeypatch):
    (repository / "sub").mkdir()
    monkeypatch.setenv("GIT_DIR", "/nowhere/.git")
    monkeypatch.setenv("GIT_INDEX_FILE", "/nowhere/index")
    checkout = Checkout.around(repository / "sub")
    assert (checkout.top, checkout.folder.as_posix()) == (repository, "sub")


def test_every_file_that_is_not_committed_counts(repository, checkout):
    assert checkout.uncommitted() == 0
    (repository / "model").write_text("changed")
    (repository / "new").mkdir()
    (repository / "new" / "one").touch()
    (repository / "new" / "two").touch()
    assert checkout.uncommitted() == 3


def test_a_shallow_clone_says_what_brings_the_revision(repository, tmp_path):
    commit(repository, model="second")
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{repository}", "shallow")
    with pytest.raises(GitError, match=r"no revision 'HEAD~1' in .*shallow; .*`git fetch --unshallow`"):
        Checkout.around(tmp_path / "shallow").revision("HEAD~1")


@pytest.fixture
def with_submodule(repository, tmp_path, monkeypatch):
    part = tmp_path / "part"
    part.mkdir()
    git(part, "init", "--quiet")
    commit(part, weights="some")
    monkeypatch.setenv("GIT_ALLOW_PROTOCOL", "file")
    git(repository, "submodule", "--quiet", "add", str(part), "parts")
    commit(repository)
    return repository


def test_submodules_of_the_checkout_are_filled_in_and_removed(with_submodule, tmp_path):
    checkout = Checkout.around(with_submodule)
    before = (with_submodule / ".git" / "config").read_text()
    with worktrees(checkout, both(checkout), tmp_path, Stop()) as (made, notes):
        assert (made["head"] / "parts" / "weights").read_text() == "some"
        assert notes == []
    assert checkout.checkouts() == [with_submodule]
    assert (with_submodule / ".git" / "config").read_text() == before


def test_submodules_that_cannot_be_had_are_told(with_submodule, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_ALLOW_PROTOCOL", "none")
    checkout = Checkout.around(with_submodule)
    with worktrees(checkout, both(checkout), tmp_path, Stop()) as (_, notes):
        assert len(notes) == 2
        assert "its submodules could not be checked out: " in notes[0]


def test_files_of_git_lfs_without_git_lfs_are_told(repository, checkout, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    (repository / ".gitattributes").write_text("*.bin filter=lfs diff=lfs merge=lfs\n")
    commit(repository)
    with worktrees(checkout, both(checkout, "HEAD~1"), tmp_path, Stop()) as (_, notes):
        assert [note.partition(": ")[2] for note in notes] == [
            "files from Git LFS contain pointers instead of data, because git-lfs is not set up (git lfs install)"
        ]
