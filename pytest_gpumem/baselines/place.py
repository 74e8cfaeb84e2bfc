"""Where the store's files lie: a folder, or a URL that fsspec can open. Text in, text out, nothing half written."""

from __future__ import annotations

import os
import tempfile
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

SUFFIX = ".toml"
_LOCK = ".lock"


class PlaceError(Exception):
    """The place cannot be read or written; the message says which file and why."""


class Place(Protocol):
    """Files by their path relative to the place (``"cpu-x86_64/tests/test_gpt.py.toml"``)."""

    def paths(self) -> list[str]:
        """Every file of baselines in the place, sorted."""

    def read(self, path: str) -> str | None:
        """A file's text; ``None`` when there is no such file."""

    def write(self, path: str, text: str) -> None:
        """Replace a file's text whole: a reader sees the old text or the new one, also after a crash."""

    def remove(self, path: str) -> None:
        """Delete a file."""

    def locked(self) -> AbstractContextManager[object]:
        """Nobody else reads to write meanwhile."""

    def shown(self, path: str) -> str:
        """The file as a person finds it."""


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

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, draft = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
            try:
                with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                # mkstemp makes files that only their owner may read; what lies in version control is for everybody.
                Path(draft).chmod(0o666 & ~_umask())
                Path(draft).replace(target)
            except BaseException:
                Path(draft).unlink(missing_ok=True)
                raise
        except OSError as error:
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


class Url:
    """A folder behind a URL (``s3://bucket/baselines``, ``https://...``), through fsspec.

    There is no lock behind a URL: let one job write it. What HTTP serves can only be read.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise PlaceError(f"{url}: {error}") from error

    def paths(self) -> list[str]:
        found = self._try(f"{self._root}/**", lambda path: self._files.glob(f"{path}/*{SUFFIX}"))
        return sorted(str(path).removeprefix(self._root).lstrip("/") for path in found)

    def read(self, path: str) -> str | None:
        try:
            return str(self._files.cat_file(f"{self._root}/{path}").decode("utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise PlaceError(f"{self.shown(path)}: cannot be read: {error}") from error

    def write(self, path: str, text: str) -> None:
        target = f"{self._root}/{path}"
        self._try(target, lambda _: self._files.makedirs(target.rpartition("/")[0], exist_ok=True))
        self._try(target, lambda _: self._files.pipe_file(target, text.encode("utf-8")))

    def remove(self, path: str) -> None:
        self._try(f"{self._root}/{path}", self._files.rm_file)

    def locked(self) -> AbstractContextManager[object]:
        return nullcontext()

    def shown(self, path: str) -> str:
        return f"{self.url}/{path}"

    def _try(self, path: str, action: Any) -> Any:
        try:
            return action(path)
        except (OSError, NotImplementedError) as error:
            raise PlaceError(f"{self.url}: {path}: {type(error).__name__} {error}") from error


def place_of(location: str, base: Path) -> Place:
    """The place at ``location``: a URL if it has a scheme, else a folder, relative to ``base``."""
    return Url(location) if "://" in location else Folder(base / location)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
