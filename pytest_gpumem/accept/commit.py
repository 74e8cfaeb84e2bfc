"""The commit of a report beside the one that is checked out."""

from __future__ import annotations

from pathlib import Path

from pytest_gpumem.git import GitError, commit_of, git
from pytest_gpumem.units import counted


def why_other_commit(commit: str | None, here: Path, store: Path | None) -> str | None:
    """Return, as a sentence, why what a report measured is not the code that is checked out; ``None`` where it is.

    It is where both commits have the same files beside the store, as the merge commit of a pull request has that is up to date.

    Args:
        commit: The report's commit, an abbreviated hash.
        here: A folder of the checkout.
        store: The folder of the store; ``None`` for a bucket.
    """
    head = commit_of(here)
    if commit is None:
        return None if head is None else f"the report does not say of which commit it is, and HEAD is {head}"
    if head is None:
        return f"the report is of commit {commit}, and {here} is in no git repository, or git does not answer"
    if head.startswith(commit) or commit.startswith(head):
        return None
    return _difference(commit, head, here, store)


def _difference(commit: str, head: str, here: Path, store: Path | None) -> str | None:
    """Return, as a sentence, what differs between two commits, or that it is not known; ``None`` where nothing does."""
    try:
        git(here, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    except GitError:
        return (
            f"the report is of commit {commit}, which this clone does not have (HEAD is {head}); fetch it, the merge commit "
            "of a pull request with `git fetch origin pull/NUMBER/merge`"
        )
    try:
        differing = _differing(commit, here, store)
    except GitError as error:
        return f"the report is of commit {commit}, HEAD is {head}, and git does not say what differs: {error}"
    if not differing:
        return None
    files = ", ".join(differing[:3]) + (", ..." if len(differing) > 3 else "")
    count = counted(len(differing), "file differs", "files differ")
    return f"the report is of commit {commit}, and HEAD, {head}, is another one: {count} ({files})"


def _differing(commit: str, here: Path, store: Path | None) -> list[str]:
    """Return the files that differ between a commit and HEAD, beside those of the store. Raises `GitError`."""
    top = Path(git(here, "rev-parse", "--show-toplevel").rstrip("\n")).resolve()
    paths = [":/"]
    if store is not None and store.resolve() != top and store.resolve().is_relative_to(top):
        paths.append(f":(top,exclude,literal){store.resolve().relative_to(top).as_posix()}")
    names = git(here, "diff-tree", "-r", "-z", "--name-only", "--no-renames", commit, "HEAD", "--", *paths)
    return [name for name in names.split("\0") if name]
