"""The workflows and the composite action: valid, safe, and of use where they are run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner

from pytest_gpumem.emulation.torch_build import OLDEST
from pytest_gpumem.reports.json_report import to_json
from pytest_gpumem.reports.session_report import SessionReport, Terms
from tests.workflows import ACTION, ROOT, Runner, read_yaml

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.search(r'"torch==([^"]+)"', (ROOT / "example_project" / "pyproject.toml").read_text())[1]
"""The release of torch that the example's baselines are of."""


def valid(schema: str, *files: Path) -> None:
    done = CliRunner().invoke(check_jsonschema, ["--builtin-schema", f"vendor.{schema}", *map(str, files)])
    assert done.exit_code == 0, done.output


def steps_of(file: Path) -> list[tuple[str, dict]]:
    """Every step of a workflow or an action, with a name to tell it by."""
    plain = read_yaml(file.read_text(encoding="utf-8"))
    jobs = plain["jobs"] if "jobs" in plain else {"action": plain["runs"]}
    return [
        (f"{file.name}: {name}: {step.get('name', step.get('uses', step.get('run')))}", step)
        for name, job in jobs.items()
        for step in job["steps"]
    ]


PROPOSING = {"actions/checkout", "actions/download-artifact", "peter-evans/create-pull-request"}
"""The actions of a job that opens a pull request with baselines."""


def done_by(*jobs: dict) -> set[str]:
    """What jobs do: their scripts, and the actions that they use."""
    return {step["run"] if "run" in step else step["uses"].partition("@")[0] for job in jobs for step in job["steps"]}


def keeps_no_token(job: dict) -> bool:
    """Whether checkouts leave the job's token where nothing that is run later can read it."""
    checkouts = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
    return all(step.get("with", {}).get("persist-credentials") is False for step in checkouts)


def names_the_gpu(step: dict) -> bool:
    """Whether a step measures on the GPU, real or emulated, or fails, whatever settings say; or measures nothing."""
    script = step.get("run", "")
    measures = "--gpumem-baseline" in script or "--gpumem-update" in script
    if step.get("uses", "").partition("@")[0].endswith("/actions/gpumem"):
        measures, script = True, step.get("with", {}).get("arguments", "")
    return not measures or not {"--gpumem-device=cuda", "--gpumem-device=emulated:h100"}.isdisjoint(script.split())


STEPS = [step for file in [*WORKFLOWS, ACTION] for step in steps_of(file)]


def test_the_workflows_are_workflows():
    assert {file.name for file in WORKFLOWS} >= {"ci.yml", "gpu.yml"}
    valid("github-workflows", *WORKFLOWS)


def test_the_action_is_an_action():
    valid("github-actions", ACTION)


@pytest.mark.parametrize(("name", "step"), STEPS, ids=[name for name, _ in STEPS])
def test_no_script_contains_an_expression(name, step):
    """Its value, which may be a branch's name or somebody's title, would be run."""
    assert "${{" not in step.get("run", ""), name


@pytest.mark.parametrize(("name", "step"), STEPS, ids=[name for name, _ in STEPS])
def test_actions_of_others_are_pinned_to_a_commit(name, step):
    uses = step.get("uses", "./")
    if not uses.startswith(("./", "actions/")):
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", uses), name


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_may_do_no_more_than_it_must_and_ends(file):
    plain = read_yaml(file.read_text(encoding="utf-8"))
    assert plain["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in plain["on"]
    for name, job in plain["jobs"].items():
        assert job["timeout-minutes"] <= 60, name
        assert keeps_no_token(job), name


def test_pull_requests_from_forks_do_not_run_on_the_gpu_and_who_can_write_runs_nothing():
    jobs = read_yaml((ROOT / ".github/workflows/gpu.yml").read_text(encoding="utf-8"))["jobs"]
    ours = {name: job for name, job in jobs.items() if "self-hosted" in job["runs-on"]}
    assert ours.keys() == {"gate", "record"}
    assert "github.event.pull_request.head.repo.full_name == github.repository" in ours["gate"]["if"]
    assert "github.event_name == 'workflow_dispatch'" in ours["record"]["if"]
    assert not any("write" in job.get("permissions", {}).get("contents", "") for job in ours.values())
    writing = [job for job in jobs.values() if job.get("permissions", {}).get("contents") == "write"]
    assert done_by(*writing) == PROPOSING | {"rm -rf example_project/gpumem-baselines"}


@pytest.mark.parametrize(
    ("name", "step"), steps_of(ROOT / ".github/workflows/gpu.yml"), ids=lambda one: one if isinstance(one, str) else ""
)
def test_a_gpu_is_what_is_gated_where_there_is_to_be_one(name, step):
    assert names_the_gpu(step), name


def test_a_step_that_measures_and_names_no_gpu_is_found():
    assert not names_the_gpu({"run": "python -m pytest --gpumem-baseline"})
    assert not names_the_gpu({"uses": "./.github/actions/gpumem", "with": {"arguments": "--gpumem-device=auto"}})


def test_every_input_of_the_action_is_used_and_every_output_is_one_of_a_step():
    text = ACTION.read_text(encoding="utf-8")
    plain = read_yaml(text)
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(plain["inputs"])
    ids = {step["id"] for step in plain["runs"]["steps"] if "id" in step}
    assert {re.search(r"steps\.(\w+)\.", about["value"])[1] for about in plain["outputs"].values()} <= ids


def test_ci_documents_every_input_and_output_of_the_action():
    plain = read_yaml(ACTION.read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8").partition("\n## GitHub Actions\n")[2]
    inputs, outputs = (
        dict(re.findall(r"^\| `([\w-]+)` \| (.*?) \|", table, flags=re.MULTILINE))
        for table in text.partition("\n## ")[0].split("\n| output |")
    )
    assert list(outputs) == list(plain["outputs"])
    words = {"none": "", "that of the job": "${{ github.token }}"}
    told = {name: words.get(default, default.strip("`")) for name, default in inputs.items()}
    assert told == {name: about["default"] for name, about in plain["inputs"].items()}


# A Python that notes what it is asked for. `venv` copies it, `pip` of the plugin installs that, and `pytest` leaves a report
# and ends as it is told.
PYTHON = """\
#!/bin/bash
printf '%s\\0' "$0" "$@" >>"$LOG"; echo >>"$LOG"
isolated=(); if [[ $1 == -I ]]; then isolated=(-I); shift; fi
case "$1 $2" in
  "-m venv") mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
  "-m pip") if [[ $* == *"[report]" ]]; then touch "$PLUGIN"; fi ;;
  "-m pytest") if [[ -e $MADE ]]; then cp "$MADE" gpumem-report/gpumem.json; fi; exit "$ENDS" ;;
  "-m pytest_gpumem.cli.main") echo "$GITHUB_TOKEN" >>"$LOG.token"; exit "$COMMENTS" ;;
  "-c "*distributions*) [[ -e $PLUGIN ]] ;;
  "-c "*base_prefix*) [[ $VENV == no ]] ;;
  "-c "*plotly*) [[ $PLOTLY == yes ]] ;;
  *) exec "$REAL" "${isolated[@]}" "$@" ;;
esac
"""


class Machine:
    """A runner with that Python, and what became of a run of the action on it."""

    def __init__(self, folder: Path, pull_request: bool = True) -> None:
        self.folder = folder
        for name in ("bin", "temp", "work"):
            (folder / name).mkdir()
        (folder / "bin" / "python3").write_text(PYTHON)
        (folder / "bin" / "python3").chmod(0o755)
        self.log = folder / "log"
        environment = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "LOG": str(self.log),
            "PLUGIN": str(folder / "plugin"),
            "MADE": str(folder / "made.json"),
            "REAL": sys.executable,
            "VENV": "no",
            "PLOTLY": "yes",
            "ENDS": "0",
            "COMMENTS": "0",
        }
        event = {"pull_request": {"number": 7}} if pull_request else {}
        self.runner = Runner(folder / "work", folder / "temp", environment, {"event": event})
        (folder / "plugin").touch()
        self.makes("gpumem: 1 gated")

    def makes(self, accounting: str, passed: bool = True, results: int = 1) -> None:
        """What pytest reports: of the keys of a report, with as much in them as the action reads."""
        told = {"accounting": accounting, "passed": passed, "results": [{}] * results}
        assert told.keys() <= json.loads(to_json(SessionReport("2026-11-21T10:00:00Z", "1.0", None, Terms()))).keys()
        (self.folder / "made.json").write_text(json.dumps(told))

    def run(self, **inputs: str) -> tuple[bool, dict[str, str]]:
        return self.runner.run_action({name.replace("_", "-"): value for name, value in inputs.items()})

    def asked(self, module: str) -> list[list[str]]:
        """The arguments of each run of a module, the Python first, whether it was isolated or not."""
        runs = [[word for word in words if word != "-I"] for words in self.runs()]
        return [[words[0], *words[3:]] for words in runs if words[1:3] == ["-m", module]]

    def runs(self) -> list[list[str]]:
        """Each run of a Python, which comes first, with its arguments."""
        return [line.split("\0") for line in self.log.read_text().split("\0\n")[:-1]]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_what_is_there_is_used_as_it_is(machine):
    assert machine.run() == (
        True,
        {"passed": "true", "accounting": "gpumem: 1 gated", "report": f"{machine.folder}/work/gpumem-report"},
    )
    assert machine.asked("pip") == machine.asked("venv") == []
    ((python, *arguments),) = machine.asked("pytest")
    assert python == f"{machine.folder}/bin/python3"
    report = f"--gpumem-report={machine.folder}/work/gpumem-report/gpumem"
    assert arguments == ["--gpumem-baseline", f"{report}.json", f"{report}.md", f"{report}.html"]


def test_what_is_missing_is_installed_where_it_stays_for_the_job_only(machine):
    (machine.folder / "plugin").unlink()
    assert machine.run(install="-e '.[test, more]' --no-deps")[0]
    python = f"{machine.folder}/temp/gpumem-python/bin/python"
    ((_, *made),) = machine.asked("venv")
    assert made == ["--system-site-packages", str(Path(python).parents[1])]
    (project, plugin) = machine.asked("pip")
    assert project == [python, "install", "-e", ".[test, more]", "--no-deps"]
    assert plugin[:2] == [python, "install"]
    assert Path(plugin[2].removesuffix("[report]")).resolve() == ROOT
    assert machine.asked("pytest")[0][0] == python


def test_a_virtual_environment_is_installed_into(machine):
    machine.runner.environment["VENV"] = "yes"
    assert machine.run(install="-r requirements.txt")[0]
    assert machine.asked("venv") == []
    assert machine.asked("pip") == [[f"{machine.folder}/bin/python3", "install", "-r", "requirements.txt"]]


@pytest.mark.parametrize("name", ["arguments", "install"])
def test_arguments_are_taken_apart_and_not_run(machine, name):
    evil = "-k 'a b' $(touch evil) `touch evil` ; touch evil && * ~ $HOME \"it's\" '' \\\\"
    assert machine.run(**{name: evil})[0]
    words = [
        "-k",
        "a b",
        "$(touch",
        "evil)",
        "`touch",
        "evil`",
        ";",
        "touch",
        "evil",
        "&&",
        "*",
        "~",
        "$HOME",
        "it's",
        "",
        "\\",
    ]
    (asked,) = machine.asked("pytest" if name == "arguments" else "pip")
    assert asked[-len(words) :] == words
    assert not list(machine.folder.rglob("evil"))


@pytest.mark.parametrize("name", ["arguments", "install"])
def test_a_quote_that_is_not_closed_is_told(machine, name):
    assert not machine.run(**{name: "-k 'a"})[0]
    assert f"::error title=gpumem::the input {name} is not quoted as for a shell" in machine.runner.log
    assert not machine.runner.uses


def test_a_python_that_is_not_there_is_told(machine):
    passed, outputs = machine.run(python="python9")
    assert (passed, outputs["passed"]) == (False, "false")
    assert "::error title=gpumem::there is no Python called python9" in machine.runner.log


@pytest.mark.parametrize("code", ["1", "2", "5"])
def test_a_red_gate_is_red_after_everything_was_uploaded(machine, code):
    machine.runner.environment["ENDS"] = code
    machine.makes("gpumem: 1 gated, 1 regressed", passed=False)
    passed, outputs = machine.run(name="gpumem-h100")
    assert not passed
    assert (outputs["passed"], outputs["accounting"]) == ("false", "gpumem: 1 gated, 1 regressed")
    ((action, given),) = machine.runner.uses
    assert action.startswith("actions/upload-artifact@")
    assert given == {"name": "gpumem-h100", "path": f"{outputs['report']}/gpumem.*", "overwrite": "true"}
    assert [asked[1:] for asked in machine.asked("pytest_gpumem.cli.main")] == [
        [
            "comment",
            f"{outputs['report']}/gpumem.json",
            "--name",
            "gpumem-h100",
            "--link",
            "https://github.com/a/b/actions/runs/1/artifacts/2",
        ]
    ]


def test_a_report_that_did_not_pass_is_red_though_pytest_ended_with_0(machine):
    machine.makes("gpumem: 1 gated, 1 regressed", passed=False)
    passed, outputs = machine.run()
    assert (passed, outputs["passed"]) == (False, "false")
    why = "pytest ended with exit code 0, and its report says: gpumem: 1 gated, 1 regressed"
    assert f"::error title=gpumem::the gate did not pass: {why}" in machine.runner.log
    assert machine.asked("pytest_gpumem.cli.main")[-1][2].endswith("/gpumem.json")


@pytest.mark.parametrize("text", ['{"accounting": "gpu', "{}", "[]", '{"accounting": "", "passed": true}', "\xff"])
def test_a_report_that_is_not_whole_is_red(machine, text):
    (machine.folder / "made.json").write_bytes(text.encode("latin-1"))
    passed, outputs = machine.run()
    assert (passed, outputs["passed"], outputs["accounting"]) == (False, "false", "")
    said = "nothing was gated: pytest ended with exit code 0, and gpumem.json is not a whole report"
    assert f"::error title=gpumem::{said}" in machine.runner.log
    assert machine.asked("pytest_gpumem.cli.main")[-1][2].endswith("/gpumem.md")


def test_a_test_that_is_red_after_the_report_is_red_though_the_report_passed(machine):
    machine.runner.environment["ENDS"] = "1"
    passed, outputs = machine.run()
    assert (passed, outputs["passed"]) == (False, "false")


def test_a_run_in_which_no_measured_test_was_selected_is_red_and_the_comment_says_so(machine):
    machine.makes("gpumem: 0 gated", results=0)
    passed, outputs = machine.run()
    assert (passed, outputs["passed"]) == (False, "false")
    said = "pytest ended with exit code 0, and no measured test was selected"
    assert f"::error title=gpumem::nothing was gated: {said}" in machine.runner.log
    report = machine.asked("pytest_gpumem.cli.main")[-1][2]
    assert report == f"{outputs['report']}/gpumem.md"
    assert said in Path(report).read_text()


def test_only_the_tests_can_import_from_the_working_folder(machine):
    """There a pull request may have put what the action would import, and run with the token of its comment."""
    (machine.folder / "plugin").unlink()
    for name in ("json", "uuid", "click", "shlex", "pathlib"):
        (machine.folder / "work" / f"{name}.py").write_text("raise SystemExit('not the library')")
    passed, _ = machine.run(install="-r requirements.txt", arguments="-k it")
    assert passed, machine.runner.log
    assert [words[1:3] for words in machine.runs() if words[1] != "-I"] == [["-m", "pytest"]]
    assert len(machine.runs()) == 11


@pytest.mark.parametrize("code", ["0", "4"])
def test_a_run_without_a_report_says_so_and_does_not_show_an_old_one(machine, code):
    assert machine.run()[0]
    (machine.folder / "made.json").unlink()
    machine.runner.environment["ENDS"] = code
    passed, outputs = machine.run()
    assert (passed, outputs["passed"], outputs["accounting"]) == (False, "false", "")
    report = Path(outputs["report"])
    assert [file.name for file in report.iterdir()] == ["gpumem.md"]
    said = f"pytest ended with exit code {code}, and wrote no report"
    assert said in (report / "gpumem.md").read_text()
    assert f"::error title=gpumem::nothing was gated: {said}" in machine.runner.log
    assert machine.asked("pytest_gpumem.cli.main")[-1][2] == f"{report}/gpumem.md"


def test_a_comment_that_cannot_be_put_does_not_change_the_verdict(machine):
    machine.runner.environment["COMMENTS"] = "1"
    assert machine.run()[0]


def test_a_comment_is_put_where_one_is_wanted_with_the_token_that_was_given(machine, tmp_path_factory):
    assert machine.run(token="secret")[0]
    assert (machine.folder / "log.token").read_text() == "secret\n"
    assert machine.run(comment="false")[0]
    assert len(machine.asked("pytest_gpumem.cli.main")) == 1
    other = Machine(tmp_path_factory.mktemp("push"), pull_request=False)
    assert other.run()[0]
    assert other.asked("pytest_gpumem.cli.main") == []


def test_without_plotly_the_other_reports_are_made(machine):
    machine.runner.environment["PLOTLY"] = "no"
    assert machine.run()[0]
    assert not any(word.endswith(".html") for word in machine.asked("pytest")[0])
    assert "::notice title=gpumem::no HTML report without plotly" in machine.runner.log


@pytest.mark.parametrize(
    "text", ["1 gated\npassed=false\ncode=9", "EOF\n<<", "\ud800 \u202e 漢字", "50 % ${{ secrets.X }}"]
)
def test_what_tests_say_makes_no_outputs_of_its_own(machine, text):
    machine.makes(text)
    passed, outputs = machine.run()
    assert (passed, outputs["passed"]) == (True, "true")
    assert outputs["accounting"] == text.replace("\ud800", "\\ud800")
    machine.makes(text, passed=False)
    assert not machine.run()[0]
    (told,) = (line for line in machine.runner.log.splitlines() if line.startswith("::error"))
    assert told.endswith(text.replace("\ud800", "\\ud800").replace("%", "%25").replace("\n", "%0A"))


def test_the_action_runs_in_the_folder_that_it_is_given(machine):
    (machine.folder / "work" / "sub folder").mkdir()
    _, outputs = machine.run(working_directory="sub folder", report="gpumem-report")
    assert outputs["report"] == f"{machine.folder}/work/sub folder/gpumem-report"


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
    ran = {"browser": fetched[:2], ".venv-emulated/.installed": fetched, "lint": ["lint"]}
    assert (tmp_path / "log").read_text().split() == ran.get(failing, [*fetched, "test", "emulated"])
    assert ("browser says" in done.stdout) == (failing in fetched[1:])


def made(*words: str) -> str:
    """The commands that make would run for targets that are not there."""
    environment = {"PATH": os.environ["PATH"]}
    command = [shutil.which("make"), "--directory", ROOT, "--dry-run", "--always-make", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("target", ["test", "emulated"])
@pytest.mark.parametrize(
    ("release", "suffix"), [(None, ""), (PINNED, ""), ("2.15.0", "-2.15.0"), ("nightly", "-nightly")]
)
def test_each_release_of_torch_has_an_environment_of_its_own_for_which_it_is_installed(target, release, suffix):
    commands = made(target, *([] if release is None else [f"TORCH={release}"]))
    folder = {"test": ".venv", "emulated": ".venv-emulated"}[target] + suffix
    assert {*re.findall(r"\.venv[^/\s]*", commands)} == {folder}
    (suite,) = re.findall(rf"{folder}/bin/python -m pytest -n auto.*", commands)
    assert suite.endswith('-m "not thorough" ')
    installed = commands.partition(suite)[0]
    if release == "nightly":
        index = {"test": "cpu", "emulated": r"cu\d+"}[target]
        assert re.search(
            rf"--pre torch --index-url https://download\.pytorch\.org/whl/nightly/{index}$", installed, re.MULTILINE
        )
        assert "torch=" not in commands
    else:
        sign = {"test": "==", "emulated": "==="}[target]
        assert {*re.findall(r"torch(=+[^ \n]+)", commands)} == {sign + (release or PINNED)}
    assert "triton" not in commands, "torch requires it in its release"


def test_ci_tests_the_release_of_the_examples_baselines_the_newest_the_oldest_and_the_nightly_which_alone_may_fail():
    jobs = read_yaml((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    oldest = re.search(r'"torch>=([^"]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert oldest == ".".join(map(str, OLDEST))
    for name in ("test", "emulated"):
        matrix = jobs[name]["strategy"]["matrix"]
        releases = [*matrix["torch"], *(one["torch"] for one in matrix.get("include", []))]
        assert [*releases[:3], "nightly"] == releases
        pinned, newest, floor = releases[:3]
        assert (pinned, floor) == (PINNED, f"{oldest}.0")
        assert tuple(map(int, newest.split("."))) > tuple(map(int, pinned.split(".")))
        assert jobs[name]["continue-on-error"] == "${{ matrix.torch == 'nightly' }}"
        assert jobs[name]["env"]["TORCH"] == "${{ matrix.torch }}"
        assert any(step.get("run", "").startswith(f"make {name} ") for step in jobs[name]["steps"])
    assert [name for name, job in jobs.items() if "continue-on-error" in job] == ["test", "emulated"]


BROWSER = {
    "there": (["chromium"], "0", 0, "there is a chromium: "),
    "nowhere to take it from": ([], "0", 1, "there is no apt-get"),
    "not allowed": (["apt-get"], "1000", 1, "run as root, 'apt-get install --no-install-recommends chromium'"),
    "installed": (["apt-get"], "0", 0, "install -q -y --no-install-recommends chromium"),
    "failing": (["apt-get"], "0", 1, "chromium could not be installed (see above)"),
}


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("case", BROWSER)
def test_the_browser_is_installed_or_it_is_said_why_not(case, tmp_path):
    present, user, code, said = BROWSER[case]
    (tmp_path / "sh").symlink_to(shutil.which("sh"))
    scripts = {"id": f"echo {user}", **dict.fromkeys(present, f'echo "$@"; exit {int(case == "failing")}')}
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!{shutil.which('sh')}\n{script}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [shutil.which("make"), "-C", str(ROOT), "browser"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) == (code != 0)
    assert said in done.stdout + done.stderr
