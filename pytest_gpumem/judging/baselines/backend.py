"""The interface of a backend: a folder or bucket with the store's files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pytest_gpumem.judging.baselines.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path


SUFFIX = ".toml"
LARGEST = 2**25
"""The largest file to read, in bytes: 34 MB. 1,000 tests with compositions need 15 MB."""


class Backend(Protocol):
    """Storage for text files by relative path.

    Example: ``"cpu-x86_64/tests/test_gpt.py.toml"``. All methods raise `BackendError`.
    """

    folder: Path | None = None
    """The folder with the files on this machine; ``None`` if the files are elsewhere."""

    def paths(self) -> list[str]:
        """Return the paths to all baseline files, sorted."""

    def read(self, path: str) -> str | None:
        """Return a file's text; ``None`` if the file does not exist."""

    def read_many(self, paths: Sequence[str]) -> Mapping[str, str | None]:
        """Return several files' texts, in the same order as ``paths``."""
        return {path: self.read(path) for path in paths}

    def write(self, path: str, text: str) -> None:
        """Replace a file atomically: a reader sees the old text or the new text, even after a crash."""
        raise BackendError(f"{self.shown(path)}: cannot be written")

    def remove(self, path: str) -> None:
        """Delete a file."""
        raise BackendError(f"{self.shown(path)}: cannot be removed")

    def locked(self) -> AbstractContextManager[str | None]:
        """Hold the writers' lock within a context. If the backend has no lock, the context yields the reason as a clause."""

    def shown(self, path: str) -> str:
        """Return the file's location for messages, without credentials."""
