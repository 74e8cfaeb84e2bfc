"""The store: baselines by device, test file and test. Read anywhere, written by one process at the end of a session."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.baselines.backend import SUFFIX, Backend
from pytest_gpumem.baselines.errors import BackendError, FormatError, IncompleteChangeError, StoreError
from pytest_gpumem.baselines.format import parse, render
from pytest_gpumem.gate.baseline import Baseline, Key, NoBaseline

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

_UP = "__up__"
_SLUG = re.compile(r"[^/\\:\x00-\x1f]+")
_TAKEN = frozenset({".", "..", ".lock", ".gitignore"})
_DRIVE = re.compile(r"[A-Za-z]:")


class Store:
    """The baselines in a storage backend. Each file is read once, when first needed.

    A baseline's file is ``<device's slug>/<path of the test file from the root directory>.toml``, for example
    ``cpu-x86_64/tests/test_gpt.py.toml``. A slug is the name of one folder. In the path of a test file each leading ``..`` is
    stored as a folder ``__up__``, so no path leads out of the store. Any other name from a device, a hook or a listing is
    refused.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._paths: list[str] | None = None
        self._read: dict[str, _Read] = {}

    @property
    def folder(self) -> Path | None:
        """The folder on this machine that it is in; ``None`` for a bucket or a commit."""
        return self._backend.folder

    def check(self) -> None:
        """Read every file. Raises `StoreError` for the first that cannot be understood."""
        self._read_files(self._known_paths())

    def find(self, key: Key, slug: str) -> Baseline | NoBaseline:
        """Return the baseline of ``key`` on the device called ``slug``, or which other devices have one."""
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
        """Return the names of the measurements of a test that have a baseline on the device called ``slug``, sorted."""
        return sorted(key.name for key in self._entries(path_of(slug, file)) if key.test == test)

    def keys(self, slug: str | None = None, files: Collection[str] | None = None) -> list[tuple[str, Key]]:
        """Return every baseline as (slug, key), sorted: of one device when ``slug`` is given, of test files with ``files``."""
        paths = [
            path
            for path in self._known_paths()
            if slug in (None, _slug(path)) and (files is None or _file(path) in files)
        ]
        unread = [path for path in paths if path not in self._read]
        if unread:
            self._read_files(unread)
        return sorted((_slug(path), key) for path in paths for key in self._entries(path))

    def files(self) -> set[str]:
        """Return the test files that have baselines on any device. Reads no file."""
        return set(map(_file, self._known_paths()))

    def change(self, entries: Mapping[Key, Baseline], gone: Iterable[tuple[str, Key]] = ()) -> str | None:
        """Write ``entries``, each to the file of its environment's device, and remove ``gone``, given as (slug, key).

        Merged, entry by entry, with what others wrote meanwhile. A file without entries goes. Returns, as a clause, why
        others could not be kept from writing at the same time, if that is so. Raises `StoreError` or `BackendError`; a file
        that cannot be understood is left as it was. Raises `IncompleteChangeError` if files before the failed one were
        written.
        """
        written: dict[str, dict[Key, Baseline]] = {}
        removed: dict[str, set[Key]] = {}
        for key, entry in entries.items():
            written.setdefault(path_of(entry.environment.slug, key.file), {})[key] = entry
        for slug, key in gone:
            removed.setdefault(path_of(slug, key.file), set()).add(key)
        paths = sorted(written.keys() | removed.keys())
        self._paths = None
        with self._backend.locked() as unlocked:
            self._read_files(paths)
            for position, path in enumerate(paths):
                try:
                    self._change_file(path, written.get(path, {}), removed.get(path, ()))
                except BackendError as error:
                    left = paths[position:]
                    keys = [key for path in left for key in (*written.get(path, ()), *removed.get(path, ()))]
                    done = sum(len(written.get(path, ())) for path in paths[:position])
                    raise IncompleteChangeError(error, done, frozenset((key.file, key.test) for key in keys)) from error
        return unlocked

    def _change_file(self, path: str, entries: Mapping[Key, Baseline], gone: Collection[Key]) -> None:
        stored = self._read[path].entries
        merged = {**{key: entry for key, entry in stored.items() if key not in gone}, **entries}
        if merged:
            text = render(merged)
            self._backend.write(path, text)
            self._read[path] = _Read(text, merged)
        elif stored:
            self._backend.remove(path)
            del self._read[path]

    def _known_paths(self) -> list[str]:
        if self._paths is None:
            self._paths = [path for path in self._backend.paths() if "/" in path]
            for path in self._paths:
                self._check_listed(path)
        return self._paths

    def _check_listed(self, path: str) -> None:
        """Raise `StoreError` for a file in a listing at a path that no baseline would be written to."""
        with suppress(StoreError):
            if path_of(_slug(path), _file(path)) == path:
                return
        raise StoreError(f"{self._backend.shown(path)}: no baselines can lie there; remove the file from the store")

    def _entries(self, path: str) -> Mapping[Key, Baseline]:
        if path not in self._read:
            self._read_files([path])
        return self._read[path].entries

    def _read_files(self, paths: Sequence[str]) -> None:
        """Read files as they are now, and parse those whose text has changed."""
        for path, text in self._backend.read_many(paths).items():
            if path not in self._read or self._read[path].text != text:
                try:
                    entries = {} if text is None else parse(text, _file(path), _slug(path))
                except FormatError as error:
                    raise StoreError(f"{self._backend.shown(path)}: {error}") from None
                self._read[path] = _Read(text, entries)


class _Read(NamedTuple):
    """A file's text, ``None`` when there is no such file, and the entries in it."""

    text: str | None
    entries: Mapping[Key, Baseline]


def path_of(slug: str, file: str) -> str:
    """Return the path in a store of the baselines of a test file: ``"cpu-x86_64/tests/test_gpt.py.toml"``.

    Raises `StoreError` for names that would lead out of it.
    """
    if _SLUG.fullmatch(slug) is None or slug in _TAKEN:
        raise StoreError(f"the slug of a device is {slug!r}, expected the name of a folder, like 'nvidia-h100'")
    return f"{slug}/{_inside(file)}"


def _inside(file: str) -> str:
    """Return the path in a device's folder of the baselines of a test file. Raises `StoreError`."""
    # A test file outside of the root directory has a path that climbs out of it, and the store must not.
    parts = [_UP if part == ".." else part for part in file.split("/")]
    # Stores are shared between systems, so what leads out of a folder on Windows is refused everywhere.
    if any(part in ("", ".") or "\0" in part or ".." in part.split("\\") for part in parts) or _DRIVE.match(file):
        raise StoreError(f"the test file {file!r} has no place in the store, expected a path from the root directory")
    return "/".join(parts) + SUFFIX


def _slug(path: str) -> str:
    return path.partition("/")[0]


def _file(path: str) -> str:
    """Return the test file whose baselines lie at ``path``: the inverse of `path_of`."""
    inside = path.partition("/")[2].removesuffix(SUFFIX)
    return "/".join(".." if part == _UP else part for part in inside.split("/"))
