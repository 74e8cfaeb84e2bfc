"""A run of a workflow, and the pull request that it ran for, by GitHub's word: the run itself may say anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pytest_gpumem.github.comment import GitHubError, persistently

if TYPE_CHECKING:
    from pytest_gpumem.github.comment import Api


@dataclass(frozen=True, slots=True)
class Head:
    """The commit of a pull request, and the branch that it is on: ``branch`` is ``"owner:name"``."""

    commit: str
    branch: str
    repository: int
    """The number of the repository with the branch, which for a fork is the fork's."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a workflow. ``head`` is ``None`` if it ran for no pull request, or the fork is gone."""

    number: int
    address: str
    failed: bool
    """True if the run has ended, and not with success."""
    head: Head | None


def find_run(api: Api, repository: str, number: int) -> Run:
    """Return a run of a repository (``"owner/name"``) by its number. Raises `GitHubError`."""
    plain, _ = persistently(lambda: api.request("GET", f"/repos/{repository}/actions/runs/{number}"))
    try:
        conclusion = plain["conclusion"]
        head = _head(plain) if plain["event"] == "pull_request" else None
        return Run(number, str(plain["html_url"]), conclusion not in (None, "success"), head)
    except (KeyError, TypeError):
        raise GitHubError(f"GitHub does not say what run {number} ran for") from None


def _head(plain: Any) -> Head | None:
    fork = plain["head_repository"]
    if fork is None:
        return None
    return Head(str(plain["head_sha"]), f"{fork['owner']['login']}:{plain['head_branch']}", int(fork["id"]))


def pull_request_of_run(api: Api, repository: str, run: Run) -> int | None:
    """Return the number of the open pull request whose newest commit a run was for; ``None`` if there is not exactly one.

    GitHub names the pull requests of a run only if their branches are in the same repository, so they are looked for by
    branch. Raises `GitHubError`.
    """
    head = run.head
    if head is None:
        return None
    path = f"/repos/{repository}/pulls?state=open&per_page=100&head={quote(head.branch, safe='')}"
    pulls = persistently(lambda: list(api.pages(path)))
    try:
        found = [
            int(pull["number"])
            for pull in pulls
            if pull["head"]["sha"] == head.commit and (pull["head"]["repo"] or {}).get("id") == head.repository
        ]
    except (KeyError, TypeError):
        raise GitHubError(f"GitHub does not say which commits the pull requests of {head.branch} have") from None
    return found[0] if len(found) == 1 else None
