"""The state of a checkout that is run as it is, by which runs of it before a change are told from those after it."""

from __future__ import annotations

import itertools
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.git import GitError, git

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.ab.checkout import Checkout

_SUFFIXES = (".py", ".toml", ".ini", ".cfg")
_INSTALLED = frozenset({"site-packages", "dist-packages", "node_modules", "__pycache__"})
_MOST_FOLDERS = 20_000
"""Folders that are looked into: as many, with a file in each, took 1.1 s on a busy server."""


def state_of(checkout: Checkout) -> str:
    """Return a text that is another one after the checkout's code or settings have changed.

    Of a repository it is the commit and the changes to it. Without git it is the names, sizes and times of the files of code
    and settings below the folder, and where there are too many folders to look into, another text each time.
    """
    try:
        untracked = git(checkout.top, "ls-files", "-z", "--others", "--exclude-standard").split("\0")
        files = [(name, path.stat().st_mtime_ns) for name in untracked if (path := checkout.top / name).is_file()]
        return git(checkout.top, "rev-parse", "HEAD") + git(checkout.top, "diff", "HEAD") + str(files)
    except (GitError, OSError):
        folders = list(itertools.islice(_folders(checkout.top), _MOST_FOLDERS + 1))
        return str(sorted(_files(folders))) if len(folders) <= _MOST_FOLDERS else uuid.uuid4().hex


def _folders(top: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the folders below one, without hidden ones and environments, and the names of the files in each."""
    for folder, within, files in os.walk(top):
        within[:] = [
            one
            for one in within
            if not one.startswith(".")
            and one not in _INSTALLED
            and not Path(folder, one, "pyvenv.cfg").exists()
            and not Path(folder, one, "conda-meta").exists()
        ]
        yield folder, files


def _files(folders: list[tuple[str, list[str]]]) -> Iterator[tuple[str, int, int]]:
    """Yield name, size and time of each file of code or settings."""
    for folder, names in folders:
        for name in names:
            if name.endswith(_SUFFIXES):
                path = Path(folder, name)
                try:
                    found = path.stat()
                except OSError:
                    # A link that leads nowhere.
                    continue
                yield str(path), found.st_size, found.st_mtime_ns
