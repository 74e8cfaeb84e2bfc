"""Assignment of a machine's GPUs to pytest-xdist workers."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.variables import CUDA_VISIBLE_DEVICES

if TYPE_CHECKING:
    from collections.abc import Mapping

_DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")


def visible_gpus(environ: Mapping[str, str], installed: int) -> list[str]:
    """Return the GPUs that this process may use, as entries of ``CUDA_VISIBLE_DEVICES``.

    ``installed`` is how many the machine has; an entry may be an index, a UUID or a MIG instance. As the driver does, the
    list ends before the first ``-1``.
    """
    chosen = environ.get(CUDA_VISIBLE_DEVICES)
    if chosen is None:
        return [str(index) for index in range(installed)]
    visible: list[str] = []
    for entry in (part.strip() for part in chosen.split(",")):
        if not entry or entry == "-1":
            break
        visible.append(entry)
    return visible


def gpu_of_worker(visible: list[str], worker_id: str) -> str | None:
    """Return the one GPU that worker ``gw0``, ``gw1``, ... is given; ``None`` where there is no choice to make."""
    number = re.search(r"\d+$", worker_id)
    if len(visible) < 2 or number is None:
        return None
    return visible[int(number.group()) % len(visible)]


def installed_gpus() -> int:
    """Return how many GPUs the driver lists: read from its files, so that neither CUDA nor the GPU is touched."""
    try:
        return sum(1 for _ in _DRIVER_GPUS.iterdir())
    except OSError:
        return 0


def give_worker_its_gpu(worker_id: str) -> None:
    """Narrow ``CUDA_VISIBLE_DEVICES`` of this worker to its own GPU. Must come before CUDA is first used."""
    gpu = gpu_of_worker(visible_gpus(os.environ, installed_gpus()), worker_id)
    if gpu is not None:
        os.environ[CUDA_VISIBLE_DEVICES] = gpu
