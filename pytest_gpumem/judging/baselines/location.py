"""Choose the storage backend for the location of a store, which is a path or a URL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import BackendError
from pytest_gpumem.judging.baselines.folder import Folder

if TYPE_CHECKING:
    from pytest_gpumem.judging.baselines.backend import Backend


# A single letter before "://" is a Windows drive, so such a text is a path. "simplecache::s3://bucket" counts as a URL, which
# `Bucket` refuses.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::[A-Za-z0-9+.:-]+)*://")


def backend_of(location: str, base: Path) -> Backend:
    """Return the storage backend for a location.

    For example, ``s3://bucket/baselines`` is a URL, and ``gpumem-baselines`` is a folder in ``base``. In a path, ``~`` is the
    user's home folder.

    Args:
        location: A URL or a path.
        base: The folder for relative paths.

    Raises:
        BackendError: The location is not valid, it is a file, or it is a URL that names neither a folder nor a bucket.
    """
    if not is_url(location):
        try:
            return _folder(base / Path(location).expanduser())
        except RuntimeError as error:
            raise BackendError(f"{location}: {error}") from None
    scheme, _, rest = location.partition("://")
    if scheme.lower() in ("file", "local"):
        return _folder(_path_in(location, rest))
    from pytest_gpumem.judging.baselines.bucket import Bucket

    return Bucket(location)


def _folder(root: Path) -> Folder:
    nearest = next((path for path in (root, *root.parents) if path.exists()), root)
    if nearest.exists() and not nearest.is_dir():
        kind = "a file" if nearest.is_file() else "neither a file nor a folder"
        raise BackendError(f"the store {root}: {nearest} is {kind}, expected a folder")
    return Folder(root)


def is_url(location: str) -> bool:
    """Return whether a location is a URL. ``s3://bucket`` is a URL; ``C://store`` is a path."""
    return _URL.match(location) is not None


def names_host(location: str) -> bool:
    r"""Return whether a path names another host, like the Windows share ``\\host\share``."""
    return re.match(r"[\\/]{2}", location) is not None


def _path_in(location: str, rest: str) -> Path:
    """Return the absolute path from a ``file://`` URL (RFC 8089)."""
    from urllib.request import url2pathname

    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise BackendError(
            f"{location}: a folder's URL needs an absolute path with three slashes, like file:///srv/gpumem-baselines"
        )
    # Quote `?` and `#`: from Python 3.14, url2pathname regards the text after `?` as a query and after `#` as a fragment.
    return Path(url2pathname(f"{slash}{path}".replace("?", "%3F").replace("#", "%23")))
