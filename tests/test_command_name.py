"""The name of the command in hints, where another package has a command ``gpumem``, too."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner

from pytest_gpumem.base import command_name
from pytest_gpumem.base.command_name import OtherCommand, other_in
from pytest_gpumem.tools.doctor.findings import findings
from pytest_gpumem.tools.main import main
from tests.test_doctor import FACTS

THEIRS = (
    b"#!/usr/bin/python3\nimport sys\nfrom gpumem.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
)
OURS = THEIRS.replace(b"gpumem.cli", b"pytest_gpumem.tools.main")


@pytest.mark.parametrize(
    ("content", "other"),
    [
        (THEIRS, OtherCommand("x", "gpumem.cli")),
        (b"#!/usr/bin/env python\nprint('no import')\n", OtherCommand("x")),
        (b"MZ\x90" + bytes(1000) + b"PK\3\4" + THEIRS, OtherCommand("x", "gpumem.cli")),
        (OURS, None),
        (b"#!/bin/sh\n'''exec' /a/long/path/python \"$0\" \"$@\"\n' '''\n" + OURS, None),
        (b"# EASY-INSTALL-ENTRY-SCRIPT: 'pytest-gpumem','console_scripts','gpumem'\n", None),
        (b"MZ\x90" + bytes(1000) + b"PK\3\4" + OURS, None),
        (b'#!/usr/bin/env bash\nexec pyenv exec "gpumem" "$@"\n', None),
        (b"\x7fELF", None),
        (b"", None),
    ],
    ids=["script", "no_import", "exe", "ours", "long_path", "setuptools", "our_exe", "shim", "binary", "unreadable"],
)
def test_a_command_is_another_packages_if_its_script_shows_so(content, other):
    assert other_in("x", content) == other


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """Returns a function that puts a command ``gpumem`` first on the path. It must not be run."""

    def put(content):
        file = tmp_path / ("gpumem.bat" if sys.platform == "win32" else "gpumem")
        file.write_bytes(content)
        file.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        command_name.command_name.cache_clear()
        return str(file)

    yield put
    command_name.command_name.cache_clear()


@pytest.mark.parametrize(("content", "typed"), [(THEIRS, "pytest-gpumem"), (OURS, "gpumem")], ids=["theirs", "ours"])
def test_hints_have_the_name_that_starts_this_package(on_path, tmp_path, monkeypatch, content, typed):
    on_path(content)
    store = tmp_path / "store"
    store.mkdir()
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["show", "--store", str(store), "test_nowhere"])
    assert result.exit_code == 2
    assert f"`{typed} show` lists all baselines" in result.output


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_on_the_path_is_not_waited_for(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "gpumem", 0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command_name.other_command() is None


def test_the_doctor_tells_of_another_packages_command_and_what_to_type(on_path):
    path = on_path(THEIRS)
    (row,) = (
        one for one in findings(replace(FACTS, other_command=command_name.other_command())) if one.subject == "command"
    )
    assert row.status == "limited"
    assert row.fact == f"the first gpumem on the PATH belongs to another package: {path}, of the module gpumem.cli"
    assert row.mend == "type pytest-gpumem, the second name of this package's command"
    assert not [one for one in findings(FACTS) if one.subject == "command"]


@pytest.mark.parametrize("name", ["gpumem", "pytest-gpumem", "python -m pytest_gpumem"])
def test_usage_has_the_name_that_was_typed_and_the_version_that_of_the_package(name):
    assert CliRunner().invoke(main, ["--help"], prog_name=name).output.startswith(f"Usage: {name} [OPTIONS] COMMAND")
    assert CliRunner().invoke(main, ["show", "--help"], prog_name=name).output.startswith(f"Usage: {name} show ")
    assert CliRunner().invoke(main, ["--version"], prog_name=name).output.startswith("pytest-gpumem, version ")
