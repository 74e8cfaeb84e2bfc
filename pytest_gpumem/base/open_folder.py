"""Open folders by file descriptors, so no symbolic link below a root folder is followed.

A branch from somebody else can contain links. For example, ``gpumem-baselines/cpu-x86_64`` can lead to ``/etc``. If this
module checked a path first and opened it later, somebody could create a link between the two moments. So each folder is
opened relative to its parent, with ``dir_fd`` and ``O_NOFOLLOW``. Windows has neither of them. There, each name is checked
just before it is opened.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import SymbolicLinkError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_HAS_DESCRIPTORS = {os.open, os.mkdir, os.rename, os.rmdir, os.stat, os.unlink} <= os.supports_dir_fd
_OPEN = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
# Without O_NONBLOCK, opening a named pipe would wait for a writer.
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_JUNCTION = 0xA0000003
"""``IO_REPARSE_TAG_MOUNT_POINT``: a link between folders on Windows."""


class OpenFolder:
    """An open folder. Its methods look up names in this folder, even if its path leads to another folder by then.

    Args:
        path: The folder's path, for messages.
        descriptor: The folder's file descriptor; ``None`` on systems that cannot look up names in a folder by its
            descriptor.
    """

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self.path = path
        self._descriptor = descriptor

    def status(self, name: str) -> os.stat_result:
        """Return the status of the file ``name``.

        For a link, return the status of the link itself. Raises ``OSError``.
        """
        with self._errors_named(name):
            return os.stat(self._at(name), dir_fd=self._descriptor, follow_symlinks=False)

    def refuse_link(self, name: str) -> None:
        """Raise `SymbolicLinkError` if ``name`` is a symbolic link."""
        with suppress(FileNotFoundError):
            status = self.status(name)
            if stat.S_ISLNK(status.st_mode) or getattr(status, "st_reparse_tag", 0) == _JUNCTION:
                raise SymbolicLinkError(self.path / name)

    def open(self, name: str, flags: int, mode: int = 0o666) -> int:
        """Open the file ``name`` and return its file descriptor. Raises ``OSError``, also if the file is a link."""
        self.refuse_link(name)
        with self._errors_named(name):
            return os.open(self._at(name), flags | _OPEN | _NO_LINK, mode, dir_fd=self._descriptor)

    def read_text(self, name: str, most: int) -> str:
        """Return the UTF-8 text of a file. Every line end in the text is a newline character.

        Raises:
            OSError: The file is a link, a named pipe or a device, or has more than ``most`` bytes.
            UnicodeDecodeError: The file is not UTF-8.
        """
        # Check before opening the file, because opening a device file can have side effects.
        self._check_regular(name, self.status(name))
        with open(self.open(name, _READ), encoding="utf-8") as file:  # noqa: PTH123 - a descriptor
            status = os.fstat(file.fileno())
            self._check_regular(name, status)
            if status.st_size > most:
                raise OSError(errno.EFBIG, f"more than {most} bytes", str(self.path / name))
            return file.read()

    def replace(self, name: str, by: str) -> None:
        """Rename the file ``by`` to ``name``, and replace an existing file.

        If ``name`` is a link, the link itself is replaced.
        """
        with self._errors_named(name):
            os.replace(self._at(by), self._at(name), src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def remove(self, name: str) -> None:
        """Remove the file ``name`` if it exists. If ``name`` is a link, the link itself is removed."""
        with self._errors_named(name), suppress(FileNotFoundError):
            os.unlink(self._at(name), dir_fd=self._descriptor)

    def remove_folder(self, name: str) -> None:
        """Remove the empty folder ``name``. Raises ``OSError``."""
        with self._errors_named(name):
            os.rmdir(self._at(name), dir_fd=self._descriptor)

    def folder(self, name: str, *, make: bool) -> OpenFolder:
        """Open a subfolder. Raises ``OSError``, also if the subfolder is a link."""
        if name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(f"{name!r} is not the name of a folder")
        if make:
            with self._errors_named(name), suppress(FileExistsError):
                os.mkdir(self._at(name), dir_fd=self._descriptor)
        self.refuse_link(name)
        with self._errors_named(name):
            return _opened(self.path / name, self._at(name), self._descriptor, _NO_LINK)

    def make_private(self, *, refuse_shared: bool) -> None:
        """Change the folder's permissions, so only this user can enter it.

        On systems without user ids, such as Windows, nothing is changed.

        Args:
            refuse_shared: Whether to refuse an existing folder to which other users can write. Use True if files in the
                folder are loaded or run, because these users may have written them.

        Raises:
            OSError: The folder belongs to another user, or is not empty and other users could write to it.
        """
        if self._descriptor is None or not hasattr(os, "getuid"):
            return
        status = os.fstat(self._descriptor)
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "the folder belongs to another user", str(self.path))
        could_write = refuse_shared and mode & 0o022
        if could_write and os.listdir(self._descriptor):  # noqa: PTH208 - a descriptor
            raise PermissionError(errno.EPERM, "other users can write to the folder", str(self.path))
        if mode & 0o077:
            os.fchmod(self._descriptor, 0o700)
        if could_write and os.listdir(self._descriptor):  # noqa: PTH208 - a descriptor
            os.fchmod(self._descriptor, mode)
            raise PermissionError(errno.EPERM, "other users can write to the folder", str(self.path))

    def refuse_foreign_file(self, name: str) -> None:
        """Raise ``OSError`` if ``name`` belongs to another user."""
        if hasattr(os, "getuid") and self.status(name).st_uid != os.getuid():
            raise PermissionError(errno.EPERM, f"{name} belongs to another user", str(self.path / name))

    def close(self) -> None:
        """Close the descriptor."""
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _at(self, name: str) -> str:
        return name if self._descriptor is not None else str(self.path / name)

    def _check_regular(self, name: str, status: os.stat_result) -> None:
        self.refuse_link(name)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{name} is not a regular file; remove it")

    @contextmanager
    def _errors_named(self, name: str) -> Iterator[None]:
        """Put the complete path into an ``OSError``, because the original error has only the file's name."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path / name)) from None


@contextmanager
def open_folder(root: Path, below: Sequence[str] = (), *, make: bool = False) -> Iterator[OpenFolder]:
    """Open a folder below ``root``. The root itself may be a symbolic link, but the folders below the root may not.

    Args:
        root: A trusted folder, for example the root of a store.
        below: The names of the folders on the path from the root: ``("cpu-x86_64", "tests")``.
        make: Whether to create missing folders.

    Raises:
        OSError: A folder cannot be opened, or is a symbolic link.
    """
    if make:
        root.mkdir(parents=True, exist_ok=True)
    opened = _opened(root, str(root), None, 0)
    try:
        for name in below:
            inner = opened.folder(name, make=make)
            opened.close()
            opened = inner
        yield opened
    finally:
        opened.close()


@contextmanager
def private_folder(path: Path, *, refuse_shared: bool = False) -> Iterator[OpenFolder]:
    """Open a folder that only this user can enter. A missing folder is created.

    Args:
        path: The folder. Its parent exists and is trusted.
        refuse_shared: As in `OpenFolder.make_private`.

    Raises:
        OSError: The folder is a symbolic link, belongs to another user, or could be written to by other users.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    with open_folder(path.parent, [path.name]) as folder:
        folder.make_private(refuse_shared=refuse_shared)
        yield folder


def _opened(path: Path, name: str, within: int | None, flags: int) -> OpenFolder:
    if _HAS_DESCRIPTORS:
        return OpenFolder(path, os.open(name, _FOLDER | _OPEN | flags, dir_fd=within))
    if not path.is_dir():
        code, reason = (errno.ENOTDIR, "not a folder") if path.exists() else (errno.ENOENT, "no such folder")
        raise OSError(code, reason, str(path))
    return OpenFolder(path, None)
