"""The workflows and the composite action: safe, and of use where they are run. `make lint` checks that they are valid."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner
from packaging.utils import canonicalize_name

from pytest_gpumem import __version__
from pytest_gpumem.emulating.emulation.torch_build import OLDEST
from pytest_gpumem.reporting.reports.json_report import to_json
from pytest_gpumem.reporting.reports.session_report import SessionReport, Terms
from pytest_gpumem.tools.init.workflow import gate_lines
from tests.fake_github import fake_github
from tests.reports.sessions import REGRESSED, session
from tests.workflows import ACTION, COMMENT_ACTION, PASSED, ROOT, Runner, read_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACCOUNT = re.search(r'^Source = "https://github\.com/([^/]+)/', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
"""The account that the repository is under."""
OWN_BRANCH = "github.event.pull_request.head.repo.full_name == github.repository"
PUSHED = "github.event_name == 'push'"
RUNS_NOTHING = {
    "actions/checkout",
    "actions/download-artifact",
    "github/codeql-action/upload-sarif",
    "peter-evans/create-pull-request",
    "pypa/gh-action-pypi-publish",
    "./comment",
    f"{ACCOUNT}/pytest-gpumem/comment",
}
"""Actions that run no code of a project, for jobs whose token can write."""
MAY_RUN = re.compile(r'rm -rf [\w/]*gpumem-baselines|gh pr comment "\$NUMBER" --body "[^"]*"')
"""Commands that run no code of a project, either."""
PINNED = re.search(r'"torch==([^"]+)"', (ROOT / "example_project" / "pyproject.toml").read_text())[1]
"""The release of torch that the example's baselines are of."""


def valid(schema: str, *files: Path) -> None:
    done = CliRunner().invoke(check_jsonschema, ["--builtin-schema", f"vendor.{schema}", *map(str, files)])
    assert done.exit_code == 0, done.output


def faults(workflow: dict, *, on_gpu: bool = False) -> list[str]:
    """Return what is unsafe in a workflow and zizmor does not find, or, ``on_gpu``, what might gate on another device."""
    jobs = workflow["jobs"].items()
    return [f"{name}: {fault}" for name, job in jobs for fault in _faults_of_job(job, workflow, on_gpu)]


def _faults_of_job(job: dict, workflow: dict, on_gpu: bool) -> Iterator[str]:
    events, condition, steps = workflow["on"], job.get("if", ""), job.get("steps", ())
    if "runs-on" in job and job.get("timeout-minutes", 61) > 60:
        yield "may run for hours"
    by_hand = "workflow_dispatch" in (condition if "pull_request" in events else events)
    if "self-hosted" in job.get("runs-on", "") and not by_hand and OWN_BRANCH not in condition:
        yield "strangers' code on a machine of one's own"
    # What has been pushed was reviewed: no pull request's code runs in such a job.
    can_write = "write" in job.get("permissions", workflow["permissions"]).values() and condition != PUSHED
    does = {step["uses"].partition("@")[0] if "uses" in step else step["run"] for step in steps}
    foreign = sorted(does - RUNS_NOTHING - {*filter(MAY_RUN.fullmatch, does)})
    if can_write and foreign:
        yield f"has a token that can write, and runs {foreign}"
    if "workflow_run" in events and any("ref" in step.get("with", {}) for step in steps):
        yield "checks out what a stranger wrote, beside secrets"
    yield from (f"an expression's value would be run: {step}" for step in steps if "${{" in step.get("run", ""))
    yield from (f"names no GPU: {step}" for step in steps if on_gpu and not names_the_gpu(step))


def names_the_gpu(step: dict) -> bool:
    """Whether a step measures on the GPU, real or emulated, or fails, whatever settings say; or measures nothing."""
    script = step.get("run", "")
    measures = "--gpumem-baseline" in script or "--gpumem-update" in script
    if step.get("uses", "").partition("@")[0] in ("./", f"{ACCOUNT}/pytest-gpumem"):
        measures, script = True, step.get("with", {}).get("arguments", "")
    return not measures or not {"--gpumem-device=cuda", "--gpumem-device=emulated:h100"}.isdisjoint(script.split())


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_may_do_only_what_it_must(file):
    workflow = read_yaml(file.read_text(encoding="utf-8"))
    assert faults(workflow, on_gpu=file.name == "gpu.yml") == []
    assert workflow["permissions"] == ({} if file.name == "comment.yml" else {"contents": "read"})


@pytest.mark.parametrize(("action", "section"), [(ACTION, "The gate"), (COMMENT_ACTION, "The comment")])
def test_every_input_and_output_of_an_action_is_documented_and_used(action, section):
    text = action.read_text(encoding="utf-8")
    plain = read_yaml(text)
    page = (ROOT / "docs" / "github.md").read_text(encoding="utf-8").partition(f"\n## {section}\n")[2]
    inputs, outputs = (
        dict(re.findall(r"^\| `([\w-]+)` \| (.*?) \|", table, flags=re.MULTILINE))
        for table in [*page.partition("\n## ")[0].split("\n| output |"), ""][:2]
    )
    of_run = "${{ github.event.workflow_run.id || github.run_id }}"
    words = {"none": "", "that of the job": "${{ github.token }}", "see right": of_run}
    told = {name: words.get(default, default.strip("`")) for name, default in inputs.items()}
    assert told == {name: about["default"] for name, about in plain["inputs"].items()}
    assert {*re.findall(r"inputs\.([\w-]+)", text)} == {*inputs}
    assert list(outputs) == list(plain.get("outputs", ()))
    ids = {step["id"] for step in plain["runs"]["steps"] if "id" in step}
    assert {re.search(r"steps\.(\w+)\.", about["value"])[1] for about in plain.get("outputs", {}).values()} <= ids


def test_what_users_copy_pins_the_action_and_the_plugin_to_this_version():
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "pytest_gpumem" / "tools" / "init").rglob("*.yml"),
    ]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    actions = re.findall(rf"uses: {ACCOUNT}/pytest-gpumem(?:/comment)?(@\S*)", text)
    plugins = re.findall(rf"git\+https://github\.com/{ACCOUNT}/pytest-gpumem([^\s`]*)", text)
    assert len(actions) == text.count(f"uses: {ACCOUNT}/") >= 12
    assert {
        *actions,
        *plugins,
        gate_lines(None, [])[-1].rpartition("pytest-gpumem")[2],
    } == {f"@v{__version__}"}


def test_lint_sees_every_workflow_that_is_shown_or_written(tmp_path):
    """`make lint` writes each workflow of the pages into a file, and starts zizmor and check-jsonschema."""
    subprocess.run([sys.executable, ROOT / ".ci" / "docs_workflows.py", tmp_path / "workflows"], check=True)
    seen = "\n".join(file.read_text(encoding="utf-8") for file in (tmp_path / "workflows").iterdir())
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    shown = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines() if "- uses: " in line]
    assert len(shown) > 20
    assert [line for line in shown if line.strip() not in seen] == []
    commands = made("lint").replace("\\\n", " ").splitlines()
    checks = [line.split() for line in commands if "/zizmor " in line or "/check-jsonschema " in line]
    audit, workflows, actions, dependabot = ({*words[1:]} for words in checks)
    ours = {"action.yml", "comment/action.yml"}
    copied = {"pytest_gpumem/tools/init/workflows/*.yml", "build/workflows/*.yml"}
    assert audit >= {"--persona=pedantic", "--min-severity=medium", ".github", *ours, *copied}
    assert workflows >= {"vendor.github-workflows", ".github/workflows/*.yml", *copied}
    assert actions >= {"vendor.github-actions", *ours}
    assert dependabot >= {"vendor.dependabot", ".github/dependabot.yml"}


def test_every_finding_that_lint_ignores_has_its_reason():
    folders = (ROOT / ".github", ROOT / "docs", ROOT / "comment", ROOT / "pytest_gpumem" / "tools" / "init")
    files = [file for folder in folders for file in folder.rglob("*") if file.suffix in (".yml", ".md")]
    ignored = re.findall(
        r"zizmor: ignore(.*)", "\n".join(file.read_text(encoding="utf-8") for file in (*files, ACTION))
    )
    assert len(ignored) >= 5
    assert [one for one in ignored if not re.fullmatch(r"\[[\w-]+\] \w+( [\w,'-]+)+", one)] == []


# The action

PYTEST = """\
import os, pathlib, sys
if "REPORT_TEXT" in os.environ:
    report = next(word for word in sys.argv if word.endswith(".json")).partition("=")[2]
    pathlib.Path(report).write_bytes(os.environ["REPORT_TEXT"].encode("utf-8", "surrogateescape"))
os._exit(int(os.environ.get("ENDS", "0")))
"""
"""In the working folder, from which the action imports pytest alone: it leaves a report, and ends as it is told."""


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    made = Runner(tmp_path / "work")
    (made.folder / "pytest.py").write_text(PYTEST)
    made.environment["REPORT_TEXT"] = report("gpumem: 1 gated")
    return made


def report(accounting: str, *, passed: bool = True, results: int = 1) -> str:
    """A report with as much in it as the action reads, by the keys of a real one."""
    told = {"accounting": accounting, "passed": passed, "results": [{}] * results}
    assert told.keys() <= json.loads(to_json(SessionReport("2026-11-21T10:00:00Z", "1.0", None, Terms()))).keys()
    return json.dumps(told)


def asked(runner: Runner, module: str) -> list[list[str]]:
    """The arguments of each run of a module, the Python first, whether it was isolated or not."""
    runs = [[word for word in words if word != "-I"] for words in runner.calls()]
    return [[words[0], *words[3:]] for words in runs if words[1:3] == ["-m", module]]


def test_the_action_uses_what_is_there_isolated_from_the_working_folder(runner):
    """There a pull request may have put what the action would import, and run with the token of its comment."""
    for name in ("json", "uuid", "click", "shlex"):
        (runner.folder / f"{name}.py").write_text("raise SystemExit('not the library')")
    assert runner.run_action(), runner.log
    assert asked(runner, "pip") == asked(runner, "venv") == []
    folder = f"{runner.folder}/gpumem-report"
    reports = [f"--gpumem-report={folder}/gpumem.{form}" for form in ("json", "md", "html")]
    assert asked(runner, "pytest") == [[runner.python, "--gpumem-baseline", *reports]]
    assert [words[1:3] for words in runner.calls() if words[1] != "-I"] == [["-m", "pytest"]]


@pytest.mark.parametrize("named", [None, "/mine"])
def test_what_is_loaded_and_run_is_kept_where_no_earlier_job_put_anything(runner, named):
    tells = "import os, pathlib\npathlib.Path(os.environ['LOG'] + '-cache').write_text(os.environ['GPUMEM_CACHE'])\n"
    (runner.folder / "pytest.py").write_text(tells + PYTEST)
    if named is not None:
        runner.environment["GPUMEM_CACHE"] = named
    assert runner.run_action(), runner.log
    assert (runner.temp / "log-cache").read_text() == (named or f"{runner.temp}/gpumem-cache")
    steps = read_yaml(ACTION.read_text(encoding="utf-8"))["runs"]["steps"]
    running = [step for step in steps if {"ab", "bisect"} & set(step.get("run", "").split())]
    assert [step["name"] for step in running] == ["Gate", "Bisect"]
    assert all('export GPUMEM_CACHE="${GPUMEM_CACHE:-$RUNNER_TEMP/gpumem-cache}"' in step["run"] for step in running)


@pytest.mark.parametrize("environment", [True, False], ids=["virtual environment", "no virtual environment"])
def test_what_is_missing_is_installed_where_it_stays_for_the_job_only(runner, environment):
    runner.plugin.unlink()
    runner.environment["VENV"] = "yes" if environment else "no"
    (runner.folder / "sub folder").mkdir()
    shutil.move(runner.folder / "pytest.py", runner.folder / "sub folder")
    assert runner.run_action(install="-e '.[test, more]' --no-deps", working_directory="sub folder"), runner.log
    python = runner.python if environment else f"{runner.temp}/gpumem-python/bin/python"
    project, plugin = asked(runner, "pip")
    assert project == [python, "install", "-e", ".[test, more]", "--no-deps"]
    assert plugin[:2] == [python, "install"]
    assert Path(plugin[2]).resolve() == ROOT
    assert len(asked(runner, "venv")) == (not environment)
    assert asked(runner, "pytest")[0][0] == python
    assert runner.values["steps.gate.outputs.report"] == f"{runner.folder}/sub folder/gpumem-report"


def test_reports_of_a_red_gate_are_uploaded_and_no_step_beside_the_tests_has_a_token():
    text = ACTION.read_text(encoding="utf-8")
    steps = read_yaml(text)["runs"]["steps"]
    upload, bisect, found = conditional = [step for step in steps if "if" in step]
    assert upload["with"]["name"] == found["with"]["name"] == "${{ inputs.name }}"
    files = [step["with"]["path"].replace("${{ steps.gate.outputs.report }}/", "").split() for step in (upload, found)]
    assert files == [["gpumem.*"], ["gpumem.*", "culprit.*"]]
    assert found["if"].endswith(" && steps.bisect.outputs.culprit }}")
    for step in conditional:
        assert step["continue-on-error"] is True
        assert {"!cancelled()", "steps.gate.outcome == 'success'"} <= set(step["if"].strip("${} ").split(" && "))
    assert bisect["if"].endswith(" && inputs.bisect == 'true' && !github.event.pull_request.number }}")
    assert "token" not in re.sub("#.*", "", text).lower()


@pytest.mark.parametrize("action", [ACTION, COMMENT_ACTION])
def test_inputs_reach_scripts_as_environment_variables_only(action):
    steps = read_yaml(action.read_text(encoding="utf-8"))["runs"]["steps"]
    assert [step for step in steps if "${{" in step.get("run", "")] == []


TORCH_METADATA = """\
Metadata-Version: 2.1
Name: torch
Version: 2.13.0
Requires-Dist: filelock
Requires-Dist: cuda-bindings<14; platform_system == "Linux"
Requires-Dist: nvidia-cudnn-cu13==9.20.0.48
Requires-Dist: triton==3.7.1; platform_system == "Linux"
"""


@pytest.fixture
def metadata(runner: Runner, tmp_path: Path) -> Path:
    """Return the metadata of a torch in an environment of its own, in which the action runs: that of the suite stays as it is."""
    real = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", real], check=True)
    runner.environment["REAL"] = str(real / "bin" / "python")
    beneath = f"{ROOT}\nimport site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    packages = next(real.glob("lib/python3*/site-packages"))
    (packages / "beneath.pth").write_text(beneath)
    file = packages / "torch-2.13.0.dist-info" / "METADATA"
    file.parent.mkdir()
    file.write_text(TORCH_METADATA)
    return file


def test_for_an_emulated_gpu_torch_is_installed_without_nvidias_libraries(runner, metadata):
    address = "https://example.org/torch-2.13.0%2Bcu130.whl"
    torch = {"metadata": {"name": "torch", "version": "2.13.0+cu130"}, "download_info": {"url": address}}
    other = {"metadata": {"name": "numpy", "version": "2"}, "download_info": {"url": "https://example.org/numpy.whl"}}
    runner.environment["TO_INSTALL"] = json.dumps({"install": [other, torch]})
    for _ in range(2):  # a job that is run again may find what it left
        assert runner.run_action(install="-r requirements.txt", emulated="true"), runner.log
    dry, alone, everything = asked(runner, "pip")[:3]
    assert dry[1:5] == ["install", "--dry-run", "--quiet", "--no-deps"]
    assert dry[-2:] == everything[-2:] == ["-r", "requirements.txt"]
    assert alone[1:] == ["install", "--no-deps", f"torch @ {address}"]
    assert [line for line in metadata.read_text().splitlines() if "Requires" in line] == [
        "Requires-Dist: filelock",
        'Requires-Dist: cuda-bindings<14; extra == "nvidia"',
        'Requires-Dist: nvidia-cudnn-cu13==9.20.0.48; extra == "nvidia"',
        'Requires-Dist: triton==3.7.1; platform_system == "Linux"',
    ]


@pytest.mark.usefixtures("metadata")
def test_a_torch_that_is_there_is_not_installed_again(runner):
    assert runner.run_action(install="-r requirements.txt", emulated="true"), runner.log
    assert [words[2] for words in asked(runner, "pip")] == ["--dry-run", "--dry-run", "-r"]


def test_without_a_torch_there_is_nothing_to_emulate_with(runner, metadata):
    shutil.rmtree(metadata.parent)
    (metadata.parents[1] / "beneath.pth").unlink()
    assert not runner.run_action(install="-r requirements.txt", emulated="true")
    assert "::error title=gpumem::the input emulated needs a torch, and the input install asks for none" in runner.log


def test_a_torch_beneath_the_environment_keeps_its_requirements(runner, metadata, tmp_path):
    """It is the machine's, and other jobs have it."""
    beneath = tmp_path / "torch-2.13.0.dist-info" / "METADATA"
    shutil.move(metadata.parent, beneath.parent)
    (metadata.parents[1] / "machine.pth").write_text(f"{tmp_path}\n")
    assert runner.run_action(install="-r requirements.txt", emulated="true"), runner.log
    assert beneath.read_text() == TORCH_METADATA


def test_the_action_can_be_listed():
    """The marketplace lists an action of a repository's root, with a name, a description of one paragraph and an icon."""
    plain = read_yaml(ACTION.read_text(encoding="utf-8"))
    assert ACTION.parent == ROOT
    assert plain["name"] == "pytest-gpumem"
    assert plain.keys() >= {"author", "description", "branding"}
    assert len(plain["description"]) <= 125


# The comment of another job


@pytest.fixture
def commenting(tmp_path: Path) -> Iterator[Runner]:
    """A job that `workflow_run` starts, with the reports of a run for a fork's pull request."""
    with fake_github() as github:
        github.run(conclusion="failure")
        made = Runner(tmp_path / "work", github.environment())
        made.github = github
        made.environment["GITHUB_EVENT_PATH"] = str(tmp_path / "no event")
        del made.environment["GITHUB_TOKEN"]
        reports = made.temp / "gpumem-reports"
        reports.mkdir()
        (reports / "gpumem.json").write_text(to_json(session(REGRESSED)))
        (reports / "gpumem.md").write_text("@everybody, run this")
        yield made


def test_the_comment_is_made_of_another_runs_report_and_nothing_else_is_run(commenting):
    for name in ("json", "click", "pytest_gpumem"):
        for folder in (commenting.folder, commenting.temp / "gpumem-reports"):
            (folder / f"{name}.py").write_text("import pathlib; pathlib.Path('evil').touch()\n")
    assert commenting.run_action(COMMENT_ACTION), commenting.log
    (comment,) = commenting.github.comments
    assert "gpumem failed" in comment["body"]
    assert "@everybody" not in comment["body"]
    assert not list(commenting.folder.parent.rglob("evil"))
    assert all(words[1] == "-I" for words in commenting.calls())
    assert {words[3] for words in commenting.calls() if words[2] == "-m"} == {"venv", "pip", "pytest_gpumem.tools.main"}


def test_torch_is_not_installed_to_comment(commenting):
    assert commenting.run_action(COMMENT_ACTION), commenting.log
    package, others = asked(commenting, "pip")
    assert package[1:3] == ["install", "--no-deps"]
    assert Path(package[3]).resolve() == ROOT
    lines = Path(others[-1]).read_text().splitlines()
    pinned = {
        canonicalize_name(line.partition("==")[0]) for line in Path(others[-3]).read_text().splitlines() if "==" in line
    }
    assert {canonicalize_name(re.match(r"[\w.-]+", line)[0]) for line in lines} <= pinned
    assert {re.match(r"[\w.-]+", line)[0] for line in lines} >= {"click", "filelock", "jinja2"}
    assert not any(line.startswith(("torch", "numpy")) for line in lines)


def test_a_run_without_an_artifact_is_told(commenting):
    shutil.rmtree(commenting.temp / "gpumem-reports")
    assert commenting.run_action(COMMENT_ACTION), commenting.log
    steps = read_yaml(COMMENT_ACTION.read_text(encoding="utf-8"))["runs"]["steps"]
    assert [step["continue-on-error"] for step in steps if "uses" in step] == [True]
    (comment,) = commenting.github.comments
    assert "nothing was gated" in comment["body"]


def test_an_issue_is_opened_with_what_was_found_and_closed(commenting):
    found = {"format": 1, "found": True, "result": "tiny 1.1 did it"}
    (commenting.temp / "gpumem-reports" / "culprit.json").write_text(json.dumps(found))
    assert commenting.run_action(COMMENT_ACTION, issue="open"), commenting.log
    (issue,) = commenting.github.issues
    assert issue["title"] == "gpumem: tiny 1.1 did it"
    assert commenting.run_action(COMMENT_ACTION, issue="closed"), commenting.log
    assert issue["state"] == "closed"
    assert commenting.github.comments == []


@pytest.mark.parametrize("name", ["arguments", "install"])
def test_arguments_are_taken_apart_and_not_run(runner, name):
    evil = "-k 'a b' $(touch evil) `touch evil` ; touch evil && * ~ $HOME \"it's\" '' \\\\"
    assert runner.run_action(**{name: evil})
    unquoted = "$(touch evil) `touch evil` ; touch evil && * ~ $HOME it's"
    words = ["-k", "a b", *unquoted.split(), "", "\\"]
    (given,) = asked(runner, "pytest" if name == "arguments" else "pip")
    assert given[-len(words) :] == words
    assert not list(runner.folder.rglob("evil"))


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"arguments": "-k 'a"}, "the input arguments is not quoted as for a shell"),
        ({"install": "-k 'a"}, "the input install is not quoted as for a shell"),
        ({"python": "python9"}, "there is no Python called python9"),
        ({"emulated": "h100"}, "the input emulated is true or false"),
    ],
)
def test_an_input_that_cannot_be_used_is_told_and_nothing_is_gated(runner, inputs, said):
    assert not runner.run_action(**inputs)
    assert f"::error title=gpumem::{said}" in runner.log
    assert PASSED not in runner.values


NOTHING = "nothing was gated: pytest ended with exit code"


@pytest.mark.parametrize(
    ("code", "text", "why"),
    [
        ("1", report("1 regressed", passed=False), "the gate did not pass: pytest ended with exit code 1"),
        ("0", report("1 regressed", passed=False), "exit code 0, and its report says: 1 regressed"),
        ("1", report("gpumem: 1 gated"), "the gate did not pass: pytest ended with exit code 1"),
        ("0", report("gpumem: 0 gated", results=0), f"{NOTHING} 0, and no measured test was selected"),
        ("0", '{"accounting": "gpu', f"{NOTHING} 0, and gpumem.json is not a whole report"),
        ("0", "[]", f"{NOTHING} 0, and gpumem.json is not a whole report"),
        ("0", "\udcff", f"{NOTHING} 0, and gpumem.json is not a whole report"),
        ("4", None, f"{NOTHING} 4, and wrote no report"),
    ],
)
def test_a_gate_that_did_not_pass_is_red_and_says_why(runner, code, text, why):
    report_of_before = runner.folder / "gpumem-report" / "gpumem.json"
    report_of_before.parent.mkdir()
    report_of_before.write_text(report("gpumem: 1 gated"))
    runner.environment["ENDS"] = code
    del runner.environment["REPORT_TEXT"]
    if text is not None:
        runner.environment["REPORT_TEXT"] = text
    assert not runner.run_action()
    assert runner.values[PASSED] == "false"
    (told,) = (line for line in runner.log.splitlines() if line.startswith("::error"))
    assert why in told


@pytest.mark.parametrize(
    "text", ["1 gated\npassed=false\ncode=9", "1\nEOF\n<<", "\ud800 \u202e", "50 % ${{ secrets.X }}"]
)
def test_what_tests_say_makes_no_outputs_of_its_own(runner, text):
    runner.environment["REPORT_TEXT"] = report(text)
    assert runner.run_action()
    said = text.replace("\ud800", "\\ud800")
    assert runner.values["steps.gate.outputs.accounting"] == said
    assert runner.values[PASSED] == "true"
    runner.environment["REPORT_TEXT"] = report(text, passed=False)
    assert not runner.run_action()
    (told,) = (line for line in runner.log.splitlines() if line.startswith("::error"))
    assert told.endswith(said.replace("%", "%25").replace("\n", "%0A"))


# What CI runs


@pytest.mark.parametrize("failing", ["", "browser", ".venv-emulated/.installed", "lint", "emulated"])
def test_ci_waits_for_what_is_fetched_and_tests_nothing_without_it(tmp_path, failing):
    for folder in (".ci", "bin"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    make = '#!/bin/bash\nif [[ $1 == browser ]]; then sleep 0.2; fi\necho "$1" >>log; echo "$1 says"; [[ $1 != "$FAILING" ]]\n'
    (tmp_path / "bin" / "make").write_text(make)
    (tmp_path / "bin" / "make").chmod(0o755)
    done = subprocess.run(
        [tmp_path / ".ci" / "run"],
        env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "FAILING": failing},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == (not failing)
    fetched = ["lint", "browser", ".venv-emulated/.installed"]
    ran = {"browser": fetched[:2], ".venv-emulated/.installed": fetched}.get(failing, [*fetched, "test", "emulated"])
    log = (tmp_path / "log").read_text().split()
    # Where lint fails, what is fetched beside it may not have come to its end.
    assert "test" not in log if failing == "lint" else sorted(log[:3]) + log[3:] == sorted(ran[:3]) + ran[3:]
    assert ("browser says" in done.stdout) == (failing in fetched[1:])


def targets(script: str) -> list[str]:
    """The targets that a script makes, in order; files among them are part of another one."""
    lines = re.findall(r"^[ {]*make ([^;&|>\n]*)", re.sub(r" && ", "\n", script), flags=re.MULTILINE)
    return [word for line in lines for word in shlex.split(line) if re.fullmatch(r"[a-z-]+", word)]


def test_the_workflow_makes_before_its_tests_what_ci_makes_and_tests_the_same():
    ci = targets((ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    prepared = ci[: ci.index("lint")]
    assert (prepared, ci[len(prepared) :]) == (["browser", "compiler", "docs"], ["lint", "test", "emulated"])
    jobs = read_yaml((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    does = {
        name: targets("\n".join(step.get("run", "") for step in job.get("steps", ()))) for name, job in jobs.items()
    }
    each_time = [target for name, job in does.items() if "schedule" not in jobs[name].get("if", "") for target in job]
    # The size is told and nothing fails by it; `make emulated` gates the example on an emulated GPU.
    assert {*each_time} - {"size", "example-cpu"} == {*ci}
    for job in does.values():
        if "test" in job:
            assert job[: len(prepared) + 1] == [*prepared, "test"]


def made(*words: str) -> str:
    """The commands that make would run for targets that are not there."""
    environment = {"PATH": os.environ["PATH"]}
    command = [shutil.which("make"), "--directory", ROOT, "--dry-run", "--always-make", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("target", ["test", "emulated"])
@pytest.mark.parametrize(("release", "suffix"), [(PINNED, ""), ("2.15.0", "-2.15.0"), ("nightly", "-nightly")])
def test_each_release_of_torch_is_installed_in_an_environment_of_its_own(target, release, suffix):
    commands = made(target, f"TORCH={release}")
    folder = {"test": ".venv", "emulated": ".venv-emulated"}[target] + suffix
    assert {*re.findall(r"\.venv[^/\s]*", commands)} == {folder}
    (suite,) = re.findall(rf"{folder}/bin/python -m pytest -n auto.*", commands)
    assert suite.endswith('-m "not thorough" ')
    if release == "nightly":
        index = {"test": "cpu", "emulated": r"cu\d+"}[target]
        assert re.search(rf"--pre torch --index-url \S+/nightly/{index}$", commands.partition(suite)[0], re.MULTILINE)
        assert "torch=" not in commands
    else:
        sign = {"test": "==", "emulated": "==="}[target]
        assert {*re.findall(r"torch(=+[^ \n]+)", commands)} == {sign + release}
    assert "triton" not in commands, "torch requires it in its release"


def test_ci_tests_four_releases_of_torch_of_which_the_nightly_alone_may_fail():
    jobs = read_yaml((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    oldest = re.search(r'"torch>=([^"]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert oldest == ".".join(map(str, OLDEST))
    for name in ("test", "emulated"):
        matrix = jobs[name]["strategy"]["matrix"]
        releases = dict.fromkeys([*matrix["torch"], *(one["torch"] for one in matrix.get("include", []))])
        pinned, newest, floor, nightly = releases
        assert (pinned, floor, nightly) == (PINNED, f"{oldest}.0", "nightly")
        assert tuple(map(int, newest.split("."))) > tuple(map(int, pinned.split(".")))
        assert jobs[name]["continue-on-error"] == "${{ matrix.torch == 'nightly' }}"
        assert jobs[name]["env"]["TORCH"] == "${{ matrix.torch }}"
        assert any(step.get("run", "").startswith(f"make {name} ") for step in jobs[name]["steps"])
    assert [name for name, job in jobs.items() if "continue-on-error" in job] == ["test", "emulated"]


BROWSER = {
    "there": (["chromium"], "0", 0, "there is a chromium: "),
    "nowhere to take it from": ([], "0", 1, "there is no apt-get"),
    "not allowed": (["apt-get"], "1000", 1, "run as root, 'apt-get install --no-install-recommends chromium'"),
    "failing": (["apt-get"], "0", 1, "chromium could not be installed (see above)"),
}


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("case", BROWSER)
def test_the_browser_is_installed_or_it_is_said_why_not(case, tmp_path):
    present, user, code, said = BROWSER[case]
    (tmp_path / "sh").symlink_to(shutil.which("sh"))
    scripts = {"id": f"echo {user}", **dict.fromkeys(present, "exit 1")}
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!{shutil.which('sh')}\n{script}\n")
        (tmp_path / name).chmod(0o755)
    command = [shutil.which("make"), "-C", str(ROOT), "browser"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == (code != 0)
    assert said in done.stdout + done.stderr
