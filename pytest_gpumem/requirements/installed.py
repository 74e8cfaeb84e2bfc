"""Installed packages by the files of their code: the name and version that a distribution is installed under."""

from __future__ import annotations

import importlib.metadata
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_FOLDERS = ("site-packages", "dist-packages")
_DECIDE_MEMORY = ("nvidia-cublas", "nvidia-cudnn", "nvidia-cusparselt", "nvidia-nccl", "triton")
"""Prefixes of the packages that torch requires whose release decides how much memory an operator takes."""


class Package(NamedTuple):
    """A distribution as it is installed."""

    name: str
    version: str


class InstalledFile(NamedTuple):
    """A file of an installed package: the folder that packages are installed in, and the parts of its path from there."""

    folder: str
    parts: tuple[str, ...]

    @property
    def package(self) -> Package | None:
        """The package that has this file; ``None`` for a folder that nobody installed."""
        return _package(self.folder, self.parts[0].removesuffix(".py"))

    @property
    def shown(self) -> str:
        """``transformers 4.38.2: models/llama/modeling_llama.py``, without the package where none is known."""
        package = self.package
        if package is None:
            return "/".join(self.parts)
        within = self.parts[1:] if self.parts[0] == package.name and len(self.parts) > 1 else self.parts
        return f"{package.name} {package.version}: {'/'.join(within)}"


def installed_file(path: PurePath) -> InstalledFile | None:
    """Return where a file is among installed packages; ``None`` for one that is in none of their folders."""
    parts = path.parts
    for folder in _FOLDERS:
        if folder in parts:
            end = len(parts) - parts[::-1].index(folder)
            return InstalledFile(str(PurePath(*parts[:end])), parts[end:])
    return None


def versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those of these packages that are installed, by name."""
    found = ((name, next(iter(importlib.metadata.distributions(name=name)), None)) for name in names)
    return {name: distribution.version for name, distribution in found if distribution is not None}


@cache
def needed_by_torch() -> tuple[str, ...]:
    """Return the packages that torch requires and whose release decides memory: cuDNN, cuBLAS, NCCL, Triton."""
    try:
        requirements = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    names = {requirement.partition(";")[0].partition("=")[0].strip("<>!~ []()") for requirement in requirements}
    return tuple(sorted(name for name in names if name.startswith(_DECIDE_MEMORY)))


@cache
def _package(folder: str, top: str) -> Package | None:
    """Return the package that has the module ``top`` in a folder of installed packages."""
    for distribution in importlib.metadata.distributions(name=top, path=[folder]):
        return Package(top, distribution.version)
    return by_module(folder).get(top)


@cache
def by_module(folder: str) -> Mapping[str, Package]:
    """Return the packages in a folder by their modules, of which some are called otherwise than the package."""
    found: dict[str, Package] = {}
    for distribution in importlib.metadata.distributions(path=[folder]):
        listed = (distribution.read_text("top_level.txt") or "").split()
        files = (file.parts[0] for file in distribution.files or () if file.suffix == ".py")
        for module in {*listed, *(part.removesuffix(".py") for part in files)}:
            found.setdefault(module, Package(distribution.metadata["Name"], distribution.version))
    return found
