"""The history of a baseline in git. If the store file was renamed, the history continues in the file with the old name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import FormatError
from pytest_gpumem.base.git import contents, git, is_shallow
from pytest_gpumem.judging.baselines.format import parse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_gpumem.judging.gate.baseline import Baseline, Key

_HEADER, _FIELD = "\x1e", "\x1f"
# These options override the user's git configuration. Paths are taken literally, because they may contain glob characters.
_LOG = (
    *("--literal-pathspecs", "-c", "log.showRoot=true", "log", "--date-order", "--date=short", "--no-color"),
    *("--no-show-signature", "--no-relative", "--raw", "--no-abbrev", "-z"),
)


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit: its full hash, the author's date (``2026-11-02``), the author's name, and the first line of the message.

    ``cut_off`` is true if the clone is shallow and lacks the commit's parents. Git then lists all files as new in this commit,
    although they may be older.
    """

    name: str
    date: str
    author: str
    subject: str
    cut_off: bool = False


@dataclass(frozen=True, slots=True)
class FileChange:
    """A change that a commit makes to a file. The old and the new contents are given as names of git blobs.

    ``before`` has the blob in each parent commit, and ``after`` the blob in the commit itself. ``None`` means that the file
    does not exist there.
    """

    commit: Commit
    before: tuple[str | None, ...]
    after: str | None


@dataclass(frozen=True, slots=True)
class UnreadableFile:
    """A version of a store file that is invalid. It takes the place of its baselines, which are unknown."""

    why: str


@dataclass(frozen=True, slots=True)
class Event:
    """A change to a baseline.

    ``commit`` is ``None`` if the change is not committed. ``before`` is ``None`` if the baseline was added, and ``after`` is
    ``None`` if it was removed.
    """

    commit: Commit | None
    before: Baseline | UnreadableFile | None
    after: Baseline | UnreadableFile | None


def file_changes(top: Path, path: str) -> list[FileChange]:
    """Return the changes to a file up to HEAD, the latest last.

    Renames are followed. ``git log --follow`` is not used, because it also follows copies, and the files in a store are so
    similar that git often regards a new file as a copy. A merge commit is a change only if the file in the merge commit differs
    from the file in each parent.

    Args:
        top: The folder with the git checkout.
        path: The path of the file, relative to ``top``.

    Raises:
        GitError: git failed.
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
            # Earlier commits contain this file under its old path. So continue with the old path.
            path, blob = source
            followed.append(FileChange(change.commit, (blob,), change.after))
            start = f"{change.commit.name}^"
            break
    return followed[::-1]


def _renamed_from(top: Path, change: FileChange, path: str) -> tuple[str, str] | None:
    """Return the old path and blob, if the change renamed a file to ``path``; otherwise ``None``."""
    if change.before != (None,) or change.after is None or change.commit.cut_off:
        return None
    # Without the option --root, git lists no files for a repository's first commit, which cannot rename a file.
    words = git(top, "diff-tree", "-r", "-M", "-z", "--raw", "--diff-filter=R", "--no-commit-id", change.commit.name)
    listed = iter(words.split("\0"))
    for word in listed:
        if word.startswith(":"):
            # ":100644 100644 <before> <after> R094", then the old path and the new path.
            source, target = next(listed), next(listed)
            if target == path:
                return source, word.split()[2]
    return None


def paths_ever(top: Path, folder: str) -> set[str]:
    """Return the paths to all files that any commit up to HEAD has in a folder. Raises `GitError`."""
    listed = git(top, *_LOG, "-m", "--no-renames", "--format=", "--name-only", "--", folder)
    return {path for path in listed.split("\0") if path.strip()}


def texts_of(top: Path, changes: Sequence[FileChange]) -> dict[str, bytes]:
    """Return the contents of all blobs in ``changes``, by blob name. Raises `GitError`."""
    return contents(top, (blob for change in changes for blob in (*change.before, change.after) if blob is not None))


def events_of(changes: Sequence[FileChange], texts: Mapping[str, bytes], key: Key) -> list[Event]:
    """Return the changes to a baseline among the changes to its store file, in the same order. Pure.

    The baseline is found by its test and measurement only, because the test file may have had another name in an older commit.
    """
    states: dict[str | None, Baseline | UnreadableFile | None] = {None: None}
    states |= {blob: state_in(text, key) for blob, text in texts.items()}
    events = []
    for change in changes:
        before, after = [states[blob] for blob in change.before] or [None], states[change.after]
        if all(state != after for state in before):
            events.append(Event(change.commit, before[0], after))
    return events


def state_in(text: bytes, key: Key) -> Baseline | UnreadableFile | None:
    """Return a baseline from the text of its store file; ``None`` if the text does not contain the baseline. Pure."""
    file = _entries(text)
    return file if isinstance(file, UnreadableFile) else file.get((key.test, key.name))


def names_in(texts: Mapping[str, bytes], test: str) -> set[str]:
    """Return the names of the measurements for which a test has a baseline in at least one of the texts."""
    files = (_entries(text) for text in texts.values())
    return {name for file in files if not isinstance(file, UnreadableFile) for owner, name in file if owner == test}


def _entries(text: bytes) -> dict[tuple[str, str], Baseline] | UnreadableFile:
    try:
        entries = parse(text.decode("utf-8").replace("\r\n", "\n"), "")
    except (FormatError, UnicodeDecodeError) as error:
        return UnreadableFile(str(error))
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
            # ":100644 100644 <before> <after> M". Each further parent of the commit adds a colon, a mode and a blob.
            parents = len(word) - len(word.lstrip(":"))
            blobs = word.split()[parents + 1 : -1]
            *before, after = (None if not blob.strip("0") else blob for blob in blobs)
            yield FileChange(commit, tuple(before), after)
            # The next word is the file's path. Neither branch above applies to a path, so the loop skips it.


def _cut_off(top: Path) -> frozenset[str]:
    """Return the commits whose parents are missing, because the clone is shallow."""
    if not is_shallow(top):
        return frozenset()
    file = Path(git(top, "rev-parse", "--git-path", "shallow").rstrip("\n"))
    return frozenset((top / file).read_text(encoding="ascii").split())
