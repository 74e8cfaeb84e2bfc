"""The git backend: the store in a revision of its git repository, read only."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from pytest_gpumem.baselines.backend import SUFFIX, BackendError
from pytest_gpumem.git import GitError, contents, git

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path


class GitBackend:
    """The files below ``folder``, a path from ``top``, in a commit. Raises `BackendError`."""

    def __init__(self, top: Path, commit: str, folder: str, name: str) -> None:
        """``top`` is the folder of the checkout; ``name`` is what a person calls the commit."""
        self._name = name
        self._folder = folder
        below = "" if folder in ("", ".") else f"{folder}/"
        try:
            listed = git(top, "ls-tree", "-r", "-z", "--full-tree", commit, "--", *([below] if below else []))
            blobs = {}
            for line in listed.split("\0"):
                # "100644 blob <name>\t<path>"
                words, _, path = line.partition("\t")
                if path.endswith(SUFFIX) and words.split()[1] == "blob":
                    blobs[path.removeprefix(below)] = words.split()[2]
            read = contents(top, blobs.values())
        except GitError as error:
            raise BackendError(f"{name}: {error}") from None
        self._files = {path: read[blob] for path, blob in blobs.items()}

    def paths(self) -> list[str]:
        return sorted(self._files)

    def read(self, path: str) -> str | None:
        if path not in self._files:
            return None
        try:
            # As a file is read: a checkout may have turned the ends of lines.
            return self._files[path].decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise BackendError(f"{self.shown(path)}: cannot be read: {error}") from None

    def read_many(self, paths: Sequence[str]) -> dict[str, str | None]:
        return {path: self.read(path) for path in paths}

    def write(self, path: str, text: str) -> NoReturn:
        raise BackendError(f"{self.shown(path)}: cannot be written into a commit")

    def remove(self, path: str) -> NoReturn:
        raise BackendError(f"{self.shown(path)}: cannot be removed from a commit")

    def locked(self) -> AbstractContextManager[None]:
        raise BackendError(f"{self._name}: a commit cannot be written")

    def shown(self, path: str) -> str:
        return f"{self._name}:{self._folder}/{path}"
