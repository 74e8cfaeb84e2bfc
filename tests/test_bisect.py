"""``gpumem bisect`` in histories with branches, and in those that a line of ``git log`` does not tell as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile

import pytest

from pytest_gpumem.base.requirements import installers
from pytest_gpumem.tools.bisect.candidates import commits, graph_of
from pytest_gpumem.tools.checkout import Checkout
from tests.git_store import Repository
from tests.packages_here import make_wheel, only_from
from tests.support.processes import fork_runs
from tests.test_ab import PLAIN
from tests.test_upgrades import MB, Commits, gpumem


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """An empty repository. What lies in the caches is this test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("PYTEST_ADDOPTS", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    fork_runs(monkeypatch)
    made = Commits(tmp_path / "repository")
    monkeypatch.chdir(made.path)
    return made


def write(repository, name, text=""):
    """Commit a file under its name, and return the commit."""
    (repository.path / name).write_text(text, encoding="utf-8")
    repository.git("add", "--all")
    repository.git("commit", "--quiet", "--message", name)
    return head(repository)


def head(repository):
    return repository.git("rev-parse", "HEAD").strip()


@pytest.fixture
def merged(repository):
    """A branch of six commits that left before the culprit and is merged after it, and the commits by name.

    ``start`` is good; ``culprit`` needs more, ``branch-0`` to ``branch-5`` do not, and ``merge`` and ``last`` have both.
    """
    made = {}
    (repository.path / "shipped.py").write_text(f"PEAK = {10 * MB}\n", encoding="utf-8")
    made["fork"] = write(repository, "fork")
    repository.git("checkout", "--quiet", "-b", "feature")
    for number in range(6):
        made[f"branch-{number}"] = write(repository, f"branch-{number}")
    repository.git("checkout", "--quiet", "main")
    made["start"] = write(repository, "start")
    made["culprit"] = write(repository, "shipped.py", f"PEAK = {12 * MB}\n")
    repository.git("merge", "--quiet", "--no-ff", "--message=merge", "feature")
    made["merge"] = head(repository)
    made["last"] = write(repository, "last")
    return made


@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.thorough)])
def test_a_merged_branch_that_left_before_the_culprit_is_not_named(repository, merged, jobs):
    ends = ["--all", "--jobs", jobs, "--good", merged["start"], "--bad", "main"]
    result = gpumem("bisect", *ends, "test_it.py", "--", *PLAIN)
    assert result.exit_code == 0, result.output
    assert f"gpumem bisect: {merged['culprit'][:9]} shipped.py (Ada, " in result.stdout
    assert f"(+20.0 %), after {merged['start'][:9]}\n" in result.stdout
    assert result.stderr.count("1 measured in") <= 6


def test_a_culprit_on_a_merged_branch_is_compared_with_its_parent_there(repository, merged):
    """The branch left before the good end, whose history the first commit of the branch is not in."""
    repository.git("checkout", "--quiet", "-b", "another", merged["fork"])
    culprit = write(repository, "shipped.py", f"PEAK = {14 * MB}\n")
    repository.git("checkout", "--quiet", "-b", "together", merged["start"])
    repository.git("merge", "--quiet", "--no-ff", "--message=both", "another")
    result = gpumem("bisect", "--all", "--good", merged["start"], "--bad", "together", "test_it.py", "--", *PLAIN)
    assert result.exit_code == 0, result.output
    assert f"gpumem bisect: {culprit[:9]} shipped.py (Ada, " in result.stdout
    assert f"(+40.0 %), after {merged['fork'][:9]}\n" in result.stdout


def test_a_culprit_that_cannot_be_run_is_one_of_two(repository, merged):
    repository.git("checkout", "--quiet", "-b", "broken", merged["start"])
    culprit = write(repository, "shipped.py", f"import nothing_there\nPEAK = {12 * MB}\n")
    mended = write(repository, "shipped.py", f"PEAK = {12 * MB}\n")
    repository.git("merge", "--quiet", "--no-ff", "--message=both", "feature")
    result = gpumem("bisect", "--all", "--good", merged["start"], "--bad", "broken", "test_it.py", "--", *PLAIN)
    assert result.exit_code == 0, result.output
    assert f"gpumem bisect: one of {culprit[:9]}, {mended[:9]} did it: " in result.stdout
    assert "skipped  ModuleNotFoundError: No module named 'nothing_there'" in result.stdout


@pytest.mark.thorough
def test_the_commit_that_mended_it_is_found_in_a_history_with_branches(repository, merged):
    mender = write(repository, "shipped.py", f"PEAK = {10 * MB}\n")
    repository.git("checkout", "--quiet", "-b", "later", "HEAD~1")
    write(repository, "later")
    repository.git("checkout", "--quiet", "main")
    repository.git("merge", "--quiet", "--no-ff", "--message=again", "later")
    result = gpumem("bisect", "--all", "--good", "main", "--bad", merged["merge"], "test_it.py", "--", *PLAIN)
    assert result.exit_code == 0, result.output
    assert f"gpumem bisect: {mender[:9]} shipped.py (Ada, " in result.stdout
    assert f"fixed it: peak allocated 12.00 MB to 10.00 MB (-16.7 %), after {merged['last'][:9]}\n" in result.stdout


USES = """
from uses import run


def test_step(gpumem):
    weight = torch.ones(1000, WIDTH, requires_grad=True)
    gpumem.measure(lambda: run(weight).sum().backward())
"""
OF_THE_GATE = [*PLAIN, "--gpumem-device=cpu", "--no-gpumem-time", "--gpumem-strict"]
FROM = ["bisect", "--from", "report.json", "--", *OF_THE_GATE]


@pytest.fixture
def gate(project, tmp_path, monkeypatch):
    """A project to be gated in this process, and searched by forks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(project.path)
    fork_runs(monkeypatch)
    return project


@pytest.mark.thorough
def test_the_release_that_made_a_gate_red_is_named(gate, tmp_path, monkeypatch):
    here, index = tmp_path / "site-packages", tmp_path / "wheels"
    # It installs only what is not here, and what is here for this process is not for the runs.
    monkeypatch.setattr(installers, "find_uv", lambda: None)
    monkeypatch.syspath_prepend(here)
    for name, value in only_from(index).items():
        monkeypatch.setenv(name, value)
    for minor, more in enumerate(("", "", ".exp()", ".exp()")):
        text = f"def run(weight):\n    return (weight * {minor}).exp(){more}\n"
        make_wheel(index, "tinymodels", f"1.{minor}", {"tinymodels/__init__.py": text})
    gate.write(USES.replace("uses", "tinymodels").replace("WIDTH", "100"))
    for minor, mode in ((0, "--gpumem-update=new"), (3, "--gpumem-baseline")):
        shutil.rmtree(here, ignore_errors=True)
        zipfile.ZipFile(index / f"tinymodels-1.{minor}-py3-none-any.whl").extractall(here)
        gate.run(mode, "--gpumem-report=report.json")
    result = gpumem(*FROM)
    assert result.exit_code == 0, result.output
    assert "gpumem bisect: tinymodels 1.2 did it: peak allocated " in result.stdout
    assert ", after 1.1\n" in result.stdout


def test_the_commit_since_the_baseline_that_made_a_gate_red_is_named(gate):
    repository = Repository(gate.path)
    (gate.path / ".gitignore").write_text("__pycache__\n*.json\n", encoding="utf-8")
    gate.write("def run(weight):\n    return weight.exp()\n", "uses.py")

    def commit(width: int) -> str:
        gate.write(USES.replace("WIDTH", str(width)))
        return repository.commit(f"width {width}")[:9]

    commit(90)
    commit(100)
    assert gate.run("--gpumem-update=new").ret == 0
    accepted, culprit, _ = commit(100), commit(130), commit(131)
    gate.run("--gpumem-baseline", "--gpumem-report=report.json").assert_outcomes(failed=1)
    result = gpumem(*FROM)
    assert result.exit_code == 0, result.output
    assert f"gpumem bisect: {culprit} width 130 (Ada, " in result.stdout
    assert f", after {accepted}\n" in result.stdout

    # As actions/checkout leaves it without fetch-depth: 0.
    repository.git("clone", "--quiet", "--depth=1", f"file://{gate.path}", "../shallow")
    (gate.path / ".git").rename(gate.path.parent / "whole.git")
    (gate.path.parent / "shallow" / ".git").rename(gate.path / ".git")
    result = gpumem(*FROM)
    assert result.exit_code != 0
    assert "this clone is shallow, so the commit that accepted the baseline of" in result.stderr
    assert "fetch-depth: 0" in result.stderr


NO_WORKTREES = "--setup ran in worktrees, which are removed now: if --setup installed packages from a worktree, install them again\n"


def test_runs_with_a_setup_are_one_at_a_time(repository, tmp_path):
    """A set-up's packages are there for every run, until the next one installs something else."""
    log = tmp_path / "log"
    conftest = repository.path / "conftest.py"
    ended = (
        f"\n\ndef pytest_sessionfinish():\n    with open({str(log)!r}, 'a') as file:\n        file.write('end\\n')\n"
    )
    conftest.write_text(conftest.read_text(encoding="utf-8") + ended, encoding="utf-8")
    for number in range(4):
        repository.commit(number, (12 if number > 1 else 10) * MB)
    given = ["--jobs", "3", "--setup", f"echo begin >> '{log}'", "--good", "HEAD~3"]
    result = gpumem("bisect", *given, "test_it.py", "--", *PLAIN)
    assert result.exit_code == 0, result.output
    lines = log.read_text(encoding="utf-8").split()
    assert lines == ["begin", "end"] * (len(lines) // 2), "one begins when the one before it has ended"
    assert "with --setup, only one run is made at a time" in result.stderr
    assert result.stderr.endswith(NO_WORKTREES)


def ends_of(repository, good, bad):
    checkout = Checkout.around(repository.path)
    return checkout, checkout.revision(good), checkout.revision(bad)


def test_only_a_search_in_branches_has_a_graph_that_is_no_line(repository, merged):
    ends = ends_of(repository, merged["start"], "main")
    line = commits(*ends)
    assert [one.variant.revision.commit for one in line] == [
        merged[one] for one in ("start", "culprit", "merge", "last")
    ]
    assert graph_of(line).parents == [(), (0,), (1,), (2,)]
    branched = commits(*ends, first_parent=False)
    assert {one.variant.revision.commit for one in branched} == set(merged.values())
    assert branched[0].variant.revision.commit == merged["start"]
    assert branched[1].variant.revision.commit == merged["fork"], "the branch left there"


@pytest.mark.parametrize("ends_a_line", ["\u2028", "\f", "\x85", "\x1f", "\r", "\x1e"])
def test_a_subject_with_a_character_that_ends_a_line_is_one_subject(repository, ends_a_line):
    write(repository, "first")
    subject = f"one{ends_a_line}two"
    repository.git("commit", "--quiet", "--allow-empty", "--message", subject)
    write(repository, "last")
    row = commits(*ends_of(repository, "HEAD~2", "main"))
    assert [one.description.rpartition(" (Ada, ")[0] for one in row] == ["first", subject, "last"]


GPG = """#!/bin/sh
case "$*" in
*--verify*) echo "gpg: Good signature from Ada" >&2; echo "[GNUPG:] GOODSIG 1 Ada" ;;
*) cat >/dev/null; printf -- "-----BEGIN PGP SIGNATURE-----\n\n-----END PGP SIGNATURE-----\n"
   printf "\n[GNUPG:] SIG_CREATED D\n" >&2 ;;
esac
"""


@pytest.mark.skipif(os.name == "nt", reason="a shell script stands in for gpg")
def test_signatures_that_git_shows_are_no_commits(repository, tmp_path):
    gpg = tmp_path / "gpg"
    gpg.write_text(GPG, encoding="utf-8")
    gpg.chmod(0o755)
    for name, value in {"gpg.program": str(gpg), "log.showSignature": "true", "user.signingKey": "1"}.items():
        repository.git("config", name, value)
    write(repository, "first")
    repository.git("commit", "--quiet", "--allow-empty", "--gpg-sign", "--message=signed")
    shown = subprocess.run(["git", "log"], cwd=repository.path, check=True, capture_output=True, text=True).stdout
    assert "gpg: Good signature" in shown
    row = commits(*ends_of(repository, "HEAD~1", "main"))
    assert [one.description.partition(" ")[0] for one in row] == ["first", "signed"]
