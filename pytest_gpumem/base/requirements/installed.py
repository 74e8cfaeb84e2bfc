"""Find the installed package to which a source file belongs, with the package's name and version."""

from __future__ import annotations

import importlib.metadata
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from importlib.metadata import Distribution

_FOLDERS = ("site-packages", "dist-packages")
_MEMORY_PACKAGES = ("nvidia-cublas", "nvidia-cudnn", "nvidia-cusparselt", "nvidia-nccl", "triton")
"""Name prefixes for packages that torch needs and whose release decides how much memory operators take."""


class Package(NamedTuple):
    """An installed package, which `importlib.metadata` calls a distribution."""

    name: str
    version: str


class InstalledFile(NamedTuple):
    """A file in a folder with installed packages: the folder, and the file's path parts within this folder.

    Example: ``InstalledFile("/venv/lib/python3.11/site-packages", ("transformers", "models", "llama", "modeling_llama.py"))``.
    """

    folder: str
    parts: tuple[str, ...]

    @property
    def package(self) -> Package | None:
        """The package to which this file belongs; ``None`` if the file belongs to no installed package."""
        return _package(self.folder, self.parts)

    @property
    def shown(self) -> str:
        """The file's text in reports: ``transformers 4.38.2: models/llama/modeling_llama.py``.

        If the package is unknown, the text is only the path.
        """
        package = self.package
        if package is None:
            return "/".join(self.parts)
        within = self.parts[1:] if self.parts[0] == package.name and len(self.parts) > 1 else self.parts
        return f"{package.name} {package.version}: {'/'.join(within)}"


def installed_file(path: PurePath) -> InstalledFile | None:
    """Return the `InstalledFile` for a path; ``None`` for a path outside ``site-packages``."""
    parts = path.parts
    for folder in _FOLDERS:
        if folder in parts:
            end = len(parts) - parts[::-1].index(folder)
            return InstalledFile(str(PurePath(*parts[:end])), parts[end:])
    return None


def versions(names: Iterable[str]) -> dict[str, str]:
    """Return the installed packages' versions by name. Names without an installed package are left out."""
    pairs = ((name, next(iter(importlib.metadata.distributions(name=name)), None)) for name in names)
    return {name: distribution.version for name, distribution in pairs if distribution is not None}


@cache
def needed_by_torch() -> tuple[str, ...]:
    """Return the packages that torch needs and whose release affects memory: cuBLAS, cuDNN, cuSPARSELt, NCCL and Triton."""
    try:
        requirements = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    names = {requirement.partition(";")[0].partition("=")[0].strip("<>!~ []()") for requirement in requirements}
    return tuple(sorted(name for name in names if name.startswith(_MEMORY_PACKAGES)))


@cache
def _package(folder: str, parts: tuple[str, ...]) -> Package | None:
    """Return the package to which a file belongs.

    Args:
        folder: The folder with all installed packages.
        parts: The file's path parts within this folder.
    """
    top = parts[0].removesuffix(".py")
    # Most packages are named like their module. So first read only the file list of the package with the module's name. All
    # file lists are read only if this package does not have the file.
    for distribution in importlib.metadata.distributions(name=top, path=[folder]):
        record = _record_of(folder, top)
        if not record or f"\n{'/'.join(parts)}," in record:
            return Package(top, distribution.version)
    sharing = _distributions(folder).get(top, ())
    if len(sharing) < 2:
        return next((_named(distribution) for distribution in sharing), None)
    return _longest_prefix(_by_path(folder, top), parts)


@cache
def _record_of(folder: str, name: str) -> str:
    """Return a newline and the text of a package's file list (``RECORD``); an empty text if the package has no file list."""
    distributions = importlib.metadata.distributions(name=name, path=[folder])
    texts = (distribution.read_text("RECORD") for distribution in distributions)
    text = next(texts, None)
    return "\n" + text.replace("\r\n", "\n") if text else ""


@cache
def by_module(folder: str) -> Mapping[str, Package]:
    """Return the packages in a folder by top-level module name.

    Example: the module ``sklearn`` belongs to ``scikit-learn``. If several packages share a top-level module, the result has
    the first package.
    """
    return {module: _named(sharing[0]) for module, sharing in _distributions(folder).items()}


@cache
def _distributions(folder: str) -> Mapping[str, Sequence[Distribution]]:
    """Return the distributions in a folder by top-level module name."""
    by_name: dict[str, list[Distribution]] = {}
    for distribution in importlib.metadata.distributions(path=[folder]):
        listed = (distribution.read_text("top_level.txt") or "").split()
        files = (file.parts[0] for file in distribution.files or () if file.suffix == ".py")
        for module in {*listed, *(part.removesuffix(".py") for part in files)}:
            by_name.setdefault(module, []).append(distribution)
    return by_name


@cache
def _by_path(folder: str, top: str) -> Mapping[tuple[str, ...], Package]:
    """Return the packages that share the top-level module ``top``, by the paths to all their files and folders."""
    packages: dict[tuple[str, ...], Package] = {}
    for distribution in _distributions(folder)[top]:
        package = _named(distribution)
        for file in distribution.files or ():
            if file.parts[0].removesuffix(".py") == top:
                for end in range(1, len(file.parts) + 1):
                    packages.setdefault(file.parts[:end], package)
    return packages


def _longest_prefix(by_path: Mapping[tuple[str, ...], Package], parts: tuple[str, ...]) -> Package | None:
    prefixes = (parts[:end] for end in range(len(parts), 0, -1))
    return next((by_path[prefix] for prefix in prefixes if prefix in by_path), None)


def _named(distribution: Distribution) -> Package:
    return Package(distribution.metadata["Name"], distribution.version)
