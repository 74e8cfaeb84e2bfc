"""The state of a checkout, by which an interrupted search knows its own runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pytest_gpumem.tools.bisect import state
from pytest_gpumem.tools.bisect.state import state_of
from pytest_gpumem.tools.checkout import Checkout


@pytest.fixture
def checkout(tmp_path):
    """A folder without git, whose test has a module in a folder."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "net.py").write_text("WIDTH = 64\n", encoding="utf-8")
    (tmp_path / "test_it.py").touch()
    return Checkout(tmp_path, Path())


def write(checkout, name):
    path = checkout.top / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("WIDTH = 65\n", encoding="utf-8")


@pytest.mark.parametrize(
    "name", ["models/net.py", "models/new.py", "conftest.py", "pyproject.toml", "a/b/setup.cfg", "pytest.ini"]
)
def test_without_git_code_that_was_edited_is_another_state(checkout, name):
    before = state_of(checkout)
    assert state_of(checkout) == before
    write(checkout, name)
    os.utime(checkout.top / name, ns=(0, 10**9))
    assert state_of(checkout) != before


@pytest.mark.parametrize(
    "name", ["report.json", ".cache/a.py", "env/lib/a.py", "lib/site-packages/a.py", "__pycache__/a.py"]
)
def test_without_git_what_is_no_code_of_the_project_does_not_count(checkout, name):
    write(checkout, "env/pyvenv.cfg")
    before = state_of(checkout)
    write(checkout, name)
    assert state_of(checkout) == before


def test_a_link_that_leads_nowhere_does_not_count(checkout):
    before = state_of(checkout)
    (checkout.top / "gone.py").symlink_to("nowhere.py")
    assert state_of(checkout) == before


def test_of_more_folders_than_are_looked_into_no_state_is_that_of_before(checkout, monkeypatch):
    monkeypatch.setattr(state, "_MOST_FOLDERS", 1)
    assert state_of(checkout) != state_of(checkout)


def test_a_repository_without_a_commit_has_the_state_of_its_files(checkout):
    subprocess.run(["git", "init", "--quiet"], cwd=checkout.top, check=True)
    before = state_of(checkout)
    write(checkout, "models/net.py")
    assert state_of(checkout) != before
