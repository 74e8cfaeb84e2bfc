"""Sources of code by the lines of rows: folders on this machine, or a commit."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.util import decode_source
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pytest_gpumem.git import GitError, contents, git
from pytest_gpumem.values.source_lines import file_and_line, package_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_SUFFIX = ".py"
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_NOT_THE_PROJECTS = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
_MOST_FILES = 20_000
_PLAIN = "100"
"""Beginning of the mode of a file that is neither a link nor a repository."""


class Source(Protocol):
    """One version of the code."""

    def lines(self, line: str) -> Sequence[str] | None:
        """Return the lines of the file that a row's ``line`` is in.

        They are empty if there is no such file in this version, and ``None`` if nothing is known of it.
        """

    def neighbours(self, line: str) -> Iterator[str]:
        """Yield the Python files of the same project or package, each as a line: ``models/gpt.py:1``."""


def _decoded(data: bytes) -> list[str] | None:
    """Return the lines of a source file as Python counts them, in its own encoding; ``None`` if it cannot be decoded."""
    try:
        return decode_source(data).split("\n")
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return None


def _is_inside(path: str) -> bool:
    """Return whether a path that a row names leads nowhere but into the folder that it counts from."""
    parts = PurePosixPath(path).parts
    return bool(parts) and ".." not in parts and not PurePosixPath(path).is_absolute() and not Path(path).is_absolute()


@dataclass(frozen=True, slots=True)
class Folders:
    """The code on this machine: pytest's root directory, and the folders of installed packages in their order."""

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
        tried = (folder / top / within for folder in self.packages for top in (package, ""))
        return next((path for path in tried if path.is_file()), None) if _is_inside(within) else None

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
                    yield from (f"{before}: {prefix}{found}:1" for found in _python_files(folder / name))
                    return


def _python_files(folder: Path) -> Iterator[str]:
    """Yield the Python files in a folder, but for hidden folders and environments, from there."""
    number = 0
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _NOT_THE_PROJECTS
            and not (Path(here) / name / "pyvenv.cfg").exists()
        )
        for name in sorted(files):
            if name.endswith(_SUFFIX):
                number += 1
                if number > _MOST_FILES:
                    return
                yield (Path(here) / name).relative_to(folder).as_posix()


class NothingKnown:
    """A version of the code that nothing is known of."""

    def lines(self, line: str) -> None:
        del line

    def neighbours(self, line: str) -> Iterator[str]:
        del line
        return iter(())


class Blob(NamedTuple):
    """A file in a commit: its mode, ``100644`` for a plain one, and the name of its contents."""

    mode: str
    name: str


@dataclass(frozen=True)
class Commit:
    """The project's code in a commit. Nothing is known of installed packages, nor of repositories within this one.

    Its methods raise `GitError` if the clone lacks the contents of a file.
    """

    top: Path
    """The folder of the checkout."""
    prefix: PurePosixPath
    """The path of pytest's root directory in that folder."""
    files: Mapping[str, Blob]
    """Each file in the commit, by its path from the top."""

    @classmethod
    def read(cls, top: Path, root: Path, commit: str) -> Commit:
        """Return a commit by its hash, which may be abbreviated.

        Args:
            top: The folder of the checkout.
            root: pytest's root directory.
            commit: The hash.

        Raises:
            GitError: The clone does not have the commit, or it is no hash.
            ValueError: The root directory is not in the checkout.
        """
        if not _COMMIT.fullmatch(commit):
            raise GitError(f"{commit!r} is no hash of a commit")
        listed = git(top, "ls-tree", "-r", "-z", "--full-tree", f"{commit}^{{commit}}")
        files = {}
        for entry in filter(None, listed.split("\0")):
            # "100644 blob <name>\t<path>"
            words, _, path = entry.partition("\t")
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
            return None if self._is_of_another(path) else []
        return _decoded(contents(self.top, [blob.name])[blob.name]) if blob.mode.startswith(_PLAIN) else None

    def _is_of_another(self, path: PurePosixPath) -> bool:
        """Return whether a file belongs to a submodule, or to another repository in this one's folder."""
        return any(
            str(folder) in self.files or (self.top / folder / ".git").exists() for folder in path.parents if folder.name
        )

    def neighbours(self, line: str) -> Iterator[str]:
        if package_of(line):
            return
        for path in map(PurePosixPath, self.files):
            if path.suffix == _SUFFIX and path.is_relative_to(self.prefix):
                yield f"{path.relative_to(self.prefix)}:1"
