"""Assign a GPU to each pytest-xdist worker."""

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
    """Return the GPUs that a process sees, each written as in ``CUDA_VISIBLE_DEVICES``: an index, a UUID or a MIG instance.

    As in the driver, ``-1`` and all entries after it are ignored. For example, the result for
    ``CUDA_VISIBLE_DEVICES=2,0,-1,1`` is ``["2", "0"]``.

    Args:
        environ: The process's environment variables.
        installed: The number of GPUs in the machine. All are visible if ``CUDA_VISIBLE_DEVICES`` is not set.
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
    """Return the GPU for a worker (``gw0``, ``gw1``, ...); ``None`` if there are fewer than two GPUs.

    For example, if the visible GPUs are ``["0", "3"]``, the GPU for worker ``gw4`` is ``"0"``.
    """
    number = re.search(r"\d+$", worker_id)
    if len(visible) < 2 or number is None:
        return None
    return visible[int(number.group()) % len(visible)]


def installed_gpus() -> int:
    """Return the number of GPUs in the machine. The function counts the driver's files, and does not initialise CUDA."""
    try:
        return sum(1 for _ in _DRIVER_GPUS.iterdir())
    except OSError:
        return 0


def give_worker_its_gpu(worker_id: str) -> None:
    """Set ``CUDA_VISIBLE_DEVICES`` in this process to its worker's GPU. Call this function before CUDA is first used."""
    gpu = gpu_of_worker(visible_gpus(os.environ, installed_gpus()), worker_id)
    if gpu is not None:
        os.environ[CUDA_VISIBLE_DEVICES] = gpu
