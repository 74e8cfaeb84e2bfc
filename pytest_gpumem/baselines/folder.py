"""The store in a folder on this machine: files are replaced whole, under the system's lock."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytest_gpumem.baselines.place import SUFFIX, PlaceError
from pytest_gpumem.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_LOCK = ".lock"


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
            raise PlaceError(f"{self.shown(path)}: cannot be read: {error}") from error

    def read_many(self, paths: Sequence[str]) -> dict[str, str | None]:
        return {path: self.read(path) for path in paths}

    def write(self, path: str, text: str) -> None:
        try:
            # What was written another way than given could not be found again.
            write_whole(self.root / path, text, errors="strict")
        except (OSError, UnicodeEncodeError) as error:
            raise PlaceError(f"{self.shown(path)}: cannot be written: {error}") from error

    def remove(self, path: str) -> None:
        try:
            (self.root / path).unlink(missing_ok=True)
            for folder in (self.root / path).parents:
                if folder == self.root or any(folder.iterdir()):
                    break
                folder.rmdir()
        except OSError as error:
            raise PlaceError(f"{self.shown(path)}: cannot be removed: {error}") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        from filelock import FileLock

        lock = FileLock(self.root / _LOCK)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            # The lock stays where it is: a lock file that is deleted can be held by two at once.
            ignored = self.root / ".gitignore"
            if not ignored.exists():
                ignored.write_text(f"/{_LOCK}\n/.gitignore\n", encoding="utf-8")
            lock.acquire()
        except OSError as error:
            raise PlaceError(f"{self.root}: cannot be written: {error}") from error
        try:
            yield
        finally:
            lock.release()

    def shown(self, path: str) -> str:
        return str(self.root / path)
