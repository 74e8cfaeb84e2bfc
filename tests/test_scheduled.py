"""The action in a scheduled job: the suite against another release of a dependency, and what did it, told in an issue.

The packages are wheels that uv finds in a folder, and what the test measures is what the package says (`TELLING`).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uv

from pytest_gpumem.reporting.github.comment import marker
from tests import preloaded
from tests.fake_github import FakeGitHub, fake_github
from tests.packages_here import make_wheel, only_from
from tests.test_ab import PLAIN
from tests.test_ci_docs import TOMORROW, job_of, on_the_cpu
from tests.test_upgrades import MB, TELLING
from tests.workflows import COMMENT_ACTION, ROOT, Runner

if TYPE_CHECKING:
    from collections.abc import Iterator

ARGUMENTS = " ".join(PLAIN)
CULPRIT = "tinymodels 1.1 did it: peak allocated 10.00 MB to 12.00 MB (+20.0 %), after 1.0"


@pytest.fixture
def github() -> Iterator[FakeGitHub]:
    with fake_github() as made:
        yield made


class Job(Runner):
    """A runner of a scheduled job, which has uv, and the folder of wheels in which that looks."""

    def __init__(self, folder: Path, github: FakeGitHub) -> None:
        self.github = github
        self.index = folder / "wheels"
        environment = {
            **github.environment(),
            "PYTHONPATH": str(ROOT),
            **only_from(self.index),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "TMPDIR": str(folder / "temp"),
            "GITHUB_ACTIONS": "true",
            "HOME": str(folder),
            **{f"GIT_{who}_{what}": "reader" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        }
        # It runs the tests.
        del environment["GITHUB_TOKEN"]
        super().__init__(folder / "project", environment)
        self.environment["PATH"] += f":{Path(uv.find_uv_bin()).parent}"
        if not self.index.exists():
            self.index.mkdir()
            self.write("conftest.py", TELLING)
            self.write("test_it.py", "def test_a(): ...\ndef test_b(): ...\n")
            self.release("1.0", 10)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")

    def release(self, version: str, megabytes: int, name: str = "tinymodels") -> Path:
        return make_wheel(self.index, name, version, {f"{name}/__init__.py": f"PEAK = {megabytes * MB}\n"})

    def tells(self, name: str = "gpumem") -> None:
        """Run the job of the issue, which has nothing of this one but its reports and whether it passed."""
        runner = Runner(self.folder.parent / "issue" / "work", self.github.environment())
        del runner.environment["GITHUB_TOKEN"]
        self.github.run(event="schedule", conclusion=None)
        reports = runner.temp / "gpumem-reports"
        shutil.rmtree(reports, ignore_errors=True)
        shutil.copytree(self.folder / "gpumem-report", reports)
        state = "closed" if self.output("passed") == "true" else "open"
        assert runner.run_action(COMMENT_ACTION, name=name, issue=state), runner.log
        self.log += runner.log

    @property
    def summary(self) -> str:
        return (self.temp / "summary.md").read_text(encoding="utf-8")

    def output(self, name: str) -> str:
        """An output of the action."""
        step = "bisect" if name == "culprit" else "gate"
        return self.values.get(f"steps.{step}.outputs.{name}", "")

    def errors(self) -> list[str]:
        return [line for line in self.log.splitlines() if line.startswith("::error")]


def environment_of(folder: Path) -> Path:
    """Make an environment on top of the suite's, and return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    # The package of this checkout, whatever an editable install leads to.
    beneath = f"{ROOT}\nimport site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (packages_of(python) / "beneath.pth").write_text(beneath, encoding="utf-8")
    return python


def packages_of(python: Path) -> Path:
    asked = [str(python), "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())


def installed(python: Path, wheel: Path) -> None:
    """Install a wheel in place of other releases of its package."""
    packages = packages_of(python)
    for earlier in packages.glob(f"{wheel.name.partition('-')[0]}*"):
        shutil.rmtree(earlier)
    zipfile.ZipFile(wheel).extractall(packages)


@pytest.fixture(scope="module")
def pinned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment on top of the suite's, in which release 1.0 of the packages is installed."""
    folder = tmp_path_factory.mktemp("pinned")
    python = environment_of(folder / "environment")
    for name in ("tinymodels", "unrelated"):
        installed(python, make_wheel(folder, name, "1.0", {f"{name}/__init__.py": f"PEAK = {10 * MB}\n"}))
    return python


@pytest.fixture
def job(tmp_path: Path, github: FakeGitHub, pinned: Path) -> Job:
    made = Job(tmp_path, github)
    made.environment["REAL"] = str(pinned)
    return made


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory, pinned: Path) -> Job:
    """A job that was red, and has found the release that did it, where no issue is asked for."""
    with fake_github() as github:
        job = Job(tmp_path_factory.mktemp("searched"), github)
        job.environment["REAL"] = str(pinned)
        for minor, peak in ((1, 12), (2, 12)):
            job.release(f"1.{minor}", peak)
        told = "open('{}', 'a').write(str('GITHUB_TOKEN' in __import__('os').environ))\n".format(job.temp / "seen")
        job.write("test_it.py", f"{told}def test_a(): ...\ndef test_b(): ...\n")
        nightly = {"against": "tinymodels==1.*", "bisect": "true", "arguments": ARGUMENTS, "name": "tomorrow"}
        assert not job.run_action(**nightly)
        assert github.requests == []
    return job


@pytest.fixture
def red(searched: Job, tmp_path: Path, github: FakeGitHub) -> Job:
    """A copy of `searched`, with a GitHub of its own."""
    before = searched.folder.parent
    shutil.copytree(before, tmp_path, symlinks=True, dirs_exist_ok=True)
    job = Job(tmp_path, github)
    job.environment["REAL"] = searched.environment["REAL"]
    job.log = searched.log
    job.values |= {name: value.replace(str(before), str(tmp_path)) for name, value in searched.values.items()}
    return job


def test_a_release_that_needs_more_is_red_and_named_in_the_issue_until_green(red, github):
    red.tells("tomorrow")
    assert red.output("passed") == "false"
    assert red.output("accounting").startswith(
        "gpumem ab: 2 compared, 2 regressed; 1 pair of runs, base what is here, head tiny"
    )
    assert red.output("culprit") == CULPRIT
    culprit, why = red.errors()
    assert culprit == f"::error title=gpumem bisect::{CULPRIT.replace('%', '%25')}"
    assert "the gate did not pass: gpumem ab ended with exit code 1" in why
    (issue,) = github.issues
    assert issue["title"] == f"tomorrow: {CULPRIT}"
    assert issue["body"].startswith(marker("tomorrow"))
    for told in ("tinymodels 1.2, was 1.0", "### gpumem bisect\n\ntinymodels 1.1 did it", "| `test_it.py::test_a` |"):
        assert told in issue["body"].replace("\\", "")
    assert "### gpumem ab: " in red.summary
    assert "### gpumem bisect: tinymodels 1.1" in red.summary
    assert github.comments == []
    report = json.loads((red.folder / "gpumem-report" / "gpumem.json").read_text())
    assert report["packages"] == [{"name": "tinymodels", "base": "1.0", "head": "1.2", "requested": True, "url": None}]

    found, kept = dict(red.values), red.folder / "gpumem-report"
    shutil.move(kept, red.temp / "red")
    red.release("1.3", 10)
    red.log = ""
    assert red.run_action(against="tinymodels==1.*", bisect="true", arguments=ARGUMENTS, name="tomorrow"), red.log
    assert (red.output("passed"), red.errors()) == ("true", [])
    red.tells("tomorrow")
    assert issue["state"] == "closed"
    red.values = found
    shutil.rmtree(kept)
    shutil.move(red.temp / "red", kept)
    red.tells("tomorrow")
    assert [one["state"] for one in github.issues] == ["closed", "open"]


@pytest.mark.thorough
def test_of_several_requirements_the_one_that_did_it_is_named(job, github):
    job.release("1.1", 12)
    for version in ("1.0", "1.1"):
        job.release(version, 0, "unrelated")
    assert not job.run_action(against="unrelated<2\n\n  tinymodels==1.*\n", bisect="true", arguments=ARGUMENTS)
    assert job.output("culprit").startswith("tinymodels 1.1 did it: "), job.log


@pytest.mark.parametrize(
    ("against", "why"),
    [
        pytest.param("tinymodels==9.9", "says: tinymodels==9.9 cannot be installed: ", marks=pytest.mark.thorough),
        pytest.param(
            "tinymodels==1.0 unrelated==1.0",
            "says: 'tinymodels==1.0 unrelated==1.0' is not a valid requirement",
            marks=pytest.mark.thorough,
        ),
        (
            "tinymodels==1.*\n$(touch evil)\n`touch evil`; touch evil",
            "says: '$(touch evil)' is not a valid requirement, like ",
        ),
        pytest.param("-r gone.txt", "says: gone.txt cannot be read: No such file", marks=pytest.mark.thorough),
        pytest.param(
            "unrelated==1.1",
            "says: the tests import no package that differs (unrelated as installed and 1.1)",
            marks=pytest.mark.thorough,
        ),
        (" ", "says: Missing argument 'BASE': name a revision, or give --base-with or --head-with."),
    ],
)
def test_what_cannot_be_compared_is_red_and_says_why_in_a_sentence(job, github, against, why):
    job.release("1.1", 10, "unrelated")
    assert not job.run_action(against=against, bisect="true", arguments=ARGUMENTS)
    assert job.output("passed") == "false"
    nothing, red = job.errors()
    assert red.startswith(f"::error title=gpumem::nothing was gated: gpumem ab ended with exit code 2, and {why}")
    assert nothing.startswith("::error title=gpumem bisect::bisect found nothing: no test in ")
    assert job.output("culprit") == ""
    job.tells()
    (issue,) = github.issues
    assert issue["title"] == "gpumem: the gate is red"
    assert "nothing was compared" in issue["body"]
    assert not list(job.folder.rglob("evil"))


def test_a_test_that_breaks_is_red_and_named_though_no_figure_can_be_searched_for(job, github):
    job.release("1.1", 0)
    failed = 'TestVerdict(file, test, unmeasured="it failed by itself", failed_by_itself=True)'
    measured = "TestVerdict(file, test, (Verdict(measurement, ()),))"
    job.write("conftest.py", TELLING.replace(measured, f"{measured} if tinymodels.PEAK else {failed}"))
    assert not job.run_action(against="tinymodels==1.*", bisect="true", arguments=ARGUMENTS)
    nothing, red = job.errors()
    assert "gpumem ab: 0 compared, 2 broken" in red
    assert "regressed, so there is nothing to search for; test_it.py::test_a: " in nothing


def test_without_the_permission_the_run_is_as_red_and_says_that_there_is_no_issue(red, github):
    github.read_only = True
    red.tells("tomorrow")
    assert "no issue was written, because the token may not write issues: give the job" in red.log
    assert github.issues == []


def test_nothing_is_searched_for_where_it_is_not_asked_for(job):
    job.release("1.1", 12)
    assert not job.run_action(against="tinymodels==1.*", arguments=ARGUMENTS)
    assert job.output("culprit") == ""
    assert {file.name for file in (job.folder / "gpumem-report").iterdir()} == {"gpumem.json", "gpumem.md"}


def test_the_tests_do_not_get_the_token(searched):
    assert {*(searched.temp / "seen").read_text().replace("False", "no ").split()} == {"no"}


# A gate, whose reports are searched in test_bisect.py, too

MODEL = """\
import torch
import tinymodels


def test_step(gpumem):
    weight = torch.ones(1000, {width}, requires_grad=True)
    gpumem.measure(lambda: tinymodels.run(weight).sum().backward())
"""
RUNS = "def run(weight):\n    return (weight * {factor}).exp(){more}\n"
GATE = {"arguments": "--gpumem-device=cpu --no-gpumem-time --gpumem-strict", "bisect": "true"}


@pytest.fixture
def gate(tmp_path: Path, github: FakeGitHub) -> Job:
    """A repository whose gate is green: a baseline, the commit that accepted it, and a package that it was taken with."""
    job = Job(tmp_path, github)
    python = environment_of(tmp_path / "pinned")
    job.environment["REAL"] = str(python)
    job.environment["PYTEST_ADDOPTS"] = ARGUMENTS
    (job.folder / "conftest.py").unlink()
    for minor in range(2):
        code = RUNS.format(factor=minor, more=".exp()" if minor else "")
        make_wheel(job.index, "tinymodels", f"1.{minor}", {"tinymodels/__init__.py": code})
    installed(python, job.index / "tinymodels-1.0-py3-none-any.whl")
    (job.folder / "test_it.py").unlink()
    commit(job, "git init --quiet --initial-branch=main", 100)
    recording = ["--gpumem-update=new", "--gpumem-device=cpu", "--no-gpumem-time"]
    recorded = preloaded.run(
        "-m", "pytest", *recording, cwd=job.folder, env={**job.environment, "PYTHONPATH": str(packages_of(python))}
    )
    assert recorded.returncode == 0, recorded.stdout
    commit(job, "true", 100)
    return job


def commit(job: Job, before: str, width: int) -> None:
    """Commit the project with a step of this width."""
    job.write("test_model.py", MODEL.format(width=width))
    script = f"{before}\ngit add --all\ngit commit --quiet --allow-empty --message='width {width}'"
    assert job.run([{"run": script}]), job.log


@pytest.mark.thorough
def test_the_commit_since_the_baseline_that_made_a_gate_red_is_named(gate, github):
    accepted = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=gate.folder, text=True)[:9]
    commit(gate, "true", 130)
    gate.log = ""
    assert not gate.run_action(**GATE)
    assert re.fullmatch(
        rf"[0-9a-f]{{9}} width 130 \(reader, [\d-]+\) did it: peak allocated .* \(\+\d.*\), after {accepted}",
        gate.output("culprit"),
    ), gate.log
    gate.tells()
    (issue,) = github.issues
    assert "width 130" in issue["title"]
    assert "1 regressed" in issue["body"]


@pytest.mark.thorough
def test_the_release_that_made_a_gate_red_is_named(gate):
    installed(Path(gate.environment["REAL"]), gate.index / "tinymodels-1.1-py3-none-any.whl")
    assert not gate.run_action(**GATE)
    assert gate.output("culprit").startswith("tinymodels 1.1 did it: "), gate.log


# The page


@pytest.mark.thorough
def test_the_recipe_of_the_page_names_the_branch_that_needs_more(job, github, tmp_path):
    python = environment_of(tmp_path / "runner")
    installed(python, job.release("1.0", 10, "transformers"))
    job.release("1.1", 10, "transformers")
    branch = {"transformers/__init__.py": f"PEAK = {12 * MB}\n"}
    main = make_wheel(tmp_path / "main", "transformers", "1.2.dev0", branch)
    # What the workflow takes out of torch's metadata.
    metadata = packages_of(python) / "torch-2.13.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n", encoding="utf-8")
    job.environment |= {"REAL": str(python), "PYTEST_ADDOPTS": ARGUMENTS}
    job.write("conftest.py", TELLING.replace("tinymodels", "transformers"))
    job.write("requirements.txt", "torch==2.13.0\ntransformers==1.0\n")
    workflow = on_the_cpu(TOMORROW.text)
    address = "git+https://github.com/huggingface/transformers@main"
    assert workflow.count(address) == 1
    job.write("tomorrow.yml", workflow.replace(address, main.as_uri()))
    assert not job.run(job_of(job.folder / "tomorrow.yml")["steps"])
    job.tells("tomorrow")
    (issue,) = github.issues
    assert issue["title"].startswith(
        f"tomorrow: transformers {main.as_uri()} did it: peak allocated 10.00 MB to 12.00 MB"
    )
    assert job.output("culprit") in issue["title"]
    assert job.output("culprit").endswith(", after 1.1"), "no release before it did"
