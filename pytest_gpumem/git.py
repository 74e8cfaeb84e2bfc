"""Commands of git in a folder: one command and its output, or the contents of many objects at once."""

from __future__ import annotations

import os
import shlex
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

USUAL_BRANCH = "main"
_SET_BY_HOOKS = frozenset(
    f"GIT_{name}"
    for name in ("DIR", "WORK_TREE", "INDEX_FILE", "COMMON_DIR", "PREFIX", "OBJECT_DIRECTORY", "NAMESPACE")
)


class GitError(Exception):
    """A git command failed; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Revision:
    """A revision as it was named, and the full hash of its commit."""

    name: str
    commit: str

    @property
    def short(self) -> str:
        return self.commit[:7]

    def __str__(self) -> str:
        return self.short if self.commit.startswith(self.name) else f"{self.name} ({self.short})"


def plain_environment() -> dict[str, str]:
    """Return the environment without the variables of a git hook, so that git goes by the folder it runs in."""
    return {name: value for name, value in os.environ.items() if name not in _SET_BY_HOOKS}


def git_environment() -> dict[str, str]:
    """Return `plain_environment`, in which git does not prompt for a password."""
    return {**plain_environment(), "GIT_TERMINAL_PROMPT": "0"}


def git(folder: Path, *arguments: str) -> str:
    """Return git's output. Raises `GitError`."""
    return _answer(folder, arguments).decode("utf-8", "surrogateescape")


def is_shallow(folder: Path) -> bool:
    """Return whether the clone that ``folder`` is in lacks old commits. Raises `GitError`."""
    return git(folder, "rev-parse", "--is-shallow-repository").strip() == "true"


def commit_of(folder: Path) -> str | None:
    """Return the abbreviated hash of the commit checked out in ``folder``; ``None`` where git does not say it within 10 s."""
    try:
        return _answer(folder, ("rev-parse", "--short=9", "HEAD"), seconds=10).decode().strip()
    except GitError:
        return None


def restoring_command(folder: Path) -> str | None:
    """Return the command that restores a folder that is gone and that git knows: ``git checkout -- gpumem-baselines``.

    Return ``None`` if git knows no file in it, or something is there.
    """
    if folder.exists():
        return None
    there = next(parent for parent in folder.parents if parent.is_dir())
    try:
        deleted = _answer(there, ("ls-files", "--deleted", "--", str(folder)), seconds=10)
    except GitError:
        return None
    return f"git checkout -- {shlex.quote(os.path.relpath(folder))}" if deleted else None


def default_branch(folder: Path) -> str:
    """Return the branch that changes go to: the remote ``origin``'s, else ``main`` or ``master``, else what is checked out."""
    with suppress(GitError):
        return git(folder, "symbolic-ref", "--short", "refs/remotes/origin/HEAD").strip().partition("/")[2]
    branches = git(folder, "for-each-ref", "--format=%(refname:lstrip=2)", "refs/heads").split()
    usual = next((one for one in (USUAL_BRANCH, "master") if one in branches), None)
    if usual is not None:
        return usual
    with suppress(GitError):
        return git(folder, "symbolic-ref", "--short", "HEAD").strip()
    return USUAL_BRANCH


def changed_files(folder: Path, base: str) -> frozenset[str] | None:
    """Return the files in a pull request's diff, relative to ``folder``; files outside ``folder`` are left out.

    Args:
        folder: A folder in a checkout of the pull request's branch, or of its merge into ``base``.
        base: The branch to merge into. Example: ``main``.

    Returns:
        ``None`` if the clone has neither that branch of ``origin`` nor the merge's first parent.
    """
    with suppress(GitError):
        return _differing(folder, f"refs/remotes/origin/{base}...HEAD")
    with suppress(GitError):
        # `actions/checkout` fetches the merge alone, whose first parent is the branch. With `fetch-depth: 2` that is there.
        git(folder, "rev-parse", "--verify", "--quiet", "HEAD^2")
        return _differing(folder, "HEAD^1", "HEAD")
    return None


def _differing(folder: Path, *revisions: str) -> frozenset[str]:
    names = git(folder, "diff", "--name-only", "--relative", "--no-ext-diff", "-z", *revisions, "--")
    return frozenset(filter(None, names.split("\0")))


def contents(folder: Path, objects: Iterable[str]) -> dict[str, bytes]:
    """Return the bytes of each of the blobs with these full names (40 or 64 hex digits). Raises `GitError`."""
    names = list(dict.fromkeys(objects))
    if not names:
        return {}
    answer = _answer(folder, ("cat-file", "--batch"), "".join(f"{name}\n" for name in names).encode())
    found: dict[str, bytes] = {}
    position = 0
    for name in names:
        # "<name> blob <size>\n<bytes>\n", or "<name> missing\n".
        end = answer.index(b"\n", position)
        words = answer[position:end].split()
        if len(words) != 3:
            raise GitError(f"object {name} is missing in this clone")
        start, size = end + 1, int(words[2])
        found[name] = answer[start : start + size]
        position = start + size + 1
    return found


def _answer(folder: Path, arguments: tuple[str, ...], given: bytes = b"", seconds: float | None = None) -> bytes:
    try:
        answer = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=git_environment(),
            # Empty where nothing is given: git must not wait for a terminal.
            input=given,
            capture_output=True,
            check=False,
            start_new_session=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise GitError(f"git {arguments[0]} did not end within {seconds} s") from None
    except OSError as error:
        raise GitError(f"git cannot be run: {error.strerror}") from None
    if answer.returncode:
        message = answer.stderr.decode("utf-8", "surrogateescape").strip()
        raise GitError(message or f"git {arguments[0]} ended with exit status {answer.returncode}")
    return answer.stdout
