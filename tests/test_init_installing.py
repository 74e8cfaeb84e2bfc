"""The requirements that the proposed workflow installs: pip can install them."""

from __future__ import annotations

import itertools
import json
import sys
from email.message import Message
from pathlib import Path

import pytest

from pytest_gpumem import __version__
from pytest_gpumem.tools.init import workflow as workflows
from pytest_gpumem.tools.init.installing import Sources, lines_of, unfit_of
from pytest_gpumem.tools.init.project_tests import ProjectTest, ProjectTests
from pytest_gpumem.tools.init.proposal import Machine, Project, proposal
from pytest_gpumem.tools.init.proposal import _device as proposed_device
from pytest_gpumem.tools.init.workflow import PLACEHOLDER, RUNNERS, account, gate_lines, workflow

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = '[build-system]\nbuild-backend = "uv_build"\n[project]\nname = "net"\nversion = "1"\n'
PLAIN = '[project]\nname = "net"\nversion = "1"\n'


def lines(settings="", release="2.13.0", **more):
    return list(lines_of(Sources(tomllib.loads(settings), **more), release))


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        (PACKAGE, {"folders": ["net", "data"]}),
        (PLAIN, {"folders": ["net", "tests", "docs", ".git", "not-a-name"]}),
        (PLAIN, {"folders": ["src", "data", "images"]}),
        (PLAIN + '[tool.setuptools.packages.find]\nwhere = ["pkg"]\n', {"folders": ["pkg", "data"]}),
        ('[project]\nname = "net"\ndynamic = ["version"]\n', {}),
        ('[tool.poetry]\nname = "net"\n', {}),
        ("", {"has_setup_py": True, "folders": ["net", "data"]}),
        ("", {"setup_cfg": "[metadata]\nname = net\n"}),
    ],
)
def test_a_package_is_installed(settings, more):
    assert lines(settings, **more) == ["-e ."]


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ("", {}),
        ("[tool.black]\nline-length = 100\n", {"folders": ["net"]}),
        ('[build-system]\nrequires = ["setuptools"]\n', {}),
        ('[project]\nname = "net"\n', {}),
        (PLAIN, {"folders": ["net", "data"]}),
        (PLAIN + "[tool.uv]\npackage = false\n", {}),
        ('[tool.poetry]\nname = "net"\npackage-mode = false\n', {}),
        ("", {"setup_cfg": "[tool:pytest]\ntestpaths = tests\n"}),
        ("", {"setup_cfg": "no section\n"}),
    ],
)
def test_a_project_that_is_no_package_is_not_installed(settings, more):
    assert lines(settings, **more) == []


def test_a_project_that_is_no_package_has_its_dependencies_installed():
    settings = f'{PLAIN}dependencies = ["torch>=2", "numpy"]\noptional-dependencies = {{test = ["timm"]}}\n'
    assert lines(settings, folders=["net", "data"]) == ["numpy", "timm"]


def test_files_of_requirements_are_used_by_their_names():
    files = {"requirements.txt": "numpy\n", "requirements-dev.txt": "timm\n", "tests/requirements.txt": "einops\n"}
    assert lines(files=files) == ["-r requirements.txt", "-r requirements-dev.txt", "-r tests/requirements.txt"]


def test_the_extra_and_the_group_of_its_tests_are_installed():
    settings = f'{PACKAGE}optional-dependencies = {{dev = ["x"], docs = ["y"]}}\n'
    groups = '[dependency-groups]\ndev = ["tokenizers", {include-group = "docs"}]\ndocs = ["z"]\n'
    assert lines(settings) == ["-e .[dev]"]
    assert lines(settings + groups) == ["-e .[dev]", "tokenizers"]


def test_an_extra_that_asks_for_another_release_of_torch_stands_there_line_by_line():
    settings = (
        f'{PACKAGE}optional-dependencies = {{test = ["pytest", "torch==2.4.0", "torchvision==0.19.0", "timm"]}}\n'
    )
    assert lines(settings) == ["-e .", "pytest", "timm"]
    assert lines(settings, release="2.4.0") == ["-e .[test]"]
    assert lines(settings, release=None) == ["-e .[test]"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torch==2.4.0", ["torch==2.4.0"]),
        ("torch<2.6; sys_platform == 'no such'", []),
        ("torch>=2.2", []),
        ("torchvision==0.19.0", []),
        ("# torch==2.4.0", []),
    ],
)
def test_a_requirement_of_another_release_of_torch_is_told(line, expected):
    sources = Sources(files={"requirements.txt": f"{line}\n"})
    assert [one for _, one in unfit_of(sources, "2.13.0")] == expected
    package = Sources(
        tomllib.loads(f"{PACKAGE}dependencies = [{line!r}]\n" if '"' not in line and "'" not in line else PACKAGE)
    )
    assert [one for _, one in unfit_of(package, "2.13.0")] == expected


def test_no_line_is_there_twice():
    assert gate_lines("2.13.0", ["pytest", "timm"])[-2:] == [gate_lines("2.13.0", [])[-1], "timm"]


# The device


def test_the_page_of_the_command_names_every_device_that_is_proposed():
    page = (Path(__file__).parents[1] / "docs" / "reference" / "command-init.md").read_text(encoding="utf-8")
    truths = list(itertools.product((True, False), repeat=4))
    devices = {
        proposed_device(ProjectTests((), on_gpu=on_gpu), Machine(has_gpu, can_emulate, has_cpu))[0]
        for on_gpu, has_gpu, can_emulate, has_cpu in truths
    }
    assert devices == {"cpu", "cuda", "auto", "emulated:h100"}
    assert [device for device in devices if f"`{device}`" not in page] == []


# Where it is installed from


def proposed(**here):
    found = ProjectTests((ProjectTest("test_it.py::test_a", True),))
    return proposal(Project(), found, Machine(torch="2.13.0", **here), None)


def test_files_that_name_no_account_are_told_with_what_to_replace():
    made = proposed()
    files = ("requirements-gpumem.txt", ".github/workflows/gpumem.yml", ".github/workflows/gpumem-comment.yml")
    assert made.installs_from_nowhere == files
    (note,) = [one for one in made.notes if one.startswith(f"{PLACEHOLDER} stands for the GitHub account")]
    assert f"replace it in {' and '.join(files)}" in note
    there = Project(workflow="w.yaml", workflow_text=f"uses: {PLACEHOLDER}/pytest-gpumem/x@v1")
    assert proposal(there, ProjectTests(()), Machine(account="me"), None).installs_from_nowhere == ("w.yaml",)


def test_files_that_are_there_are_told_by_their_paths_from_the_project_folder():
    gate, comment = ".github/workflows/gpumem.yml", ".github/workflows/gpumem-comment.yml"
    text = f"uses: {PLACEHOLDER}/pytest-gpumem/x@v1"
    found = ProjectTests((ProjectTest("test_it.py::test_a", True),))
    project = Project(
        folder="packages/a b",
        workflow=gate,
        workflow_text=text,
        comment_workflow=comment,
        comment_workflow_text=text,
    )
    made = proposal(project, found, Machine(account="me"), None)
    assert made.installs_from_nowhere == (f"../../{gate}", f"../../{comment}")
    assert any(note.startswith(f"../../{gate} exists and is not changed") for note in made.notes)


def test_files_name_the_account_that_the_package_is_from():
    made = proposed(account="somebody")
    texts = {edit.path: edit.after for edit in made.edits}
    assert "git+https://github.com/somebody/pytest-gpumem@" in texts["requirements-gpumem.txt"]
    assert "uses: somebody/pytest-gpumem@v" in texts[".github/workflows/gpumem.yml"]
    assert "uses: somebody/pytest-gpumem/comment@v" in texts[".github/workflows/gpumem-comment.yml"]
    assert made.installs_from_nowhere == ()
    assert not any(PLACEHOLDER in text for text in (*texts.values(), *made.notes))


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        (["Homepage, https://github.com/me/pytest-gpumem"], "me"),
        (["Documentation, https://me.github.io/pytest-gpumem/", "Source, https://github.com/you/pytest-gpumem"], "you"),
        (["Source, https://example.org/pytest-gpumem"], PLACEHOLDER),
        (None, PLACEHOLDER),
    ],
)
def test_the_account_is_that_of_the_packages_metadata(monkeypatch, urls, expected):
    message = Message()
    for url in urls or ():
        message["Project-URL"] = url
    monkeypatch.setattr(workflows, "metadata", lambda name: message)
    assert account() == expected


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("direct", "expected"),
    [
        ({"url": "https://github.com/me/pytest-gpumem", "vcs_info": {"vcs": "git", "commit_id": COMMIT}}, COMMIT),
        ({"url": "https://github.com/me/pytest-gpumem.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}}, COMMIT),
        ({"url": "https://example.org/me/pytest-gpumem", "vcs_info": {"vcs": "git", "commit_id": COMMIT}}, None),
        ({"url": "https://github.com/me/pytest-gpumem", "vcs_info": {"vcs": "git", "commit_id": "main"}}, None),
        ({"url": "file:///a/folder", "dir_info": {"editable": True}}, None),
        ([], None),
        (None, None),
    ],
)
def test_the_actions_are_pinned_to_the_commit_that_was_installed(monkeypatch, direct, expected):
    class Installed:
        def read_text(self, name):
            return None if direct is None else json.dumps(direct)

    monkeypatch.setattr(workflows, "distribution", lambda name: Installed())
    assert workflows.commit() == expected
    texts = [edit.after for edit in proposed(account="me", commit=expected).edits if edit.path.startswith(".github")]
    used = [line for text in texts for line in text.splitlines() if "uses: me/" in line]
    assert len(used) == 2
    pin = f"@v{__version__}" if expected is None else f"@{COMMIT} # v{__version__}"
    assert all(line.endswith(pin) for line in used)


@pytest.mark.parametrize("runner", [one for one in RUNNERS if one != "self-hosted"])
def test_the_workflow_installs_the_python_that_records_the_baselines(runner):
    assert 'python-version: "3.14"' in workflow(runner, "r.txt", ".", python="3.14")
    assert 'python-version: "3.12"' in workflow(runner, "r.txt", ".")


def test_the_workflow_runs_for_the_branch_that_changes_go_to():
    assert "push: {branches: [main]}" in workflow("emulated", "r.txt", ".")
    assert 'push: {branches: ["master"]}' in workflow("emulated", "r.txt", ".", branch="master")
    tests = ProjectTests((ProjectTest("test_a.py::test_a", True),))
    made = proposal(
        Project(settings=PLAIN, branch="dev/2"), tests, Machine(can_emulate=True, torch="2.13.0"), "emulated"
    )
    assert any('push: {branches: ["dev/2"]}' in edit.after for edit in made.edits)
