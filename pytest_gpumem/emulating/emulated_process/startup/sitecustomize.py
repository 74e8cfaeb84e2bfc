"""Runs at the start of every Python process of an emulated GPU or of a measured job, because ``PYTHONPATH`` has this folder."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def _install_import_hook(word: str | None) -> None:
    """Install the hook for torch's import. It is loaded from its file, because pytest must be the first to import the package.

    ``word`` is the emulated GPU, or ``None`` if the process uses real GPUs.
    """
    file = Path(__file__).parents[1] / "before_torch.py"
    module = _run(importlib.util.spec_from_file_location("_gpumem_before_torch", file))
    if module is not None:
        module.install(word)


def _run_the_next_one() -> None:
    """Run the environment's own ``sitecustomize``, if there is one. Python found this file first, and does not run it."""
    own_folder = Path(__file__).resolve().parent
    rest = [folder for folder in sys.path if Path(folder).resolve() != own_folder]
    _run(importlib.machinery.PathFinder.find_spec("sitecustomize", rest))


def _run(spec: importlib.machinery.ModuleSpec | None) -> ModuleType | None:
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    if spec.name == __name__:
        # The import system returns this module, so a program finds its own `sitecustomize` under this name.
        sys.modules[__name__] = module
    spec.loader.exec_module(module)
    return module


if os.environ.get("GPUMEM_EMULATED") or os.environ.get("GPUMEM_USAGE"):
    _install_import_hook(os.environ.get("GPUMEM_EMULATED") or None)
_run_the_next_one()
