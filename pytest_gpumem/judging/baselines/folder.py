"""Storage backends for a store in a folder on this machine, and for a store in a git commit."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.base.atomic_file import DRAFT, write_atomically
from pytest_gpumem.base.errors import BackendError, GitError
from pytest_gpumem.base.git import contents, git
from pytest_gpumem.base.open_folder import open_folder
from pytest_gpumem.judging.baselines.backend import LARGEST, SUFFIX, Backend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from pytest_gpumem.base.open_folder import OpenFolder


_LOCK = ".lock"
_IGNORE = ".gitignore"
_ITSELF = f"/{_IGNORE}"
_IGNORED = (f"/{_LOCK}", _ITSELF, f".*{DRAFT}")
"""The lines in the store's own .gitignore file."""
_LINK = "120000 "
"""The file mode of a symbolic link in git. ``git ls-tree`` prints a line for each file, which begins with the file's mode."""


class Folder(Backend):
    """A store in a folder on this machine.

    Each file is replaced atomically, while the writer holds the operating system's lock on the file ``.lock``. The store's
    ``.gitignore`` lists itself, the lock and drafts.

    At the end of a session, a single process writes, and keeps the entries that other sessions have written meanwhile. A
    process that is killed while it writes leaves a draft (``.test_gpt.py.toml.x1y2z3.draft``). Git ignores drafts, and the next
    writer removes them.

    The folder itself may be a symbolic link, for example to a shared disk. A symbolic link inside the folder is an error, even
    if the link appears during a write. The error names the link. If such links were followed, a stranger's branch could make
    the store write to another folder.
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
            # A character that cannot be encoded is an error. If it were replaced, the test's name could not be found again.
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
            # A folder that still contains other files stays.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise BackendError(f"{self.shown(path)}: cannot be removed: {error}") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        from filelock import FileLock

        lock = FileLock(self.root / _LOCK)
        try:
            with open_folder(self.root, make=True) as folder:
                # filelock also refuses a symbolic link, but its message is less clear.
                folder.refuse_link(_LOCK)
            # The lock file is never deleted. If it were, one process could lock the deleted file, and another the new file.
            lock.acquire()
        except OSError as error:
            raise BackendError(f"{self.root}: cannot be written: {error}") from error
        try:
            self._tidy()
            yield
        finally:
            lock.release()

    def _tidy(self) -> None:
        """Write the store's ``.gitignore``, and remove drafts.

        The caller must hold the lock. So no other process is writing now, and every draft was left by a killed process.
        """
        try:
            lines = [_ITSELF]
            with suppress(FileNotFoundError), self._folder_of(_IGNORE) as (folder, name):
                lines = folder.read_text(name, LARGEST).splitlines()
            # A .gitignore that does not list itself was written by the user, so do not change it.
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
        """Yield the paths of all files in the store.

        A symbolic link to a folder raises ``OSError``, because ``os.walk`` would skip the baselines in this folder silently.
        """
        for current, folders, names in os.walk(self.root):
            below = Path(current).relative_to(self.root)
            # Another session may have just removed this folder, which is no error.
            with suppress(FileNotFoundError), open_folder(self.root, below.parts) as folder:
                for name in folders:
                    folder.refuse_link(name)
            # List folders whose name ends in .toml as files. Reading such a folder raises an error that names it.
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
    """A store in a git commit, which can only be read."""

    def __init__(self, top: Path, commit: str, folder: str, name: str) -> None:
        """Read all files of the store from the commit. Raises `BackendError`.

        Args:
            top: The folder with the git checkout.
            commit: The hash or another name of the commit.
            folder: The path of the store, relative to ``top``.
            name: The name of the commit in messages.
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
            # A commit may contain Windows line ends. Convert them, as Python does for a file that is opened in text mode.
            return self._files[path].decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise BackendError(f"{self.shown(path)}: cannot be read: {error}") from None

    def locked(self) -> AbstractContextManager[None]:
        raise BackendError(f"{self._name}: a commit cannot be written")

    def shown(self, path: str) -> str:
        return f"{self._name}:{self._folder}/{path}"
