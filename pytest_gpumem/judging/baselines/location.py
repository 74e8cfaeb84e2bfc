"""Choose the storage backend for the location of a store, which is a path or a URL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import BackendError
from pytest_gpumem.judging.baselines.folder import Folder

if TYPE_CHECKING:
    from pytest_gpumem.judging.baselines.backend import Backend


_BUCKETS = frozenset({"file", "local", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
"""URL schemes for folders and buckets. Such a URL contains no host. The environment or the library chooses the host."""
# A single letter before "://" is a Windows drive. "simplecache::s3://" is a URL inside another URL.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::[A-Za-z0-9+.:-]+)*://")


def backend_of(location: str, base: Path) -> Backend:
    """Return the storage backend for a location.

    For example, ``s3://bucket/baselines`` is a URL, and ``gpumem-baselines`` is a folder in ``base``. In a path, ``~`` is the
    user's home folder.

    Args:
        location: A URL or a path.
        base: The folder for relative paths.

    Raises:
        BackendError: The location is not valid, or it is a file.
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
            # fsspec would follow symbolic links in the folder, so do not use it for a folder on this machine.
            raise BackendError(f"{location}: a folder on this machine needs no {before[0]}; write {scheme}://{rest}")
        return _folder(_path_in(location, rest))
    from pytest_gpumem.judging.baselines.url_backend import Url

    return Url(location)


def _folder(root: Path) -> Folder:
    nearest = next((path for path in (root, *root.parents) if path.exists()), root)
    if nearest.exists() and not nearest.is_dir():
        kind = "a file" if nearest.is_file() else "neither a file nor a folder"
        raise BackendError(f"the store {root}: {nearest} is {kind}, expected a folder")
    return Folder(root)


def is_url(location: str) -> bool:
    """Return whether a location is a URL. ``s3://bucket`` is a URL; ``C://store`` is a path."""
    return _URL.match(location) is not None


def chooses_host(location: str) -> bool:
    r"""Return whether a location names the host to which requests are sent.

    ``https://host/x`` and the Windows share ``\\host\share`` name a host. ``s3://bucket`` and other paths do not. The result is
    also true for a nested URL such as ``simplecache::s3://bucket``, because its outer part can write files.
    """
    if is_url(location):
        return location.partition("://")[0].lower() not in _BUCKETS
    return re.match(r"[\\/]{2}", location) is not None


def _path_in(location: str, rest: str) -> Path:
    """Return the absolute path from a ``file://`` URL (RFC 8089)."""
    from urllib.request import url2pathname

    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise BackendError(
            f"{location}: a folder's URL needs an absolute path with three slashes, like file:///srv/gpumem-baselines"
        )
    # Quote `?` and `#`, because since Python 3.14 url2pathname takes the text after them for a query and a fragment.
    return Path(url2pathname(f"{slash}{path}".replace("?", "%3F").replace("#", "%23")))
