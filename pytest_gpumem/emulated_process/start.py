"""Emulation of a GPU in this process and in those that it starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.emulated_process.before_torch import DESCRIPTION
from pytest_gpumem.emulation.gpus import described
from pytest_gpumem.emulation.load import Emulation, load
from pytest_gpumem.variables import EMULATED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.emulation.gpus import Gpu

STARTUP = Path(__file__).with_name("startup")
"""A folder for ``PYTHONPATH``, whose ``sitecustomize`` has torch preceded by the stand-ins."""


def emulate(gpu: Gpu) -> Emulation:
    """Set up an emulated GPU for this process, and those that it starts, before torch is imported.

    Raises:
        EmulationError: It cannot be done here, or is too late.
    """
    emulation = load(gpu)
    os.environ.update(environment_for(gpu, os.environ))
    if str(STARTUP) not in sys.path:
        # torch gives the processes in which it compiles this path, and not the variable.
        sys.path.insert(0, str(STARTUP))
    return emulation


def environment_for(gpu: Gpu, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for processes that are to find an emulated GPU, to be added to ``environment``."""
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in paths if path and path != str(STARTUP)]
    return {
        EMULATED: gpu.device,
        DESCRIPTION: described(gpu),
        "PYTHONPATH": os.pathsep.join([str(STARTUP), *others]),
    }
