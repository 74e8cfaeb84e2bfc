"""The interface for a storage backend: a folder, bucket or git commit that contains the store's files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pytest_gpumem.base.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path


SUFFIX = ".toml"
LARGEST = 2**25
"""The largest file to read, in bytes: 34 MB. For comparison, a file with 1,000 tests and their compositions has 15 MB."""


class Backend(Protocol):
    """Storage for text files by relative path, such as ``"cpu-x86_64/tests/test_gpt.py.toml"``.

    If the storage fails, every method raises `BackendError`.
    """

    folder: Path | None = None
    """The folder with the files on this machine; ``None`` if the files are elsewhere."""

    def paths(self) -> list[str]:
        """Return the paths to all baseline files, sorted."""

    def read(self, path: str) -> str | None:
        """Return a file's text; ``None`` if the file does not exist."""

    def read_many(self, paths: Sequence[str]) -> Mapping[str, str | None]:
        """Return the texts of several files by path, in the same order as ``paths``."""
        return {path: self.read(path) for path in paths}

    def write(self, path: str, text: str) -> None:
        """Replace a file atomically, so a reader sees either the old text or the new text, even after a crash.

        Raises:
            WriteConflictError: Another process changed the file after it was read. A backend with a lock never raises this.
        """
        raise BackendError(f"{self.shown(path)}: cannot be written")

    def remove(self, path: str) -> None:
        """Delete a file. Raises the same exceptions as `write`."""
        raise BackendError(f"{self.shown(path)}: cannot be removed")

    def locked(self) -> AbstractContextManager[None]:
        """Lock the store against other writers within a ``with`` block. A bucket is not locked: its writes detect conflicts."""

    def shown(self, path: str) -> str:
        """Return the location of a file for messages, without credentials."""
