"""History of a baseline in git, through renames of the store's file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.baselines.errors import FormatError
from pytest_gpumem.baselines.format import parse
from pytest_gpumem.git import contents, git, is_shallow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_gpumem.gate.baseline import Baseline, Key

_HEADER, _FIELD = "\x1e", "\x1f"
# Overrides the user's git configuration; paths are literal, as they may contain glob characters.
_LOG = (
    *("--literal-pathspecs", "-c", "log.showRoot=true", "log", "--date-order", "--date=short", "--no-color"),
    *("--no-show-signature", "--no-relative", "--raw", "--no-abbrev", "-z"),
)


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit: its full name, the day on which it was written (``2026-11-02``), by whom, and its message's first line.

    ``cut_off`` says that its parents are not in a shallow clone, so that the file may be older than it.
    """

    name: str
    date: str
    author: str
    subject: str
    cut_off: bool = False


@dataclass(frozen=True, slots=True)
class FileChange:
    """The change of a file by a commit, as names of blobs: one ``before`` for each parent; ``None`` where there is no file."""

    commit: Commit
    before: tuple[str | None, ...]
    after: str | None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A text that was not a file of the store, so that the baseline in it is unknown."""

    why: str


@dataclass(frozen=True, slots=True)
class Event:
    """A change of one baseline. ``commit`` is ``None`` for what has not been committed yet; a state is for no baseline."""

    commit: Commit | None
    before: Baseline | Unreadable | None
    after: Baseline | Unreadable | None


def file_changes(top: Path, path: str) -> list[FileChange]:
    """Return the changes of the file at ``path`` of the checkout at ``top`` up to its HEAD, the latest last. Raises `GitError`.

    Renamed files are followed, and a merge changes what differs from all its parents. Not by ``git log --follow``, which
    follows copies, too: files of the store are so much alike that a new one is often taken for a copy of another.
    """
    cut_off = _cut_off(top)
    followed: list[FileChange] = []
    start: str | None = "HEAD"
    while start is not None:
        form = f"--format={_HEADER}%H{_FIELD}%ad{_FIELD}%aN%x00%s"
        words = git(top, *_LOG, "-c", "--no-renames", form, start, "--", path).split("\0")
        start = None
        for change in _changes(words, cut_off):
            source = _renamed_from(top, change, path)
            if source is None:
                followed.append(change)
                continue
            # Older changes at this path are another file's.
            path, blob = source
            followed.append(FileChange(change.commit, (blob,), change.after))
            start = f"{change.commit.name}^"
            break
    return followed[::-1]


def _renamed_from(top: Path, change: FileChange, path: str) -> tuple[str, str] | None:
    """Return the path and the blob of the file that a change renamed to ``path``, if it did."""
    if change.before != (None,) or change.after is None or change.commit.cut_off:
        return None
    # The root of the history has renamed nothing: without --root nothing is listed for it.
    words = git(top, "diff-tree", "-r", "-M", "-z", "--raw", "--diff-filter=R", "--no-commit-id", change.commit.name)
    listed = iter(words.split("\0"))
    for word in listed:
        if word.startswith(":"):
            # ":100644 100644 <before> <after> R094", the old path and the new one.
            source, target = next(listed), next(listed)
            if target == path:
                return source, word.split()[2]
    return None


def paths_ever(top: Path, folder: str) -> set[str]:
    """Return all files that were ever in ``folder`` of the checkout, from ``top``. Raises `GitError`."""
    listed = git(top, *_LOG, "-m", "--no-renames", "--format=", "--name-only", "--", folder)
    return {path for path in listed.split("\0") if path.strip()}


def texts_of(top: Path, changes: Sequence[FileChange]) -> dict[str, bytes]:
    """Return the contents of all blobs that ``changes`` name. Raises `GitError`."""
    return contents(top, (blob for change in changes for blob in (*change.before, change.after) if blob is not None))


def events_of(changes: Sequence[FileChange], texts: Mapping[str, bytes], key: Key) -> list[Event]:
    """Return the changes of the baseline with this key among those of its file, in their order. Pure.

    The file may have had another name: test and measurement have to be equal.
    """
    states: dict[str | None, Baseline | Unreadable | None] = {None: None}
    states |= {blob: state_in(text, key) for blob, text in texts.items()}
    events = []
    for change in changes:
        before, after = [states[blob] for blob in change.before] or [None], states[change.after]
        if all(one != after for one in before):
            events.append(Event(change.commit, before[0], after))
    return events


def state_in(text: bytes, key: Key) -> Baseline | Unreadable | None:
    """Return the baseline with this key in the text of its file, if there is one. Pure."""
    file = _entries(text)
    return file if isinstance(file, Unreadable) else file.get((key.test, key.name))


def names_in(texts: Mapping[str, bytes], test: str) -> set[str]:
    """Return the names of the measurements of ``test`` that any of these texts has a baseline of."""
    files = (_entries(text) for text in texts.values())
    return {name for file in files if not isinstance(file, Unreadable) for one, name in file if one == test}


def _entries(text: bytes) -> dict[tuple[str, str], Baseline] | Unreadable:
    try:
        entries = parse(text.decode("utf-8").replace("\r\n", "\n"), "")
    except (FormatError, UnicodeDecodeError) as error:
        return Unreadable(str(error))
    return {(key.test, key.name): entry for key, entry in entries.items()}


def _changes(words: Sequence[str], cut_off: frozenset[str]) -> Iterator[FileChange]:
    commit: Commit | None = None
    number = 0
    while number < len(words):
        word = words[number].lstrip("\n")
        number += 1
        if word.startswith(_HEADER):
            name, date, author = word[1:].split(_FIELD, 2)
            commit = Commit(name, date, author, words[number], name in cut_off)
            number += 1
        elif word.startswith(":") and commit is not None:
            # ":100644 100644 <before> <after> R094", with one colon, mode and blob more for each further parent.
            parents = len(word) - len(word.lstrip(":"))
            blobs = word.split()[parents + 1 : -1]
            *before, after = (None if not blob.strip("0") else blob for blob in blobs)
            yield FileChange(commit, tuple(before), after)
            # The path follows, which begins with the store's folder.


def _cut_off(top: Path) -> frozenset[str]:
    """Return the commits whose parents a shallow clone does not have."""
    if not is_shallow(top):
        return frozenset()
    file = Path(git(top, "rev-parse", "--git-path", "shallow").rstrip("\n"))
    return frozenset((top / file).read_text(encoding="ascii").split())
