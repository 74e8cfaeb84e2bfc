"""What single tests need that a machine may lack: each a mark that skips with the reason."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from pathlib import Path

import pytest

_HAS_COMPILER = shutil.which("g++") is not None and Path(sysconfig.get_path("include"), "Python.h").exists()
NEEDS_COMPILER = pytest.mark.skipif(
    not _HAS_COMPILER, reason="needs g++ and Python's headers, with which torch.compile builds kernels for the CPU"
)


def package(name: str) -> pytest.MarkDecorator:
    """Return a mark that skips tests where a package is not installed, which is found out without importing it."""
    return pytest.mark.skipif(
        importlib.util.find_spec(name) is None, reason=f"needs {name}: these are tests of its code"
    )
