"""Read source files, from folders on this machine or from a commit. A file is found by a line in a row (``gpt.py:12``)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.util import decode_source
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pytest_gpumem.base.errors import GitError
from pytest_gpumem.base.git import contents, git
from pytest_gpumem.facts.values.source_lines import file_and_line, package_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_SUFFIX = ".py"
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
_MOST_FILES = 20_000
_PLAIN = "100"
"""The first digits of a plain file's mode in git. The modes of links and submodules begin with other digits."""


class Source(Protocol):
    """A version of the code, whose source files can be read."""

    def lines(self, line: str) -> Sequence[str] | None:
        """Return all lines in the file of a row's ``line``: for ``models/gpt.py:12``, the lines in ``models/gpt.py``.

        The result is empty if this version lacks the file, and ``None`` if the file cannot be found or read.
        """

    def neighbours(self, line: str) -> Iterator[str]:
        """Yield all Python files in the project or package with ``line``. A file is given as ``models/gpt.py:1``."""


def _decoded(data: bytes) -> list[str] | None:
    """Return a source file's lines, numbered like in Python's tracebacks; ``None`` if the file cannot be decoded."""
    try:
        return decode_source(data).split("\n")
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return None


def _is_inside(path: str) -> bool:
    """Return whether a relative path stays inside its folder."""
    parts = PurePosixPath(path).parts
    return bool(parts) and ".." not in parts and not PurePosixPath(path).is_absolute() and not Path(path).is_absolute()


@dataclass(frozen=True, slots=True)
class Folders:
    """The code on this machine: pytest's root directory, and the folders with installed packages in search order."""

    root: Path
    packages: Sequence[Path] = ()

    def lines(self, line: str) -> Sequence[str] | None:
        path = self._path(line)
        if path is None:
            return []
        try:
            return _decoded(path.read_bytes())
        except OSError:
            return None

    def _path(self, line: str) -> Path | None:
        file, _ = file_and_line(line)
        package = package_of(line)
        if not package:
            path = self.root / file
            inside = _is_inside(file) and path.is_file() and path.resolve().is_relative_to(self.root.resolve())
            return path if inside else None
        within = file.partition(": ")[2]
        paths = (folder / top / within for folder in self.packages for top in (package, ""))
        return next((path for path in paths if path.is_file()), None) if _is_inside(within) else None

    def neighbours(self, line: str) -> Iterator[str]:
        package = package_of(line)
        if not package:
            yield from (f"{name}:1" for name in _python_files(self.root))
            return
        before, _, within = line.partition(": ")
        top = PurePosixPath(within).parts[0]
        for folder in self.packages:
            for name, prefix in ((package, ""), (top, f"{top}/")):
                if _is_inside(name) and (folder / name).is_dir():
                    yield from (f"{before}: {prefix}{file}:1" for file in _python_files(folder / name))
                    return


def _python_files(folder: Path) -> Iterator[str]:
    """Yield the relative paths of Python files in a folder. Hidden folders and virtual environments are skipped."""
    number = 0
    for current, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _SKIPPED_FOLDERS
            and not (Path(current) / name / "pyvenv.cfg").exists()
        )
        for name in sorted(files):
            if name.endswith(_SUFFIX):
                number += 1
                if number > _MOST_FILES:
                    return
                yield (Path(current) / name).relative_to(folder).as_posix()


class NoSource:
    """A version of the code whose source files are unknown."""

    def lines(self, line: str) -> None:
        del line

    def neighbours(self, line: str) -> Iterator[str]:
        del line
        return iter(())


class Blob(NamedTuple):
    """A file in a commit: its mode, for example ``100644`` for a plain file, and git's hash for its contents."""

    mode: str
    name: str


@dataclass(frozen=True)
class Commit:
    """The project's code in a commit, without installed packages and without nested repositories.

    `lines` raises `GitError` if the clone lacks a file's contents, as a partial clone may.
    """

    top: Path
    """The checkout's root folder."""
    prefix: PurePosixPath
    """The path from the checkout's root folder to pytest's root directory."""
    files: Mapping[str, Blob]
    """The commit's files, by path from the checkout's root folder."""

    @classmethod
    def read(cls, top: Path, root: Path, commit: str) -> Commit:
        """Read a commit.

        Args:
            top: The checkout's root folder.
            root: pytest's root directory.
            commit: The commit's hash, which may be abbreviated.

        Raises:
            GitError: The clone lacks the commit, or the hash is not valid.
            ValueError: The root directory is outside the checkout.
        """
        if not _COMMIT.fullmatch(commit):
            raise GitError(f"{commit!r} is not a commit hash")
        listed = git(top, "ls-tree", "-r", "-z", "--full-tree", f"{commit}^{{commit}}")
        files = {}
        for line in filter(None, listed.split("\0")):
            # "100644 blob <name>\t<path>"
            words, _, path = line.partition("\t")
            mode, _, name = words.split()
            files[path] = Blob(mode, name)
        return cls(top, PurePosixPath(root.resolve().relative_to(top.resolve()).as_posix()), files)

    def lines(self, line: str) -> Sequence[str] | None:
        file, _ = file_and_line(line)
        if package_of(line) or not _is_inside(file):
            return None
        path = self.prefix / file
        blob = self.files.get(str(path))
        if blob is None:
            return None if self._is_in_nested_repository(path) else []
        return _decoded(contents(self.top, [blob.name])[blob.name]) if blob.mode.startswith(_PLAIN) else None

    def _is_in_nested_repository(self, path: PurePosixPath) -> bool:
        """Return whether a file belongs to a submodule or to another repository in the checkout."""
        return any(
            str(folder) in self.files or (self.top / folder / ".git").exists() for folder in path.parents if folder.name
        )

    def neighbours(self, line: str) -> Iterator[str]:
        if package_of(line):
            return
        for path in map(PurePosixPath, self.files):
            if path.suffix == _SUFFIX and path.is_relative_to(self.prefix):
                yield f"{path.relative_to(self.prefix)}:1"
