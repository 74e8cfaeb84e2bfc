"""That the code of the worktree is what runs."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest

from pytest_gpumem.base.processes import Stop
from pytest_gpumem.tools.ab.collector import outside_modules
from pytest_gpumem.tools.ab.runs import Runner, python_path, reason_to_refuse
from pytest_gpumem.tools.checkout import Checkout


@pytest.fixture
def places(tmp_path):
    """A checkout that was entered in ``lib one``, and a worktree with the same folders."""
    top, worktree = tmp_path / "check out", tmp_path / "work tree"
    for folder in ("lib one/src", "src", "python"):
        (top / folder).mkdir(parents=True)
        (worktree / folder).mkdir(parents=True)
    return Checkout(top, (top / "lib one").relative_to(top)), worktree


def test_the_folder_of_the_worktree_comes_first_then_its_top_each_with_its_src(places):
    checkout, worktree = places
    path = python_path(worktree, checkout, ["/usr/lib/python3"], None).split(os.pathsep)
    expected = [worktree / "lib one", worktree / "lib one" / "src", worktree, worktree / "src"]
    assert path == [str(folder) for folder in expected]


def test_a_path_that_an_editable_install_added_is_looked_for_in_the_worktree(places):
    checkout, worktree = places
    path = python_path(worktree, checkout, [str(checkout.top / "python"), str(checkout.top / "gone")], None)
    assert path.split(os.pathsep)[-1] == str(worktree / "python")


def test_what_pythonpath_says_of_other_places_stays_and_of_the_checkout_is_moved(places):
    checkout, worktree = places
    inherited = os.pathsep.join(["/elsewhere", str(checkout.top / "src"), "relative"])
    path = python_path(worktree, checkout, [], inherited).split(os.pathsep)
    assert path[-2:] == ["/elsewhere", "relative"]
    assert str(checkout.top / "src") not in path


def test_an_environment_within_the_checkout_is_not_looked_for_in_the_worktree(places, monkeypatch):
    checkout, worktree = places
    packages = checkout.top / ".venv" / "lib"
    (worktree / ".venv" / "lib").mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(checkout.top / ".venv"))
    assert str(worktree / ".venv" / "lib") not in python_path(worktree, checkout, [str(packages)], None)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        (
            "--gpumem-update=new",
            "leave out --gpumem-update: this command neither reads nor writes baselines",
        ),
        ("--gpumem-baseline", "leave out --gpumem-baseline: "),
        ("{top}/tests", "/tests is a path into the checkout"),
        ("--rootdir={top}", "use a relative path"),
    ],
)
def test_arguments_that_would_defeat_the_comparison_are_refused(places, argument, said):
    checkout, _ = places
    assert said in reason_to_refuse(["-q", argument.format(top=checkout.top)], checkout.top)


def test_other_arguments_are_not(places):
    checkout, _ = places
    arguments = [
        "tests/test_a.py::test_b",
        "-k",
        "a or b",
        "--no-gpumem-time",
        "-n2",
        "/elsewhere/tests",
        "-o",
        "x=/tmp",
    ]
    assert reason_to_refuse(arguments, checkout.top) is None


def test_a_run_adds_nothing_to_the_summary_of_a_job(places, monkeypatch, tmp_path):
    checkout, worktree = places
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    runner = Runner(checkout, (), None, tmp_path, Stop(), ())
    assert "GITHUB_STEP_SUMMARY" not in runner._environment(worktree, tmp_path, tmp_path / "lines")


@pytest.fixture
def loaded(monkeypatch):
    """Makes a module that was loaded from a file."""

    def load(name, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        module = ModuleType(name)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, name, module)

    return load


def test_modules_of_another_checkout_are_strangers(tmp_path, loaded):
    home, other = tmp_path / "home", tmp_path / "other"
    loaded("gpumem_ab_mine", home / "mine.py")
    loaded("gpumem_ab_theirs", other / "theirs.py")
    loaded("gpumem_ab_elsewhere", tmp_path / "other-library" / "elsewhere.py")
    assert outside_modules(str(home), [str(other)]) == {"gpumem_ab_theirs": str(other / "theirs.py")}


def test_a_worktree_within_the_checkout_is_no_stranger(tmp_path, loaded):
    loaded("gpumem_ab_mine", tmp_path / "checkout" / "tmp" / "home" / "mine.py")
    assert outside_modules(str(tmp_path / "checkout" / "tmp" / "home"), [str(tmp_path / "checkout")]) == {}


def test_an_environment_within_the_checkout_is_no_stranger(tmp_path, loaded, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    loaded("gpumem_ab_installed", tmp_path / ".venv" / "lib" / "installed.py")
    loaded("gpumem_ab_theirs", tmp_path / "theirs.py")
    assert list(outside_modules(str(tmp_path / "home"), [str(tmp_path)])) == ["gpumem_ab_theirs"]


def test_an_environment_around_the_checkout_hides_no_stranger(tmp_path, loaded, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    loaded("gpumem_ab_theirs", tmp_path / "checkout" / "theirs.py")
    assert list(outside_modules(str(tmp_path / "home"), [str(tmp_path / "checkout")])) == ["gpumem_ab_theirs"]


def test_a_link_into_the_checkout_is_seen_through(tmp_path, loaded):
    (tmp_path / "checkout").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "checkout")
    loaded("gpumem_ab_theirs", tmp_path / "link" / "theirs.py")
    (tmp_path / "checkout" / "linked.py").touch()
    (tmp_path / "linked.py").symlink_to(tmp_path / "checkout" / "linked.py")
    loaded("gpumem_ab_linked", tmp_path / "linked.py")
    assert outside_modules(str(tmp_path / "home"), [str(tmp_path / "checkout")]) == {
        "gpumem_ab_linked": str(tmp_path / "checkout" / "linked.py"),
        "gpumem_ab_theirs": str(tmp_path / "checkout" / "theirs.py"),
    }
