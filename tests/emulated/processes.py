"""Processes of a test on an emulated GPU: Python, pytest and the `gpumem` command, in the test's folder."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gpumem.base.variables import EMULATED
from pytest_gpumem.emulating.emulated_process import before_torch
from pytest_gpumem.emulating.emulated_process.start import STARTUP
from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
from pytest_gpumem.emulating.emulation.load import become
from tests import preloaded
from tests.support.processes import hide_what_is_loaded

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Processes:
    """Runs processes in ``folder``, with this repository's package; variables of their environment are keywords.

    They begin with torch loaded, and with another GPU than the suite's from then on (``gpu="h100x2"``), unless they are ``new``.
    """

    folder: Path

    def code(self, source: str, gpu: str = "h100", **variables: object) -> dict[str, Any]:
        """Return what `subprocess.Popen` is given to run ``source`` on an emulated GPU, once it imports torch."""
        environment = self._environment(variables, **_emulating(gpu))
        return {"args": [sys.executable, "-c", source], "cwd": self.folder, "env": environment, "text": True}

    def run(
        self, source: str, gpu: str = "h100", *, new: bool = False, timeout: float = 300, **variables: object
    ) -> subprocess.CompletedProcess[str]:
        """Run Python code on an emulated GPU."""
        environment = self._environment(variables, **_emulating(gpu))
        return self._python("-c", source, gpu=gpu, new=new, timeout=timeout, environment=environment)

    def start(self, source: str, gpu: str = "h100", **variables: object) -> preloaded.Process:
        """Start Python code on an emulated GPU, with torch loaded."""
        environment = self._environment(variables, **_emulating(gpu))
        return preloaded.start("-c", source, cwd=self.folder, env=environment, before=emulate)

    def pytest(
        self, *arguments: str, gpu: str = "h100", new: bool = False, timeout: float = 300, **variables: object
    ) -> subprocess.CompletedProcess[str]:
        """Run a session of pytest that emulates a GPU."""
        words = ("pytest", "-p", "no:cacheprovider", "-p", "no:randomly", f"--gpumem-device=emulated:{gpu}", *arguments)
        return self._module(*words, gpu=gpu, new=new, timeout=timeout, variables=variables)

    def gpumem(
        self, *words: str, gpu: str = "h100", new: bool = False, timeout: float = 300, **variables: object
    ) -> subprocess.CompletedProcess[str]:
        """Run the command, whose ``words`` say which GPU is emulated: ``gpu`` if it is done in its own process."""
        return self._module("pytest_gpumem.tools.main", *words, gpu=gpu, new=new, timeout=timeout, variables=variables)

    def _module(
        self, *words: str, gpu: str, new: bool, timeout: float, variables: dict[str, object]
    ) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        environment = self._environment(variables, PYTHONPATH=paths)
        return self._python("-m", *words, gpu=gpu, new=new, timeout=timeout, environment=environment)

    def _python(
        self, *words: str, gpu: str, new: bool, timeout: float, environment: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        if new or not preloaded.is_loaded_for(environment):
            own = {"args": [sys.executable, *words], "cwd": self.folder, "env": environment}
            return subprocess.run(**own, capture_output=True, text=True, check=False, timeout=timeout)
        environment = {EMULATED: f"emulated:{gpu}", **environment}
        return preloaded.run(*words, cwd=self.folder, env=environment, before=emulate, timeout=timeout)

    def _environment(self, variables: dict[str, object], **more: str) -> dict[str, str]:
        # A process is no worker of this suite.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")}
        return {**inherited, **more, **{name: str(value) for name, value in variables.items()}}


def _emulating(gpu: str) -> dict[str, str]:
    return {EMULATED: f"emulated:{gpu}", "PYTHONPATH": os.pathsep.join([str(STARTUP), str(REPOSITORY)])}


def emulate() -> None:
    """Be as if torch were only loaded now, on the GPU that the environment names, and recorded if need be.

    What is loaded is hidden from collections: a measurement has several, each of which would go through all of it.
    """
    become(emulated_gpu(os.environ[EMULATED]))
    before_torch.record_if_told_to()
    hide_what_is_loaded()
