"""Find revisions in the user's git repository, and check them out in temporary worktrees."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pytest_gpumem.base.errors import GitError
from pytest_gpumem.base.git import Revision, git, git_environment, is_shallow
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
    """A git checkout, or a plain folder without git.

    ``top`` is the checkout's root folder. ``folder`` is the path from the root to the current folder.
    """

    top: Path
    folder: Path

    @classmethod
    def around(cls, current: Path) -> Checkout:
        """Return the git checkout around the folder ``current``. Raises `GitError` outside of git repositories."""
        top = Path(git(current, "rev-parse", "--show-toplevel").rstrip("\n")).resolve()
        return cls(top, current.resolve().relative_to(top))

    @classmethod
    def as_it_is(cls, current: Path) -> Checkout:
        """Return the git checkout around the folder ``current``. Without a git repository, this folder is the checkout."""
        try:
            return cls.around(current)
        except GitError:
            return cls(current.resolve(), Path())

    def revision(self, name: str) -> Revision:
        """Return the commit that a branch, tag or hash names. Raises `GitError` if there is no such commit."""
        try:
            commit = git(self.top, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        except GitError:
            shallow = is_shallow(self.top)
            hint = "; this clone is shallow: fetch its history with `git fetch --unshallow`" if shallow else ""
            raise GitError(f"there is no revision {name!r} in {self.top}{hint}") from None
        return Revision(name, commit.strip())

    def uncommitted(self) -> int:
        """Return the number of files with uncommitted changes, including new files."""
        return len(git(self.top, "status", "--porcelain", "--untracked-files=all").splitlines())

    def checkouts(self) -> list[Path]:
        """Return the root folders of the repository's checkouts (git worktrees). This checkout comes first."""
        if not (self.top / ".git").exists():
            return [self.top]
        lines = git(self.top, "worktree", "list", "--porcelain").splitlines()
        folders = [Path(line.removeprefix("worktree ")).resolve() for line in lines if line.startswith("worktree ")]
        return list(dict.fromkeys([self.top, *folders]))


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a temporary folder, and remove the folder when the context ends.

    Meanwhile a locked file in the folder shows other processes that the folder is in use.
    """
    from filelock import FileLock

    folder = Path(tempfile.mkdtemp(prefix=_PREFIX)).resolve()
    try:
        # The operating system releases the lock when this process ends, even after a crash.
        with FileLock(folder / _LOCK):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clear_leftovers(checkout: Checkout) -> int:
    """Remove worktrees and temporary folders left by killed comparisons, and return the number of removed worktrees.

    Running comparisons keep their worktrees and folders. Raises `GitError` if the worktrees cannot be listed.
    """
    leftovers = [
        path for path in checkout.checkouts() if path.parent.name.startswith(_PREFIX) and _is_leftover(path.parent)
    ]
    for path in leftovers:
        _remove(checkout, path)
    # A comparison may have been killed between two runs. Then its temporary folder contains no worktree.
    empty = (folder for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*") if _is_leftover(folder))
    for folder in {*empty, *(path.parent for path in leftovers)}:
        shutil.rmtree(folder, ignore_errors=True)
    return len(leftovers)


def _is_leftover(folder: Path) -> bool:
    """Return whether the process that created a temporary folder has ended.

    A folder without a lock file comes from other software, so the result is False.
    """
    from filelock import FileLock, Timeout

    if not folder.exists():
        # The operating system has deleted the folder, but git still lists its worktree.
        return True
    try:
        # If another user has created a folder or a link with this name, these calls raise OSError.
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
    """Create a detached worktree for each revision, and remove the worktrees when the context ends.

    The user's branches, index and files do not change.

    Args:
        checkout: A checkout of the repository with the revisions.
        revisions: The revision for each worktree, by the worktree's name.
        folder: The folder in which the worktrees are created.
        stop: Records a signal to end the command, such as Ctrl-C.

    Yields:
        The worktrees' paths by name, and notes for the user, for example about missing submodules.

    Raises:
        GitError: A revision cannot be checked out.
        StopSignal: A signal such as Ctrl-C has come.
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
    """Check out submodules. Return a clause for each kind of missing files: submodules, and files from Git LFS."""
    notes = []
    if (worktree / ".gitmodules").exists():
        # --init would change the repository's configuration. Without this option, git only updates existing submodules.
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
            notes.append(
                "files from Git LFS contain pointers instead of data, because git-lfs is not set up (git lfs install)"
            )
    return notes


def _remove(checkout: Checkout, worktree: Path) -> None:
    # ``--force`` is given twice, because git locks a worktree during the checkout, and the lock remains if git is killed.
    remove = ("worktree", "remove", "--force", "--force", str(worktree))
    try:
        git(checkout.top, *remove)
    except GitError:
        # The worktree is damaged or in use. After its folder is deleted, git can remove the worktree from its list.
        # `git worktree prune` would also remove other worktrees from the list.
        shutil.rmtree(worktree, ignore_errors=True)
        with suppress(GitError):
            git(checkout.top, *remove)


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "git said nothing")
