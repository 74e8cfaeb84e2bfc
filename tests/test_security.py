"""SECURITY.md's tables: which commands run a project's code, and what its files can name."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_gpumem.base.errors import SettingsError
from pytest_gpumem.plugin.config.kinds import FOLDER, MODELS, REPORTS, STORE
from pytest_gpumem.plugin.config.settings import KEYS, settings_from_table
from pytest_gpumem.reporting.reports.json_report import to_json
from pytest_gpumem.tools.doctor import collecting
from pytest_gpumem.tools.doctor.facts import DeviceFacts, ProbeResult, TorchFacts
from pytest_gpumem.tools.main import main
from tests.git_store import Repository, entry
from tests.reports.sessions import OK, session

PAGE = (Path(__file__).parents[1] / "SECURITY.md").read_text(encoding="utf-8")
ROWS = {row[1]: row[2] for row in re.finditer(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE)}
COMMANDS = {name: said for name, said in ROWS.items() if name in main.list_commands(None)}
PLANTED = "from pathlib import Path\n\nPath({!r}).write_text('it was run')\n"
FILES = ("conftest.py", "planted.py", "test_gpt.py", "setup.py", "sitecustomize.py", "usercustomize.py", "theirs.py")
READING = {
    "accept": [(["report.json", "--force-commit"], 0)],
    "advise": [(["hf:model", "--fits", "24GB", "--device", "cpu"], 2)],
    "cache": [([], 0)],
    "comment": [(["report.json", "--pull-request", "1"], 2)],
    "compare": [(["HEAD"], 0), (["report.json", "report.json"], 0)],
    "doctor": [([], 0), (["--format", "json"], 0)],
    "export": [(["github-action-benchmark", "report.json"], 0)],
    "history": [(["test_a"], 0)],
    "init": [(["--no-run", "--dry-run"], 0)],
    "merge": [(["report.json", "--report", "merged.md"], 0)],
    "show": [([], 0), (["test_a", "-v"], 0)],
    "why": [(["test_a", "--report", "report.json"], 0), (["test_a"], 2)],
}
"""Words with which each command that only reads does its work, and the status that it ends with."""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A checkout whose every file that pytest or Python may run writes ``ran``."""
    repository = Repository(tmp_path / "project")
    repository.store({"test_a": entry()})
    ran = tmp_path / "ran"
    settings = (
        '[tool.gpumem]\ndevice = "cpu"\nstore = "gpumem-baselines"\n[tool.pytest.ini_options]\npythonpath = ["."]\n'
        'addopts = "-p planted --planted"\n'
    )
    (repository.path / "pyproject.toml").write_text(settings, encoding="utf-8")
    option = "\n\ndef pytest_addoption(parser):\n    parser.addoption('--planted', action='store_true')\n"
    for name in FILES:
        # An earlier test may have imported a module with this name.
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
        text = PLANTED.format(str(ran)) + (option if name == "planted.py" else "")
        (repository.path / name).write_text(f"{text}\n\ndef test_a(gpumem):\n    pass\n", encoding="utf-8")
    (repository.path / "report.json").write_text(to_json(session(OK)), encoding="utf-8")
    (repository.path / "model").mkdir()
    config = '{"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Theirs"}}'
    (repository.path / "model" / "config.json").write_text(config, encoding="utf-8")
    (repository.path / "model" / "theirs.py").write_text(PLANTED.format(str(ran)), encoding="utf-8")
    repository.git("add", ".")
    repository.git("commit", "--quiet", "-m", "all")
    monkeypatch.chdir(repository.path)
    monkeypatch.syspath_prepend(repository.path)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    found = (DeviceFacts("cpu", environment=entry().environment),)
    monkeypatch.setattr(collecting, "probe", lambda *_: ProbeResult(TorchFacts("2.15.0"), found))
    return ran


def test_each_command_is_in_the_table():
    assert sorted(COMMANDS) == sorted(main.list_commands(None))
    assert {name for name, said in COMMANDS.items() if said.startswith("no")} == set(READING)


@pytest.mark.parametrize("name", READING)
def test_a_command_that_only_reads_runs_no_code_of_the_project(planted, name):
    for words, status in READING[name]:
        done = CliRunner().invoke(main, [name, *words])
        assert done.exit_code == status, done.output
        assert not planted.exists()


@pytest.mark.parametrize("words", [["prune", "--dry-run"], ["doctor", "--conftest"], ["run", "planted.py"]])
def test_the_planted_files_are_run_where_the_table_says_so(planted, words):
    settings = Path("pyproject.toml")
    if words[0] == "doctor":
        settings.write_text(settings.read_text().replace('device = "cpu"', 'device = "theirs"'), encoding="utf-8")
    CliRunner().invoke(main, words)
    assert planted.exists()


def test_the_process_that_looks_at_devices_imports_nothing_from_the_current_folder(tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    for name in ("torch", "tomllib", "runpy", "json", "numpy"):
        (tmp_path / f"{name}.py").write_text(PLANTED.format(str(ran)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    seen = collecting.probe(["cpu"], os.environ)
    assert seen.devices[0].environment is not None
    assert not ran.exists()


def test_a_device_of_a_conftest_is_looked_for_only_if_that_is_typed(planted):
    settings = Path("pyproject.toml")
    settings.write_text(settings.read_text().replace('device = "cpu"', 'device = "theirs"'), encoding="utf-8")
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 2
    assert (
        "if a conftest.py adds the device, `gpumem doctor --conftest` runs this conftest.py and checks the device"
        in done.output
    )
    assert not planted.exists()


def test_each_setting_that_names_a_place_or_a_model_is_in_the_table():
    named = {name for name, kind in KEYS.items() if kind in (STORE, FOLDER, REPORTS, MODELS)}
    assert ROWS.keys() - COMMANDS.keys() == named | {"update", "models", "device"}


@pytest.mark.parametrize("in_file", ["addopts", "pyproject.toml"])
@pytest.mark.parametrize(
    "store",
    [
        "https://evil.example/baselines", "HTTP://169.254.169.254/latest", "ssh://evil.example/x", "sftp://me:secret@evil.example/x",
        "ftp://evil.example", "hf://datasets/evil/x", "github://evil:x@main/", "webhdfs://evil.example/x", "smb://evil.example/x",
        "simplecache::s3://bucket/x", "filecache::file:///etc", "zip://a.toml::s3://bucket/x.zip", "dask://evil.example", "jupyter://x",
        "reference://", "data://x", "nothing://x", "s3://evil.example?/x", "abfs://box@evil.example/x", "s3://me:secret@bucket/x",
    ],
)  # fmt: skip
def test_a_url_that_is_no_bucket_is_never_opened(tmp_path, monkeypatch, store, in_file):
    def request(*_arguments):
        raise AssertionError("a request is sent")

    for name in ("socket.getaddrinfo", "obstore.list", "obstore.get"):
        monkeypatch.setattr(name, request)
    if in_file == "addopts":
        (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = '--gpumem-store={store}'\n", encoding="utf-8")
    else:
        (tmp_path / "pyproject.toml").write_text(f"[tool.gpumem]\nstore = '{store}'\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    done = CliRunner().invoke(main, ["show"])
    assert done.exit_code == 2
    assert re.search("bucket|not an Azure storage account", done.output)
    assert "secret" not in done.output


@pytest.mark.parametrize("store", ["\\\\evil.example\\share", "//evil.example/share"])
def test_a_store_in_a_file_of_the_project_names_no_host(tmp_path, monkeypatch, store):
    with pytest.raises(SettingsError) as raised:
        settings_from_table({"store": store}, "pyproject.toml: [tool.gpumem]")
    message = str(raised.value)
    assert message.startswith("pyproject.toml: [tool.gpumem]: store is ")
    assert "because a pull request can change the file: --gpumem-store=" in message
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = '--gpumem-store={store}'\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    done = CliRunner().invoke(main, ["show"])
    assert done.exit_code == 2
    assert "addopts: --gpumem-store is " in done.output


@pytest.mark.parametrize(
    "store",
    ["kept", "../kept", "~/kept", "/srv/kept", "C:\\kept", "file:///srv/kept", "s3://bucket/x", "gs://bucket", "abfs://c@a/x", "az://c/x"],
)  # fmt: skip
def test_a_store_in_a_file_of_the_project_may_be_a_folder_or_a_bucket(store):
    assert settings_from_table({"store": store}, "here").store == store


@pytest.mark.parametrize("by", ["addopts", "typed", "PYTEST_ADDOPTS"])
def test_any_store_may_be_typed_and_none_with_a_host_be_in_addopts(project, monkeypatch, by):
    word = "--gpumem-store=//localhost/baselines"
    project.write("def test_it(gpumem):\n    with gpumem.track('a'):\n        torch.ones(9)\n")
    if by == "addopts":
        project.settings(f'[tool.pytest.ini_options]\naddopts = "{word}"\n')
    if by == "PYTEST_ADDOPTS":
        monkeypatch.setenv(by, f"-p no:randomly {word}")
    result = project.run("--gpumem-baseline", *([word] if by == "typed" else []))
    is_refused = "addopts: --gpumem-store is '//localhost/baselines'" in result.stdout.str() + result.stderr.str()
    assert is_refused == (by == "addopts")
    assert result.ret != 0
