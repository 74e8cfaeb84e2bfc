"""Installed packages by the files of their code: the name and version that a distribution is installed under."""

from __future__ import annotations

import importlib.metadata
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from importlib.metadata import Distribution

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
        return _package(self.folder, self.parts)

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
def _package(folder: str, parts: tuple[str, ...]) -> Package | None:
    """Return the package that has a file in a folder of installed packages, by the parts of its path there."""
    top = parts[0].removesuffix(".py")
    # Most are called as their module is, and their own list of files is one text: all lists are read only for the others.
    for distribution in importlib.metadata.distributions(name=top, path=[folder]):
        record = _record_of(folder, top)
        if not record or f"\n{'/'.join(parts)}," in record:
            return Package(top, distribution.version)
    sharing = _distributions(folder).get(top, ())
    if len(sharing) < 2:
        return next((_named(one) for one in sharing), None)
    return _longest_prefix(_by_path(folder, top), parts)


@cache
def _record_of(folder: str, name: str) -> str:
    """Return the list of files of a distribution, a line for each after an empty one; empty where it has none."""
    texts = (one.read_text("RECORD") for one in importlib.metadata.distributions(name=name, path=[folder]))
    text = next(texts, None)
    return "\n" + text.replace("\r\n", "\n") if text else ""


@cache
def by_module(folder: str) -> Mapping[str, Package]:
    """Return the packages in a folder by their modules, of which some are called otherwise than the package.

    Of several that share a first name, as parts of a namespace do, it is one.
    """
    return {module: _named(sharing[0]) for module, sharing in _distributions(folder).items()}


@cache
def _distributions(folder: str) -> Mapping[str, Sequence[Distribution]]:
    """Return the distributions in a folder by the first names of their modules."""
    found: dict[str, list[Distribution]] = {}
    for distribution in importlib.metadata.distributions(path=[folder]):
        listed = (distribution.read_text("top_level.txt") or "").split()
        files = (file.parts[0] for file in distribution.files or () if file.suffix == ".py")
        for module in {*listed, *(part.removesuffix(".py") for part in files)}:
            found.setdefault(module, []).append(distribution)
    return found


@cache
def _by_path(folder: str, top: str) -> Mapping[tuple[str, ...], Package]:
    """Return the distributions that share a first name by the files that they list, and by the folders of these files."""
    found: dict[tuple[str, ...], Package] = {}
    for distribution in _distributions(folder)[top]:
        package = _named(distribution)
        for file in distribution.files or ():
            if file.parts[0].removesuffix(".py") == top:
                for end in range(1, len(file.parts) + 1):
                    found.setdefault(file.parts[:end], package)
    return found


def _longest_prefix(by_path: Mapping[tuple[str, ...], Package], parts: tuple[str, ...]) -> Package | None:
    prefixes = (parts[:end] for end in range(len(parts), 0, -1))
    return next((by_path[one] for one in prefixes if one in by_path), None)


def _named(distribution: Distribution) -> Package:
    return Package(distribution.metadata["Name"], distribution.version)
