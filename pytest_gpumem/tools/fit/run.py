"""Run a program on an emulated GPU, and collect its processes' memory usage."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.base.processes import run
from pytest_gpumem.base.variables import ALLOC_CONF, CUDA_ALLOC_CONF
from pytest_gpumem.emulating.emulated_process.before_torch import PEAKS, STEPS, USAGE
from pytest_gpumem.emulating.emulated_process.start import environment_for
from pytest_gpumem.emulating.emulated_process.usage import read_usages
from pytest_gpumem.tools.fit.outcome import ProgramRun

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_gpumem.base.processes import Stop
    from pytest_gpumem.emulating.emulation.gpus import Gpu

SETTINGS = (CUDA_ALLOC_CONF, ALLOC_CONF)
"""Environment variables with settings for PyTorch's allocator. Newer torch releases read the second variable as well."""
_EXPANDABLE = "expandable_segments"
_TAIL = 64 * 1024


def with_expandable_segments(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return environment variables to enable expandable segments in PyTorch's allocator. Return ``None`` if the environment
    already contains a setting for expandable segments.
    """
    configured = {name: environment[name] for name in SETTINGS if environment.get(name)}
    if any(_EXPANDABLE in value for value in configured.values()):
        return None
    return {
        name: ",".join(filter(None, (value, f"{_EXPANDABLE}:True")))
        for name, value in (configured or {SETTINGS[0]: ""}).items()
    }


def run_on(
    gpu: Gpu, command: Sequence[str], environment: Mapping[str, str], stop: Stop, steps: int | None = None
) -> ProgramRun:
    """Run ``command`` to its end on an emulated GPU.

    Args:
        gpu: The GPU, or several equal GPUs.
        command: The program and its arguments.
        environment: The program's environment, without variables for the emulated GPU.
        stop: Ends the program when this process receives a signal such as SIGTERM.
        steps: The number of optimizer steps after which the program ends, or ``None`` to run to its end.

    Raises:
        OSError: The program cannot be started.
        StopSignal: A signal ended the program.
    """
    with run_folder() as folder:
        status = run(
            command,
            folder=Path.cwd(),
            environment={**emulating(gpu, environment), **folder.variables(steps)},
            output=folder.output,
            errors=folder.errors,
            stop=stop,
        )
        return folder.run(status)


def emulating(gpu: Gpu, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for a program on an emulated GPU. Remove variables that would make the program print its
    peaks or end early.
    """
    variables = {key: value for key, value in environment.items() if key not in (PEAKS, STEPS)}
    return {**variables, **environment_for(gpu, variables)}


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A temporary folder for a run. It contains the program's output, and a file from each process with its memory usage."""

    path: Path

    @property
    def output(self) -> Path:
        return self.path / "output"

    @property
    def errors(self) -> Path:
        return self.path / "errors"

    def variables(self, steps: int | None) -> dict[str, str]:
        """Return environment variables that make processes write their memory usage into the folder, and end after ``steps``
        optimizer steps.
        """
        return {USAGE: str(self.path), **({} if steps is None else {STEPS: str(steps)})}

    def run(self, status: int) -> ProgramRun:
        """Read a program's output and memory usage after it has ended with the exit status ``status``."""
        return ProgramRun(status, _tail(self.errors) or _tail(self.output), read_usages(self.path))


@contextmanager
def run_folder() -> Iterator[RunFolder]:
    """Create a folder for a run, and remove it when the context ends."""
    with tempfile.TemporaryDirectory(prefix="gpumem-fit-", ignore_cleanup_errors=True) as name:
        yield RunFolder(Path(name))


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL), os.SEEK_SET)
        return file.read().decode("utf-8", errors="replace").strip()
