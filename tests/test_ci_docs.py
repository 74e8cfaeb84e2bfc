"""The pages on CI, followed to the letter: an empty repository gets a gate, which a regression turns red.

Every block of the pages is used. Python, TOML and text are files. Shell lines are run, also those of workflows and of other
systems' jobs, but pip installs nothing because the packages are here. The GPU is a CPU. Commands within sentences, for
whoever sets a runner up as root, are not run.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.fake_github import NUMBER, FakeGitHub, fake_github
from tests.pages import Block, blocks_of
from tests.support.processes import LEFT_OUT
from tests.test_ci import faults, valid
from tests.workflows import COMMENT_ACTION, ROOT, Runner, read_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FUSED = "return x + self.mlp(self.norm(x))"
KEEPS_A_COPY = "return x + self.mlp(self.norm(x).double().exp().log().float())"


PAGES = ("docs/ci.md", "docs/github.md", "docs/runner.md", "docs/ci-elsewhere.md")
BLOCKS = [one for page in PAGES for one in blocks_of(page)]
START = [one for one in BLOCKS if one.section == "From nothing to a gate"]
GATE, COMMENT = (one for one in START if one.language == "yaml")
(TOMORROW,) = (one for one in BLOCKS if (one.file or "").endswith("tomorrow.yml"))
"""That of tests/test_scheduled.py."""
ACCEPT, HISTORY = (one for one in BLOCKS if one.section == "Accept a regression" and one.language == "sh")
(BY_COMMENT,) = (one for one in BLOCKS if (one.file or "").endswith("accept.yml"))
WORKFLOWS = {
    one.file.rpartition("/")[2]: read_yaml(one.text)
    for one in BLOCKS
    if (one.file or "").startswith(".github/workflows/")
}
GATES = [WORKFLOWS[name] for name in ("gpumem.yml", "gpumem-cpu.yml", "gpumem-gpu.yml")]
"""The workflows that gate pull requests."""
ANOTHER_DEVICE = {
    "A real GPU confirms it": "git rm -r --quiet gpumem-baselines && git commit --quiet --message 'Another device'",
    ".github/workflows/record.yml": "rm -r gpumem-baselines",
}
"""Commands that remove the CPU's baselines before a block, by the block's file or section."""


class Reader:
    """Somebody who does as the page says, in a repository and on a runner of theirs."""

    def __init__(self, folder: Path, github: FakeGitHub) -> None:
        event = folder / "event.json"
        event.write_text(json.dumps({"pull_request": {"number": NUMBER}}))
        self.github = github
        self.runner = Runner(
            folder / "project",
            {
                **github.environment(),
                "HOME": str(folder),
                "CUDA_VISIBLE_DEVICES": "",
                # What the machine does meanwhile is nothing to a test of the page.
                "PYTEST_ADDOPTS": " ".join((*LEFT_OUT, "--no-gpumem-time", "--gpumem-device=cpu")),
                "GITHUB_ACTIONS": "true",
                "GITHUB_WORKSPACE": str(folder / "project"),
                "GITHUB_EVENT_PATH": str(event),
                "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
                **{f"GIT_{who}_{what}": "reader" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
            },
        )
        # Only the step that has the token in its own environment is to have it.
        del self.runner.environment["GITHUB_TOKEN"]
        self.folder = self.runner.folder

    def shell(self, script: str) -> str:
        said = len(self.runner.log)
        assert self.runner.run([{"run": script}]), self.runner.log
        return self.runner.log[said:]

    def follow(self, one: Block) -> str:
        """Do as a block says: write the file, or run the commands."""
        if one.language == "sh":
            return self.shell(on_the_cpu(one.text))
        path = self.folder / one.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(on_the_cpu(one.text), encoding="utf-8")
        return ""

    def gates(self) -> bool:
        """Return whether the gate's job succeeds. The job of the comment runs after it, with its reports."""
        self.runner.log = ""
        passed = self.runner.run(job_of(self.folder / GATE.file)["steps"])
        self.github.run(conclusion="success" if passed else "failure")
        event = {"github.event.workflow_run.name": WORKFLOWS["gpumem.yml"]["name"]}
        runner = Runner(self.folder.parent / "comment" / "work", self.github.environment(), event)
        del runner.environment["GITHUB_TOKEN"]
        shutil.copytree(self.folder / "gpumem-report", runner.temp / "gpumem-reports", dirs_exist_ok=True)
        (step,) = job_of(self.folder / COMMENT.file)["steps"]
        assert runner.run_action(COMMENT_ACTION, **step["with"]), runner.log
        return passed

    def replace(self, before: str, after: str) -> None:
        model = self.folder / "model.py"
        assert model.read_text().count(before) == 1
        model.write_text(model.read_text().replace(before, after))


def on_the_cpu(text: str) -> str:
    """A block that is to run here, where there may be neither a GPU nor a torch for one."""
    for gpu in ("--gpumem-device=cuda", "--gpumem-device=emulated:h100"):
        text = text.replace(gpu, "--gpumem-device=cpu")
    # The torch of the suite stays as it is; tests/test_install.py runs this.
    return text.replace("sed -i ", "sed -n ").replace("emulated: true", "emulated: false")


def job_of(file: Path) -> Any:
    """The first job of a workflow."""
    return next(iter(read_yaml(file.read_text(encoding="utf-8"))["jobs"].values()))


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of one who has followed the page from nothing to a gate. Each test has a copy."""
    folder = tmp_path_factory.mktemp("started")
    with fake_github() as github:
        reader = Reader(folder, github)
        reader.shell("git init --bare --quiet --initial-branch=main ../origin.git")
        reader.shell("git init --quiet --initial-branch=main && git remote add origin ../origin.git")
        for one in START:
            reader.follow(one)
    return folder


@pytest.fixture
def reader(started: Path, tmp_path: Path) -> Iterator[Reader]:
    shutil.copytree(started, tmp_path, dirs_exist_ok=True)
    with fake_github() as github:
        yield Reader(tmp_path, github)


@pytest.fixture(scope="module")
def red(started: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Reader, list[Any]]:
    """Return one whose pull request needs more, after its gate, and the comments that it made. Each test has a copy."""
    folder = tmp_path_factory.mktemp("red")
    shutil.copytree(started, folder, dirs_exist_ok=True)
    with fake_github() as github:
        reader = Reader(folder, github)
        reader.replace(FUSED, KEEPS_A_COPY)
        reader.shell(
            "git add model.py && git commit --quiet --message change && git push --quiet origin HEAD:refs/pull/7/merge"
        )
        assert not reader.gates(), reader.runner.log
        return reader, [*github.comments]


def test_an_empty_repository_gets_a_gate_that_a_regression_turns_red(red):
    reader, (comment,) = red
    assert reader.shell("git status --porcelain --untracked-files=no") == ""
    (baselines,) = (path.relative_to(reader.folder) for path in reader.folder.glob("gpumem-baselines/*/*.toml"))
    files = {"model.py", "test_model.py", "requirements.txt", GATE.file, COMMENT.file, str(baselines)}
    assert {*reader.shell("git ls-tree -r --name-only origin/main").split()} == files
    assert "gpumem: 1 gated, 1 regressed\n" in reader.runner.log
    installed = [words[words.index("install") + 1 :] for words in reader.runner.calls() if "install" in words]
    assert installed == [["-r", "requirements.txt"], ["-r", "requirements.txt"]]
    assert re.search(r"^::error file=test_model\.py,line=6,title=", reader.runner.log, flags=re.MULTILINE)
    assert "test_train_step" in (reader.folder.parent / "summary.md").read_text(encoding="utf-8")
    assert "regressed" in comment["body"]
    assert "model.py:" in comment["body"]
    reports = {path.name for path in (reader.folder / "gpumem-report").iterdir()}
    assert reports == {"gpumem.html", "gpumem.json", "gpumem.md"}


@pytest.mark.thorough
def test_what_is_accepted_turns_it_green(red, tmp_path):
    shutil.copytree(red[0].folder.parent, tmp_path, dirs_exist_ok=True)
    with fake_github() as github:
        reader = Reader(tmp_path, github)
        reader.follow(ACCEPT)
        assert "float32 scores until the fused kernel takes a bias" in reader.follow(HISTORY)
        assert reader.gates(), reader.runner.log
        assert "gpumem: 1 gated\n" in reader.runner.log
        (comment,) = github.comments
    assert "passed" in comment["body"]
    assert "regressed" not in comment["body"]


GH = """\
#!/bin/bash
case "$*" in
  "api repos/someone/project/collaborators/a-maintainer/permission --jq .permission") echo "$MAY" ;;
  "pr view 7 "*isCrossRepository*) echo "$IS_FORK" ;;
  "pr view 7 "*headRefName*) echo 'topic/$(touch${IFS}evil)' ;;
  "run list --workflow gpumem-gpu.yml --commit $(git rev-parse HEAD) --status completed "*) echo $ENDED ;;
  "run download 77 --name gpumem-gpu --dir "*) mkdir -p "${@: -1}"; cp gpumem-report/* "${@: -1}" ;;
  *) exit 1 ;;
esac
"""
"""GitHub's command, as far as the workflow calls it."""


@pytest.fixture(scope="module")
def measured(red: tuple[Reader, list[Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of one whose pull request needs more and has code wherever it might be run."""
    folder = tmp_path_factory.mktemp("measured")
    shutil.copytree(red[0].folder.parent, folder, dirs_exist_ok=True)
    with fake_github() as github:
        reader = Reader(folder, github)
    assert (reader.folder / "gpumem-report" / "gpumem.json").exists(), reader.runner.log
    for name in ("conftest", "a_plugin", "filelock", "jinja2", "json", "pytest_gpumem"):
        (reader.folder / f"{name}.py").write_text("import pathlib; pathlib.Path('evil').touch()\n", encoding="utf-8")
    settings = '[tool.pytest.ini_options]\npythonpath = ["."]\naddopts = "-p a_plugin"\n'
    (reader.folder / "pyproject.toml").write_text(settings, encoding="utf-8")
    command = folder / "bin" / "gh"
    command.write_text(GH, encoding="utf-8")
    command.chmod(0o755)
    reader.follow(BY_COMMENT)
    return folder


@pytest.fixture
def asked(measured: Path, tmp_path: Path) -> Iterator[Reader]:
    """One on whose pull request a maintainer has commented."""
    shutil.copytree(measured, tmp_path, dirs_exist_ok=True)
    with fake_github() as github:
        reader = Reader(tmp_path, github)
        reader.runner.environment |= {"MAY": "write", "IS_FORK": "false", "ENDED": "77"}
        reader.runner.values |= {
            "github.event.issue.number": "7",
            "github.event.comment.user.login": "a-maintainer",
            "github.event.comment.body": '/gpumem accept until "#12" $(touch evil)\r\nmore',
            "github.repository": "someone/project",
        }
        yield reader


def accepts(reader: Reader) -> bool:
    """Return whether the job that accepts succeeds, after a look that it ran nothing of the pull request."""
    succeeded = reader.runner.run(job_of(reader.folder / BY_COMMENT.file)["steps"])
    assert not (reader.folder / "evil").exists()
    return succeeded


def stored(reader: Reader) -> str:
    (file,) = reader.folder.glob("gpumem-baselines/*/*.toml")
    return file.read_text(encoding="utf-8")


def test_a_maintainers_comment_accepts_the_jobs_figures_and_runs_no_foreign_code(asked):
    assert accepts(asked), asked.runner.log
    assert "gpumem accept: 1 accepted\n" in asked.runner.log
    assert 'reason = "until \\"#12\\" $(touch evil)"' in stored(asked)
    assert asked.runner.values["steps.accept.outputs.branch"] == "topic/$(touch${IFS}evil)"


def test_a_comment_without_a_reason_names_who_accepted(asked):
    asked.runner.values["github.event.comment.body"] = "/gpumem accept\r\n"
    assert accepts(asked), asked.runner.log
    assert 'reason = "accepted by a-maintainer in #7"' in stored(asked)


def test_a_comment_with_another_word_accepts_nothing_and_gets_no_answer(asked):
    asked.runner.values["github.event.comment.body"] = "/gpumem acceptance of #12"
    was = stored(asked)
    assert not accepts(asked)
    assert "the comment has another word than accept" in asked.runner.log
    assert stored(asked) == was
    assert "steps.accept.outputs.asked" not in asked.runner.values


@pytest.mark.parametrize(
    ("environment", "before", "told"),
    [
        ({"MAY": "read"}, "true", "a-maintainer may not write to this repository"),
        ({"IS_FORK": "true"}, "true", "the branch is a fork's"),
        ({"ENDED": ""}, "true", "no run of gpumem-gpu.yml has ended for the last commit"),
        ({}, "ln -s ../../outside gpumem-baselines/cpu-other", "gpumem-baselines has links"),
        (
            {},
            "echo >x && git add x && git commit --quiet --message x",
            "1 file differs (x)",
        ),
        ({}, "echo '{' >gpumem-report/gpumem.json", "gpumem.json: "),
    ],
    ids=["may only read", "a fork", "no run", "links", "another commit", "no report"],
)
def test_a_comment_accepts_nothing_where_it_must_not_and_says_why(asked, environment, before, told):
    asked.runner.environment |= environment
    asked.shell(before)
    was = stored(asked)
    assert not accepts(asked)
    assert told in asked.runner.log
    assert stored(asked) == was
    # Who may not write gets no answer, either.
    assert ("steps.accept.outputs.asked" in asked.runner.values) == ("MAY" not in environment)


def test_the_writing_job_runs_only_actions_and_the_reading_job_writes_nothing():
    jobs = WORKFLOWS["accept.yml"]["jobs"]
    assert {name: job["permissions"] for name, job in jobs.items()} == {
        "accept": {"actions": "read", "contents": "read", "pull-requests": "read"},
        "propose": {"contents": "write", "pull-requests": "write"},
        "answer": {"pull-requests": "write"},
    }
    assert [step["run"] for step in jobs["propose"]["steps"] if "run" in step] == ["rm -rf gpumem-baselines"]
    assert not any("uses" in step for step in jobs["answer"]["steps"])


@pytest.mark.thorough
def test_the_other_blocks_of_the_page_work_too(reader):
    reader.runner.values["inputs.reason"] = 'a "new" $(touch evil) batch'
    for one in BLOCKS:
        if one in (*START, ACCEPT, HISTORY, TOMORROW, BY_COMMENT) or one.file in (*SCHEMAS, "gate.sh", "Jenkinsfile"):
            continue
        reader.shell(ANOTHER_DEVICE.get(one.file or one.section, "true"))
        reader.follow(one)
        if one.language != "yaml":
            continue
        assert reader.runner.run(job_of(reader.folder / one.file)["steps"]), reader.runner.log
    (stored,) = reader.folder.glob("gpumem-baselines/*/test_model.py.toml")
    assert 'a \\"new\\" $(touch evil) batch' in stored.read_text(encoding="utf-8")
    assert not (reader.folder / "evil").exists()
    assert (reader.runner.temp / "python/bin/python").exists(), "packages stay on the runner"
    assert json.loads((reader.folder / "benchmark.json").read_text(encoding="utf-8"))
    sarif = reader.folder / "gpumem-report" / "gpumem.sarif"
    assert json.loads(sarif.read_text(encoding="utf-8"))["version"] == "2.1.0"
    assert "test_train_step" in (reader.folder / "gpumem.prom").read_text(encoding="utf-8")
    left_out = subprocess.run(
        ["gpumem", "merge", "shards/1.json", "--shards", "2"],
        cwd=reader.folder,
        env=reader.runner.environment,
        check=False,
    )
    assert left_out.returncode == 2


@pytest.mark.thorough
def test_the_jobs_of_other_systems_gate_and_keep_their_reports(reader):
    """GitLab's job has lines of its own. The other systems run ``gate.sh``."""
    elsewhere = {one.file: one.text for one in BLOCKS if one.page == "docs/ci-elsewhere.md" and one.file}
    gitlab = read_yaml(on_the_cpu(elsewhere.pop(".gitlab-ci.yml")))["gpumem"]
    reader.shell("\n".join(gitlab["script"] + gitlab["after_script"]))
    assert_kept(reader, gitlab["artifacts"]["paths"] + [*gitlab["artifacts"]["reports"].values()])
    reader.shell("rm junit.xml gpumem.html gpumem.json")
    (reader.folder / "gate.sh").write_text(on_the_cpu(elsewhere.pop("gate.sh")), encoding="utf-8")
    reader.shell("sh gate.sh")
    for text in elsewhere.values():
        assert "sh gate.sh" in text
        assert "gpumem.html" in text or "gpumem.*" in text
        assert "junit.xml" in text
    assert_kept(reader, ["junit.xml", "gpumem.html", "gpumem.json"])


def assert_kept(reader: Reader, names: list[str]) -> None:
    assert all((reader.folder / name).stat().st_size for name in names)


SCHEMAS = {
    ".gitlab-ci.yml": "gitlab-ci",
    ".buildkite/pipeline.yml": "buildkite",
    "azure-pipelines.yml": "azure-pipelines",
    ".circleci/config.yml": "circle-ci",
    ".github/dependabot.yml": "dependabot",
}
"""The schema of each file that is no workflow of GitHub."""


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_of_the_pages_may_do_only_what_it_must(name):
    assert faults(WORKFLOWS[name], on_gpu="-cpu" not in name) == []


def test_few_jobs_of_the_pages_have_a_token_that_can_write_and_none_installs():
    """A job that can write takes what another job has uploaded."""
    able = {
        (file, name): job
        for file, workflow in WORKFLOWS.items()
        for name, job in workflow["jobs"].items()
        if "write" in job.get("permissions", workflow["permissions"]).values()
    }
    assert not any("install" in str(step) for job in able.values() for step in job["steps"])
    assert able.keys() == {
        ("gpumem-comment.yml", "comment"),
        ("gpumem-scanning.yml", "upload"),
        ("tomorrow.yml", "issue"),
        ("record.yml", "propose"),
        ("accept.yml", "propose"),
        ("accept.yml", "answer"),
    }


def test_a_merge_queue_is_gated_by_every_workflow_that_gates_pull_requests():
    """A check that a queue waits for has to run there, and one that is skipped counts as passed."""
    for workflow in GATES:
        assert workflow["on"].keys() >= {"pull_request", "merge_group"}
        condition = workflow["jobs"]["gpumem"].get("if", "github.event_name == 'merge_group' || ")
        assert condition.startswith("github.event_name == 'merge_group' || ")


@pytest.mark.parametrize("file", SCHEMAS)
def test_each_file_that_is_no_workflow_of_github_is_valid(file, tmp_path):
    (block,) = (one for one in BLOCKS if one.file == file)
    (tmp_path / "file.yml").write_text(block.text, encoding="utf-8")
    valid(SCHEMAS[file], tmp_path / "file.yml")


def test_the_comments_workflow_runs_after_each_gate_and_needs_its_permissions():
    comment = WORKFLOWS["gpumem-comment.yml"]
    assert comment["on"]["workflow_run"]["workflows"] == [workflow["name"] for workflow in GATES]
    assert comment["jobs"]["comment"]["if"] == "github.event.workflow_run.event == 'pull_request'"
    assert comment["jobs"]["comment"]["permissions"] == {"actions": "read", "pull-requests": "write"}


def test_the_jobs_of_an_emulated_gpu_install_torch_without_nvidias_libraries():
    """An emulated GPU replaces the libraries, and the runner need not download them."""
    steps = [
        step["with"]
        for workflow in WORKFLOWS.values()
        for job in workflow["jobs"].values()
        for step in job["steps"]
        if "emulated:h100" in step.get("with", {}).get("arguments", "")
    ]
    assert [step["emulated"] for step in steps] == [True] * 3
    # That of tests/test_install.py.
    (edit,) = re.findall(r"^sed .*$", (ROOT / "docs" / "guide" / "no-gpu.md").read_text(encoding="utf-8"), re.MULTILINE)
    (gate,) = (one for one in BLOCKS if one.file == "gate.sh")
    (gitlab,) = (read_yaml(one.text)["gpumem"] for one in BLOCKS if one.file == ".gitlab-ci.yml")
    assert edit in gate.text.splitlines()
    assert edit in gitlab["script"]
    assert gitlab["variables"] == {"GPUMEM_CACHE": "/tmp/gpumem-cache"}, "~/.cache is open to every user there"


def test_the_readme_shows_the_gates_job():
    _, start, rest = GATE.text.partition("    runs-on")
    assert start + rest in (ROOT / "README.md").read_text(encoding="utf-8")
