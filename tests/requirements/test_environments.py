"""Making environments: what they are kept by, waiting for another process, and pip where none is installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner
from filelock import FileLock

from pytest_gpumem.base.errors import StopSignal
from pytest_gpumem.base.git import plain_environment
from pytest_gpumem.base.processes import Stop
from pytest_gpumem.base.requirements import environments
from pytest_gpumem.base.requirements.environments import Environments, cache_folder, interpreter
from pytest_gpumem.base.requirements.pip import pip_command
from pytest_gpumem.base.requirements.releases import releases_of
from pytest_gpumem.base.requirements.requirement_set import requirement_set
from pytest_gpumem.tools.bisect.journal import Journal
from pytest_gpumem.tools.main import main


@pytest.fixture
def stopped():
    """A stop that Ctrl-C has asked for."""
    stop = Stop()
    stop.record(signal.SIGINT)
    return stop


def test_waiting_for_another_process_with_the_same_environment_is_interruptible(tmp_path, stopped):
    wanted = requirement_set(["tinymodels==1.0"])
    lock = tmp_path / f"{environments._key(wanted, emulated=False)}.lock"
    with FileLock(lock), pytest.raises(StopSignal):
        Environments(tmp_path, plain_environment()).make(wanted, stopped)


@pytest.fixture
def filled(monkeypatch):
    """Environments that nothing is installed into: making one takes no time."""

    def fill(self, folder, wanted, stop, tick, *, emulated):
        interpreter(folder).parent.mkdir(parents=True)
        interpreter(folder).touch()
        record = {"name": str(wanted), "packages": {}, "modules": [], "made": 0.0}
        (folder / "environment.json").write_text(json.dumps(record), encoding="utf-8")

    monkeypatch.setattr(Environments, "_fill", fill)
    monkeypatch.setattr(environments, "_in_use", [])


def test_an_environment_of_no_exact_release_stays_while_a_process_uses_it(tmp_path, filled):
    made = Environments(tmp_path, plain_environment())
    wanted = requirement_set(["tinymodels"])
    first, second = made.make(wanted, Stop()), made.make(wanted, Stop())
    other = made.make(requirement_set(["tinymodels>1"]), Stop())
    assert first.folder.exists()
    assert first.folder != second.folder
    for lock in environments._in_use:
        lock.release()
    third = made.make(wanted, Stop())
    assert {one.folder for one in made.finished()} == {third.folder, other.folder}
    assert {path.stem for path in tmp_path.glob("*.lock")} == {third.folder.name, other.folder.name}


def test_an_environment_that_a_signal_broke_off_is_counted_and_removed(tmp_path, filled, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = Environments(cache_folder(), plain_environment())
    made.make(requirement_set(["tinymodels==1.0"]), Stop())
    (made.folder / "0123456789abcdef" / "lib").mkdir(parents=True)
    (made.folder / "0123456789abcdef" / "lib" / "half.py").write_bytes(bytes(2000))
    listed = CliRunner().invoke(main, ["cache"])
    assert "1 environment, " in listed.output
    assert ", and 1 not finished, 2.00 kB, in " in listed.output
    assert CliRunner().invoke(main, ["cache", "--clear"]).exit_code == 0
    assert CliRunner().invoke(main, ["cache"]).output.startswith("gpumem cache: 0 environments, 0 B, in ")


def test_listing_releases_can_be_interrupted(stopped):
    with pytest.raises(StopSignal):
        releases_of("tinymodels", {**os.environ, "PIP_NO_INDEX": "1"}, stopped)


def test_a_python_without_pip_uses_the_one_that_it_brings_along(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    command = pip_command(interpreter(tmp_path / "bare"), plain_environment())
    told = subprocess.run([*command, "--version"], check=True, capture_output=True, text=True).stdout
    assert told.startswith("pip ")
    assert not list((tmp_path / "bare").rglob("site-packages/pip")), "nothing was installed"


@pytest.mark.parametrize(
    ("python", "package", "is_another"),
    [
        (None, "torch==2.13.0", True),
        ("python3.12", "torch==2.13.0", False),
        ("python3.12", "pytest_gpumem==0.0.9", True),
    ],
)
def test_an_environment_is_kept_by_what_it_lies_on(monkeypatch, python, package, is_another):
    """Above another Python nothing comes from here but this plugin."""
    wanted = requirement_set(["tinymodels==1.0"], python=python)
    monkeypatch.setattr(environments, "packages_here", lambda: ["pytest==8.2"])
    before = environments._key(wanted, emulated=False)
    monkeypatch.setattr(environments, "packages_here", lambda: ["pytest==8.2", package])
    assert (environments._key(wanted, emulated=False) != before) is is_another


def test_runs_of_a_bisection_are_those_of_the_packages_that_were_installed(monkeypatch):
    before = Journal.of(["test_it.py"])
    assert Journal.of(["test_it.py"]) == before
    monkeypatch.setattr("pytest_gpumem.tools.bisect.journal.packages_here", lambda: ["torch==1.0"])
    assert Journal.of(["test_it.py"]) != before
