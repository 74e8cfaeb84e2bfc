"""What is installed, read once: every session of pytest reads the metadata of all packages, and a test has several."""

from __future__ import annotations

import importlib.metadata
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class _ReadOnce:
    """A package whose metadata and entry points are read when first asked for, and kept."""

    def __init__(self, package: importlib.metadata.Distribution) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._package, name)
        setattr(self, name, value)
        return value


def read_installed_packages_once() -> None:
    """Let this process read the packages of its environment once. Those elsewhere on the path may change."""
    folder = Path(sysconfig.get_path("purelib"))
    find = importlib.metadata.distributions
    known: dict[Path, Any] = {}

    def distributions(**context: Any) -> Iterator[Any]:
        for package in find(**context):
            path = getattr(package, "_path", None)
            if isinstance(path, Path) and path.parent == folder:
                yield known.setdefault(path, _ReadOnce(package))
            else:
                yield package

    importlib.metadata.distributions = distributions
