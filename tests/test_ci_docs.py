"""docs/ci.md, followed to the letter: an empty repository gets a gate, a regression turns it red, and a reason green again.

Every block of the page is used. Python, TOML and text are files, shell is run, and so are the scripts of the workflows and
of GitLab's jobs, in which only `pip install` does nothing: what it would install is here. The GPU is a CPU. Commands within
sentences, for whoever sets a runner up as root, are not run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.fake_github import fake_github
from tests.test_ci import PROPOSING, done_by, keeps_no_token, names_the_gpu, valid
from tests.workflows import ROOT, Runner, read_yaml

if TYPE_CHECKING:
    from pathlib import Path

    from tests.warm import Commands

FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FUSED = "return x + self.mlp(self.norm(x))"
CPU = "--gpumem-device=cpu"
KEEPS_A_COPY = "return x + self.mlp(self.norm(x).double().exp().log().float())"


@dataclass(frozen=True)
class Block:
    section: str
    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(HEADING.findall(FENCE.sub("", text[: found.start()]))[-1], found[1], found[2] or "", found[3])
        for found in FENCE.finditer(text)
    ]


BLOCKS = blocks(ROOT / "docs" / "ci.md")
START = [one for one in BLOCKS if one.section == "From nothing to a gate"]


def on_the_cpu(text: str) -> str:
    """A block that is to run here, where there may be neither a GPU nor a torch for one."""
    for gpu in ("--gpumem-device=cuda", "--gpumem-device=emulated:h100"):
        text = text.replace(gpu, CPU)
    # The torch of the suite stays as it is; tests/test_install.py runs this.
    return text.replace("sed -i ", "sed -n ")


class Repository:
    """What a reader has who does as the page says, on a machine of theirs."""

    def __init__(self, folder: Path, commands: Commands) -> None:
        self.folder = folder / "project"
        self.temp = folder / "temp"
        self.commands = commands
        for path in (self.folder, self.temp, folder / "home"):
            path.mkdir(exist_ok=True)
        ours = ("PYTEST", "PYTHON", "GITHUB_", "GIT_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self.environment = kept | {
            "PATH": f"{commands.folder}:{os.environ['PATH']}",
            "HOME": str(folder / "home"),
            "CUDA_VISIBLE_DEVICES": "",
            # What the machine does meanwhile is nothing to a test of the page.
            "PYTEST_ADDOPTS": "-p no:randomly -p no:hypothesispytest -p no:cacheprovider --gpumem-no-time " + CPU,
            **{f"GIT_{who}_{what}": "reader" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        }

    def shell(self, script: str, code: int = 0) -> str:
        done = subprocess.run(
            ["bash", "-e", "-c", script],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=120,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def follow(self, one: Block) -> str:
        """Do as a block says: write the file, or run the commands."""
        if one.language == "sh":
            return self.shell(on_the_cpu(one.text))
        path = self.folder / one.title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(on_the_cpu(one.text), encoding="utf-8")
        return ""

    def runner(self, github: dict[str, str]) -> Runner:
        event = self.temp / "event.json"
        event.write_text(json.dumps({"pull_request": {"number": 7}}))
        environment = {
            **self.environment,
            **github,
            "GITHUB_ACTIONS": "true",
            "GITHUB_WORKSPACE": str(self.folder),
            "GITHUB_EVENT_PATH": str(event),
            "GITHUB_STEP_SUMMARY": str(self.temp / "summary.md"),
        }
        context = {"event": {"pull_request": {"number": 7}}, "token": github["GITHUB_TOKEN"]}
        # Only the step that has the token in its own environment is to have it.
        del environment["GITHUB_TOKEN"]
        return Runner(self.folder, self.temp, environment, context)

    def jobs(self, one: Block) -> dict:
        return read_yaml((self.folder / one.title).read_text(encoding="utf-8"))["jobs"]

    def break_the_model(self) -> None:
        model = self.folder / "model.py"
        text = model.read_text(encoding="utf-8")
        assert text.count(FUSED) == 1
        model.write_text(text.replace(FUSED, KEEPS_A_COPY), encoding="utf-8")


@pytest.fixture(scope="module")
def started(tmp_path_factory, warm_commands) -> Repository:
    """A repository in which everything was done that makes a gate from nothing."""
    mine = Repository(tmp_path_factory.mktemp("reader"), warm_commands())
    mine.shell("git init --bare --quiet --initial-branch=main ../origin.git")
    mine.shell("git init --quiet --initial-branch=main && git remote add origin ../origin.git")
    for one in START:
        mine.follow(one)
    return mine


@pytest.fixture
def mine(started, tmp_path, warm_commands) -> Repository:
    shutil.copytree(started.folder, tmp_path / "project")
    return Repository(tmp_path, warm_commands())


def test_an_empty_repository_gets_baselines_and_a_workflow(started):
    assert started.shell("git status --porcelain --untracked-files=no") == ""
    files = started.shell("git ls-files").splitlines()
    (baselines,) = (file for file in files if file.startswith("gpumem-baselines/"))
    workflow = ".github/workflows/gpumem.yml"
    assert {*files} == {"model.py", "test_model.py", "requirements.txt", workflow, baselines}
    assert started.shell("git ls-remote origin main").split()[0] == started.shell("git rev-parse HEAD").strip()
    assert ["-r", "requirements.txt"] in started.commands.installed()
    assert list(started.folder.glob("gpumem-baselines/*/test_model.py.toml"))
    (workflow,) = (one for one in START if one.language == "yaml")
    _, start, rest = workflow.text.partition("    runs-on")
    (readme,) = (one for one in blocks(ROOT / "README.md") if one.language == "yaml")
    assert readme.text == start + rest


def test_a_regression_turns_the_gate_red_and_a_reason_green_again(mine):
    (workflow,) = (one for one in START if one.language == "yaml")
    (job,) = mine.jobs(workflow).values()
    with fake_github() as github:
        runner = mine.runner(github.environment())
        assert runner.run_job(job), runner.log
        assert ["--no-deps", "torch==2.13.0"] in mine.commands.installed()
        assert "gpumem: 1 gated\n" in runner.log
        (comment,) = github.comments
        assert "passed" in comment["body"]

        mine.break_the_model()
        runner = mine.runner(github.environment())
        assert not runner.run_job(job)
        assert "gpumem: 1 gated, 1 regressed\n" in runner.log
        assert re.search(r"^::error file=test_model\.py,line=6,title=", runner.log, flags=re.MULTILINE)
        assert "test_train_step" in (mine.temp / "summary.md").read_text(encoding="utf-8")
        (comment,) = github.comments
        assert "regressed" in comment["body"]
        assert "model.py:" in comment["body"]
        assert [action.partition("@")[0] for action, _ in runner.uses] == [
            "actions/checkout",
            "actions/setup-python",
            "actions/upload-artifact",
        ]
        made = {path.name for path in (mine.folder / "gpumem-report").iterdir()}
        assert made == {"gpumem.html", "gpumem.json", "gpumem.md"}

        accept, history = (one for one in BLOCKS if one.title == "accept")
        mine.follow(accept)
        assert "float32 scores until the fused kernel takes a bias" in mine.follow(history)
        runner = mine.runner(github.environment())
        assert runner.run_job(job), runner.log
        (comment,) = github.comments
        assert "regressed" not in comment["body"]


def test_the_workflow_gates_pushes_to_main_cancels_older_runs_caches_wheels_and_loads_none_of_nvidias(started):
    (workflow,) = (read_yaml(one.text) for one in START if one.language == "yaml")
    assert workflow["on"] == {"push": {"branches": ["main"]}, "pull_request": None}
    # A pull request has a ref of its own; a push to main must not end the run of the commit before.
    assert workflow["concurrency"] == {
        "group": "gpumem-${{ github.ref }}",
        "cancel-in-progress": "${{ github.event_name == 'pull_request' }}",
    }
    (job,) = workflow["jobs"].values()
    _, python, install, gate = job["steps"]
    assert (python["with"]["cache"], python["with"]["cache-dependency-path"]) == ("pip", "requirements.txt")
    torch, edit = install["run"].splitlines()
    assert edit in (ROOT / "docs" / "guide.md").read_text(encoding="utf-8").splitlines(), (
        "that of tests/test_install.py"
    )
    assert torch == "pip install --no-deps $(grep ^torch== requirements.txt)"
    # What is installed by the action goes on top of that torch.
    assert gate["with"]["python"] == "python"


def titled(title: str) -> Block:
    return next(one for one in BLOCKS if one.title == title)


@pytest.mark.thorough
def test_a_real_gpus_workflow_gates_with_baselines_of_its_own_and_a_name_of_its_own(mine):
    mine.shell("git rm -r --quiet gpumem-baselines && git commit --quiet --message 'Another device'")
    mine.follow(titled("on the GPU"))
    workflow = titled(".github/workflows/gpumem-gpu.yml")
    mine.follow(workflow)
    (job,) = mine.jobs(workflow).values()
    with fake_github() as github:
        runner = mine.runner(github.environment())
        assert runner.run_job(job), runner.log
        assert "gpumem: 1 gated\n" in runner.log
    assert [given.get("name") for _, given in runner.uses] == [None, "gpumem-gpu"]


def test_the_workflow_without_the_action_gates_and_comments(mine):
    workflow = titled(".github/workflows/by-hand.yml")
    mine.follow(workflow)
    (job,) = mine.jobs(workflow).values()
    with fake_github() as github:
        runner = mine.runner(github.environment())
        assert runner.run_job(job), runner.log
        assert "gpumem: 1 gated\n" in runner.log
        assert len(github.comments) == 1
    assert [given.get("path") for _, given in runner.uses] == [None, "gpumem.*"]
    assert {path.name for path in mine.folder.glob("gpumem.*")} == {"gpumem.json", "gpumem.html"}


@pytest.mark.thorough
def test_the_job_of_gitlab_gates_and_keeps_what_it_says_it_keeps(mine):
    file = titled(".gitlab-ci.yml")
    mine.follow(file)
    (job,) = read_yaml((mine.folder / file.title).read_text(encoding="utf-8")).values()
    # GitLab's runner starts one shell for all lines.
    assert "gpumem: 1 gated\n" in mine.shell("\n".join(job["script"]))
    kept = [*job["artifacts"]["paths"], job["artifacts"]["reports"]["junit"]]
    assert all((mine.folder / path).stat().st_size for path in kept)


@pytest.mark.thorough
def test_the_plain_commands_gate_and_feed_a_dashboard(mine):
    (gate,) = (one for one in BLOCKS if one.section == "Plain shell")
    (export,) = (one for one in BLOCKS if one.section == "Dashboards")
    assert "gpumem: 1 gated\n" in mine.follow(gate)
    mine.follow(export)
    assert json.loads((mine.folder / "benchmark.json").read_text(encoding="utf-8"))
    assert "test_train_step" in (mine.folder / "gpumem.prom").read_text(encoding="utf-8")


@pytest.mark.thorough
def test_shards_are_judged_as_a_whole(mine):
    (shards,) = (one for one in BLOCKS if one.section == "Shards")
    assert "gpumem: 1 gated\n" in mine.follow(shards)
    mine.shell("rm shards/1.json")
    assert mine.shell("gpumem merge shards/*.json --shards 2", code=2)
    left_out = mine.shell("gpumem merge shards/*.json", code=1)
    assert "none of them: test_model.py::test_train_step" in left_out
    assert "nothing was gated: 1 measured test was collected, and none was run in any shard" in left_out


@pytest.mark.thorough
def test_the_runner_records_baselines_with_the_reason_that_was_given(mine):
    workflow = titled(".github/workflows/record.yml")
    mine.follow(workflow)
    jobs = mine.jobs(workflow)
    mine.shell("rm -r gpumem-baselines")
    runner = mine.runner({"GITHUB_TOKEN": ""})
    assert runner.run_job(jobs["record"], {"reason": 'a "new" $(touch evil) batch'}), runner.log
    assert (mine.temp / "python/bin/python").exists(), "packages stay on the runner"
    (stored,) = mine.folder.glob("gpumem-baselines/*/test_model.py.toml")
    assert 'a \\"new\\" $(touch evil) batch' in stored.read_text(encoding="utf-8")
    assert not (mine.folder / "evil").exists()
    assert done_by(jobs["propose"]) == PROPOSING | {"rm -rf gpumem-baselines"}


def test_the_workflows_of_the_page_are_valid(tmp_path):
    workflows, jobs = [], []
    for number, one in enumerate(one for one in BLOCKS if one.language == "yaml"):
        file = tmp_path / f"{number}.yml"
        file.write_text(one.text, encoding="utf-8")
        (jobs if one.title == ".gitlab-ci.yml" else workflows).append(file)
    valid("github-workflows", *workflows)
    valid("gitlab-ci", *jobs)
    for file in workflows:
        for job in read_yaml(file.read_text(encoding="utf-8"))["jobs"].values():
            assert not any("${{" in step.get("run", "") for step in job["steps"])
            assert keeps_no_token(job)
            assert all(map(names_the_gpu, job["steps"]))
            if "self-hosted" in job["runs-on"] and "workflow_dispatch" not in file.read_text(encoding="utf-8"):
                assert job["if"] == "github.event.pull_request.head.repo.full_name == github.repository"


def test_no_block_of_the_page_gates_on_another_device_than_the_gpu():
    (gitlab,) = read_yaml(titled(".gitlab-ci.yml").text).values()
    assert all(names_the_gpu({"run": script}) for script in gitlab["script"])
    assert not any("device =" in one.text for one in BLOCKS)
    readme = next(one for one in blocks(ROOT / "README.md") if one.language == "yaml")
    job = read_yaml(readme.text)
    assert keeps_no_token(job)
    assert all(map(names_the_gpu, job["steps"]))


def test_every_block_of_the_page_is_of_a_kind_that_is_tested():
    """That of settings is read by tests/test_docs.py."""
    untitled = [one for one in BLOCKS if not one.title and one.language != "sh"]
    assert [(one.section, one.language) for one in untitled] == [("Baselines elsewhere", "toml")]
    assert {one.section for one in BLOCKS if one.language == "sh"} == {
        "From nothing to a gate",
        "A real GPU confirms it",
        "Plain shell",
        "Accept a regression",
        "Shards",
        "Dashboards",
    }
