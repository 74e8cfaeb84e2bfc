"""Storage backends of the store: the contract of one, and the choice by location. Text in, text out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

SUFFIX = ".toml"

# One letter before "://" is a drive of Windows. "simplecache::s3://" is a URL within another.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::[A-Za-z0-9+.:-]+)*://")


class BackendError(Exception):
    """The backend cannot be read or written; the message says which file and why."""


class Backend(Protocol):
    """Storage of text files by relative path (``"cpu-x86_64/tests/test_gpt.py.toml"``). All raise `BackendError`."""

    def paths(self) -> list[str]:
        """Return the paths of all files of baselines, sorted."""

    def read(self, path: str) -> str | None:
        """Return a file's text; ``None`` when there is no such file."""

    def read_many(self, paths: Sequence[str]) -> Mapping[str, str | None]:
        """Return the texts of files in the order of ``paths``, read concurrently where that is faster."""

    def write(self, path: str, text: str) -> None:
        """Replace a file's text whole: a reader sees the old text or the new one, also after a crash."""

    def remove(self, path: str) -> None:
        """Delete a file."""

    def locked(self) -> AbstractContextManager[str | None]:
        """Hold the writers' lock within the context; gives a clause that says why, where there can be no lock."""

    def shown(self, path: str) -> str:
        """Return the file's location for messages, without credentials."""


def backend_of(location: str, base: Path) -> Backend:
    """Return the backend for ``location``: a URL if it has a scheme, else a folder relative to ``base``. ``~`` is expanded.

    Raises `BackendError` for a location that cannot be one.
    """
    from pytest_gpumem.baselines.folder_backend import Folder

    if not is_url(location):
        try:
            return Folder(base / Path(location).expanduser())
        except RuntimeError as error:
            raise BackendError(f"{location}: {error}") from None
    scheme, _, rest = location.partition("://")
    if scheme.lower() in ("file", "local"):
        return Folder(_path_in(location, rest))
    from pytest_gpumem.baselines.url_backend import Url

    return Url(location)


def is_url(location: str) -> bool:
    """Return whether a location is a URL and not a path: ``s3://bucket`` is, ``C://store`` is not."""
    return _URL.match(location) is not None


def _path_in(location: str, rest: str) -> Path:
    """Return the path in a ``file://`` URL (RFC 8089), which is always absolute."""
    from urllib.request import url2pathname

    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise BackendError(
            f"{location}: a folder's URL is whole and has three slashes, like file:///srv/gpumem-baselines"
        )
    return Path(url2pathname(slash + path))
