"""Runs at the start of every Python process of an emulated GPU or of a measured job, because ``PYTHONPATH`` has this folder.

Most of these processes do not load torch, so this file imports only what costs less than a millisecond.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys


def _install_import_hook(word: str | None) -> None:
    """Install the hook for torch's import. It is loaded from its file, because pytest must be the first to import the package.

    ``word`` is the emulated GPU, or ``None`` if the process uses real GPUs.
    """
    name = "_gpumem_before_torch"
    file = os.path.join(os.path.dirname(_FOLDER), "before_torch.py")
    module = type(sys)(name)
    importlib.machinery.SourceFileLoader(name, file).exec_module(module)
    module.install(word)


def _run_the_next_one() -> None:
    """Run the environment's own ``sitecustomize``, if there is one. Python found this file first, and does not run it."""
    rest = [folder for folder in sys.path if os.path.realpath(folder) != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        # The import system returns this module, so a program finds its own `sitecustomize` under this name.
        module = sys.modules[__name__] = module_from_spec(spec)
        spec.loader.exec_module(module)


_FOLDER = os.path.dirname(os.path.realpath(__file__))
if os.environ.get("GPUMEM_EMULATED") or os.environ.get("GPUMEM_USAGE"):
    _install_import_hook(os.environ.get("GPUMEM_EMULATED") or None)
_run_the_next_one()
