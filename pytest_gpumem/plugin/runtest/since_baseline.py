"""Find the source lines that have changed since a baseline was accepted. git runs only if a test became worse."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import GitError
from pytest_gpumem.base.git import git
from pytest_gpumem.judging.baselines.history import file_changes, texts_of
from pytest_gpumem.judging.baselines.store import path_of
from pytest_gpumem.judging.changed_code.marks import ChangedCode, with_changed_code
from pytest_gpumem.judging.changed_code.sources import Commit, Folders, NoSource

if TYPE_CHECKING:
    from pytest_gpumem.judging.baselines.history import FileChange
    from pytest_gpumem.judging.gate.baseline import Key
    from pytest_gpumem.judging.gate.verdict import Verdict

_FAILURES = (GitError, OSError, ValueError)
"""Errors that can occur if the clone has no history, if a file is missing, or if ``git`` is another program."""


@dataclass(frozen=True)
class SinceBaselines:
    """Finds the source lines that have changed since baselines were accepted. git runs only if a verdict needs them.

    Example:
        A commit ``4f2c1a9`` wrote ``peak_allocated = 280000`` into the store, and the checked-out code needs 380,000 bytes.
        `marked` compares the current files with the files in ``4f2c1a9``, so the failure can mark rows with a changed line.
    """

    root: Path
    """pytest's root directory. Paths in rows are relative to this folder."""
    store: Path | None
    """The store's folder; ``None`` if the store is not a folder but, for example, a bucket."""
    _tops: list[Path | None] = field(default_factory=list)
    _commits: dict[str, ChangedCode | None] = field(default_factory=dict)
    _histories: dict[str, tuple[list[FileChange], dict[str, bytes]]] = field(default_factory=dict)

    def marked(self, verdict: Verdict, key: Key, slug: str) -> Verdict:
        """Return the verdict with marks on the lines that have changed since its baseline.

        If the code at the time of the baseline is not available, for example in a shallow clone, there are no marks.

        Args:
            verdict: The verdict on a measurement.
            key: The baseline's key.
            slug: The baseline's device.
        """
        if verdict.origin is None or (verdict.difference is None and not verdict.count_changes):
            return verdict
        changed = None
        with suppress(*_FAILURES):
            changed = self._since(self._accepted_in(key, slug) or verdict.origin.commit)
        names = [clause.partition(" ")[0] for clause in verdict.changed_packages]
        changed = changed or ChangedCode(NoSource(), Folders(self.root))
        with suppress(*_FAILURES):
            return with_changed_code(verdict, changed.with_packages(names))
        return verdict

    @property
    def _top(self) -> Path | None:
        """The top folder of the git repository; ``None`` if there is no repository."""
        if not self._tops:
            top = None
            with suppress(*_FAILURES):
                top = Path(git(self.root, "rev-parse", "--show-toplevel").rstrip("\n")).resolve()
            self._tops.append(top)
        return self._tops[0]

    def _since(self, commit: str | None) -> ChangedCode | None:
        """Return the changes between a commit and the current files; ``None`` if the commit is unknown or there is no
        repository.
        """
        if commit is None or self._top is None:
            return None
        if commit not in self._commits:
            self._commits[commit] = None
            old = Commit.read(self._top, self.root, commit)
            self._commits[commit] = ChangedCode(old, Folders(self.root))
        return self._commits[commit]

    def _accepted_in(self, key: Key, slug: str) -> str | None:
        """Return the commit in which a baseline got its current content; ``None`` if this commit is not known.

        A baseline's entry in the store also names a commit: the one that was checked out during the update. This commit is
        often too old, because people usually commit a change together with its new baselines.
        """
        if self.store is None or self._top is None:
            return None
        file = self.store.resolve() / path_of(slug, key.file)
        if not file.is_relative_to(self._top):
            return None
        path = file.relative_to(self._top).as_posix()
        if path not in self._histories:
            self._histories[path] = [], {}
            changes = file_changes(self._top, path)
            self._histories[path] = changes, texts_of(self._top, changes)
        return commit_of_entry(*self._histories[path], file.read_bytes(), key)


def commit_of_entry(changes: list[FileChange], texts: dict[str, bytes], current: bytes, key: Key) -> str | None:
    """Return the commit in which an entry in a store file got its current content; ``None`` if no commit has this content.

    Args:
        changes: The commits that changed the file, the latest last.
        texts: The file's contents before and after each change, by git object.
        current: The file's current content.
        key: The entry's key.
    """
    entry = _entry(current, key)
    for change in reversed(changes):
        if entry is None or change.after is None or _entry(texts[change.after], key) != entry:
            return None
        previous_entries = [None if blob is None else _entry(texts[blob], key) for blob in change.before] or [None]
        if entry not in previous_entries:
            return None if change.commit.cut_off else change.commit.name
    return None


def _entry(text: bytes, key: Key) -> bytes | None:
    """Return the text of a test's entry in a store file; ``None`` if the file does not have the entry."""
    import tomli_w

    text = b"\n" + text.replace(b"\r\n", b"\n")
    header = b"\n" + tomli_w.dumps({"tests": {key.test: {key.name: {}}}}).strip().encode() + b"\n"
    _, separator, rest = text.partition(header)
    return rest.partition(b"\n[")[0].strip() if separator else None
