"""The store in a folder on this machine: files are replaced whole, under the system's lock."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytest_gpumem.baselines.backend import SUFFIX, BackendError
from pytest_gpumem.whole_file import DRAFT, write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_LOCK = ".lock"
_ITSELF = "/.gitignore"
_IGNORED = (f"/{_LOCK}", _ITSELF, f".*{DRAFT}")
"""What of a store is not to be committed, as lines of its .gitignore."""


class Folder:
    """A folder on this machine."""

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

    def read_many(self, paths: Sequence[str]) -> dict[str, str | None]:
        return {path: self.read(path) for path in paths}

    def write(self, path: str, text: str) -> None:
        try:
            # What was written another way than given could not be found again.
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

        Called by the holder of the lock: whoever writes now is itself, so that no draft is of a writer that is alive.
        """
        ignored = self.root / ".gitignore"
        try:
            lines = ignored.read_text(encoding="utf-8").splitlines() if ignored.exists() else [_ITSELF]
            missing = [line for line in _IGNORED if line not in lines]
            # One that does not ignore itself is somebody's own.
            if _ITSELF in lines and (missing or not ignored.exists()):
                write_whole(ignored, "".join(f"{line}\n" for line in dict.fromkeys([*lines, *_IGNORED])))
            for draft in self.root.rglob(f".*{DRAFT}"):
                draft.unlink(missing_ok=True)
        except (OSError, UnicodeDecodeError) as error:
            raise BackendError(f"{self.root}: cannot be tidied up: {error}") from error

    def shown(self, path: str) -> str:
        return str(self.root / path)
