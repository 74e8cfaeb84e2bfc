"""Make and check this package's folder in the user's cache, which contains libraries, programs and kernels to run.

So no other user may be able to put a file into this folder. Another user could do this, for example, if ``XDG_CACHE_HOME`` is
``/tmp``, or if root runs with the home folder of another user.
"""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from pytest_gpumem.base.open_folder import open_folder, private_folder
from pytest_gpumem.base.variables import CACHE

_FOLDERS = ("bisections", "emulation", "environments", "torchinductor")
"""The names of the folders in the cache."""


class CacheError(Exception):
    """Error for a cache folder that may contain files from other users. The message is a sentence with the remedy."""


def cache_root() -> Path:
    """Return the path of the cache, which is not checked: ``~/.cache/pytest-gpumem`` on Linux."""
    import platformdirs

    chosen = os.environ.get(CACHE)
    return Path(chosen).absolute() if chosen else platformdirs.user_cache_path("pytest-gpumem")


def make_private_folder(folder: Path) -> None:
    """Make a folder in the cache if it does not exist, after a check that only this user can change the cache.

    Args:
        folder: The folder, for example ``~/.cache/pytest-gpumem/emulation``. Its parent is the cache.

    Raises:
        CacheError: The cache cannot be made, is a link, belongs to another user, or other users could write to it or replace
            it.
    """
    root = folder.parent
    try:
        # If a file is in the place of a folder, opening it raises the error.
        with suppress(FileExistsError):
            root.parent.mkdir(mode=0o700, parents=True)
        _refuse_shared(root)
        with private_folder(root, refuse_shared=True):
            # Nobody else can enter the root, so a link in the root belongs to this user.
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
    """Check that only this user can have written the files in a cache folder.

    The check includes the time before `make_private_folder` closed the cache to other users.

    Raises:
        CacheError: Other users own the folder or a file directly in it, or could write to it.
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
    """Remove this package's folders from the cache. Other files stay, because `GPUMEM_CACHE` may name any folder.

    Raises:
        OSError: A file cannot be removed, or the cache is a link, which could lead anywhere.
    """
    root = cache_root()
    with suppress(FileNotFoundError), open_folder(root.parent, [root.name]):
        for name in _FOLDERS:
            path = root / name
            if path.is_symlink():
                path.unlink()
            elif path.exists():
                shutil.rmtree(path)
