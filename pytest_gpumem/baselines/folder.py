"""Files of a store in a folder of this machine, or in a git revision."""

from __future__ import annotations

import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytest_gpumem.baselines.backend import SUFFIX, Backend
from pytest_gpumem.baselines.errors import BackendError
from pytest_gpumem.git import GitError, contents, git
from pytest_gpumem.whole_file import DRAFT, write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path


_LOCK = ".lock"
_ITSELF = "/.gitignore"
_IGNORED = (f"/{_LOCK}", _ITSELF, f".*{DRAFT}")
"""The lines of a store's .gitignore."""


class Folder(Backend):
    """A folder on this machine: files are replaced whole, under the system's lock."""

    def __init__(self, root: Path) -> None:
        self.root = self.folder = root

    def paths(self) -> list[str]:
        return sorted(path.relative_to(self.root).as_posix() for path in self.root.rglob(f"*{SUFFIX}"))

    def read(self, path: str) -> str | None:
        try:
            return _read_text(self.root / path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise BackendError(f"{self.shown(path)}: cannot be read: {error}") from error

    def write(self, path: str, text: str) -> None:
        try:
            # A test's name that was written in another way could not be found again.
            write_whole(self.root / path, text, errors="strict")
        except (OSError, UnicodeEncodeError) as error:
            raise BackendError(f"{self.shown(path)}: cannot be written: {error}") from error

    def remove(self, path: str) -> None:
        try:
            (self.root / path).unlink(missing_ok=True)
            for folder in (self.root / path).parents:
                if folder == self.root or any(folder.iterdir()):
                    break
                folder.rmdir()
        except OSError as error:
            raise BackendError(f"{self.shown(path)}: cannot be removed: {error}") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        from filelock import FileLock

        lock = FileLock(self.root / _LOCK)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            # The lock stays where it is: a lock file that is deleted can be held by two at once.
            lock.acquire()
        except OSError as error:
            raise BackendError(f"{self.root}: cannot be written: {error}") from error
        try:
            self._tidy()
            yield
        finally:
            lock.release()

    def _tidy(self) -> None:
        """Write the store's ``.gitignore``, and remove drafts of writers that were killed.

        Called by the holder of the lock, so that no draft is of a writer that is alive.
        """
        ignored = self.root / ".gitignore"
        try:
            lines = _read_text(ignored).splitlines() if ignored.exists() else [_ITSELF]
            missing = [line for line in _IGNORED if line not in lines]
            # Only a .gitignore of ours ignores itself; another one is the user's.
            if _ITSELF in lines and (missing or not ignored.exists()):
                write_whole(ignored, "".join(f"{line}\n" for line in dict.fromkeys([*lines, *_IGNORED])))
            for draft in self.root.rglob(f".*{DRAFT}"):
                draft.unlink(missing_ok=True)
        except (OSError, UnicodeDecodeError) as error:
            raise BackendError(f"{self.root}: cannot be tidied up: {error}") from error

    def shown(self, path: str) -> str:
        return str(self.root / path)


def _read_text(path: Path) -> str:
    """Return the text of a file. Raises ``OSError`` for a FIFO or a device, because reading it may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path.name} is not a regular file; remove it")
    return path.read_text(encoding="utf-8")


class GitBackend(Backend):
    """The files below ``folder``, a path from ``top``, in a commit; read only. Raises `BackendError`."""

    def __init__(self, top: Path, commit: str, folder: str, name: str) -> None:
        """List the files.

        Args:
            top: The folder of the checkout.
            commit: The name of the commit.
            folder: The path of the store from ``top``.
            name: The words for the commit in messages.
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
            # As a file is read: a checkout may have turned the ends of lines.
            return self._files[path].decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise BackendError(f"{self.shown(path)}: cannot be read: {error}") from None

    def locked(self) -> AbstractContextManager[None]:
        raise BackendError(f"{self._name}: a commit cannot be written")

    def shown(self, path: str) -> str:
        return f"{self._name}:{self._folder}/{path}"
