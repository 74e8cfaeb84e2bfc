"""Create and check this package's folder in the user's cache.

Programs in this folder are run, and libraries in it are loaded. So other users must not be able to write files into the
folder. For example, they could write if ``XDG_CACHE_HOME`` is ``/tmp``, or if root runs a command with ``HOME`` set to another
user's folder.
"""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from pytest_gpumem.base.errors import CacheError
from pytest_gpumem.base.open_folder import open_folder, private_folder
from pytest_gpumem.base.variables import CACHE

_FOLDERS = ("bisections", "counter", "emulation", "environments", "torchinductor")
"""The names of the folders in the cache."""


def cache_root() -> Path:
    """Return the path of the cache, by default ``~/.cache/pytest-gpumem`` on Linux. The folder may be missing or unsafe."""
    import platformdirs

    chosen = os.environ.get(CACHE)
    return Path(chosen).absolute() if chosen else platformdirs.user_cache_path("pytest-gpumem")


def make_private_folder(folder: Path) -> None:
    """Check that only this user can change the cache, and create a missing folder in the cache.

    Args:
        folder: The folder, for example ``~/.cache/pytest-gpumem/emulation``. Its parent is the cache.

    Raises:
        CacheError: The cache cannot be created, is a symbolic link, belongs to another user, or could be changed or
            replaced by other users.
    """
    root = folder.parent
    try:
        # If the path is an existing file, ignore the error here. Opening this file as a folder raises an error below.
        with suppress(FileExistsError):
            root.parent.mkdir(mode=0o700, parents=True)
        _refuse_shared(root)
        with private_folder(root, refuse_shared=True):
            # Only this user can enter the cache, so a link in the cache was created by this user and is safe.
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise CacheError(
            f"the cache {root} is not used: {error.strerror}; set {CACHE} to a new folder, or remove this one if it is yours"
        ) from None


def _refuse_shared(root: Path) -> None:
    """Raise `CacheError` if other users can rename the cache and put another folder in its place.

    In a folder with the sticky bit, such as ``/tmp``, only the owner of a file can rename it. The group's permissions are not
    checked, because folders with the mode 0775 are usual on systems with a group for each user.
    """
    mode = root.parent.stat().st_mode
    if hasattr(os, "getuid") and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise CacheError(
            f"the cache {root} is not used: other users can write to {root.parent}, so they could replace the cache; "
            f"use `chmod o-w {root.parent}`, or set {CACHE} to a folder in another place"
        )


def check_private_folder(folder: Path) -> None:
    """Check that nobody but this user can have written the files in a cache folder.

    The check also finds files that other users wrote before `make_private_folder` made the cache private.

    Raises:
        CacheError: Other users own the folder or a file directly in it, or could write to the folder.
    """
    try:
        with open_folder(folder.parent, [folder.name]) as opened:
            opened.make_private(refuse_shared=True)
            for path in folder.iterdir():
                opened.refuse_foreign_file(path.name)
    except OSError as error:
        raise CacheError(
            f"{folder} is not used: {error.strerror}; remove it by `gpumem cache --clear`, and it is made again"
        ) from None


def clear() -> None:
    """Remove this package's folders from the cache.

    Other files in the cache stay, because the user may set `GPUMEM_CACHE` to a folder with files of other programs.

    Raises:
        OSError: A file cannot be removed, or the cache is a symbolic link. Links are refused, because they could lead
            anywhere.
    """
    root = cache_root()
    with suppress(FileNotFoundError), open_folder(root.parent, [root.name]):
        for name in _FOLDERS:
            path = root / name
            if path.is_symlink():
                path.unlink()
            elif path.exists():
                shutil.rmtree(path)
