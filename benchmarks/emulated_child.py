"""Functions of a benchmark that run in a process of their own, on an emulated GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def run_child(
    script: Path, asked: Mapping[str, Any], environment: Mapping[str, str], seconds: float
) -> tuple[str, Any]:
    """Start ``script --do JSON``, which calls `serve`, and wait for it.

    Args:
        script: The benchmark.
        asked: ``do``, the name of the function, ``gpu``, the name of the GPU (``"h100"``), and ``values``, whether small
            tensors are computed on the host; the function is given all of it.
        environment: Of the new process.
        seconds: It is ended after so many.

    Returns:
        torch's release there, and what the function returned.

    Raises:
        RuntimeError: It failed; with what it wrote.
    """
    command = [sys.executable, str(script.resolve()), "--do", json.dumps(asked)]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False, timeout=seconds)
    if done.returncode:
        raise RuntimeError(f"{asked['do']} on emulated:{asked['gpu']} failed:\n{done.stderr[-4000:]}")
    said = json.loads(done.stdout.splitlines()[-1])
    return said["torch"], said["result"]


def serve(text: str, functions: Mapping[str, Callable[[dict[str, Any]], Any]]) -> NoReturn:
    """Do what `run_child` asks, print it as JSON, and end at once: nothing waits for threads of autograd."""
    asked = json.loads(text)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from pytest_gpumem.emulating.emulated_process.before_torch import install
    from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
    from pytest_gpumem.emulating.emulation.load import load

    gpu = f"emulated:{asked['gpu']}"
    if asked["values"]:
        install(gpu)
    else:
        load(emulated_gpu(gpu))
    import torch

    result = functions[asked["do"]](asked)
    print(json.dumps({"torch": torch.__version__, "result": result}), flush=True)
    os._exit(0)
