"""``gpumem init``: a repository that has tests gets a gate, without an edit by hand."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.base import processes
from pytest_gpumem.plugin.config.settings import KEYS, matches_test
from pytest_gpumem.tools.doctor import collecting
from pytest_gpumem.tools.doctor.facts import DeviceFacts, ProbeResult, TorchFacts
from pytest_gpumem.tools.init import command, edits, first_baselines, observing, shown_session
from pytest_gpumem.tools.init.observing import ObservedRun
from pytest_gpumem.tools.init.project_tests import ProjectTest, ProjectTests
from pytest_gpumem.tools.init.proposal import ATTRIBUTES, MARK_KEY, SETTINGS, WORKFLOW
from pytest_gpumem.tools.init.shown_session import run_shown
from pytest_gpumem.tools.init.workflow import (
    DEVICES,
    PLACEHOLDER,
    RUNNERS,
    comment_workflow,
    has_all,
    scalar,
    template,
    workflow,
)
from pytest_gpumem.tools.main import main
from tests.support.processes import fork_runs
from tests.test_ci import faults, valid
from tests.workflows import read_yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
INFERENCE = "    return model(torch.ones(128, 64))\n"
STEP = "    model(torch.ones(128, 64)).square().mean().backward()\n    model.zero_grad()\n"
MODEL = """from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        return self.layers(x)


def make_net():
    return Net()
"""
HOLDS_A_TENSOR = MODEL.replace(
    "return self.layers(x)", "self.last = self.layers(x).double()\n        return self.last.float()"
)
DATA = "def test_numbers():\n    assert 1 + 1 == 2\n"
FLAT = {
    "model.py": MODEL,
    "test_model.py": "import torch\nfrom model import make_net\n\n\ndef test_it():\n    model = make_net()\n"
    + INFERENCE.replace("return ", ""),
    "test_data.py": DATA,
}
SRC = {
    "pyproject.toml": '[project]\nname = "net"\nversion = "1"\n\n[tool.pytest.ini_options]\ntestpaths = ["tests"]\npythonpath = ["src"]',
    "src/net/__init__.py": "",
    "src/net/model.py": MODEL,
    "src/net/steps.py": "import torch\n\n\ndef train(model):\n" + STEP,
    "tests/conftest.py": "import pytest\nfrom net.model import Net\n\n\n@pytest.fixture\ndef net():\n    return Net()\n",
    "tests/test_net.py": "import pytest\nfrom net.steps import train\n\n\n@pytest.mark.parametrize('count', [1, 2])\n"
    "def test_trains(net, count):\n    train(net)\n\n\ndef test_has_layers(net):\n    assert len(net.layers) == 3\n",
}
BESIDE = {
    "net/__init__.py": "",
    "net/model.py": MODEL,
    "net/model_test.py": "import unittest\nimport torch\nfrom net.model import Net\n\n\nclass NetCase(unittest.TestCase):\n"
    "    def setUp(self):\n        self.net = Net()\n\n    def test_runs(self):\n        self.net(torch.ones(128, 64))\n",
    "net/data_test.py": DATA,
}
LAYOUTS = {"flat": (FLAT, "model.py"), "src": (SRC, "src/net/model.py"), "beside": (BESIDE, "net/model.py")}


@pytest.fixture
def here(monkeypatch):
    """Have the machine measure on the CPU, or what a test says, without torch being imported for it."""

    def set_to(*able: str, release: str = "2.15.0"):
        def probe(words, environment):
            found = tuple(DeviceFacts(word, trouble=None if word in able else "no") for word in words)
            return ProbeResult(TorchFacts(release), found)

        monkeypatch.setattr(collecting, "probe", probe)

    set_to("cpu")
    return set_to


@pytest.fixture
def repository(project, here, monkeypatch):
    """Write files into a project that is a git repository, whose first baselines a process with torch loaded records."""
    monkeypatch.chdir(project.path)
    fork_runs(monkeypatch, observing, shown_session, first_baselines)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:randomly --no-gpumem-time")
    (project.path / ".git").mkdir()
    (project.path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (project.path / ".git" / "objects").mkdir()
    (project.path / ".git" / "refs").mkdir()

    def write(files):
        for name, text in files.items():
            path = project.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return project

    return write


def init(*arguments, **more):
    return CliRunner().invoke(main, ["init", *arguments], **more)


def there(project) -> set[str]:
    found = (path.relative_to(project.path).as_posix() for path in project.path.rglob("*") if path.is_file())
    return {
        path
        for path in found
        if not path.startswith(".git/") and "__pycache__" not in path and ".pytest_cache" not in path
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_repository_gets_a_gate_that_is_green_until_something_holds_a_tensor(repository, layout, monkeypatch):
    if layout == "flat":  # once as it is
        monkeypatch.setattr(observing, "run", processes.run)
        monkeypatch.setattr(shown_session, "run", processes.run)
    files, model = LAYOUTS[layout]
    project = repository(files)
    done = init("--yes")
    assert done.exit_code == 0, done.output
    assert "baselines written (new)" in done.output or "baseline written (new)" in done.output
    gate = project.run("--gpumem-baseline", "--gpumem-strict", device=None)
    assert gate.ret == 0
    (project.path / model).write_text(HOLDS_A_TENSOR)
    gate = project.run("--gpumem-baseline", "--gpumem-strict", device=None)
    assert gate.ret == 1
    gate.stdout.fnmatch_lines(["gpumem: * gated, * regressed"])


def test_a_second_run_has_nothing_to_do(repository):
    project = repository(SRC)
    assert init("--yes").exit_code == 0
    before = {name: (project.path / name).read_bytes() for name in there(project)}
    done = init("--yes")
    assert done.exit_code == 0
    assert "there is nothing to write" in done.output
    assert "gpumem-baselines has baselines" in done.output
    assert {name: (project.path / name).read_bytes() for name in there(project)} == before


# What is proposed


def test_only_looking_writes_nothing_and_shows_the_changes(repository):
    project = repository(FLAT)
    done = init("--yes", "--dry-run")
    assert done.exit_code == 0
    assert there(project) == {*FLAT}
    for line in ("+[tool.gpumem]", '+device = "cpu"', '+    "test_model.py",', "+++ b/.github/workflows/gpumem.yml"):
        assert line in done.output.splitlines()
    assert f"+{MARK_KEY} = [" in done.output
    assert MARK_KEY in KEYS


@pytest.mark.parametrize("text", ["[tool.black]\r\nline-length = 100\r\n", "# no end", "[tool.x]\n\n\n", ""])
def test_the_rest_of_pyproject_stays_as_it_was(repository, text):
    project = repository(FLAT)
    path = project.path / SETTINGS
    path.write_bytes(text.encode())
    project.path.joinpath("gpumem-baselines").mkdir()
    project.path.joinpath("gpumem-baselines/a.toml").write_text("")
    assert init("--yes").exit_code == 0
    written = path.read_bytes()
    assert written.startswith(text.encode())
    assert (b"\r\n" in written) == ("\r\n" in text)
    assert written.count(b"\r\n") in (0, written.count(b"\n"))


@pytest.mark.parametrize(
    ("able", "source", "device", "runner"),
    [
        (("cpu",), "cpu", "cpu", "cpu"),
        (("cpu", "cuda"), "cpu", "cpu", "cpu"),
        (("cpu", "cuda"), "cuda", "cuda", "self-hosted"),
        (("cpu", "emulated:h100"), "cuda", "auto", "emulated"),
        (("emulated:h100",), "cpu", "emulated:h100", "emulated"),
        (("cpu",), "cuda", "auto", "cpu"),
    ],
)
def test_device_and_runner_are_those_that_measure_something_here(
    repository, here, monkeypatch, able, source, device, runner
):
    repository(FLAT)
    here(*able)
    tests = ProjectTests((ProjectTest("test_model.py::test_it", runs_model=True),), on_gpu=source == "cuda")
    monkeypatch.setattr(command, "observe", lambda *_: ObservedRun(tests))
    done = init("--yes", "--dry-run")
    assert f'+device = "{device}"' in done.output.splitlines()
    assert f"the workflow is for --runner={runner}, because " in done.output


def test_a_runner_that_this_machine_has_no_baselines_for_is_said(repository):
    repository(FLAT)
    done = init("--no-run", "--dry-run", "--runner", "self-hosted")
    assert "runs-on: [self-hosted, gpu]" in done.output
    assert "--gpumem-update=new --gpumem-device=cuda`" in done.output


@pytest.mark.parametrize(
    ("able", "runner", "recordings"),
    [
        (("cpu",), "cpu", [["--no-gpumem-time"]]),
        (("cpu", "cuda"), "self-hosted", [[]]),
        (("cpu", "cuda"), "cpu", [[], ["--gpumem-device=cpu", "--no-gpumem-time"]]),
        (("cpu", "emulated:h100"), "emulated", [[], ["--gpumem-device=emulated:h100"]]),
    ],
)
def test_times_are_recorded_where_the_workflow_takes_some(repository, here, monkeypatch, able, runner, recordings):
    ran = []
    monkeypatch.setattr(
        first_baselines, "run_shown", lambda words, folder, environment: (ran.append(list(words)), (0, ()))[1]
    )
    repository({**FLAT, "conftest.py": "import torch\n\ntorch.cuda.is_available()\n"})
    here(*able)
    init("--yes", "--runner", runner)
    assert ran == [["-m", "pytest", "--gpumem-update=new", *options] for options in recordings]


@pytest.mark.parametrize("table", ["[tool.gpumem]\n", '[tool.gpumem]\ndevice = "cuda"\n'])
def test_a_missing_device_in_the_settings_is_to_be_recorded_on_its_machine(repository, table):
    repository({**FLAT, SETTINGS: table})
    done = init("--yes", "--runner", "self-hosted")
    assert done.exit_code == 0, done.output
    assert "the workflow gates on cuda, which this machine does not have: record the baselines" in done.output
    first = "python -m pytest --gpumem-update=new --gpumem-device=cuda (on a machine that has cuda)"
    *said, last = done.output.splitlines()[-3:]
    assert said == ["the gate needs baselines that are not recorded yet. First run:", f"  {first}"]
    assert re.fullmatch(r"then (replace .*, and )?commit the written files and the recorded baselines; .*", last)


def test_after_a_no_it_is_said_what_is_to_be_run_first(repository, monkeypatch):
    project = repository(FLAT)
    monkeypatch.setattr(command, "_has_terminal", lambda: True)
    done = init(input="y\ny\nn\n")
    assert done.exit_code == 0, done.output
    assert "\n  python -m pytest --gpumem-update=new --no-gpumem-time\n" in done.output
    assert "\ncommit the written files" not in done.output
    assert not (project.path / "gpumem-baselines").exists()


def test_what_there_is_is_left_alone_and_said(repository):
    own = {
        **FLAT,
        SETTINGS: '[tool.gpumem]\ndevice = "cpu"\n',
        ATTRIBUTES: "/gpumem-baselines/** -diff",
        WORKFLOW: "on: push\n",
    }
    project = repository(own)
    done = init("--yes", "--dry-run")
    assert (
        f"{SETTINGS} has [tool.gpumem], which is not changed; it does not name 1 test that runs models. "
        f'To measure them, add to its {MARK_KEY}: ["test_model.py"]' in done.output
    )
    assert f"{ATTRIBUTES} has a rule for gpumem-baselines, so it is not changed" in done.output
    assert (
        f"{WORKFLOW} exists and is not changed; check that it runs `python -m pytest --gpumem-baseline`" in done.output
    )
    assert there(project) == {*own}


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("", '; it does not name 1 test that runs models. To measure them, add to its mark: ["test_model.py"]'),
        ('mark = ["test_data.py"]\n', "; it does not name 1 test that runs models. To measure them, add to its mark: "),
        ('mark = ["test_mod*"]\n', ""),
        ('mark = ["test_model.py::test_it"]\n', ""),
    ],
)
def test_a_section_that_is_there_is_answered_with_what_to_add_to_it(repository, table, said):
    repository({**FLAT, SETTINGS: f"[tool.gpumem]\n{table}"})
    (line,) = [one for one in init("--yes", "--dry-run").output.splitlines() if "which is not changed" in one]
    assert line.startswith(f"{SETTINGS} has [tool.gpumem], which is not changed{said}")
    assert said or line.endswith("not changed")


def test_a_workflow_with_the_other_suffix_is_not_doubled(repository):
    repository({**FLAT, ".github/workflows/gpumem.yaml": "on: push\n"})
    done = init("--no-run", "--dry-run")
    assert ".github/workflows/gpumem.yaml exists and is not changed" in done.output
    assert "+++ b/.github" not in done.output


@pytest.mark.parametrize(
    "text", ["[tool.black]\nline-length = 100", "# a\u2028b\x85c\n[tool.x]\n", "a = 1\r\nb = 2\r\n", "", None]
)
def test_the_changes_that_are_shown_are_those_that_are_written(repository, monkeypatch, tmp_path_factory, text):
    shown = []
    monkeypatch.setattr(command, "_show", lambda proposed: shown.extend(proposed.edits))
    project = repository(FLAT)
    if text is not None:
        (project.path / SETTINGS).write_bytes(text.encode())
    (project.path / "gpumem-baselines").mkdir()
    (project.path / "gpumem-baselines" / "a.toml").write_text("")
    copy = tmp_path_factory.mktemp("copy")
    if text is not None:
        (copy / SETTINGS).write_bytes(text.encode())
    assert init("--yes").exit_code == 0
    for edit in shown:
        patch = "\n".join([*edit.diff(), ""])
        done = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", "-"],
            cwd=copy,
            input=patch.encode(),
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert (copy / edit.path).read_bytes() == (project.path / edit.path).read_bytes()


@pytest.mark.parametrize("option", ["--yes", "--no-run"])
def test_only_looking_leaves_no_file_of_any_kind(repository, option):
    project = repository(SRC)

    def there_now():
        paths = (path for path in project.path.rglob("*") if path.name != ".git" and "__pycache__" not in path.parts)
        return {path: path.stat().st_mtime_ns for path in paths if path.is_file()}

    before = there_now()
    assert init(option, "--dry-run").exit_code == 0
    assert there_now() == before


def test_a_folder_below_the_root_is_set_up_alone(repository, monkeypatch):
    files = {f"pkg/{name}": text for name, text in FLAT.items()}
    project = repository({**files, "pytest.ini": "[pytest]\n", "other/test_model.py": FLAT["test_model.py"]})
    monkeypatch.chdir(project.path / "pkg")
    done = init("--yes")
    assert done.exit_code == 0, done.output
    assert f"{project.path / 'pkg'}:\ntest functions that run a model: 1 of 2 (" in done.output
    assert '+    "pkg/test_model.py",' in done.output
    assert "other/" not in done.output
    step = read_yaml((project.path / WORKFLOW).read_text())["jobs"]["gpumem"]["steps"][-1]
    assert step["with"]["arguments"] == "pkg --gpumem-device=cpu --no-gpumem-time"
    assert (project.path / "gpumem-baselines").is_dir()


@pytest.mark.parametrize("folder", ["a [b]", "é \u65e5", 'quo\'te "x"', "back\\slash", "tab\there"])
def test_names_of_files_of_any_kind_are_quoted_in_patterns(repository, folder):
    project = repository(
        {f"{folder}/test_it.py": FLAT["test_model.py"], "model.py": MODEL, f"{folder}/test_data.py": DATA}
    )
    (project.path / "gpumem-baselines").mkdir()
    (project.path / "gpumem-baselines" / "a.toml").write_text("")
    assert init("--yes").exit_code == 0
    (pattern,) = tomllib.loads((project.path / SETTINGS).read_text(encoding="utf-8"))["tool"]["gpumem"]["mark"]
    folder = folder.replace("\\", "/")  # as pytest writes node ids
    assert matches_test(pattern, f"{folder}/test_it.py::test_it[a b::é]")
    assert not matches_test(pattern, f"{folder}/test_data.py::test_numbers")


@pytest.mark.parametrize(
    ("line", "is_of_store"),
    [
        ("/gpumem-baselines/** text eol=lf", True),
        ("gpumem-baselines/**\t-text", True),
        ('"gpumem-baselines/*" -text', True),
        ("  gpumem-baselines/**/*.toml -text", True),
        ("# gpumem-baselines/** -text", False),
        ("/gpumem-baselines-old/** -text", False),
        ("/packages/net/gpumem-baselines/** -text", False),
        ("/gpumem-baselines/cpu-x86_64/** -text", False),
        ("*.bin filter=gpumem-baselines/**", False),
    ],
)
def test_attributes_are_left_alone_where_a_pattern_is_of_the_store(repository, line, is_of_store):
    repository({**FLAT, ATTRIBUTES: f"*.png binary\n{line}\n"})
    output = init("--no-run", "--dry-run").output
    assert ("+/gpumem-baselines/** text eol=lf" in output) != is_of_store
    assert (f"{ATTRIBUTES} has a rule for gpumem-baselines, so it is not changed" in output) == is_of_store


def test_requirements_that_have_all_are_used(repository):
    repository({**FLAT, "requirements.txt": "torch==2.13.0\npytest\npytest-gpumem @ git+https://github.com/o/r\n"})
    done = init("--no-run", "--dry-run")
    assert "requirements-gpumem.txt" not in done.output
    assert "install: -r requirements.txt" in done.output


PLUGIN = "pytest-gpumem @ git+https://github.com/o/r"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["torch==2.13.0", PLUGIN], True),
        (["torch==2.13.0+cpu", "PyTest_GPUmem>=0.1  # the gate"], True),
        (["torch==2.13.0", "pytest.gpumem==0.1 --hash=sha256:00"], True),
        (['torch==2.13.0 ; python_version<"3.13"', PLUGIN], False),
        (['torch==2.13.0;python_version<"3.13"', PLUGIN], False),
        (["torch==2.13.0", 'torch==2.12.0; python_version<"3.10"', PLUGIN], False),
        (["torch==2.13.0 # pinned", PLUGIN], False),
        (["torch==2.13.0\r", PLUGIN], False),
        (["torch==2.*", PLUGIN], False),
        (["torch==2.13.0,!=2.12", PLUGIN], False),
        (["torch>=2.13.0", PLUGIN], False),
        (["# torch==2.13.0", PLUGIN], False),
        (["torch==2.13.0", "# pytest-gpumem"], False),
        (["torch==2.13.0", "x  # for pytest-gpumem"], False),
        (["torch==2.13.0", "-r pytest-gpumem.txt"], False),
        ([], False),
    ],
)
def test_requirements_have_all_where_the_workflow_can_install_from_them(lines, expected):
    assert has_all("\n".join(lines)) is expected


def test_without_a_known_release_of_torch_no_requirements_are_proposed(repository, here):
    repository(FLAT)
    here("cpu", release=None)
    done = init("--no-run", "--dry-run")
    assert "+++ b/requirements-gpumem.txt" not in done.output
    assert "requirements-gpumem.txt is not proposed, because " in done.output
    assert "torch==RELEASE, pytest, pytest-gpumem @ " in done.output


# Wrong input


def test_a_pyproject_that_is_no_toml_is_named_with_its_line(repository):
    project = repository({**FLAT, SETTINGS: "[tool.black]\nline-length = \n"})
    done = init("--yes")
    assert done.exit_code == 2
    assert SETTINGS in done.output
    assert "line 2" in done.output
    assert there(project) == {*FLAT, SETTINGS}


def test_a_tool_table_that_is_closed_is_said(repository):
    project = repository({**FLAT, SETTINGS: "tool = {x = {y = 1}}\n"})
    done = init("--yes")
    assert done.exit_code == 2
    assert "inline table" in done.output
    assert there(project) == {*FLAT, SETTINGS}


def test_a_folder_without_git_is_set_up_and_told_to_commit(repository):
    project = repository(FLAT)
    (project.path / ".git" / "HEAD").unlink()
    done = init("--no-run", "--dry-run")
    assert done.exit_code == 0
    assert "this is not a git repository: commit and review the baselines" in done.output
    assert "+++ b/.gitattributes" not in done.output


def test_a_folder_that_cannot_be_written_is_one_sentence_and_nothing_is_half_written(repository):
    project = repository({**FLAT, ".github": "a file\n"})
    done = init("--yes")
    assert done.exit_code == 2
    assert re.search(
        r"gpumem\.yml cannot be written: \S+/\.github is a file, expected a folder; nothing was written", done.output
    )
    assert there(project) == {*FLAT, ".github"}


def test_a_read_only_folder_is_seen_before_the_first_file_is_written(repository, monkeypatch):
    project = repository(FLAT)
    monkeypatch.setattr(edits.os, "access", lambda path, mode: False)
    done = init("--yes")
    assert done.exit_code == 2
    assert "a folder that you may not write to; nothing was written" in done.output
    assert there(project) == {*FLAT}


@pytest.mark.skipif(os.name != "posix", reason="links need permissions on other systems")
@pytest.mark.parametrize("options", [("--no-run", "--dry-run"), ("--yes",)])
@pytest.mark.parametrize("link", [SETTINGS, ATTRIBUTES, ".github", ".github/workflows", WORKFLOW])
def test_what_a_link_in_the_repository_leads_to_is_neither_shown_nor_written(
    repository, tmp_path_factory, link, options
):
    """The repository's owner has not agreed to its content yet."""
    outside = tmp_path_factory.mktemp("outside")
    (outside / "file").write_text("# precious\n", encoding="utf-8")
    project = repository(FLAT)
    path = project.path / link
    path.parent.mkdir(parents=True, exist_ok=True)
    # A workflow that exists is left alone, and so this link leads to one that does not.
    name = {".github": "", ".github/workflows": "", WORKFLOW: "missing"}.get(link, "file")
    path.symlink_to(outside / name)
    before = there(project)
    done = init(*options)
    assert (done.exit_code, "precious" in done.output) == (2, False)
    assert f"{path} is a symbolic link, which is not followed; remove it; nothing was written" in done.output
    assert there(project) == before
    assert [one.name for one in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text(encoding="utf-8") == "# precious\n"


def test_files_are_put_back_when_one_cannot_be_written(repository, monkeypatch):
    project = repository({**FLAT, SETTINGS: "# mine\n"})
    write = edits.write_atomically

    def full(path, text, **more):
        if path.name == "gpumem.yml":
            raise OSError(28, "No space left on device")
        write(path, text, **more)

    monkeypatch.setattr(edits, "write_atomically", full)
    done = init("--yes")
    assert done.exit_code == 2
    assert "No space left on device; nothing was written" in done.output
    assert there(project) == {*FLAT, SETTINGS}
    assert (project.path / SETTINGS).read_text() == "# mine\n"


def test_a_project_without_tests_of_models_is_told_what_to_mark(repository):
    project = repository({"test_data.py": DATA})
    done = init("--yes")
    assert done.exit_code == 1
    assert "@pytest.mark.gpumem" in done.output
    assert there(project) == {"test_data.py"}
    example = [line.removeprefix("    ") for line in done.output.splitlines() if line.startswith("    ")]
    project.write("\n".join(["import torch", "", *example, ""]), "test_example.py")
    project.run("test_example.py").stdout.fnmatch_lines(["gpumem: 0 gated, 1 recorded *"])


def test_without_a_terminal_and_yes_nothing_runs_and_nothing_is_written(repository):
    project = repository({**FLAT, "conftest.py": "open('ran', 'w')\n"})
    for options in [(), ("--dry-run",), ("--no-run",)]:
        done = init(*options)
        assert done.exit_code == 2
        assert "cannot ask a question without a terminal, so nothing was written: add --yes" in done.output
        assert there(project) == {*FLAT, "conftest.py"}


@pytest.mark.parametrize(
    ("answer", "status"),
    [("n\nn\n", 0), ("", 130), ("y\nn\n", 0), ("y\n", 130)],
    ids=["two no", "end of input", "no", "end of input at the second question"],
)
def test_without_a_yes_nothing_is_written(repository, monkeypatch, answer, status):
    project = repository(FLAT)
    monkeypatch.setattr(command, "_has_terminal", lambda: True)
    done = init(input=answer)
    assert done.exit_code == status, done.output
    assert there(project) == {*FLAT}


def test_ctrl_c_at_the_question_writes_nothing(repository, monkeypatch):
    project = repository(FLAT)
    monkeypatch.setattr(command, "_has_terminal", lambda: True)
    asked = []

    class Typed(io.BytesIO):
        def read1(self, *_):
            asked.append(True)
            raise KeyboardInterrupt

    done = init(input=Typed())
    assert (done.exit_code, asked) == (130, [True]), done.output
    assert there(project) == {*FLAT}


@pytest.mark.thorough
def test_interrupting_the_question_on_a_terminal_writes_nothing(repository):
    pexpect = pytest.importorskip("pexpect")
    project = repository(FLAT)
    child = pexpect.spawn(
        sys.executable, ["-m", "pytest_gpumem.tools.main", "init"], cwd=project.path, timeout=120, encoding="utf-8"
    )
    child.expect(r"Run the tests\?")
    # readline shows the question shortly before it waits for keys. It notes a signal in between, and looks at it only after
    # the next key or signal: about 1 of 100 times. A user presses Ctrl-C again.
    for _ in range(10):
        child.sendintr()
        if child.expect([pexpect.EOF, pexpect.TIMEOUT], timeout=10) == 0:
            break
    child.close()
    assert child.exitstatus == 130
    assert there(project) == {*FLAT}


FAILS_LATER = """import pathlib
import torch


def test_fails():
    run = pathlib.Path(__file__).with_name("run")
    size = 9 if run.exists() else 8
    run.touch()
    torch.nn.Linear(8, 8)(torch.ones(size))
"""


def test_a_test_that_fails_only_when_it_is_recorded_is_left_out_and_said(repository):
    project = repository({**FLAT, "test_more.py": FAILS_LATER})
    done = init("--yes")
    assert done.exit_code == 0, done.output
    why = "because they failed by themselves (see above) and have no baseline; add them when they pass:"
    assert f"\nleft out of mark, {why}\n  test_more.py::test_fails\n" in done.output
    assert "test_more.py" not in (project.path / SETTINGS).read_text()
    gate = project.run("--gpumem-baseline", "test_model.py", device=None, separate=True)
    gate.stdout.fnmatch_lines(["gpumem: 1 gated*"])


@pytest.fixture
def differing(repository):
    """A project with a test whose figures are others each time."""
    counted_runs = "import pathlib\nimport torch\n\nRUNS = pathlib.Path(__file__).with_name('runs')\n\n\ndef test_differs():\n    torch.nn.Linear(64, 64)(torch.ones(len(RUNS.read_text()), 64))\n"
    conftest = "import pathlib\n\n\ndef pytest_sessionfinish(session):\n    runs = pathlib.Path(__file__).with_name('runs')\n    runs.write_text(runs.read_text() * 4)\n"
    return repository({**FLAT, "test_more.py": counted_runs, "conftest.py": conftest, "runs": "x" * 1024})


def test_a_test_whose_figures_depend_on_chance_is_left_out_and_said(differing):
    project = differing
    done = init("--yes")
    assert done.exit_code == 0, done.output
    why = "because they failed on the code that recorded their baselines (see above), so their figures are random"
    named = "add them when their figures repeat, for example with a seed:\n  test_more.py::test_differs\n"
    assert f"\nleft out of mark, {why}; {named}" in done.output
    assert "test_more.py" not in (project.path / SETTINGS).read_text()
    gate = project.run("--gpumem-baseline", "--gpumem-strict", device=None, separate=True)
    assert gate.ret == 0
    gate.stdout.fnmatch_lines(["gpumem: 1 gated*"])


def test_where_no_test_can_be_recorded_that_is_said(repository):
    project = repository({"test_more.py": FAILS_LATER})
    done = init("--yes")
    assert done.exit_code == 1
    assert "not every test could be recorded" in done.output
    assert "test_more.py" in (project.path / SETTINGS).read_text()


def test_a_session_that_breaks_off_is_said(repository):
    repository({**FLAT, "test_more.py": "import there_is_no_such_module\n"})
    done = init("--yes")
    assert done.exit_code == 1
    assert "not every test could be recorded" in done.output


def test_a_session_that_a_signal_ends_is_said(repository):
    kills = "import os\nimport signal\n\n\ndef test_ends():\n    os.kill(os.getpid(), signal.SIGTERM)\n"
    repository({**FLAT, "test_more.py": kills})
    done = init("--yes")
    assert done.exit_code == 1
    assert "SIGTERM ended the session, so no baselines were recorded" in done.output


def test_the_summary_is_shown_where_many_tests_fail(repository):
    fails = "import pytest\n\n\n@pytest.mark.parametrize('number', range(40))\ndef test_fails(number):\n    assert not 'this'\n"
    repository({**FLAT, "test_more.py": fails})
    done = init("--yes")
    assert done.exit_code == 0
    shown = done.output.splitlines()
    assert "gpumem: 1 recorded, new" in shown
    assert any(line.startswith("gpumem store: 1 baseline written (new)") for line in shown)


# The workflow


def test_the_workflows_are_those_of_the_docs():
    pages = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("ci.md", "runner.md"))
    assert all(f"\n{template(name)}```\n" in pages for name in (*RUNNERS, "comment"))


@pytest.mark.parametrize("folder", [".", "packages/net"])
@pytest.mark.parametrize("tests", [".", "tests/of the gpu"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_the_workflow_of_a_folder_in_a_repository_is_valid_and_safe(tmp_path, runner, tests, folder):
    file = tmp_path / "gpumem.yml"
    file.write_text(workflow(runner, "requirements-gpumem.txt", folder, tests))
    valid("github-workflows", file)
    plain = read_yaml(file.read_text())
    assert faults(plain, on_gpu=runner != "cpu") == []
    steps = plain["jobs"]["gpumem"]["steps"]
    inputs = steps[-1]["with"]
    assert inputs.get("working-directory", ".") == folder
    assert all(step.get("working-directory", ".") == folder for step in steps if "run" in step)
    assert inputs["install"] == "-r requirements-gpumem.txt"
    # A comment is found by the name of the workflow, which its artifact has, too.
    assert inputs.get("name", "gpumem") == plain["name"]
    assert f"[{plain['name']}," in template("comment") or f", {plain['name']}" in template("comment")
    folder_of_tests, *options = (
        shlex.split(inputs["arguments"]) if tests != "." else (".", *inputs["arguments"].split())
    )
    assert folder_of_tests == tests
    assert all(option.startswith("--") for option in options)
    assert f"--gpumem-device={DEVICES[runner]}" in options


def test_the_workflow_of_the_comment_is_valid_and_safe(tmp_path):
    file = tmp_path / "comment.yml"
    file.write_text(comment_workflow(commit="c0ffee" * 6 + "dead"))
    valid("github-workflows", file)
    plain = read_yaml(file.read_text())
    assert faults(plain) == []
    (step,) = plain["jobs"]["comment"]["steps"]
    assert step["uses"] == f"{PLACEHOLDER}/pytest-gpumem/comment@{'c0ffee' * 6}dead"


def test_a_workflow_that_comments_is_proposed_beside_the_gate_and_never_changed(repository):
    comment, gate = ".github/workflows/gpumem-comment.yml", ".github/workflows/gpumem.yml"
    repository(FLAT)
    output = init("--no-run", "--dry-run").output
    assert f"+++ b/{comment}" in output
    assert f"{comment} comments on pull requests in a separate job" in output
    repository({comment.replace(".yml", ".yaml"): "on: push\n"})
    output = init("--no-run", "--dry-run").output
    assert f"+++ b/{gate}" in output
    assert f"{comment[:-3]}yaml exists and is not changed" in output
    assert f"+++ b/{comment}" not in output
    repository({gate: "on: push\n", comment.replace(".yml", ".yaml"): "on: push\n"})
    assert "gpumem-comment" not in init("--no-run", "--dry-run").output


def evaluated(text: str) -> str:
    """A text as GitHub hands it to a step; an expression that is no literal is an error."""
    literal = re.compile(r"\$\{\{ '((?:[^']|'')*)' \}\}")
    assert "${{" not in literal.sub("", text)
    return literal.sub(lambda found: found[1].replace("''", "'"), text)


NAMES = [
    "a, b", "a #b", "a: b", "a}b", "{a}", "[a]", "*a", "&a", "!a", "#a", "%a", "@a", "`a`", "-a", "- a", "? a", "~", "null", "yes",
    "1.0", "0x1", "'a'", '"a"', "a\\", "a ", " a", "\u00e9\u65e5\U0001f600", "a\u0085b\u2028\ufeff", "a\tb\nc", "requirements.txt",
    "${{ github.token }}", "$(id)", "a';id;'", "branches: [main]", "with: {install: x", 'python-version: "3"', "arguments: x}",
]  # fmt: skip


def steps_of(runner: str, text: str, folder: str, tests: str) -> None:
    """Assert that the steps of a workflow run in a folder, with these tests, and with no others."""
    *steps, gate = read_yaml(text)["jobs"]["gpumem"]["steps"]
    inputs, plain = gate["with"], read_yaml(template(runner))["jobs"]["gpumem"]["steps"][-1]["with"]
    assert evaluated(inputs["working-directory"]) == folder
    assert [evaluated(step["working-directory"]) for step in steps if "run" in step] == [
        folder for step in steps if "run" in step
    ]
    word, *options = shlex.split(evaluated(inputs["arguments"]))
    assert (word.removeprefix("./"), options) == (tests.removeprefix("./"), shlex.split(plain["arguments"]))
    assert inputs.keys() - {"working-directory"} == plain.keys()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_folder_of_any_name_is_one_text_in_the_workflow(tmp_path, runner, name):
    text = workflow(runner, "requirements-gpumem.txt", name, name, branch=name)
    steps_of(runner, text, name, name)
    (tmp_path / "gpumem.yml").write_text(text, encoding="utf-8")
    valid("github-workflows", tmp_path / "gpumem.yml")


@given(
    name=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1),
    runner=st.sampled_from(RUNNERS),
)
def test_any_text_is_one_text_in_the_workflow(name, runner):
    steps_of(runner, workflow(runner, "requirements.txt", name, name, branch=name), name, name)
    assert read_yaml(f"a: [{scalar(name)}, b]") == {"a": [name, "b"]}


def test_a_branch_is_no_pattern_of_branches():
    text = workflow("emulated", "requirements.txt", ".", branch="c++")
    assert read_yaml(text)["on"]["push"]["branches"] == [r"c\+\+"]


@pytest.mark.parametrize("store", ["a b", 'a"b', "a[1]", "a#b", "*", "é", "a\\b"])
def test_a_store_of_any_name_keeps_its_lines_ends(repository, store):
    project = repository({**FLAT, SETTINGS: f"[tool.gpumem]\nstore = {json.dumps(store)}\n"})
    (project.path / store).mkdir()
    (project.path / store / "a.toml").write_text("")
    assert init("--yes").exit_code == 0
    command = ["git", "check-attr", "-z", "eol", "--", f"{store}/cpu/test.toml", "other/test.toml"]
    words = subprocess.run(command, cwd=project.path, check=True, capture_output=True, text=True).stdout.split("\0")
    assert words[2::3] == ["lf", "unspecified"]
    assert ".gitattributes has" in init("--no-run", "--dry-run").output


# Its pages


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("init", ["settings in `[tool.gpumem]`", "Text that is already in these files stays unchanged."]),
        ("doctor", ["compares the current environment", "writes only the compiled libraries of an emulated GPU"]),
    ],
)
def test_the_help_says_what_a_command_does_and_leaves(name, words):
    output = " ".join(CliRunner().invoke(main, [name, "--help"]).output.split())
    assert [one for one in words if one not in output] == []


def test_baselines_that_cannot_be_taken_out_are_said_with_the_command_that_does(differing, monkeypatch):
    def refusing(words, **how):
        assert "prune" in words
        how["output"].write_text("Error: gpumem-baselines cannot be written: no space left\n", encoding="utf-8")
        return 2

    monkeypatch.setattr(first_baselines, "run", refusing)
    done = init("--yes")
    told = "\nError: gpumem-baselines cannot be written: no space left\ntheir baselines are still in the store; when this is fixed, run: "
    assert f"{told}gpumem prune test_more.py::test_differs\n" in done.output, done.output


def test_progress_is_shown_while_the_tests_run_and_not_again_at_the_end(repository, monkeypatch):
    repository(FLAT)
    shown = []

    def running(_words, *, output, tick, **_how):
        with output.open("ab") as file:
            for text in (
                b"rootdir: /\ntest_a.py ..",
                b"..    [ 50%]\ntest_b.",
                b"py .   [100%]\n",
                b"gpumem: 5 recorded",
            ):
                file.write(text)
                file.flush()
                tick()
                shown.append(len(written))
        return 0

    written: list[str] = []
    monkeypatch.setattr(shown_session, "run", running)
    monkeypatch.setattr(shown_session, "write_lines", written.extend)
    assert run_shown(["-m", "pytest"], Path.cwd(), {}) == (0, [])
    assert written == ["test_a.py ....    [ 50%]", "test_b.py .   [100%]", "gpumem: 5 recorded"]
    assert shown == [0, 1, 2, 2]


def test_a_signal_while_baselines_are_recorded_ends_it_with_its_exit_status(repository, monkeypatch):
    repository(FLAT)

    def interrupted(_words, *, stop, **_how):
        os.kill(os.getpid(), signal.SIGTERM)
        stop.check()

    monkeypatch.setattr(shown_session, "run", interrupted)
    done = init("--yes")
    assert done.exit_code == 128 + signal.SIGTERM
    assert "\n`python -m pytest --gpumem-update=new` records the missing baselines\n\ninterrupted\n" in done.output
