"""``gpumem init``: a repository that has tests gets a gate, without an edit by hand."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_gpumem.cli import init as command
from pytest_gpumem.cli.main import main
from pytest_gpumem.config.settings import KEYS, matches_test
from pytest_gpumem.doctor import looking
from pytest_gpumem.doctor.facts import DeviceFacts, Looked, TorchFacts
from pytest_gpumem.init.found_tests import FoundTest, Names, find_tests
from pytest_gpumem.init.patterns import patterns_of
from pytest_gpumem.init.proposal import ATTRIBUTES, MARK_KEY, SETTINGS, WORKFLOW
from pytest_gpumem.init.sources import sources_of
from pytest_gpumem.init.workflow import RUNNERS, has_all, template, workflow
from tests.test_ci import faults, valid
from tests.workflows import read_yaml

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
        def look(words, environment):
            found = tuple(DeviceFacts(word, trouble=None if word in able else "no") for word in words)
            return Looked(TorchFacts(release), found)

        monkeypatch.setattr(looking, "look", look)

    set_to("cpu")
    return set_to


@pytest.fixture
def repository(project, here, monkeypatch):
    """Write files into a project that is a git repository."""
    monkeypatch.chdir(project.path)
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
def test_a_repository_gets_a_gate_that_is_green_until_something_holds_a_tensor(repository, layout):
    files, model = LAYOUTS[layout]
    project = repository(files)
    done = init("--yes")
    assert done.exit_code == 0, done.output
    assert "baselines written (new)" in done.output or "baseline written (new)" in done.output
    gate = project.run("--gpumem-baseline", "--gpumem-strict", device=None, separate=True)
    assert gate.ret == 0
    (project.path / model).write_text(HOLDS_A_TENSOR)
    gate = project.run("--gpumem-baseline", "--gpumem-strict", device=None, separate=True)
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
    done = init("--dry-run")
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
def test_device_and_runner_are_those_that_measure_something_here(repository, here, able, source, device, runner):
    repository({**FLAT, "conftest.py": f"DEVICE = '{source}'\n"})
    here(*able)
    done = init("--dry-run")
    assert f'+device = "{device}"' in done.output.splitlines()
    assert f"the workflow is for the runner {runner}: " in done.output


def test_a_runner_that_this_machine_has_no_baselines_for_is_said(repository):
    repository(FLAT)
    done = init("--dry-run", "--runner", "self-hosted")
    assert "runs-on: [self-hosted, gpu]" in done.output
    assert "--gpumem-update=new --gpumem-device=cuda`" in done.output


@pytest.mark.parametrize("table", ["[tool.gpumem]\n", '[tool.gpumem]\ndevice = "cuda"\n'])
def test_a_device_of_the_settings_that_is_not_here_is_told_to_be_recorded_where_it_is(repository, table):
    repository({**FLAT, SETTINGS: table})
    done = init("--yes", "--runner", "self-hosted")
    assert done.exit_code == 0, done.output
    assert "the workflow gates on cuda, which is not here: record its baselines where it is" in done.output
    first = "python -m pytest --gpumem-update=new --gpumem-device=cuda (on a machine that has cuda)"
    assert done.output.splitlines()[-3:] == [
        "the gate needs baselines that are not recorded yet; run first:",
        f"  {first}",
        "then commit what was written and recorded; `pytest --gpumem-baseline` is the gate",
    ]


def test_after_a_no_it_is_said_what_is_to_be_run_first(repository, monkeypatch):
    project = repository(FLAT)
    monkeypatch.setattr(command, "_has_terminal", lambda: True)
    done = init(input="y\nn\n")
    assert done.exit_code == 0, done.output
    assert "\n  python -m pytest --gpumem-update=new\n" in done.output
    assert "\ncommit what was written" not in done.output
    assert not (project.path / "gpumem-baselines").exists()


def test_what_there_is_is_left_alone_and_said(repository):
    own = {
        **FLAT,
        SETTINGS: '[tool.gpumem]\ndevice = "cpu"\n',
        ATTRIBUTES: "/gpumem-baselines/** -diff",
        WORKFLOW: "on: push\n",
    }
    project = repository(own)
    done = init("--dry-run")
    assert (
        f'{SETTINGS} has [tool.gpumem], which is left alone; tests that run models are {MARK_KEY} = ["test_model.py"]'
        in done.output
    )
    assert f"{ATTRIBUTES} has gpumem-baselines, and is left alone" in done.output
    assert f"{WORKFLOW} is there, and is left alone" in done.output
    assert there(project) == {*own}


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
    output = init("--dry-run").output
    assert ("+/gpumem-baselines/** text eol=lf" in output) != is_of_store
    assert (f"{ATTRIBUTES} has gpumem-baselines, and is left alone" in output) == is_of_store


def test_requirements_that_have_all_are_used(repository):
    repository(
        {**FLAT, "requirements.txt": "torch==2.13.0\npytest\npytest-gpumem[report] @ git+https://github.com/o/r\n"}
    )
    done = init("--dry-run")
    assert "requirements-gpumem.txt" not in done.output
    assert "install: -r requirements.txt" in done.output


PLUGIN = "pytest-gpumem[report] @ git+https://github.com/o/r"


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
    done = init("--dry-run")
    assert "+++ b/requirements-gpumem.txt" not in done.output
    assert "requirements-gpumem.txt, which the workflow installs from, is not proposed: " in done.output
    assert "torch==RELEASE, pytest, pytest-gpumem[report] @ " in done.output


def test_requirements_of_a_package_install_it_with_its_tests(repository):
    repository(
        {
            **SRC,
            "pyproject.toml": SRC["pyproject.toml"].replace("\n\n", '\noptional-dependencies = {dev = ["x"]}\n\n', 1),
        }
    )
    done = init("--dry-run")
    assert {"+torch==2.15.0", "+-e .[dev]"} <= set(done.output.splitlines())


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
    done = init("--dry-run")
    assert done.exit_code == 0
    assert "this is no git repository: baselines are to be committed" in done.output
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
    monkeypatch.setattr(command.os, "access", lambda path, mode: False)
    done = init("--yes")
    assert done.exit_code == 2
    assert "a folder that you may not write to; nothing was written" in done.output
    assert there(project) == {*FLAT}


def test_files_are_put_back_when_one_cannot_be_written(repository, monkeypatch):
    project = repository({**FLAT, SETTINGS: "# mine\n"})
    write = command.write_whole

    def full(path, text, **more):
        if path.name == "gpumem.yml":
            raise OSError(28, "No space left on device")
        write(path, text, **more)

    monkeypatch.setattr(command, "write_whole", full)
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


def test_without_a_terminal_and_yes_nothing_is_written(repository):
    project = repository(FLAT)
    done = init()
    assert done.exit_code == 2
    assert "--yes" in done.output
    assert there(project) == {*FLAT}


@pytest.mark.parametrize(("answer", "status"), [("n\n", 0), ("", 130)], ids=["no", "end of input"])
def test_without_a_yes_nothing_is_written(repository, monkeypatch, answer, status):
    project = repository(FLAT)
    monkeypatch.setattr(command, "_has_terminal", lambda: True)
    done = init(input=answer)
    assert done.exit_code == status, done.output
    assert there(project) == {*FLAT}


def test_interrupting_the_question_writes_nothing(repository):
    pexpect = pytest.importorskip("pexpect")
    project = repository(FLAT)
    child = pexpect.spawn(
        sys.executable, ["-m", "pytest_gpumem.cli.main", "init"], cwd=project.path, timeout=120, encoding="utf-8"
    )
    child.expect(r"Write 4 files\?")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    assert there(project) == {*FLAT}


def test_a_test_that_cannot_be_recorded_is_said(repository):
    repository(
        {**FLAT, "test_more.py": "import torch\n\n\ndef test_fails():\n    torch.nn.Linear(8, 8)(torch.ones(9))\n"}
    )
    done = init("--yes")
    assert done.exit_code == 1
    assert "not every test could be recorded" in done.output


# Which tests run models


def found(files, names=None):
    return find_tests(sources_of(files), names or Names()).tests


def running(source, **files):
    head = "import pytest\nimport torch\nfrom torch import nn\n\n"
    all_files = {"test_it.py": head + source, **{f"{name}.py": text for name, text in files.items()}}
    return [one.nodeid.partition("::")[2] for one in found(all_files) if one.runs_model]


@pytest.mark.parametrize(
    "body",
    [
        "loss.backward()",
        "optimizer.step()",
        "self_opt.step()",
        "nn.Linear(8, 8)(x)",
        "m = torch.nn.Sequential(nn.Linear(8, 8)).cuda().eval()\n    y = m(x)",
        "m, n = nn.Linear(8, 8), 3\n    m(x)",
        "m: nn.Module = nn.Linear(8, 8)\n    m(x)",
        "m = torch.compile(nn.Linear(8, 8))\n    m(x)",
        "llm.generate(ids)",
        "net.forward(x)",
        "torch.autograd.grad(a, b)",
        "from transformers import AutoModel\n    AutoModel.from_pretrained('x')",
        "import timm\n    timm.create_model('resnet18')(x)",
        "import torchvision.models\n    torchvision.models.resnet18()(x)",
        "with torch.no_grad():\n        nn.GELU()(x)",
        "async_result = [nn.ReLU()(x) for x in xs]",
    ],
)
def test_a_body_that_runs_a_model_is_found(body):
    assert running(f"def test_it(x):\n    {body}\n") == ["test_it"]


@pytest.mark.parametrize(
    "body",
    [
        "assert torch.ones(3).sum() == 3",
        "m = nn.Linear(8, 8)\n    assert m.in_features == 8",
        "scheduler.step()",
        "m: nn.Module\n    m(x)",
        "torch.autograd.set_detect_anomaly(True)",
        "nn.Parameter(torch.ones(3))",
        "from transformers import AutoTokenizer\n    AutoTokenizer.from_pretrained('x')",
        "from torchvision import transforms\n    transforms.ToTensor()",
        "'loss.backward()'",
        "nn.functional.relu(x)",
    ],
)
def test_a_body_that_runs_none_is_not(body):
    assert running(f"def test_it(x):\n    {body}\n") == []


def test_fixtures_helpers_and_classes_are_followed():
    fixture = "@pytest.fixture\ndef net():\n    return nn.Linear(8, 8)\n\n\n@pytest.fixture(name='out')\ndef _out(net):\n    return net(1)\n\n\n"
    assert running(
        f"{fixture}def test_a(net):\n    net(1)\n\n\ndef test_b(out):\n    out\n\n\ndef test_c(net):\n    net\n"
    ) == ["test_a", "test_b"]
    helper = "def step(m):\n    m.backward()\n\n\ndef outer(m):\n    step(m)\n\n\n"
    assert running(f"{helper}def test_a():\n    outer(1)\n\n\ndef test_b():\n    print(1)\n") == ["test_a"]
    assert running(
        "from steps import train\n\n\ndef test_a():\n    train()\n", steps="def train():\n    loss.backward()\n"
    ) == ["test_a"]
    method = "class TestIt:\n    def run_it(self):\n        x.backward()\n\n    def test_a(self):\n        self.run_it()\n\n    def test_b(self):\n        pass\n"
    assert running(method) == ["TestIt::test_a"]
    inherited = "class Base:\n    def test_a(self):\n        x.backward()\n\n\nclass TestIt(Base):\n    pass\n"
    assert running(inherited) == ["TestIt::test_a"]


def test_fixtures_of_conftests_above_and_models_of_the_project_are_known():
    files = {
        "pkg/nets.py": "import torch\n\n\nclass Base(torch.nn.Module):\n    pass\n\n\nclass Net(Base):\n    pass\n\n\ndef build():\n    net = Net()\n    return net, 3\n",
        "tests/conftest.py": "import pytest\nfrom pkg.nets import build\n\n\n@pytest.fixture\ndef net():\n    made, _ = build()\n    yield made\n",
        "tests/deep/test_it.py": "from pkg import nets\n\n\ndef test_a(net):\n    net(1)\n\n\ndef test_b():\n    nets.Net()(1)\n\n\ndef test_c(net):\n    str(net)\n",
        "other/test_it.py": "def test_d(net):\n    net(1)\n",
        "tests/test_broken.py": "def test_(:\n",
    }
    assert [one.nodeid for one in found(files) if one.runs_model] == [
        "tests/deep/test_it.py::test_a",
        "tests/deep/test_it.py::test_b",
    ]


RUN = "nn.Linear(8, 8)(1)"


@pytest.mark.parametrize("name", ["setUp", "setUpClass", "setup_method", "setup_class"])
def test_what_is_run_before_the_methods_of_a_class_is_of_its_tests(name):
    set_up = (
        f"class TestIt:\n    @classmethod\n    def {name}(cls):\n        {RUN}\n\n    def test_a(self):\n        pass\n"
    )
    assert running(f"{set_up}\n\ndef test_b():\n    pass\n") == ["TestIt::test_a"]


@pytest.mark.parametrize("body", ["cls.net = nn.Linear(8, 8)", "cls.net: nn.Module = nn.Linear(8, 8)"])
def test_a_model_that_a_class_has_for_its_methods_is_known(body):
    tests = "    def test_a(self):\n        self.net(1)\n\n    def test_b(self):\n        str(self.net)\n"
    set_up = f"    @classmethod\n    def setUpClass(cls):\n        {body}\n\n"
    assert running(f"class TestIt:\n{set_up}{tests}") == ["TestIt::test_a"]
    assert running(f"class TestIt:\n    net = nn.Linear(8, 8)\n\n{tests}") == ["TestIt::test_a"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("setup_module", ["test_a", "TestIt::test_b"]),
        ("setUpModule", ["test_a", "TestIt::test_b"]),
        ("setup_function", ["test_a"]),
        ("setup_other", []),
    ],
)
def test_what_is_run_before_the_tests_of_a_module_is_of_its_tests(name, expected):
    tests = "def test_a():\n    pass\n\n\nclass TestIt:\n    def test_b(self):\n        pass\n"
    assert running(f"def {name}():\n    {RUN}\n\n\n{tests}") == expected


@pytest.mark.parametrize("head", ["net = None\n\n\ndef setup_module():\n    global net\n    ", ""])
def test_a_model_that_is_a_global_is_known(head):
    source = f"{head}net: nn.Module = nn.Linear(8, 8)\n" if not head else f"{head}net = nn.Linear(8, 8)\n"
    assert running(f"{source}\n\ndef test_a():\n    net(1)\n\n\ndef test_b():\n    str(net)\n") == ["test_a"]


def test_fixtures_that_no_test_has_to_take_are_of_all():
    fixture = f"@pytest.fixture(autouse=True, params=[1, 2])\ndef warm():\n    {RUN}\n\n\n"
    tests = "def test_a():\n    pass\n\n\nclass TestIt:\n    def test_b(self):\n        pass\n"
    assert running(f"{fixture}{tests}") == ["test_a", "TestIt::test_b"]
    assert running(f"{fixture.replace('True', 'False')}{tests}") == []
    head = "import pytest\nfrom torch import nn\n\n\n"
    (one, other) = found({"a/conftest.py": head + fixture, "a/test_a.py": tests})
    assert one.runs_model
    assert other.runs_model
    assert one.has_parameters
    of_class = (
        "class TestIt:\n    @pytest.fixture(autouse=True)\n    def warm(self):\n        self.net = nn.Linear(8, 8)\n\n"
    )
    assert running(f"{of_class}    def test_a(self):\n        self.net(1)\n") == ["TestIt::test_a"]


def test_methods_of_a_test_case_are_tests_whatever_the_settings_say():
    source = "import unittest\n\n\nclass Base(unittest.TestCase):\n    def test_a(self): pass\n    def check_b(self): pass\n\n\n"
    source += "class NetCase(Base):\n    def __init__(self): pass\n\n\ndef test_c(): pass\ndef check_d(): pass\n"
    assert [one.nodeid for one in found({"test_it.py": source}, Names(functions=["check_*"]))] == [
        "test_it.py::Base::test_a",
        "test_it.py::NetCase::test_a",
        "test_it.py::check_d",
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("init", ["Proposes `[tool.gpumem]` in pyproject.toml", "Existing files and sections are not changed."]),
        ("doctor", ["Compares the environment here", "Writes nothing except the compiled stand-ins"]),
    ],
)
def test_the_help_says_what_a_command_does_and_leaves(name, words):
    output = " ".join(CliRunner().invoke(main, [name, "--help"]).output.split())
    assert [one for one in words if one not in output] == []


def test_functions_that_call_each_other_end():
    assert running("def a():\n    b()\n\n\ndef b():\n    a()\n\n\ndef test_it():\n    a()\n") == []


def test_tests_are_those_that_pytest_would_collect():
    files = {
        "test_a.py": "class Helper:\n    def test_x(self): pass\n\n\nclass TestB:\n    def __init__(self): pass\n    def test_x(self): pass\n\n\ndef test_y(): pass\ndef check_z(): pass\n",
        "b_test.py": "def test_b(): pass\n",
        "checks/c.py": "def test_c(): pass\n",
    }
    assert [one.nodeid for one in found(files)] == ["b_test.py::test_b", "test_a.py::test_y"]
    names = Names(files=["*.py"], functions=["check_*"], folders=["."])
    assert [one.nodeid for one in found(files, names)] == ["test_a.py::check_z"]
    assert found(files, Names(folders=["checks"])) == ()


def test_tests_that_are_measured_already_are_known():
    source = "import pytest\n\n\n@pytest.mark.gpumem(max_gb=1)\ndef test_a(): pass\n\n\ndef test_b(gpumem): pass\n\n\ndef test_c(): pass\n"
    assert [one.is_measured for one in found({"test_it.py": source})] == [True, True, False]
    marked = "import pytest\n\npytestmark = [pytest.mark.gpumem]\n\n\ndef test_a(): pass\n"
    assert [one.is_measured for one in found({"test_it.py": marked})] == [True]


@pytest.mark.parametrize(
    "decorator", ["pytest.mark.parametrize('x', [1])", "pytest.mark.gpumem_configs(precision=['fp32'])"]
)
def test_tests_that_become_several_items_are_known(decorator):
    source = f"import pytest\n\n\n@{decorator}\ndef test_a(x): pass\n\n\ndef test_b(): pass\n"
    assert [one.has_parameters for one in found({"test_it.py": source})] == [True, False]


def test_the_reference_names_the_key_that_is_written():
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    section = page.partition("\n## gpumem init\n")[2].partition("\n## ")[0]
    assert f"for tests that run models, `{MARK_KEY}`," in section


# Patterns


def patterns(**tests: bool | None):
    """The patterns of tests, by ``file__name``: True runs a model, False does not, None is measured already."""
    made = [
        FoundTest(name.replace("__", "::").replace("_py", ".py"), bool(runs), runs is None)
        for name, runs in tests.items()
    ]
    return patterns_of(made), made


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        ({"a_py__test_x": True, "a_py__test_y": True}, ("a.py",)),
        ({"a_py__test_x": True, "a_py__test_y": False}, ("a.py::test_x",)),
        ({"a_py__test_x": True, "a_py__test_y": None}, ("a.py",)),
        ({"a_py__T__test_x": True, "a_py__T__test_z": True, "a_py__test_y": False}, ("a.py::T",)),
        ({"a_py__T__test_x": True, "a_py__T__test_y": False}, ("a.py::T::test_x",)),
        ({"a_py__test_run_x": True, "a_py__test_run_y": True, "a_py__test_y": False}, ("a.py::test_run*",)),
        (
            {"a_py__test_run_x": True, "a_py__test_run_y": True, "a_py__test_run": False},
            ("a.py::test_run_x", "a.py::test_run_y"),
        ),
        ({"a_py__test_x": False}, ()),
    ],
)
def test_patterns_are_few_and_name_exactly_the_tests_that_run_models(tests, expected):
    made, of = patterns(**tests)
    assert made == expected
    for one in of:
        if not one.is_measured:
            assert any(matches_test(pattern, one.nodeid) for pattern in made) == one.runs_model


def test_a_folder_of_tests_that_all_run_models_is_one_pattern():
    tests = [FoundTest(f"tests/models/{name}::test_x", True) for name in ("test_a.py", "deep/test_b.py")]
    assert patterns_of([*tests, FoundTest("tests/test_c.py::test_x", False)]) == ("tests/models/*",)


def test_parametrized_tests_are_named_with_their_brackets():
    one, other = FoundTest("a.py::test_x", True, has_parameters=True), FoundTest("a.py::test_xy", False)
    (pattern,) = patterns_of([one, other])
    assert matches_test(pattern, "a.py::test_x[1]")
    assert not matches_test(pattern, "a.py::test_xy")
    assert patterns_of([FoundTest("a.py::test_x", True, has_parameters=None), other]) == (
        "a.py::test_x",
        "a.py::test_x[*",
    )


# The workflow


def test_the_workflows_are_those_of_the_docs():
    pages = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("ci.md", "runner.md"))
    assert all(f"\n{template(runner)}```\n" in pages for runner in RUNNERS)


@pytest.mark.parametrize("runner", RUNNERS)
def test_the_workflow_of_a_folder_in_a_repository_is_valid_and_safe(tmp_path, runner):
    file = tmp_path / "gpumem.yml"
    file.write_text(workflow(runner, "requirements-gpumem.txt", "packages/net"))
    valid("github-workflows", file)
    assert faults(file, on_gpu=runner != "cpu") == []
    steps = read_yaml(file.read_text())["jobs"]["gpumem"]["steps"]
    assert steps[-1]["with"]["working-directory"] == "packages/net"
    assert all(step.get("working-directory") == "packages/net" for step in steps if "run" in step)
    assert "-r requirements-gpumem.txt" in steps[-1]["with"]["install"]
