"""Processes of a test on an emulated GPU: Python, pytest and the `gpumem` command, in the test's folder."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpumem.emulation.gpus import emulated_gpu
from pytest_gpumem.emulation.load import STARTUP, VARIABLE, current_emulation

if TYPE_CHECKING:
    from collections.abc import Callable

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Processes:
    """Starts processes in ``folder``, with this repository's package; variables of their environment are keywords.

    A process is a fork of one that has loaded torch with the suite's GPU, and has another GPU (``gpu="h100x2"``) from then on,
    unless it is ``new``, or the GPU has other kernels, which are chosen when torch is loaded.
    """

    folder: Path
    warm_python: Callable[[], str]

    def python(self, gpu: str = "h100", *, new: bool = False) -> str:
        return sys.executable if new or not _has_kernels_of_the_suites(gpu) else self.warm_python()

    def code(self, source: str, gpu: str = "h100", *, new: bool = False, **variables: object) -> dict[str, Any]:
        """Return what `subprocess.Popen` is given to run ``source`` on an emulated GPU, once it imports torch."""
        words = [self.python(gpu, new=new), "-X", "forked", "-c", source]
        paths = os.pathsep.join([str(STARTUP), str(REPOSITORY)])
        return {"args": words, **self._where({VARIABLE: f"emulated:{gpu}", "PYTHONPATH": paths} | variables)}

    def run(
        self, source: str, gpu: str = "h100", *, new: bool = False, timeout: float = 300, **variables: object
    ) -> subprocess.CompletedProcess[str]:
        """Run Python code on an emulated GPU."""
        return _run(timeout, **self.code(source, gpu, new=new, **variables))

    def pytest(
        self, *arguments: str, gpu: str = "h100", new: bool = False, timeout: float = 300, **variables: object
    ) -> subprocess.CompletedProcess[str]:
        """Run a session of pytest that emulates a GPU."""
        words = ("pytest", "-p", "no:cacheprovider", "-p", "no:randomly", f"--gpumem-device=emulated:{gpu}", *arguments)
        return self._module(*words, gpu=gpu, new=new, timeout=timeout, **variables)

    def gpumem(
        self, *words: str, gpu: str = "h100", new: bool = False, timeout: float = 300, **variables: object
    ) -> subprocess.CompletedProcess[str]:
        """Run the command, whose ``words`` say which GPU is emulated: ``gpu`` if it is done in its own process."""
        return self._module("pytest_gpumem.cli.main", *words, gpu=gpu, new=new, timeout=timeout, **variables)

    def _module(
        self, *words: str, gpu: str, new: bool, timeout: float, **variables: object
    ) -> subprocess.CompletedProcess[str]:
        python = self.python(gpu, new=new)
        paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        fork = {VARIABLE: f"emulated:{gpu}"} if python != sys.executable else {}
        return _run(timeout, args=[python, "-m", *words], **self._where({"PYTHONPATH": paths, **fork} | variables))

    def _where(self, variables: dict[str, object]) -> dict[str, Any]:
        environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        return {"cwd": self.folder, "env": environment, "text": True}


def _run(timeout: float, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(capture_output=True, check=False, timeout=timeout, **how)


def _has_kernels_of_the_suites(gpu: str) -> bool:
    suites = current_emulation()
    return suites is not None and emulated_gpu(gpu).capability == suites.gpu.capability
