"""Where the store's files lie: the contract of a place, and which place a location is. Text in, text out."""

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
    """The place cannot be read or written; the message says which file and why."""


class Backend(Protocol):
    """Files by their path relative to the place (``"cpu-x86_64/tests/test_gpt.py.toml"``). All raise `BackendError`."""

    def paths(self) -> list[str]:
        """Every file of baselines in the place, sorted."""

    def read(self, path: str) -> str | None:
        """A file's text; ``None`` when there is no such file."""

    def read_many(self, paths: Sequence[str]) -> Mapping[str, str | None]:
        """The texts of files, at once where that is faster; in the order of ``paths``."""

    def write(self, path: str, text: str) -> None:
        """Replace a file's text whole: a reader sees the old text or the new one, also after a crash."""

    def remove(self, path: str) -> None:
        """Delete a file."""

    def locked(self) -> AbstractContextManager[str | None]:
        """Nobody else reads to write meanwhile; or gives, as a clause, why others cannot be kept out of this place."""

    def shown(self, path: str) -> str:
        """The file as a person finds it, without credentials."""


def backend_of(location: str, base: Path) -> Backend:
    """The place at ``location``: a URL if it has a scheme, else a folder, relative to ``base``. ``~`` is the home folder.

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
    """Whether a location is a URL and no path: ``s3://bucket`` is, ``C://store`` is not."""
    return _URL.match(location) is not None


def _path_in(location: str, rest: str) -> Path:
    """The path of a ``file://`` URL (RFC 8089), which is always a whole one."""
    from urllib.request import url2pathname

    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise BackendError(
            f"{location}: a folder's URL is whole and has three slashes, like file:///srv/gpumem-baselines"
        )
    return Path(url2pathname(slash + path))
