"""Fingerprint of a working tree. Stored runs can be reused if the fingerprint is the same as when they were stored."""

from __future__ import annotations

import itertools
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import GitError
from pytest_gpumem.base.git import git

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.tools.checkout import Checkout

_SUFFIXES = (".py", ".toml", ".ini", ".cfg")
_INSTALLED = frozenset({"site-packages", "dist-packages", "node_modules", "__pycache__"})
_MOST_FOLDERS = 20_000
"""The maximum number of folders to read. Reading 20,000 folders with a file in each took 1.1 s on a busy server."""


def state_of(checkout: Checkout) -> str:
    """Return a text that changes whenever the checkout's code or settings change.

    In a git repository, the text contains the HEAD commit, the uncommitted changes, and the names and modification times of
    new files. Without git, the text contains the names, sizes and modification times of all files with code or settings. With
    more than 20,000 folders, each call returns a different text, so no stored run is reused.
    """
    try:
        untracked = git(checkout.top, "ls-files", "-z", "--others", "--exclude-standard").split("\0")
        files = [(name, path.stat().st_mtime_ns) for name in untracked if (path := checkout.top / name).is_file()]
        return git(checkout.top, "rev-parse", "HEAD") + git(checkout.top, "diff", "HEAD") + str(files)
    except (GitError, OSError):
        folders = list(itertools.islice(_folders(checkout.top), _MOST_FOLDERS + 1))
        return str(sorted(_files(folders))) if len(folders) <= _MOST_FOLDERS else uuid.uuid4().hex


def _folders(top: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield ``top`` and the folders below it, each with its file names. Hidden folders and environments are skipped."""
    for folder, subfolders, files in os.walk(top):
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith(".")
            and name not in _INSTALLED
            and not Path(folder, name, "pyvenv.cfg").exists()
            and not Path(folder, name, "conda-meta").exists()
        ]
        yield folder, files


def _files(folders: list[tuple[str, list[str]]]) -> Iterator[tuple[str, int, int]]:
    """Yield path, size and modification time for each file with code or settings."""
    for folder, names in folders:
        for name in names:
            if name.endswith(_SUFFIXES):
                path = Path(folder, name)
                try:
                    status = path.stat()
                except OSError:
                    # The file is a dangling link, or was deleted meanwhile.
                    continue
                yield str(path), status.st_size, status.st_mtime_ns
