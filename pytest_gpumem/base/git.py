"""Run git commands in a folder, and read their output."""

from __future__ import annotations

import os
import shlex
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import GitError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

USUAL_BRANCH = "main"
_SET_BY_HOOKS = frozenset(
    f"GIT_{name}"
    for name in ("DIR", "WORK_TREE", "INDEX_FILE", "COMMON_DIR", "PREFIX", "OBJECT_DIRECTORY", "NAMESPACE")
)


@dataclass(frozen=True, slots=True)
class Revision:
    """A name for a commit, such as a branch, with the commit's hash.

    The text of ``Revision("main", "4f2c1a9...")`` is ``"main (4f2c1a9)"``.
    """

    name: str
    """The name as the user typed it: a branch, a tag or a hash."""
    commit: str
    """The full hash."""

    @property
    def short(self) -> str:
        return self.commit[:7]

    def __str__(self) -> str:
        return self.short if self.commit.startswith(self.name) else f"{self.name} ({self.short})"


def plain_environment() -> dict[str, str]:
    """Return ``os.environ`` without the variables that git sets for its hooks, such as ``GIT_DIR``.

    Without these variables, git uses the repository around its current folder, even if a hook started this process.
    """
    return {name: value for name, value in os.environ.items() if name not in _SET_BY_HOOKS}


def git_environment() -> dict[str, str]:
    """Return `plain_environment` with ``GIT_TERMINAL_PROMPT=0``, so git does not ask for a password."""
    return {**plain_environment(), "GIT_TERMINAL_PROMPT": "0"}


def git(folder: Path, *arguments: str) -> str:
    """Run git in ``folder`` and return its output, for example ``git(folder, "rev-parse", "HEAD")``. Raises `GitError`."""
    return _output(folder, arguments).decode("utf-8", "surrogateescape")


def is_shallow(folder: Path) -> bool:
    """Return whether ``folder`` is in a shallow clone, which lacks old commits. Raises `GitError`."""
    return git(folder, "rev-parse", "--is-shallow-repository").strip() == "true"


def commit_of(folder: Path) -> str | None:
    """Return the abbreviated hash of the checked-out commit; ``None`` if git fails or takes more than 10 s."""
    try:
        return _output(folder, ("rev-parse", "--short=9", "HEAD"), seconds=10).decode().strip()
    except GitError:
        return None


def restoring_command(folder: Path) -> str | None:
    """Return the command for restoring a deleted folder: ``git checkout -- gpumem-baselines``.

    Return ``None`` if the path exists, or if git tracks no file in the folder.
    """
    if folder.exists():
        return None
    existing = next(parent for parent in folder.parents if parent.is_dir())
    try:
        deleted = _output(existing, ("ls-files", "--deleted", "--", str(folder)), seconds=10)
    except GitError:
        return None
    return f"git checkout -- {shlex.quote(os.path.relpath(folder))}" if deleted else None


def default_branch(folder: Path) -> str:
    """Return the branch into which changes are merged.

    The result is ``origin``'s default branch. If ``origin`` has none, the result is ``main`` or ``master``. If neither branch
    exists, the result is the checked-out branch.
    """
    with suppress(GitError):
        return git(folder, "symbolic-ref", "--short", "refs/remotes/origin/HEAD").strip().partition("/")[2]
    branches = git(folder, "for-each-ref", "--format=%(refname:lstrip=2)", "refs/heads").split()
    usual = next((branch for branch in (USUAL_BRANCH, "master") if branch in branches), None)
    if usual is not None:
        return usual
    with suppress(GitError):
        return git(folder, "symbolic-ref", "--short", "HEAD").strip()
    return USUAL_BRANCH


def changed_files(folder: Path, base: str) -> frozenset[str] | None:
    """Return the files in ``folder`` that a pull request changes, as paths from ``folder``.

    Args:
        folder: A folder in a checkout of the pull request's branch, or of its merge commit.
        base: The branch into which the pull request is merged. Example: ``main``.

    Returns:
        Paths such as ``tests/test_gpt.py``; ``None`` if the clone has neither the branch ``base`` from ``origin`` nor the
        first parent of the merge commit.
    """
    with suppress(GitError):
        return _differing(folder, f"refs/remotes/origin/{base}...HEAD")
    with suppress(GitError):
        # `actions/checkout` fetches only the merge commit. With `fetch-depth: 2`, it also fetches the merge commit's first
        # parent, which is the tip of `base`.
        git(folder, "rev-parse", "--verify", "--quiet", "HEAD^2")
        return _differing(folder, "HEAD^1", "HEAD")
    return None


def _differing(folder: Path, *revisions: str) -> frozenset[str]:
    names = git(folder, "diff", "--name-only", "--relative", "--no-ext-diff", "-z", *revisions, "--")
    return frozenset(filter(None, names.split("\0")))


def contents(folder: Path, objects: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of blobs (git's objects for files), by object name.

    Args:
        folder: A folder in the checkout.
        objects: The full object names, with 40 or 64 hex digits.

    Raises:
        GitError: git failed, or the clone lacks a blob.
    """
    names = list(dict.fromkeys(objects))
    if not names:
        return {}
    output = _output(folder, ("cat-file", "--batch"), "".join(f"{name}\n" for name in names).encode())
    blobs: dict[str, bytes] = {}
    position = 0
    for name in names:
        # "<name> blob <size>\n<bytes>\n", or "<name> missing\n".
        end = output.index(b"\n", position)
        words = output[position:end].split()
        if len(words) != 3:
            raise GitError(f"object {name} is missing in this clone")
        start, size = end + 1, int(words[2])
        blobs[name] = output[start : start + size]
        position = start + size + 1
    return blobs


def _output(folder: Path, arguments: tuple[str, ...], stdin: bytes = b"", seconds: float | None = None) -> bytes:
    """Return git's standard output. Raises `GitError` if git fails or takes longer than ``seconds``."""
    try:
        process = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=git_environment(),
            # Always pass an input, even if it is empty, because otherwise git may wait for input from the terminal.
            input=stdin,
            capture_output=True,
            check=False,
            start_new_session=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise GitError(f"git {arguments[0]} did not end within {seconds} s") from None
    except OSError as error:
        raise GitError(f"git cannot be run: {error.strerror}") from None
    if process.returncode:
        message = process.stderr.decode("utf-8", "surrogateescape").strip()
        raise GitError(message or f"git {arguments[0]} ended with exit status {process.returncode}")
    return process.stdout
