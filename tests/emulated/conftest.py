"""Tests on an emulated GPU, on which the suite runs: `make emulated`. Each runs Python of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.base.variables import EMULATED
from pytest_gpumem.emulating.emulated_process.before_torch import PEAKS
from pytest_gpumem.emulating.emulated_process.start import STARTUP
from pytest_gpumem.emulating.emulation.load import current_emulation
from tests import preloaded
from tests.emulated.processes import Processes

if TYPE_CHECKING:
    from collections.abc import Callable

PLANTED_PROJECT = Path(__file__).parent / "planted_project"
collect_ignore = [PLANTED_PROJECT.name]
if current_emulation() is not None:
    preloaded.load_as_well("tests.with_transformers")
WITHOUT_VALUES = """
import sys, types
nothing = types.ModuleType("pytest_gpumem.emulating.host_values.scope")
nothing.begin = nothing.current = lambda: None
import pytest_gpumem.emulating.host_values
sys.modules[nothing.__name__] = pytest_gpumem.emulating.host_values.scope = nothing
"""
"""Run before torch is imported: it is as if values of small tensors were not computed."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if current_emulation() is None:
        pytest.skip("needs an emulated GPU (make emulated)")


@pytest.fixture(autouse=True)
def _without_the_gpu_of_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts processes with a GPU of their own; the suite has one, since torch cannot be imported without."""
    monkeypatch.delenv(EMULATED, raising=False)
    monkeypatch.delenv(PEAKS, raising=False)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path and path != str(STARTUP)))


@pytest.fixture
def processes(tmp_path) -> Processes:
    return Processes(tmp_path)


@pytest.fixture
def on_gpu(processes) -> Callable[..., str]:
    """Run Python on an emulated GPU, and return what it prints; ``torch`` is imported. It must end well, if not ``fails``."""

    def run(
        source: str, gpu: str = "h100", *, fails: bool = False, before: str = "", timeout: float = 120, **variables: str
    ) -> str:
        # What comes before torch is imported is a process's own.
        done = processes.run(f"{before}import torch\n{source}", gpu, new=bool(before), timeout=timeout, **variables)
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + (done.stderr if fails else "")

    return run
