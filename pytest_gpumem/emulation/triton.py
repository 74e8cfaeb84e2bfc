"""Requirements of torch.compile on an emulated GPU: Triton, the driver that it links to, and a cache of its own."""

from __future__ import annotations

import getpass
import importlib.util
import os
import re
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.emulation.torch_build import requirement

if TYPE_CHECKING:
    from collections.abc import Mapping


def compiler_variables(driver: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch.compile needs, without those that are there.

    Which of several kernels is fastest is not known on an emulated GPU, and torch keeps what it found: so it keeps it apart
    from what is found on a real one.

    Args:
        driver: The stand-in of ``libcuda.so.1``. Triton links to it, and would look for it among the system's libraries.
        environment: What is there; it is left alone.
    """
    variables = {"TRITON_LIBCUDA_PATH": str(driver.parent), "TORCHINDUCTOR_CACHE_DIR": _cache()}
    return {name: value for name, value in variables.items() if not environment.get(name)}


def what_compiling_lacks(environment: Mapping[str, str]) -> str | None:
    """Return a sentence on what torch.compile lacks and how to install it; ``None`` where all is there."""
    if importlib.util.find_spec("triton") is None:
        return (
            "torch.compile needs Triton on an emulated GPU, too, and there is none: "
            f"pip install --no-deps {requirement('triton') or 'triton'}"
        )
    if not environment.get("CC") and not shutil.which("gcc") and not shutil.which("clang"):
        return (
            "torch.compile needs a C compiler for Triton, and none was found: install one (Debian and Ubuntu: apt-get "
            "install gcc libc6-dev) or set CC"
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        return (
            f"torch.compile needs Python's headers for Triton, and there is no {header}: install them (Debian and Ubuntu: "
            "apt-get install python3-dev)"
        )
    return None


def _cache() -> str:
    """Return the folder of the compiler's cache, beside torch's own, which is ``torchinductor_<user>``."""
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{user}_emulated")  # noqa: PTH118
