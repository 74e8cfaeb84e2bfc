"""The store of all baselines. Any process may read the store. At the end of a session, a single process writes its changes."""

from __future__ import annotations

import random
import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.base.errors import BackendError, FormatError, IncompleteChangeError, StoreError, WriteConflictError
from pytest_gpumem.judging.baselines.backend import SUFFIX, Backend
from pytest_gpumem.judging.baselines.format import parse, render
from pytest_gpumem.judging.gate.baseline import Baseline, Key, NoBaseline

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

_TRIES = 30
"""The number of attempts to write a file that other processes keep changing. If several processes try at the same time, one of
them succeeds, so about 30 processes can write at once."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
_UP = "__up__"
_SLUG = re.compile(r"[^/\\:\x00-\x1f]+")
_RESERVED_NAMES = frozenset({".", "..", ".lock", ".gitignore"})
_DRIVE = re.compile(r"[A-Za-z]:")


class Store:
    """The baselines in a storage backend. A store file is read when a baseline in it is needed for the first time.

    A baseline is in the file ``<device's slug>/<path of the test file from the root directory>.toml``, for example
    ``cpu-x86_64/tests/test_gpt.py.toml``. A slug is a device's name as a folder. If the path of a test file begins with ``..``,
    this part becomes a folder ``__up__``, so no path leads outside the store. Any other name that would lead outside the store
    is refused. Such a name may come from a device, a hook or the backend's list of files.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._paths: list[str] | None = None
        self._files: dict[str, _StoredFile] = {}

    @property
    def folder(self) -> Path | None:
        """The store's folder on this machine; ``None`` for a bucket or a commit."""
        return self._backend.folder

    def check(self) -> None:
        """Read every file. Raises `StoreError` for the first invalid file."""
        self._read_files(self._known_paths())

    def find(self, key: Key, slug: str) -> Baseline | NoBaseline:
        """Return a key's baseline on a device, or a `NoBaseline` with the devices on which the key has a baseline."""
        entry = self._entries(path_of(slug, key.file)).get(key)
        if entry is not None:
            return entry
        inside = _inside(key.file)
        other_devices = (
            other.environment.device
            for path in self._known_paths()
            if path.partition("/")[2] == inside and (other := self._entries(path).get(key)) is not None
        )
        return NoBaseline(tuple(sorted(set(other_devices))))

    def names(self, slug: str, file: str, test: str) -> list[str]:
        """Return the sorted names of the measurements for which a test has a baseline on a device."""
        return sorted(key.name for key in self._entries(path_of(slug, file)) if key.test == test)

    def keys(self, slug: str | None = None, files: Collection[str] | None = None) -> list[tuple[str, Key]]:
        """Return the stored baselines as (slug, key), sorted.

        Args:
            slug: The device; ``None`` for all devices.
            files: The test files; ``None`` for all files.
        """
        paths = [
            path
            for path in self._known_paths()
            if slug in (None, _slug(path)) and (files is None or _file(path) in files)
        ]
        unread = [path for path in paths if path not in self._files]
        if unread:
            self._read_files(unread)
        return sorted((_slug(path), key) for path in paths for key in self._entries(path))

    def files(self) -> set[str]:
        """Return the test files that have baselines on any device. Only paths are listed, and no file is read."""
        return set(map(_file, self._known_paths()))

    def change(self, entries: Mapping[Key, Baseline], removals: Iterable[tuple[str, Key]] = ()) -> None:
        """Write and remove entries. Entries that other processes wrote meanwhile are kept. Files without entries are deleted.

        The files are replaced one after another, sorted by path, and each file atomically. A process that reads the store
        between two writes sees the new entries in the first file and the old entries in the second file.

        Args:
            entries: The entries to write. Each entry is written to a file for its own device.
            removals: The entries to remove, as (slug, key).

        Raises:
            StoreError: A file is not valid. This file is not changed.
            BackendError: The store cannot be read or locked.
            IncompleteChangeError: A file could not be written. The files before it in the order were written, and those after
                it were not.
        """
        written: dict[str, dict[Key, Baseline]] = {}
        removed: dict[str, set[Key]] = {}
        for key, entry in entries.items():
            written.setdefault(path_of(entry.environment.slug, key.file), {})[key] = entry
        for slug, key in removals:
            removed.setdefault(path_of(slug, key.file), set()).add(key)
        paths = sorted(written.keys() | removed.keys())
        self._paths = None
        with self._backend.locked():
            self._read_files(paths)
            for position, path in enumerate(paths):
                try:
                    self._change_file(path, written.get(path, {}), removed.get(path, ()))
                except (BackendError, StoreError) as error:
                    unwritten = paths[position:]
                    keys = [key for path in unwritten for key in (*written.get(path, ()), *removed.get(path, ()))]
                    count = sum(len(written.get(path, ())) for path in paths[:position])
                    raise IncompleteChangeError(
                        error, count, frozenset((key.file, key.test) for key in keys)
                    ) from error

    def _change_file(self, path: str, entries: Mapping[Key, Baseline], removed: Collection[Key]) -> None:
        for attempt in range(_TRIES):
            try:
                self._write_changed(path, entries, removed)
            except WriteConflictError:
                # Pause for a random time, so the same processes do not write at the same moment again.
                time.sleep(random.uniform(0, min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE)))  # noqa: S311
                self._read_files([path])
            else:
                return
        raise BackendError(
            f"{self._backend.shown(path)}: other jobs changed this file during each of {_TRIES} attempts to write it; "
            "run the update again"
        )

    def _write_changed(self, path: str, entries: Mapping[Key, Baseline], removed: Collection[Key]) -> None:
        stored = self._files[path].entries
        merged = {**{key: entry for key, entry in stored.items() if key not in removed}, **entries}
        if merged:
            text = render(merged)
            self._backend.write(path, text)
            self._files[path] = _StoredFile(text, merged)
        elif stored:
            self._backend.remove(path)
            del self._files[path]

    def _known_paths(self) -> list[str]:
        if self._paths is None:
            self._paths = [path for path in self._backend.paths() if "/" in path]
            for path in self._paths:
                self._check_listed(path)
        return self._paths

    def _check_listed(self, path: str) -> None:
        """Raise `StoreError` if a listed file has a path to which the store would never write a baseline."""
        with suppress(StoreError):
            if path_of(_slug(path), _file(path)) == path:
                return
        raise StoreError(
            f"{self._backend.shown(path)}: this path cannot contain baselines; remove the file from the store"
        )

    def _entries(self, path: str) -> Mapping[Key, Baseline]:
        if path not in self._files:
            self._read_files([path])
        return self._files[path].entries

    def _read_files(self, paths: Sequence[str]) -> None:
        """Read the files, also if they were read before. Parse a file only if its text has changed since then."""
        for path, text in self._backend.read_many(paths).items():
            if path not in self._files or self._files[path].text != text:
                try:
                    entries = {} if text is None else parse(text, _file(path), _slug(path))
                except FormatError as error:
                    raise StoreError(f"{self._backend.shown(path)}: {error}") from None
                self._files[path] = _StoredFile(text, entries)


class _StoredFile(NamedTuple):
    """The text of a store file and its entries. The text is ``None`` if the file does not exist."""

    text: str | None
    entries: Mapping[Key, Baseline]


def path_of(slug: str, file: str) -> str:
    """Return the path of the store file with a test file's baselines on a device.

    Example: ``path_of("cpu-x86_64", "tests/test_gpt.py")`` is ``"cpu-x86_64/tests/test_gpt.py.toml"``.

    Raises:
        StoreError: The slug or the test file's path would lead outside the store.
    """
    if _SLUG.fullmatch(slug) is None or slug in _RESERVED_NAMES:
        raise StoreError(f"the slug of a device is {slug!r}, but it must be the name of a folder, like 'nvidia-h100'")
    return f"{slug}/{_inside(file)}"


def _inside(file: str) -> str:
    """Return the path of the store file with a test file's baselines, relative to the device's folder. Raises `StoreError`."""
    # The path of a test file outside the root directory begins with "..". In the store, such a path must stay inside.
    parts = [_UP if part == ".." else part for part in file.split("/")]
    # Several operating systems may share a store. So a path that would lead outside on Windows is refused on every system.
    if any(part in ("", ".") or "\0" in part or ".." in part.split("\\") for part in parts) or _DRIVE.match(file):
        raise StoreError(
            f"the test file {file!r} cannot be in the store, because its path does not begin at the root directory"
        )
    return "/".join(parts) + SUFFIX


def _slug(path: str) -> str:
    return path.partition("/")[0]


def _file(path: str) -> str:
    """Return the test file whose baselines are in the store file ``path``. This is the inverse of `path_of`."""
    inside = path.partition("/")[2].removesuffix(SUFFIX)
    return "/".join(".." if part == _UP else part for part in inside.split("/"))
