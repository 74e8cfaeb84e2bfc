"""Compare a report's commit with the checked-out commit."""

from __future__ import annotations

from pathlib import Path

from pytest_gpumem.base.errors import GitError
from pytest_gpumem.base.git import commit_of, git
from pytest_gpumem.base.units import counted


def why_other_commit(commit: str | None, checkout: Path, store: Path | None) -> str | None:
    """Return a sentence if a report did not measure the checked-out code; otherwise ``None``.

    Two commits have the same code if all files outside the store are equal. For example, the merge commit of an up-to-date
    pull request has the same code as its branch.

    Args:
        commit: The report's commit, an abbreviated hash.
        checkout: A folder in the checkout.
        store: The store's folder; ``None`` for a store in a bucket.
    """
    head = commit_of(checkout)
    if commit is None:
        return None if head is None else f"the report does not name its commit, and HEAD is {head}"
    if head is None:
        return (
            f"the report comes from commit {commit}, but the commit of {checkout} is unknown: it is not in a git repository, "
            "or git does not answer"
        )
    if head.startswith(commit) or commit.startswith(head):
        return None
    return _difference(commit, head, checkout, store)


def _difference(commit: str, head: str, checkout: Path, store: Path | None) -> str | None:
    """Return a sentence if two commits differ, or if git cannot compare them; ``None`` if the commits are equal."""
    try:
        git(checkout, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    except GitError:
        return (
            f"the report comes from commit {commit}, which this clone does not have (HEAD is {head}); fetch it, or for "
            "the merge commit of a pull request run `git fetch origin pull/NUMBER/merge`"
        )
    try:
        differing = _differing(commit, checkout, store)
    except GitError as error:
        return f"the report comes from commit {commit}, HEAD is {head}, and git cannot compare them: {error}"
    if not differing:
        return None
    files = ", ".join(differing[:3]) + (", ..." if len(differing) > 3 else "")
    count = counted(len(differing), "file differs", "files differ")
    return f"the report comes from commit {commit}, but HEAD is {head}: {count} ({files})"


def _differing(commit: str, checkout: Path, store: Path | None) -> list[str]:
    """Return the files outside the store with differences between a commit and HEAD.

    Raises:
        GitError: Git failed.
    """
    top = Path(git(checkout, "rev-parse", "--show-toplevel").rstrip("\n")).resolve()
    paths = [":/"]
    if store is not None and store.resolve() != top and store.resolve().is_relative_to(top):
        paths.append(f":(top,exclude,literal){store.resolve().relative_to(top).as_posix()}")
    names = git(checkout, "diff-tree", "-r", "-z", "--name-only", "--no-renames", commit, "HEAD", "--", *paths)
    return [name for name in names.split("\0") if name]
