"""Contract of a backend, the folder or bucket of a store's files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pytest_gpumem.baselines.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path


SUFFIX = ".toml"
LARGEST = 2**25
"""Bytes of the largest file that is read: 34 MB. The baselines of 1,000 tests with compositions have 15 MB."""


class Backend(Protocol):
    """Storage of text files by relative path (``"cpu-x86_64/tests/test_gpt.py.toml"``). All raise `BackendError`."""

    folder: Path | None = None
    """The folder on this machine that the files are in; ``None`` if they are elsewhere."""

    def paths(self) -> list[str]:
        """Return the paths of all files of baselines, sorted."""

    def read(self, path: str) -> str | None:
        """Return a file's text; ``None`` when there is no such file."""

    def read_many(self, paths: Sequence[str]) -> Mapping[str, str | None]:
        """Return the texts of files in the order of ``paths``."""
        return {path: self.read(path) for path in paths}

    def write(self, path: str, text: str) -> None:
        """Replace a file's text whole: a reader sees the old text or the new one, also after a crash."""
        raise BackendError(f"{self.shown(path)}: cannot be written")

    def remove(self, path: str) -> None:
        """Delete a file."""
        raise BackendError(f"{self.shown(path)}: cannot be removed")

    def locked(self) -> AbstractContextManager[str | None]:
        """Hold the writers' lock within the context; yields the reason as a clause, where there can be no lock."""

    def shown(self, path: str) -> str:
        """Return the file's location for messages, without credentials."""
