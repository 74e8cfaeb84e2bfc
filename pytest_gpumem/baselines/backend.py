"""Storage backends of the store: text files in a folder or in a git revision, and the choice by location."""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from pytest_gpumem.git import GitError, contents, git
from pytest_gpumem.whole_file import DRAFT, write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager


SUFFIX = ".toml"

# One letter before "://" is a drive of Windows. "simplecache::s3://" is a URL within another.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::[A-Za-z0-9+.:-]+)*://")


class BackendError(Exception):
    """The backend cannot be read or written; the message has the file and the reason."""


class Backend(Protocol):
    """Storage of text files by relative path (``"cpu-x86_64/tests/test_gpt.py.toml"``). All raise `BackendError`."""

    def paths(self) -> list[str]:
        """Return the paths of all files of baselines, sorted."""

    def read(self, path: str) -> str | None:
        """Return a file's text; ``None`` when there is no such file."""

    def read_many(self, paths: Sequence[str]) -> Mapping[str, str | None]:
        """Return the texts of files in the order of ``paths``."""
        return {path: self.read(path) for path in paths}

    def write(self, path: str, text: str) -> None:
        """Replace a file's text whole: a reader sees the old text or the new one, also after a crash."""

    def remove(self, path: str) -> None:
        """Delete a file."""

    def locked(self) -> AbstractContextManager[str | None]:
        """Hold the writers' lock within the context; yields the reason as a clause, where there can be no lock."""

    def shown(self, path: str) -> str:
        """Return the file's location for messages, without credentials."""


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
    if scheme.lower() in ("file", "local"):
        return _folder(_path_in(location, rest))
    from pytest_gpumem.baselines.url_backend import Url

    return Url(location)


def _folder(root: Path) -> Folder:
    there = next((path for path in (root, *root.parents) if path.exists()), root)
    if there.is_file():
        raise BackendError(f"the store {root}: {there} is a file, expected a folder")
    return Folder(root)


def is_url(location: str) -> bool:
    """Return whether a location is a URL and not a path: ``s3://bucket`` is, ``C://store`` is not."""
    return _URL.match(location) is not None


def _path_in(location: str, rest: str) -> Path:
    """Return the path in a ``file://`` URL (RFC 8089), which is always absolute."""
    from urllib.request import url2pathname

    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise BackendError(
            f"{location}: a folder's URL is whole and has three slashes, like file:///srv/gpumem-baselines"
        )
    return Path(url2pathname(slash + path))


_LOCK = ".lock"
_ITSELF = "/.gitignore"
_IGNORED = (f"/{_LOCK}", _ITSELF, f".*{DRAFT}")
"""The lines of a store's .gitignore."""


class Folder(Backend):
    """A folder on this machine: files are replaced whole, under the system's lock."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def paths(self) -> list[str]:
        return sorted(path.relative_to(self.root).as_posix() for path in self.root.rglob(f"*{SUFFIX}"))

    def read(self, path: str) -> str | None:
        try:
            return (self.root / path).read_text(encoding="utf-8")
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
            lines = ignored.read_text(encoding="utf-8").splitlines() if ignored.exists() else [_ITSELF]
            missing = [line for line in _IGNORED if line not in lines]
            # One that does not ignore itself is the user's.
            if _ITSELF in lines and (missing or not ignored.exists()):
                write_whole(ignored, "".join(f"{line}\n" for line in dict.fromkeys([*lines, *_IGNORED])))
            for draft in self.root.rglob(f".*{DRAFT}"):
                draft.unlink(missing_ok=True)
        except (OSError, UnicodeDecodeError) as error:
            raise BackendError(f"{self.root}: cannot be tidied up: {error}") from error

    def shown(self, path: str) -> str:
        return str(self.root / path)


class GitBackend(Backend):
    """The files below ``folder``, a path from ``top``, in a commit; read only. Raises `BackendError`."""

    def __init__(self, top: Path, commit: str, folder: str, name: str) -> None:
        """``top`` is the folder of the checkout; ``name`` is what a person calls the commit."""
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

    def write(self, path: str, text: str) -> NoReturn:
        raise BackendError(f"{self.shown(path)}: cannot be written into a commit")

    def remove(self, path: str) -> NoReturn:
        raise BackendError(f"{self.shown(path)}: cannot be removed from a commit")

    def locked(self) -> AbstractContextManager[None]:
        raise BackendError(f"{self._name}: a commit cannot be written")

    def shown(self, path: str) -> str:
        return f"{self._name}:{self._folder}/{path}"
