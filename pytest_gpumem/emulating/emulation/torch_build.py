"""Describe the installed build of torch, and what torch.compile needs on an emulated GPU.

The description is read from files, because torch must not be imported before the stand-ins are loaded.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sysconfig
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import CacheError, EmulationError
from pytest_gpumem.base.user_cache import cache_root, make_private_folder
from pytest_gpumem.base.variables import COMPILER

if TYPE_CHECKING:
    from collections.abc import Mapping


OLDEST = (2, 6)
"""The oldest supported torch release (built for CUDA 12.4)."""
_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
_CUDNN_OF_OLDEST = "nvidia-cudnn-cu12==9.1.0.70"


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """An installed CUDA build of torch, with its CUDA and cuDNN releases."""

    version: str
    cuda: tuple[int, int]
    cudnn: tuple[int, int, int]
    cudnn_wheel: str
    """The cuDNN package that torch requires: ``"nvidia-cudnn-cu13==9.20.0.48"``."""
    libraries: Path
    """The folder with torch's shared libraries."""


def installed_torch() -> TorchBuild:
    """Describe the torch that ``import torch`` would load, without importing it.

    Raises:
        EmulationError: torch is not installed, is too old, or is built without CUDA.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise EmulationError("torch is not installed: install a CUDA build of torch (pip install torch)")
    folder = Path(spec.submodule_search_locations[0])
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError as error:
        raise EmulationError(f"the torch in {folder} does not say which release it is: {error}") from None
    version = _found(r"__version__ = ['\"]([^'\"]+)['\"]", text)
    cuda = _found(r"cuda(?:: [^=]+)? = ['\"](\d+\.\d+)", text)
    if version is None:
        raise EmulationError(f"the torch in {folder} does not say which release it is")
    if cuda is None or not (folder / "lib" / "libtorch_cuda.so").exists():
        raise EmulationError(
            f"torch {version} has no CUDA: an emulated GPU needs the CUDA build of torch, which works without a real GPU (pip "
            f"install --no-deps --force-reinstall torch=={version.partition('+')[0]} --index-url https://pypi.org/simple)"
        )
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise EmulationError(f"torch {version} is too old to be emulated: {oldest} or newer is needed")
    major, minor = (int(part) for part in cuda.split("."))
    cudnn, wheel = _cudnn()
    return TorchBuild(version, (major, minor), cudnn, wheel, folder / "lib")


def _cudnn() -> tuple[tuple[int, int, int], str]:
    """Return the cuDNN release required by torch, and the requirement for its package."""
    wheel = requirement("nvidia-cudnn-cu") or _CUDNN_OF_OLDEST
    major, minor, patch = map(int, re.split("[=~]=", wheel)[1].split(".")[:3])
    return (major, minor, patch), wheel


def requirement(name: str) -> str | None:
    """Return torch's requirement for a package, for example ``"triton==3.6.0"``; ``None`` if torch has no such requirement.

    Args:
        name: The beginning of the package's name.
    """
    try:
        requirements = requires("torch") or []
    except PackageNotFoundError:
        return None
    # torch 2.6 writes a requirement's version in parentheses.
    matches = (re.match(rf"({re.escape(name)}\d*) ?\(?([=~]=[\w.+]+)", text) for text in requirements)
    return next((f"{match[1]}{match[2]}" for match in matches if match), None)


def _found(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None


def compiler_variables(driver: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables needed by torch.compile on an emulated GPU, except variables already set.

    They include the folder of torch's cache, which stores the fastest of several kernels. An emulated GPU cannot time kernels,
    so its cache must be separate from a real GPU's.

    Args:
        driver: The stand-in for ``libcuda.so.1``. Triton links to this file instead of the system's library.
        environment: The current variables. They are not changed.

    Raises:
        EmulationError: The cache cannot be used, for example because other users could write kernels into its folder.
    """
    variables = {"TRITON_LIBCUDA_PATH": str(driver.parent)}
    if not environment.get(_INDUCTOR):
        try:
            kernels = cache_root() / "torchinductor"
            make_private_folder(kernels)
            variables[_INDUCTOR] = str(kernels)
        except CacheError as error:
            raise EmulationError(f"compiled kernels cannot be cached: {error}") from None
    return {name: value for name, value in variables.items() if not environment.get(name)}


def needs_of_triton() -> set[str]:
    """Return the CUDA driver's functions called by the C sources of the installed Triton.

    Triton compiles these sources when it is first used. The compiled module can be loaded only if the stand-in for the driver
    has all these functions.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        return set()
    sources = Path(spec.submodule_search_locations[0]).glob("backends/nvidia/*.c")
    return {name for file in sources for name in re.findall(r"\b(cu[A-Z]\w+)\(", file.read_text(encoding="utf-8"))}


def missing_for_compiling(environment: Mapping[str, str]) -> str | None:
    """Return a sentence about a missing requirement for torch.compile and how to install it; ``None`` if nothing is missing."""
    if importlib.util.find_spec("triton") is None:
        return (
            "torch.compile also needs Triton on an emulated GPU, and Triton is not installed: "
            f"pip install --no-deps {requirement('triton') or 'triton'}"
        )
    compiler = environment.get(COMPILER, "")
    if len(compiler.split()) > 1 and not shutil.which(compiler):
        return (
            f"torch.compile needs a C compiler for Triton, but Triton allows only a program's name in CC, and CC is "
            f"{compiler!r}: set CC to the name of one program, such as /usr/lib/ccache/gcc"
        )
    if not compiler and not shutil.which("gcc") and not shutil.which("clang"):
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
