"""Start to emulate a GPU in this process and in its child processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.base.variables import EMULATED
from pytest_gpumem.emulating.emulated_process.before_torch import DESCRIPTION
from pytest_gpumem.emulating.emulation.gpus import described
from pytest_gpumem.emulating.emulation.load import Emulation, load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.emulating.emulation.gpus import Gpu

STARTUP = Path(__file__).with_name("startup")
"""A folder in the child processes' ``PYTHONPATH``. Its ``sitecustomize`` installs the import hook for torch."""


def emulate(gpu: Gpu) -> Emulation:
    """Emulate a GPU in this process and its child processes. torch must not be imported yet.

    Raises:
        EmulationError: No GPU can be emulated on this machine, torch is imported, or the process emulates another GPU.
    """
    emulation = load(gpu)
    os.environ.update(environment_for(gpu, os.environ))
    if str(STARTUP) not in sys.path:
        # torch.compile's worker processes get `sys.path`, but not the variable PYTHONPATH.
        sys.path.insert(0, str(STARTUP))
    return emulation


def environment_for(gpu: Gpu, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with which a child process emulates a GPU.

    Args:
        gpu: The GPU to emulate.
        environment: The child's other environment variables. Their ``PYTHONPATH`` is extended.
    """
    return {EMULATED: gpu.device, DESCRIPTION: described(gpu), **with_startup(environment)}


def with_startup(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with which Python runs our `STARTUP`: the environment's ``PYTHONPATH`` with this folder first."""
    paths = environment.get("PYTHONPATH", "")
    # An empty part means the current folder, so it stays.
    other_paths = [path for path in paths.split(os.pathsep) if path != str(STARTUP)] if paths else []
    return {"PYTHONPATH": os.pathsep.join([str(STARTUP), *other_paths])}
