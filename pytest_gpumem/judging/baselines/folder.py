"""A store's files in a folder on this machine, or in a git commit."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.base.atomic_file import DRAFT, write_atomically
from pytest_gpumem.base.git import GitError, contents, git
from pytest_gpumem.base.open_folder import open_folder
from pytest_gpumem.judging.baselines.backend import LARGEST, SUFFIX, Backend
from pytest_gpumem.judging.baselines.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from pytest_gpumem.base.open_folder import OpenFolder


_LOCK = ".lock"
_IGNORE = ".gitignore"
_ITSELF = f"/{_IGNORE}"
_IGNORED = (f"/{_LOCK}", _ITSELF, f".*{DRAFT}")
"""The lines in a store's .gitignore."""
_LINK = "120000 "
"""Prefix in git's line for a symbolic link: its mode."""


class Folder(Backend):
    """A store in a folder.

    Files are replaced atomically, under the system's lock on ``.lock``. ``.gitignore`` ignores itself, the lock and drafts.

    A single process writes at the session's end. It merges its entries with entries that other sessions wrote meanwhile. A
    killed writer leaves a draft (``.test_gpt.py.toml.x1y2z3.draft``). Git ignores the draft, and the next writer removes it.

    The folder itself may be a symbolic link, for example to a shared disk. A link inside the folder is an error that names the
    link, even if it appears during a write, because a stranger's branch could use it to write outside the store.
    """

    def __init__(self, root: Path) -> None:
        self.root = self.folder = root

    def paths(self) -> list[str]:
        try:
            return sorted(path for path in self._files() if path.endswith(SUFFIX))
        except OSError as error:
            raise BackendError(f"{self.root}: cannot be read: {error}") from error

    def read(self, path: str) -> str | None:
        try:
            with self._folder_of(path) as (folder, name):
                return folder.read_text(name, LARGEST)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise BackendError(f"{self.shown(path)}: cannot be read: {error}") from error

    def write(self, path: str, text: str) -> None:
        try:
            # Strict, because a test name with replaced characters could not be found again.
            write_atomically(self.root / path, text, root=self.root, errors="strict")
        except (OSError, UnicodeEncodeError) as error:
            raise BackendError(f"{self.shown(path)}: cannot be written: {error}") from error

    def remove(self, path: str) -> None:
        folders = path.split("/")[:-1]
        try:
            with self._folder_of(path) as (folder, name):
                folder.remove(name)
            for depth in range(len(folders), 0, -1):
                with open_folder(self.root, folders[: depth - 1]) as folder:
                    folder.remove_folder(folders[depth - 1])
        except OSError as error:
            # A folder with other files stays.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise BackendError(f"{self.shown(path)}: cannot be removed: {error}") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        from filelock import FileLock

        lock = FileLock(self.root / _LOCK)
        try:
            with open_folder(self.root, make=True) as folder:
                # filelock also refuses a link, but this message is clearer.
                folder.refuse_link(_LOCK)
            # The lock file is never deleted, because two processes could then hold the lock at once.
            lock.acquire()
        except OSError as error:
            raise BackendError(f"{self.root}: cannot be written: {error}") from error
        try:
            self._tidy()
            yield
        finally:
            lock.release()

    def _tidy(self) -> None:
        """Write the store's ``.gitignore``, and remove drafts from killed writers.

        The caller holds the lock, so every draft belongs to a killed writer.
        """
        try:
            lines = [_ITSELF]
            with suppress(FileNotFoundError), self._folder_of(_IGNORE) as (folder, name):
                lines = folder.read_text(name, LARGEST).splitlines()
            # Only our .gitignore ignores itself. Any other .gitignore belongs to the user.
            if _ITSELF in lines and not set(_IGNORED) <= set(lines):
                write_atomically(
                    self.root / _IGNORE, "".join(f"{line}\n" for line in dict.fromkeys([*lines, *_IGNORED]))
                )
            for path in self._files():
                with self._folder_of(path) as (folder, name):
                    if name.startswith(".") and name.endswith(DRAFT):
                        folder.remove(name)
        except (OSError, UnicodeDecodeError) as error:
            raise BackendError(f"{self.root}: cannot be tidied up: {error}") from error

    def _files(self) -> Iterator[str]:
        """Yield all file paths. Raises ``OSError`` for a link to a folder, whose baselines would be missed."""
        for current, folders, names in os.walk(self.root):
            below = Path(current).relative_to(self.root)
            # Another session may have just removed the folder.
            with suppress(FileNotFoundError), open_folder(self.root, below.parts) as folder:
                for name in folders:
                    folder.refuse_link(name)
            # A folder with a file's name is reported when it is read.
            files = [*names, *(name for name in folders if name.endswith(SUFFIX))]
            yield from ((below / name).as_posix() for name in files)

    @contextmanager
    def _folder_of(self, path: str) -> Iterator[tuple[OpenFolder, str]]:
        *folders, name = path.split("/")
        with open_folder(self.root, folders) as folder:
            yield folder, name

    def shown(self, path: str) -> str:
        return str(self.root / path)


class GitBackend(Backend):
    """A store's files in a commit, read only. Raises `BackendError`."""

    def __init__(self, top: Path, commit: str, folder: str, name: str) -> None:
        """Read the files.

        Args:
            top: The checkout's folder.
            commit: The commit's hash or name.
            folder: The path from the checkout to the store.
            name: The commit's name in messages.
        """
        self._name = name
        self._folder = folder
        below = "" if folder in ("", ".") else f"{folder}/"
        try:
            listed = git(top, "ls-tree", "-r", "-z", "--full-tree", commit, "--", *([below] if below else []))
            blobs = {}
            for line in listed.split("\0"):
                # "100644 blob <name>\t<path>"
                words, _, path = line.partition("\t")
                if path.endswith(SUFFIX) and words.startswith(_LINK):
                    raise BackendError(f"{name}:{path} is a symbolic link, which is not followed; remove it")
                if path.endswith(SUFFIX) and words.split()[1] == "blob":
                    blobs[path.removeprefix(below)] = words.split()[2]
            read = contents(top, blobs.values())
        except GitError as error:
            raise BackendError(f"{name}: {error}") from None
        self._files = {path: read[blob] for path, blob in blobs.items()}

    def paths(self) -> list[str]:
        return sorted(self._files)

    def read(self, path: str) -> str | None:
        if path not in self._files:
            return None
        try:
            # A commit may contain Windows line ends, which reading a file would also convert.
            return self._files[path].decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise BackendError(f"{self.shown(path)}: cannot be read: {error}") from None

    def locked(self) -> AbstractContextManager[None]:
        raise BackendError(f"{self._name}: a commit cannot be written")

    def shown(self, path: str) -> str:
        return f"{self._name}:{self._folder}/{path}"
