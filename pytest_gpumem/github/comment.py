"""One comment in a pull request that is kept up to date: found again by a hidden marker, and by who wrote it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from pytest_gpumem.github.api import GitHubError, UnavailableError
from pytest_gpumem.reports.markdown import MOST_OF_A_COMMENT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pytest_gpumem.github.api import Api

_WAITS = (1.0, 3.0, 9.0)
"""Seconds before each of the further tries."""
_LONGEST_WAIT = 60.0


@dataclass(frozen=True, slots=True)
class PullRequest:
    """Where the comment stands: ``repository`` is ``owner/name``."""

    repository: str
    number: int

    @property
    def comments(self) -> str:
        return f"/repos/{self.repository}/issues/{self.number}/comments"


@dataclass(frozen=True, slots=True)
class Done:
    """What became of the comment, and its address."""

    made: bool
    """Whether it is new; otherwise it was there, and has been changed."""
    address: str


def marker(name: str) -> str:
    """The first line of the comment called ``name``, which is not shown. Whatever the name is, it cannot end early."""
    return f"<!-- pytest-gpumem: {quote(name, safe=' ', errors='backslashreplace').replace('--', '-%2D')} -->"


def room(name: str) -> int:
    """How many characters the comment called ``name`` may have beneath its marker."""
    return MOST_OF_A_COMMENT - len(marker(name)) - 1


def pull_request_of_event(file: Path) -> int | None:
    """The number of the pull request that a job runs for, from the file ``GITHUB_EVENT_PATH``; ``None`` when it is for none.

    Raises ``ValueError`` when the file is not an event, and ``OSError``.
    """
    event = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(event, dict):
        raise ValueError(f"{file}: expected an object, got {type(event).__name__}")
    found = event.get("pull_request")
    if found is None:
        # A comment in a pull request is an event of the issue that it is as well.
        issue = event.get("issue")
        found = issue if isinstance(issue, dict) and issue.get("pull_request") else None
    if not isinstance(found, dict):
        return None
    number = found.get("number")
    return number if isinstance(number, int) else None


def put_comment(
    api: Api, where: PullRequest, name: str, body: str, *, sleep: Callable[[float], None] = time.sleep
) -> Done:
    """Change the comment called ``name``, or make it where there is none; ``body`` has `room`. Raises `GitHubError`.

    Tried four times while GitHub is unavailable. Each time it is looked for anew: a comment may have been made although the
    answer was lost.
    """
    # Half of a surrogate pair is no text, and GitHub would refuse all of it.
    text = f"{marker(name)}\n{body}".encode(errors="backslashreplace").decode()
    for wait in _WAITS:
        try:
            return _put(api, where, marker(name), text)
        except UnavailableError as error:
            sleep(min(error.after or wait, _LONGEST_WAIT))
    return _put(api, where, marker(name), text)


def _put(api: Api, where: PullRequest, first_line: str, text: str) -> Done:
    mine = _find(api, where, first_line)
    if mine is None:
        answer = api.request("POST", where.comments, {"body": text})
    else:
        answer = api.request("PATCH", f"/repos/{where.repository}/issues/comments/{mine}", {"body": text})
    try:
        return Done(mine is None, str(answer.plain["html_url"]))
    except (KeyError, TypeError):
        raise GitHubError("GitHub took the comment, and does not say where it is") from None


def _find(api: Api, where: PullRequest, first_line: str) -> int | None:
    """The oldest comment of the token's owner that begins with the marker. Others may quote it."""
    login: str | None = None
    for comment in api.pages(f"{where.comments}?per_page=100"):
        if not str(comment.get("body", "")).startswith(first_line):
            continue
        login = login or api.login()
        author = (comment.get("user") or {}).get("login")
        if author == login:
            return int(comment["id"])
    return None
