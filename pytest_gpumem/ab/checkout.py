"""The repository that the command was started in: its revisions, and worktrees of them for as long as they are needed."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pytest_gpumem.git import GitError, Revision, git, git_environment, is_shallow
from pytest_gpumem.open_folder import open_folder
from pytest_gpumem.processes import run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_gpumem.processes import Stop


Side = Literal["base", "head"]
BASE: Side = "base"
HEAD: Side = "head"
_PREFIX, _LOCK = "gpumem-ab-", "running.lock"
_HOOKS_OFF = ("-c", f"core.hooksPath={os.devnull}")


@dataclass(frozen=True, slots=True)
class Checkout:
    """A checkout. ``top`` is its folder; ``folder`` is the path from there to where the command was started."""

    top: Path
    folder: Path

    @classmethod
    def around(cls, here: Path) -> Checkout:
        """Return the checkout that ``here`` is in. Raises `GitError`."""
        top = Path(git(here, "rev-parse", "--show-toplevel").rstrip("\n")).resolve()
        return cls(top, here.resolve().relative_to(top))

    @classmethod
    def as_it_is(cls, here: Path) -> Checkout:
        """Return the checkout that ``here`` is in, or ``here`` itself where there is no git repository."""
        try:
            return cls.around(here)
        except GitError:
            return cls(here.resolve(), Path())

    def revision(self, name: str) -> Revision:
        """Return the commit that ``name`` means. Raises `GitError`."""
        try:
            commit = git(self.top, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        except GitError:
            shallow = is_shallow(self.top)
            hint = "; this clone has no history: fetch it with `git fetch --unshallow`" if shallow else ""
            raise GitError(f"there is no revision {name!r} in {self.top}{hint}") from None
        return Revision(name, commit.strip())

    def uncommitted(self) -> int:
        """Return the number of files that are changed or new and not committed."""
        return len(git(self.top, "status", "--porcelain", "--untracked-files=all").splitlines())

    def checkouts(self) -> list[Path]:
        """Return every folder in which this repository is checked out."""
        if not (self.top / ".git").exists():
            return [self.top]
        lines = git(self.top, "worktree", "list", "--porcelain").splitlines()
        found = [Path(line.removeprefix("worktree ")).resolve() for line in lines if line.startswith("worktree ")]
        return list(dict.fromkeys([self.top, *found]))


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder that is removed afterwards with all it has. This process holds the lock in it until it ends."""
    from filelock import FileLock

    folder = Path(tempfile.mkdtemp(prefix=_PREFIX)).resolve()
    try:
        # The system gives it back when the process ends, however that is.
        with FileLock(folder / _LOCK):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clear_leftovers(checkout: Checkout) -> int:
    """Remove worktrees and folders of killed comparisons, none of running ones, and return the number of worktrees.

    Raises `GitError`.
    """
    left = [path for path in checkout.checkouts() if path.parent.name.startswith(_PREFIX) and _is_left(path.parent)]
    for path in left:
        _remove(checkout, path)
    # One that was killed between two runs has left a folder without a worktree.
    empty = (folder for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*") if _is_left(folder))
    for folder in {*empty, *(path.parent for path in left)}:
        shutil.rmtree(folder, ignore_errors=True)
    return len(left)


def _is_left(folder: Path) -> bool:
    """Return whether the process that made a temporary folder is gone. A folder without the lock is not ours."""
    from filelock import FileLock, Timeout

    if not folder.exists():
        # The system has emptied its temporary folder, and git still has the worktree in its list.
        return True
    try:
        # Another user may have put a folder or a link of this name into the temporary folder.
        with open_folder(folder.parent, [folder.name]) as opened:
            opened.keep_others_out(also_before=True)
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
    """Make worktrees of ``revisions`` in ``folder``, by name, and notes on them for the user.

    They are detached: no branch, index or file of the checkout is touched. Raises `GitError` and `Stopped`.
    """
    made: dict[str, Path] = {}
    notes: list[str] = []
    try:
        for name, revision in revisions.items():
            made[name] = folder / name
            log = folder / f"{name}.log"
            add = ["git", *_HOOKS_OFF, "worktree", "add", "--quiet", "--detach", str(made[name]), revision.commit]
            if run(add, folder=checkout.top, environment=git_environment(), output=log, stop=stop):
                raise GitError(f"{revision} could not be checked out: {_end_of(log)}")
            notes += [f"{revision}: {note}" for note in _fill(made[name], log, stop)]
        yield made, notes
    finally:
        for path in made.values():
            _remove(checkout, path)


def _fill(worktree: Path, log: Path, stop: Stop) -> list[str]:
    """Check out submodules, and return what is missing, as clauses."""
    notes = []
    if (worktree / ".gitmodules").exists():
        # Without --init: those that the checkout has, and no change in the repository's configuration.
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
            notes.append("files of Git LFS are pointers only, since git-lfs is not set up here")
    return notes


def _remove(checkout: Checkout, worktree: Path) -> None:
    # Forced twice: git locks a worktree while it checks it out, and one that was killed meanwhile stays locked.
    remove = ("worktree", "remove", "--force", "--force", str(worktree))
    try:
        git(checkout.top, *remove)
    except GitError:
        # It is damaged, or in use: a worktree whose folder is gone can be removed. `prune` would forget others, too.
        shutil.rmtree(worktree, ignore_errors=True)
        with suppress(GitError):
            git(checkout.top, *remove)


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "git said nothing")
