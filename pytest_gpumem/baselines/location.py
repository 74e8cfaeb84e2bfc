"""The backend of a store, by its location."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.baselines.errors import BackendError
from pytest_gpumem.baselines.folder import Folder

if TYPE_CHECKING:
    from pytest_gpumem.baselines.backend import Backend


_BUCKETS = frozenset({"file", "local", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
"""Schemes with a folder or a bucket behind them, whose host the environment or the library decides on."""
# One letter before "://" is a drive of Windows. "simplecache::s3://" is a URL within another.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::[A-Za-z0-9+.:-]+)*://")


def backend_of(location: str, base: Path) -> Backend:
    """Return the backend for ``location``: a URL if it has a scheme, else a folder relative to ``base``. ``~`` is expanded.

    Raises `BackendError` for a location that cannot be one.
    """
    if not is_url(location):
        try:
            return _folder(base / Path(location).expanduser())
        except RuntimeError as error:
            raise BackendError(f"{location}: {error}") from None
    scheme, _, rest = location.partition("://")
    *before, scheme = scheme.lower().split("::")
    if scheme in ("file", "local"):
        if before:
            # fsspec would follow links in the folder.
            raise BackendError(
                f"{location}: a folder of this machine needs no {before[0]}; name it as {scheme}://{rest}"
            )
        return _folder(_path_in(location, rest))
    from pytest_gpumem.baselines.url_backend import Url

    return Url(location)


def _folder(root: Path) -> Folder:
    there = next((path for path in (root, *root.parents) if path.exists()), root)
    if there.exists() and not there.is_dir():
        kind = "a file" if there.is_file() else "neither a file nor a folder"
        raise BackendError(f"the store {root}: {there} is {kind}, expected a folder")
    return Folder(root)


def is_url(location: str) -> bool:
    """Return whether a location is a URL and not a path: ``s3://bucket`` is, ``C://store`` is not."""
    return _URL.match(location) is not None


def names_a_host(location: str) -> bool:
    r"""Return whether a location chooses where requests are sent: ``https://host/x`` does, ``s3://bucket`` and paths do not.

    A URL within another, such as ``simplecache::s3://bucket``, does as well: the outer one can write files. So does a share of
    Windows, ``\\host\share``.
    """
    if is_url(location):
        return location.partition("://")[0].lower() not in _BUCKETS
    return re.match(r"[\\/]{2}", location) is not None


def _path_in(location: str, rest: str) -> Path:
    """Return the path in a ``file://`` URL (RFC 8089), which is always absolute."""
    from urllib.request import url2pathname

    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise BackendError(
            f"{location}: a folder's URL is whole and has three slashes, like file:///srv/gpumem-baselines"
        )
    # No part of a path ends it here, as a query or a fragment would from Python 3.14 on.
    return Path(url2pathname(f"{slash}{path}".replace("?", "%3F").replace("#", "%23")))
