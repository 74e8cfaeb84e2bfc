"""Runs at the start of every Python process that may emulate a GPU, because ``PYTHONPATH`` contains this folder."""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def _emulate(word: str) -> None:
    """Install the import hook from its file, because pytest must be the first to import the package."""
    file = Path(__file__).parents[1] / "before_torch.py"
    module = _run(importlib.util.spec_from_file_location("_gpumem_before_torch", file))
    if module is not None:
        module.install(word)


def _run_the_next_one() -> None:
    """Run the environment's own ``sitecustomize``, if there is one. Python found this file first, and does not run it."""
    own_folder = Path(__file__).resolve().parent
    rest = [folder for folder in sys.path if Path(folder).resolve() != own_folder]
    _run(importlib.machinery.PathFinder.find_spec("sitecustomize", rest))


def _run(spec: "importlib.machinery.ModuleSpec | None") -> "ModuleType | None":
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if os.environ.get("GPUMEM_EMULATED"):
    _emulate(os.environ["GPUMEM_EMULATED"])
_run_the_next_one()
