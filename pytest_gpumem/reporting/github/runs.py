"""Ask GitHub about a workflow run and its pull request.

The run's own files could also name the pull request. They are not used, because a fork's code may have written them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pytest_gpumem.base.errors import GitHubError
from pytest_gpumem.reporting.github.comment import persistently

if TYPE_CHECKING:
    from pytest_gpumem.reporting.github.comment import Api


@dataclass(frozen=True, slots=True)
class Head:
    """The commit for which a workflow ran, and its branch as ``"owner:branch"``, for example ``"ada:faster-attention"``."""

    commit: str
    branch: str
    repository: int
    """GitHub's number for the repository that contains the branch, for example a fork."""


@dataclass(frozen=True, slots=True)
class Run:
    """A workflow run. ``head`` is ``None`` if the run was not for a pull request, or if the fork has been deleted since."""

    number: int
    address: str
    failed: bool
    """True if the run has ended without success."""
    head: Head | None


def find_run(api: Api, repository: str, number: int) -> Run:
    """Ask GitHub for the workflow run with a number in a repository (``"owner/name"``). Raises `GitHubError`."""
    plain, _ = persistently(lambda: api.request("GET", f"/repos/{repository}/actions/runs/{number}"))
    try:
        conclusion = plain["conclusion"]
        head = _head(plain) if plain["event"] == "pull_request" else None
        return Run(number, str(plain["html_url"]), conclusion not in (None, "success"), head)
    except (KeyError, TypeError):
        raise GitHubError(f"GitHub's answer on run {number} lacks its event or commit") from None


def _head(plain: Any) -> Head | None:
    fork = plain["head_repository"]
    if fork is None:
        return None
    return Head(str(plain["head_sha"]), f"{fork['owner']['login']}:{plain['head_branch']}", int(fork["id"]))


def pull_request_of_run(api: Api, repository: str, run: Run) -> int | None:
    """Return the number of the open pull request for which the workflow ran, if the run's commit is its newest commit.

    GitHub's answer on a run does not list pull requests from forks, so this function searches the open pull requests by branch.

    Returns:
        The number; ``None`` if no pull request or several pull requests match.

    Raises:
        GitHubError: GitHub refused the request, or is not available.
    """
    head = run.head
    if head is None:
        return None
    path = f"/repos/{repository}/pulls?state=open&per_page=100&head={quote(head.branch, safe='')}"
    pulls = persistently(lambda: list(api.pages(path)))
    try:
        numbers = [
            int(pull["number"])
            for pull in pulls
            if pull["head"]["sha"] == head.commit and (pull["head"]["repo"] or {}).get("id") == head.repository
        ]
    except (KeyError, TypeError):
        raise GitHubError(f"GitHub's answer on pull requests from {head.branch} lacks their commits") from None
    return numbers[0] if len(numbers) == 1 else None
