"""The installed build of torch, read from its files: it must not be imported before the stand-ins are loaded."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

OLDEST = (2, 6)
"""The first release of torch that is emulated (CUDA 12.4)."""
_CUDNN_OF_OLDEST = "nvidia-cudnn-cu12==9.1.0.70"


class EmulationError(Exception):
    """A GPU cannot be emulated here; the message is a sentence with the reason and a remedy."""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """A CUDA build of torch."""

    version: str
    cuda: tuple[int, int]
    cudnn: tuple[int, int, int]
    cudnn_wheel: str
    """The package that has cuDNN, as torch requires it: ``"nvidia-cudnn-cu13==9.20.0.48"``."""
    libraries: Path
    """The folder of its shared libraries."""

    @property
    def cuda_number(self) -> int:
        """Return CUDA's release as its headers have it: 13.0 is 13000."""
        return self.cuda[0] * 1000 + self.cuda[1] * 10

    @property
    def cudnn_number(self) -> int:
        """Return cuDNN's release as its headers have it: 9.20.0 is 92000."""
        major, minor, patch = self.cudnn
        return major * 10000 + minor * 100 + patch


def installed_torch() -> TorchBuild:
    """Return the torch that an import would find.

    Raises:
        EmulationError: There is none, or it is too old, or has no CUDA.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise EmulationError("torch is not installed: install a CUDA build of it (pip install torch)")
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
            f"torch {version} has no CUDA: a GPU is emulated beneath the CUDA build of torch, which needs no GPU "
            "(pip install --no-deps --force-reinstall torch from PyPI's own index; the CPU's index has another build)"
        )
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise EmulationError(f"torch {version} is too old to be emulated: {oldest} or newer is needed")
    major, minor = (int(part) for part in cuda.split("."))
    cudnn, wheel = _cudnn()
    return TorchBuild(version, (major, minor), cudnn, wheel, folder / "lib")


def _cudnn() -> tuple[tuple[int, int, int], str]:
    """Return the release of cuDNN that torch requires and checks for, and its package."""
    wheel = requirement("nvidia-cudnn-cu") or _CUDNN_OF_OLDEST
    major, minor, patch = map(int, wheel.partition("==")[2].split(".")[:3])
    return (major, minor, patch), wheel


def requirement(name: str) -> str | None:
    """Return the release of a package that torch requires, as ``"triton==3.6.0"``, by the beginning of the package's name."""
    try:
        required = requires("torch") or []
    except PackageNotFoundError:
        return None
    # torch 2.6 has the version in parentheses.
    found = (re.match(rf"({re.escape(name)}\d*) ?\(?==([\w.]+)", one) for one in required)
    return next((f"{one[1]}=={one[2]}" for one in found if one), None)


def _found(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None
