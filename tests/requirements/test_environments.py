"""Making environments: what they are kept by, waiting for another process, and pip where none is installed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from filelock import FileLock

from pytest_gpumem.bisect.journal import Journal
from pytest_gpumem.git import plain_environment
from pytest_gpumem.processes import Stop, Stopped
from pytest_gpumem.requirements import environments
from pytest_gpumem.requirements.environments import Environments, interpreter
from pytest_gpumem.requirements.pip import pip_command
from pytest_gpumem.requirements.releases import releases_of
from pytest_gpumem.requirements.requirement_set import requirement_set


@pytest.fixture
def stopped():
    """A stop that Ctrl-C has asked for."""
    stop = Stop()
    stop.note(signal.SIGINT)
    return stop


def test_waiting_for_another_process_that_makes_the_same_environment_can_be_interrupted(tmp_path, stopped):
    wanted = requirement_set(["tinymodels==1.0"])
    lock = tmp_path / f"{environments._key(wanted, emulated=False)}.lock"
    with FileLock(lock), pytest.raises(Stopped):
        Environments(tmp_path, plain_environment()).make(wanted, stopped)


def test_listing_releases_can_be_interrupted(stopped):
    with pytest.raises(Stopped):
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
    monkeypatch.setattr("pytest_gpumem.bisect.journal.packages_here", lambda: ["torch==1.0"])
    assert Journal.of(["test_it.py"]) != before
