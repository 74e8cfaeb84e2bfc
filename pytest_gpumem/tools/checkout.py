"""The user's git repository: its revisions, and temporary worktrees for them."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pytest_gpumem.base.git import GitError, Revision, git, git_environment, is_shallow
from pytest_gpumem.base.open_folder import open_folder
from pytest_gpumem.base.processes import run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_gpumem.base.processes import Stop


Side = Literal["base", "head"]
BASE: Side = "base"
HEAD: Side = "head"
_PREFIX, _LOCK = "gpumem-ab-", "running.lock"
_HOOKS_OFF = ("-c", f"core.hooksPath={os.devnull}")


@dataclass(frozen=True, slots=True)
class Checkout:
    """A checkout. ``top`` is its root, and ``folder`` the path from the root to the current folder."""

    top: Path
    folder: Path

    @classmethod
    def around(cls, current: Path) -> Checkout:
        """Return the checkout around the folder ``current``. Raises `GitError`."""
        top = Path(git(current, "rev-parse", "--show-toplevel").rstrip("\n")).resolve()
        return cls(top, current.resolve().relative_to(top))

    @classmethod
    def as_it_is(cls, current: Path) -> Checkout:
        """Return the checkout around the folder ``current``, or the folder itself if no git repository contains it."""
        try:
            return cls.around(current)
        except GitError:
            return cls(current.resolve(), Path())

    def revision(self, name: str) -> Revision:
        """Return the commit for a branch, tag or hash. Raises `GitError`."""
        try:
            commit = git(self.top, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        except GitError:
            shallow = is_shallow(self.top)
            hint = "; this clone has no history: fetch it with `git fetch --unshallow`" if shallow else ""
            raise GitError(f"there is no revision {name!r} in {self.top}{hint}") from None
        return Revision(name, commit.strip())

    def uncommitted(self) -> int:
        """Return how many changed or new files are not committed."""
        return len(git(self.top, "status", "--porcelain", "--untracked-files=all").splitlines())

    def checkouts(self) -> list[Path]:
        """Return every folder with a checkout of this repository, this checkout first."""
        if not (self.top / ".git").exists():
            return [self.top]
        lines = git(self.top, "worktree", "list", "--porcelain").splitlines()
        folders = [Path(line.removeprefix("worktree ")).resolve() for line in lines if line.startswith("worktree ")]
        return list(dict.fromkeys([self.top, *folders]))


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder that is removed at the end. A lock in the folder shows other processes that this process uses it."""
    from filelock import FileLock

    folder = Path(tempfile.mkdtemp(prefix=_PREFIX)).resolve()
    try:
        # The system releases the lock when the process ends, even after a crash.
        with FileLock(folder / _LOCK):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clear_leftovers(checkout: Checkout) -> int:
    """Remove worktrees and temporary folders from killed comparisons, and return the number of worktrees.

    Comparisons that still run keep their worktrees and folders. Raises `GitError`.
    """
    leftovers = [
        path for path in checkout.checkouts() if path.parent.name.startswith(_PREFIX) and _is_leftover(path.parent)
    ]
    for path in leftovers:
        _remove(checkout, path)
    # A comparison that was killed between two runs left a folder without a worktree.
    empty = (folder for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*") if _is_leftover(folder))
    for folder in {*empty, *(path.parent for path in leftovers)}:
        shutil.rmtree(folder, ignore_errors=True)
    return len(leftovers)


def _is_leftover(folder: Path) -> bool:
    """Return whether the process that made a temporary folder has ended. A folder without a lock file is not ours."""
    from filelock import FileLock, Timeout

    if not folder.exists():
        # The system has emptied its temporary folder, but git still lists the worktree.
        return True
    try:
        # Another user may have created a folder or a link with this name.
        with open_folder(folder.parent, [folder.name]) as opened:
            opened.make_private(refuse_shared=True)
        if not (folder / _LOCK).exists():
            return False
        with FileLock(folder / _LOCK, timeout=0):
            return True
    except (Timeout, OSError):
        return False


@contextmanager
def worktrees(
    checkout: Checkout, revisions: Mapping[str, Revision], folder: Path, stop: Stop
) -> Iterator[tuple[dict[str, Path], list[str]]]:
    """Make a detached worktree for each revision. No branch, index or file in the checkout changes.

    Args:
        checkout: The checkout.
        revisions: The revisions, by worktree name.
        folder: The folder for the worktrees.
        stop: Ends the command on a signal.

    Yields:
        The worktree paths by name, and notes for the user, for example on missing submodules.

    Raises:
        GitError: A revision cannot be checked out.
        StopSignal: A signal was noted.
    """
    tops: dict[str, Path] = {}
    notes: list[str] = []
    try:
        for name, revision in revisions.items():
            tops[name] = folder / name
            log = folder / f"{name}.log"
            add = ["git", *_HOOKS_OFF, "worktree", "add", "--quiet", "--detach", str(tops[name]), revision.commit]
            if run(add, folder=checkout.top, environment=git_environment(), output=log, stop=stop):
                raise GitError(f"{revision} could not be checked out: {_end_of(log)}")
            notes += [f"{revision}: {note}" for note in _fill(tops[name], log, stop)]
        yield tops, notes
    finally:
        for path in tops.values():
            _remove(checkout, path)


def _fill(worktree: Path, log: Path, stop: Stop) -> list[str]:
    """Check out submodules, and return a clause for each missing part."""
    notes = []
    if (worktree / ".gitmodules").exists():
        # Without --init, git only updates submodules that the checkout has, and does not change the repository's configuration.
        for arguments in (
            ["update", "--quiet"],
            ["foreach", "--quiet", "--recursive", "git submodule update --quiet --init"],
        ):
            command = ["git", *_HOOKS_OFF, "submodule", *arguments]
            if run(command, folder=worktree, environment=git_environment(), output=log, stop=stop):
                notes.append(f"its submodules could not be checked out: {_end_of(log)}")
                break
    attributes = worktree / ".gitattributes"
    if attributes.exists() and "filter=lfs" in attributes.read_text(encoding="utf-8", errors="replace"):
        try:
            git(worktree, "config", "filter.lfs.smudge")
        except GitError:
            notes.append("files from Git LFS are pointers only, because git-lfs is not set up")
    return notes


def _remove(checkout: Checkout, worktree: Path) -> None:
    # Forced twice, because git locks a worktree during its checkout, and the lock remains if git is killed.
    remove = ("worktree", "remove", "--force", "--force", str(worktree))
    try:
        git(checkout.top, *remove)
    except GitError:
        # The worktree is damaged or in use. Git can remove it once its folder is gone. `git worktree prune` is not used,
        # because it would also remove other worktrees from the list.
        shutil.rmtree(worktree, ignore_errors=True)
        with suppress(GitError):
            git(checkout.top, *remove)


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "git said nothing")
