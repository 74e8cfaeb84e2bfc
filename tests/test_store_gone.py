"""A store that git knows and that is gone: it is restored, and not recorded anew."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from pytest_gpumem.base.git import restoring_command

MARKED = "@pytest.mark.gpumem\ndef test_it():\n    torch.ones(1000)\n"
RESTORE = "git checkout -- gpumem-baselines"


def git(folder, *words: str) -> None:
    named = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", *named, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def committed(project):
    """A project whose baselines are committed."""
    project.write(MARKED)
    project.settings('[tool.gpumem]\ndevice = "cpu"\ntime = false\n')
    assert project.run("--gpumem-update=new").ret == 0
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "Record"]):
        git(project.path, *words)
    return project


SAID = f"gpumem-baselines is gone, and git has it: `{RESTORE}` restores it"


@pytest.mark.parametrize("quiet", [(), ("-q",)], ids=["by default", "quiet"])
def test_a_gate_names_the_command_before_it_asks_to_record_anew(committed, quiet):
    shutil.rmtree(committed.store)
    result = committed.run("--gpumem-baseline", *quiet)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"gpumem: {SAID}", "gpumem: nothing was gated: *"])


def test_a_session_that_records_anew_is_green_and_says_so(committed):
    shutil.rmtree(committed.store)
    result = committed.run("--gpumem-update=new")
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"gpumem store: {SAID}", "gpumem store: 1 baseline written (new), *"])


def test_a_store_that_is_there_or_was_never_committed_is_not_told_of(committed):
    assert "git checkout" not in committed.run("--gpumem-baseline").stdout.str()
    git(committed.path, "rm", "-r", "--quiet", "gpumem-baselines")
    shutil.rmtree(committed.store)
    assert "git checkout" not in committed.run("--gpumem-baseline").stdout.str()


@pytest.mark.parametrize("words", [["show"], ["history", "test_it"], ["doctor"]], ids=lambda words: words[0])
def test_a_command_that_reads_the_store_names_the_command(committed, words):
    shutil.rmtree(committed.store)
    done = committed.gpumem(*words)
    assert RESTORE in done.stdout + done.stderr


def test_the_command_counts_from_the_current_folder_and_is_quoted(tmp_path, monkeypatch):
    folder = tmp_path / "a b" / "base lines"
    folder.mkdir(parents=True)
    (folder / "x.toml").write_text("x = 1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert restoring_command(folder) is None
    for words in (["init", "--quiet"], ["add", "--all"]):
        git(tmp_path, *words)
    shutil.rmtree(folder.parent)
    assert restoring_command(folder) == "git checkout -- 'a b/base lines'"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert restoring_command(folder) == "git checkout -- '../a b/base lines'"


def test_outside_of_a_repository_there_is_no_command(tmp_path):
    assert restoring_command(tmp_path / "gone") is None
