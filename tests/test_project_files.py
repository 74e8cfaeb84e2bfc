"""Settings that commands read from a project's files: those of a session there, and none of its code is run for them."""

from __future__ import annotations

import os

import pytest
from click.testing import CliRunner

from pytest_gpumem.plugin.config.project_files import project_files
from pytest_gpumem.plugin.config.settings import settings_of
from pytest_gpumem.tools.console.project import _from_pytest, project_settings
from pytest_gpumem.tools.main import main

TABLE = '[tool.gpumem]\nunits = "iec"\nstore = "kept"\ndevice = "cpu"\n'
NAMES_ALL = "--strict-markers -ra -p no:randomly --gpumem-store={} --gpumem-report=a.md -k 'not slow' --gpumem-strict"
ADDOPTS = NAMES_ALL.format("mine")
AS_ARRAY = '["-ra", "--gpumem-store", "mine and yours", "--no-gpumem-time"]'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"pyproject.toml": TABLE},
        {"pyproject.toml": f'{TABLE}[tool.pytest.ini_options]\naddopts = "{ADDOPTS}"\n'},
        {"pyproject.toml": f"{TABLE}[tool.pytest.ini_options]\naddopts = {AS_ARRAY}\n"},
        {"pyproject.toml": TABLE, "pytest.ini": f"[pytest]\naddopts = {ADDOPTS}\n    --gpumem-update=new\n"},
        {"pyproject.toml": TABLE, "tox.ini": f"[pytest]\naddopts = {ADDOPTS}\n"},
        {"pyproject.toml": TABLE, "setup.cfg": f"[tool:pytest]\naddopts = {ADDOPTS}\n"},
        {"pyproject.toml": TABLE, "sub/pytest.ini": f"[pytest]\naddopts = {ADDOPTS}\n"},
        {"pyproject.toml": f"{TABLE}[tool.pytest.ini_options]\n", "sub/pyproject.toml": "[tool.gpumem]\nstrict = true\n"},
        {"pyproject.toml": TABLE, "setup.py": "", "sub/pyproject.toml": "[project]\nname = 'x'\n"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("started_in", [".", "sub"])
@pytest.mark.parametrize(
    "by_user", ["", "--gpumem-report=b.json --gpumem-store='a b'", "--rootdir=..", "-c other.ini -p no:randomly"]
)
def test_settings_are_those_that_a_session_would_have(folder, monkeypatch, files, started_in, by_user):
    for name, text in {
        **files,
        "sub/other.ini": "[pytest]\naddopts = --gpumem-pack\n",
        "other.ini": "[pytest]\n",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder / started_in)
    monkeypatch.setenv("PYTEST_ADDOPTS", by_user)
    found = []

    def read(config):
        found.extend([config.rootpath, config.inipath])
        return settings_of(config)

    wanted = _from_pytest(read, "--noconftest", emulates=False)
    files_found = project_files(folder / started_in, os.environ)
    assert [files_found.root, files_found.settings_file] == found
    assert files_found.settings == wanted == project_settings()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"pytest.ini": "[pytest]\naddopts = --gpumem-update=some\n"},
            "addopts: argument --gpumem-update: invalid choice",
        ),
        (
            {"pytest.ini": "[pytest]\naddopts = --gpumem-store\n"},
            "addopts: argument --gpumem-store: expected one argument",
        ),
        ({"pytest.ini": "[pytest]\naddopts = 'a\n"}, "addopts cannot be split into words: No closing quotation"),
        ({"pytest.ini": "[pytest\n"}, "pytest cannot read its settings:"),
        ({"setup.cfg": "[pytest]\n"}, "pytest cannot read its settings: [pytest] section in setup.cfg"),
        ({"pyproject.toml": "[tool.pytest]\nini_options = 3\n"}, "pytest cannot read its settings:"),
    ],
)
def test_settings_that_cannot_be_read_are_told_in_a_sentence(folder, files, message):
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    done = CliRunner().invoke(main, ["show"])
    assert done.exit_code == 2
    assert message in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("addopts", "environment", "cache"),
    [
        ("", {}, ".pytest_cache"),
        ("-o cache_dir=other", {}, "other"),
        ("", {"PYTEST_ADDOPTS": "-o cache_dir=$WHERE/x"}, "build/x"),
        ("-p no:cacheprovider", {}, None),
        ("", {"PYTEST_ADDOPTS": "-pno:cacheprovider"}, None),
    ],
)
def test_pytests_cache_is_found(folder, monkeypatch, addopts, environment, cache):
    monkeypatch.setenv("WHERE", "build")
    (folder / "pytest.ini").write_text(f"[pytest]\naddopts = {addopts}\n", encoding="utf-8")
    found = project_files(folder, environment).cache
    assert found == (None if cache is None else folder / cache)


@pytest.mark.parametrize(
    ("addopts", "environment", "is_loaded"),
    [
        ("", {}, True),
        ("-p no:gpumem", {}, False),
        ("-p no:pytest_gpumem.plugin", {}, False),
        ("", {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, False),
        ("-p pytest_gpumem.plugin", {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, True),
        ("", {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "a,pytest_gpumem.plugin"}, True),
    ],
)
def test_whether_a_session_loads_the_plugin_is_known(folder, addopts, environment, is_loaded):
    (folder / "pytest.ini").write_text(f"[pytest]\naddopts = {addopts}\n", encoding="utf-8")
    assert project_files(folder, environment).is_plugin_loaded is is_loaded
