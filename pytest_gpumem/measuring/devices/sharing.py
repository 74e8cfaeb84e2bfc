"""Assignment of a machine's GPUs to pytest-xdist workers."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.base.variables import CUDA_VISIBLE_DEVICES

if TYPE_CHECKING:
    from collections.abc import Mapping

_DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")


def visible_gpus(environ: Mapping[str, str], installed: int) -> list[str]:
    """Return the GPUs for this process, as entries in ``CUDA_VISIBLE_DEVICES``.

    An entry may be an index, a UUID or a MIG instance. The list ends before the first ``-1``, as in the driver. For example,
    ``CUDA_VISIBLE_DEVICES=2,0,-1,1`` gives ``["2", "0"]``.

    Args:
        environ: The environment variables.
        installed: The number of GPUs in the machine. Without the variable all are visible.
    """
    setting = environ.get(CUDA_VISIBLE_DEVICES)
    if setting is None:
        return [str(index) for index in range(installed)]
    visible: list[str] = []
    for entry in (part.strip() for part in setting.split(",")):
        if not entry or entry == "-1":
            break
        visible.append(entry)
    return visible


def gpu_of_worker(visible: list[str], worker_id: str) -> str | None:
    """Return the GPU for a worker (``gw0``, ``gw1``, ...); ``None`` if there is only one GPU.

    For example, with two visible GPUs ``["0", "3"]``, worker ``gw4`` gets ``"0"``.
    """
    number = re.search(r"\d+$", worker_id)
    if len(visible) < 2 or number is None:
        return None
    return visible[int(number.group()) % len(visible)]


def installed_gpus() -> int:
    """Return the number of GPUs from the driver's files. This touches neither CUDA nor the GPU."""
    try:
        return sum(1 for _ in _DRIVER_GPUS.iterdir())
    except OSError:
        return 0


def give_worker_its_gpu(worker_id: str) -> None:
    """Set ``CUDA_VISIBLE_DEVICES`` of this worker to its own GPU. Call this function before CUDA is first used."""
    gpu = gpu_of_worker(visible_gpus(os.environ, installed_gpus()), worker_id)
    if gpu is not None:
        os.environ[CUDA_VISIBLE_DEVICES] = gpu
