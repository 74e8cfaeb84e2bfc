"""A red gate names the lines that have changed since its baseline was accepted, as far as git knows the code of then."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace

import pytest

import pytest_gpumem.base.git
from pytest_gpumem.base.errors import GitError
from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.values.composition import Row
from pytest_gpumem.judging.changed_code.sources import Commit, Folders
from pytest_gpumem.judging.gate.baseline import Key
from pytest_gpumem.judging.gate.difference import Change, Difference
from pytest_gpumem.judging.gate.verdict import Origin, Verdict
from pytest_gpumem.plugin.runtest.since_baseline import SinceBaselines
from tests.git_store import Repository

HELPER = """\
def widened(x, factor):
    return torch.cat([x] * factor)
"""
MODEL = """\
from helper import widened


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(64, 64)

    def forward(self, x):
        x = self.fc(x)
        wide = widened(
            x,
            factor=2,
        )
        return (wide * wide).sum()
"""
TEST = """\
from model import Net


def test_step(gpumem):
    gpumem.train_step(Net(), torch.zeros(256, 64))
"""
LETS_GO = """\
        with torch.no_grad():
            large = widened(x, 16)
            mean = large.mean()
            del large
            most = torch.cat([x] * 20).mean()
        return x.sum() + mean + most
"""
DETACHED = """\
        hidden = self.fc(x)
        hidden = hidden.detach()
        return self.head(hidden).sum()
"""
DEEP = """\
torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 64))
        self.head = torch.nn.Linear(64, 1)"""
WIDE = """\
        x = self.fc(x)
        wide = widened(
            x,
            factor=2,
        )
        return (wide * wide).sum()
"""
CALL, CAT = "model.py:15", "helper.py:6"


@pytest.fixture
def repository(project):
    """A project whose baselines were committed with its code."""
    for name, source in (("helper.py", HELPER), ("model.py", MODEL), ("test_it.py", TEST)):
        project.write(source, name)
    found = Repository(project.path)
    project.settings("[tool.pytest.ini_options]\npythonpath = ['.']\n")
    found.commit("The code")
    accept(project)
    found.commit("The baselines")
    return found


def accept(project, *arguments: str) -> None:
    result = project.run("--gpumem-update=all", *arguments, separate=True)
    assert result.ret == 0, result.stdout.str()


def edit(project, old: str, new: str, name: str = "model.py") -> None:
    path = project.path / name
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def red(project) -> str:
    result = project.run("--gpumem-baseline", separate=True)
    assert result.ret == 1, result.stdout.str()
    return result.stdout.str()


def grown(text: str) -> list[str]:
    """The rows of the table of what grew."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if "what grew" in line)
    return [line for line in lines[first + 1 :] if re.search(r"[+-][\d.]+ [kM]?B", line)][:5]


def test_a_changed_argument_of_a_caller_is_named_before_the_line_that_allocates(project, repository):
    edit(project, "factor=2", "factor=6")
    first = grown(red(project))[0]
    assert f"{CALL}, which calls {CAT}" in first
    assert "changed line" in first


def test_a_result_that_is_no_longer_deleted_is_named_with_what_is_gone(project, repository):
    edit(project, "        return (wide * wide).sum()\n", LETS_GO)
    shutil.rmtree(project.store)
    accept(project)
    repository.commit("Let go of what is large, and record anew")
    edit(project, "            del large\n", "")
    first = grown(red(project))[0]
    assert f"model.py:20, which calls {CAT}" in first
    assert "changed line: `del large` is gone" in first


def test_a_removed_detach_is_named_with_the_calls_whose_activations_are_kept(project, repository):
    edit(project, "torch.nn.Linear(64, 64)", DEEP)
    edit(project, WIDE, DETACHED)
    shutil.rmtree(project.store)
    accept(project)
    repository.commit("Detach, and record anew")
    edit(project, "        hidden = hidden.detach()\n", "")
    text = red(project)
    sentence = next(line for line in text.splitlines() if "Backward did not reach" in line)
    assert "`fc` (called at model.py:15)" in sentence
    assert sentence.endswith(", because `hidden.detach()` is gone.")


def test_what_grew_at_lines_that_are_as_they_were_is_not_said_to_have_changed(project, repository):
    project.write("FACTOR = 2\n", "sizes.py")
    edit(project, "from helper import widened", "import sizes\nfrom helper import widened")
    edit(project, "factor=2", "factor=sizes.FACTOR")
    shutil.rmtree(project.store)
    accept(project)
    repository.commit("Move a number, and record anew")
    edit(project, "FACTOR = 2", "FACTOR = 6", "sizes.py")
    text = red(project)
    assert any(CAT in line for line in grown(text))
    assert "changed line" not in text
    assert "which calls" not in text


def test_code_that_was_committed_with_its_baseline_has_not_changed_since(project, repository):
    # The entry names the commit before, which was checked out when it was written.
    edit(project, "self.fc(x)", "self.fc(x * 1)")
    accept(project)
    repository.commit("Multiply, and accept what that takes")
    edit(project, "factor=2", "factor=6")
    marked = [line for line in grown(red(project)) if "changed line" in line]
    assert marked
    assert all(CALL in line for line in marked)


def test_a_baseline_that_is_not_committed_yet_is_of_the_commit_that_it_names(project, repository):
    edit(project, "self.fc(x)", "self.fc(x * 1)")
    repository.commit("Multiply")
    accept(project)
    edit(project, "factor=2", "factor=6")
    assert f"{CALL}, which calls {CAT}" in grown(red(project))[0]


def test_a_file_that_was_renamed_since_is_compared_with_what_it_was(project, repository):
    (project.path / "model.py").rename(project.path / "network.py")
    edit(project, "from model", "from network", "test_it.py")
    edit(project, "factor=2", "factor=6", "network.py")
    marked = [line for line in grown(red(project)) if "network.py" in line]
    assert "network.py:15" in marked[0]
    assert not [line for line in marked if re.search(r"network\.py:1[49]\b", line) and "changed line" in line]


def without_git(project, repository, monkeypatch):
    shutil.rmtree(project.path / ".git")


def git_is_missing(project, repository, monkeypatch):
    monkeypatch.setenv("PATH", str(project.path / "nothing"))


def of_a_lost_commit(project, repository, monkeypatch):
    for file in project.store.rglob("*.toml"):
        file.write_text(re.sub(r'commit = "\w+"', 'commit = "0123456789"', file.read_text()), encoding="utf-8")


def of_a_commit_that_is_an_option(project, repository, monkeypatch):
    for file in project.store.rglob("*.toml"):
        file.write_text(re.sub(r'commit = "\w+"', 'commit = "--help"', file.read_text()), encoding="utf-8")


@pytest.mark.parametrize("lost", [without_git, git_is_missing, of_a_lost_commit, of_a_commit_that_is_an_option])
def test_without_the_code_of_then_the_gate_says_what_it_said_without_it(project, repository, lost, monkeypatch):
    edit(project, "factor=2", "factor=6")
    lost(project, repository, monkeypatch)
    text = red(project)
    assert any(CAT in line for line in grown(text))
    assert "changed line" not in text
    assert "Traceback" not in text


def test_a_shallow_clone_has_no_code_of_then(project, repository, tmp_path):
    repository.commit("Another")
    clone = tmp_path / "clone"
    subprocess.run(
        ["git", "clone", "--quiet", "--depth=1", f"file://{project.path}", str(clone)], check=True, capture_output=True
    )
    shutil.rmtree(project.path / ".git")
    shutil.move(clone / ".git", project.path / ".git")
    edit(project, "factor=2", "factor=6")
    assert "changed line" not in red(project)


def test_a_gate_that_is_green_asks_git_for_nothing(project, repository, monkeypatch):
    asked = []
    answer = pytest_gpumem.base.git._output
    monkeypatch.setattr(
        pytest_gpumem.base.git, "_output", lambda *given, **more: (asked.append(given), answer(*given, **more))[1]
    )
    assert project.run("--gpumem-baseline").ret == 0
    assert asked == []
    edit(project, "factor=2", "factor=6")
    monkeypatch.delitem(__import__("sys").modules, "model", raising=False)
    assert project.run("--gpumem-baseline").ret == 1
    assert asked


def test_counts_that_grew_at_a_changed_line_say_so(project, repository):
    edit(project, "        x = self.fc(x)\n", "        x = self.fc(x)\n        x.sum().item()\n")
    text = red(project)
    row = next(line for line in text.splitlines() if "model.py:15" in line and "scalar" in line)
    assert "changed line" in row


def test_no_callers_are_kept_where_they_have_been_used(project, repository):
    edit(project, "factor=2", "factor=6")
    result = project.run("--gpumem-baseline", "--junitxml=report.xml", separate=True)
    assert result.ret == 1
    (verdict,) = project.verdicts().values()
    rows = verdict["verdicts"][0]["measurement"]["explanation"]["peak"]["rows"]
    assert {row.count(" | ") for row in rows} == {6}


def test_without_git_a_package_whose_release_differs_is_named_in_place_of_its_helper(tmp_path):
    environment = Environment("cpu", "CPU", {"torch": "2.11"}, {"lib": "2.0", "einops": "0.8"})
    origin = Origin("2026-11-02", "CPU", "2.11", packages={"lib": "1.0", "einops": "0.8"})
    row = Row("activation", 8, site="t.py:1", library="einops 0.8: ops.py:9", callers=(("lib 2.0: m.py:5", "t.py:1"),))
    verdict = Verdict(
        Measurement("call", Workload("call"), environment, {}),
        (),
        origin,
        difference=Difference(0, 8, (Change(None, row),)),
    )
    key = Key("t.py", "test_t", "call")
    (change,) = SinceBaselines(tmp_path, None).marked(verdict, key, "cpu").difference.changes
    assert (change.after.named, change.reason) == ("lib 2.0: m.py:5", "")
    same = replace(verdict, origin=replace(origin, packages={"lib": "2.0"}))
    assert SinceBaselines(tmp_path, None).marked(same, key, "cpu") == same


# The code of a commit.


@pytest.fixture
def committed(tmp_path):
    """A repository with a project in its folder ``sub``, and in that a link, a submodule's place and another repository."""
    found = Repository(tmp_path / "repository")
    sub = found.path / "sub"
    sub.mkdir()
    (sub / "model.py").write_bytes(b"x = 1\r\ny = 2\r\n")
    (sub / "link.py").symlink_to("model.py")
    (tmp_path / "secret.py").write_text("z = 3\n")
    commit = found.commit("First")
    return Commit.read(found.path, sub, commit[:9]), found


def test_a_file_of_a_commit_is_read_from_pytests_root_directory(committed):
    commit, _ = committed
    assert commit.lines("model.py:1") == ["x = 1", "y = 2", ""]
    assert list(commit.neighbours("model.py:1")) == ["link.py:1", "model.py:1"]


@pytest.mark.parametrize(
    "line", ["lib 2.0: model.py:1", "../secret.py:1", "/etc/hostname:1", "sub/../../secret.py:1", "link.py:1", ":1"]
)
def test_what_is_no_file_of_the_project_is_not_known(committed, line):
    assert committed[0].lines(line) is None


def test_a_file_that_a_commit_lacks_is_empty_unless_it_belongs_to_another_repository(committed):
    commit, repository = committed
    assert commit.lines("added.py:1") == []
    nested = repository.path / "sub" / "nested"
    (nested / ".git").mkdir(parents=True)
    assert commit.lines("nested/model.py:1") is None


@pytest.mark.parametrize("name", ["HEAD", "--help", "0123456", ""])
def test_a_commit_that_the_clone_lacks_is_refused(committed, name):
    _, repository = committed
    with pytest.raises(GitError):
        Commit.read(repository.path, repository.path / "sub", name)


def test_a_link_that_leads_out_of_the_project_is_not_followed(tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "secret.py").write_text("z = 3\n")
    (tmp_path / "project" / "link.py").symlink_to(tmp_path / "secret.py")
    folders = Folders(tmp_path / "project")
    assert folders.lines("link.py:1") == []
    assert folders.lines("../secret.py:1") == []
    assert folders.lines(f"{tmp_path}/secret.py:1") == []
