"""Run of a program on an emulated GPU, and the usage of its processes."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.emulated_process.before_torch import PEAKS, STEPS, USAGE
from pytest_gpumem.emulated_process.start import environment_for
from pytest_gpumem.emulated_process.usage import read_usages
from pytest_gpumem.fit.outcome import ProgramRun
from pytest_gpumem.processes import run
from pytest_gpumem.variables import ALLOC_CONF, CUDA_ALLOC_CONF

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_gpumem.emulation.gpus import Gpu
    from pytest_gpumem.processes import Stop

SETTINGS = (CUDA_ALLOC_CONF, ALLOC_CONF)
"""Variables with settings of PyTorch's allocator; the second in newer releases, beside the first."""
_EXPANDABLE = "expandable_segments"
_TAIL = 64 * 1024


def with_expandable_segments(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return the variables that make PyTorch's segments expandable; ``None`` where the environment sets that itself."""
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
        gpu: The GPU, or several of one.
        command: The program and its arguments.
        environment: Its environment, but for what concerns the emulated GPU.
        stop: The signal that asks for the end, which is then the program's, too.
        steps: After how many steps of an optimizer to end it; ``None`` for not before it ends.

    Raises:
        OSError: The program cannot be started.
        Stopped: The end was asked for.
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
    """Return ``environment`` for a program on an emulated GPU, whose peaks are not printed."""
    theirs = {key: value for key, value in environment.items() if key not in (PEAKS, STEPS)}
    return {**theirs, **environment_for(gpu, theirs)}


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder in which a program's processes leave their usage, and its output is kept."""

    path: Path

    @property
    def output(self) -> Path:
        return self.path / "output"

    @property
    def errors(self) -> Path:
        return self.path / "errors"

    def variables(self, steps: int | None) -> dict[str, str]:
        """Return the variables that tell processes to leave their usage here, and to end after so many steps."""
        return {USAGE: str(self.path), **({} if steps is None else {STEPS: str(steps)})}

    def run(self, status: int) -> ProgramRun:
        """Return the end of the program, with this exit status."""
        return ProgramRun(status, _tail(self.errors) or _tail(self.output), read_usages(self.path))


@contextmanager
def run_folder() -> Iterator[RunFolder]:
    """Make a folder for a run, and remove it at the end of the context."""
    with tempfile.TemporaryDirectory(prefix="gpumem-fit-", ignore_cleanup_errors=True) as name:
        yield RunFolder(Path(name))


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL), os.SEEK_SET)
        return file.read().decode("utf-8", errors="replace").strip()
