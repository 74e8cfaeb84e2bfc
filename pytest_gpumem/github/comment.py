"""One comment in a pull request, or one issue, that is kept up to date, through GitHub's REST and GraphQL API."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit

from pytest_gpumem.reports.markdown import MOST_OF_A_COMMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from http.client import HTTPMessage
    from pathlib import Path

T = TypeVar("T")
_SECONDS = 30
"""The time in seconds that an answer may take."""
_VERSION = "2022-11-28"
"""The version of the REST API: https://docs.github.com/en/rest/about-the-rest-api/api-versions."""


class GitHubError(Exception):
    """GitHub refused a request; the message says which."""


class NotAllowedError(GitHubError):
    """The token may not do that: 403, as for pull requests from forks, whose token can only read."""


class UnavailableError(GitHubError):
    """GitHub is down, cannot be reached, or limits the rate of requests: it may work later."""

    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after
        """Seconds to wait, where GitHub names them."""


@dataclass(frozen=True, slots=True)
class Api:
    """``url`` and ``graphql_url`` are ``GITHUB_API_URL`` and ``GITHUB_GRAPHQL_URL`` of a job."""

    token: str
    url: str = "https://api.github.com"
    graphql_url: str = "https://api.github.com/graphql"

    def request(self, method: str, path: str, content: Mapping[str, Any] | None = None) -> tuple[Any, str | None]:
        """Return the JSON of an answer, and the address of a list's next page. Raises `GitHubError`.

        ``path`` begins with a slash, or is an address.
        """
        address = path if "://" in path else self.url.rstrip("/") + path
        # The token goes where the job's GitHub is, and nowhere else.
        homes = {urlsplit(self.url)[:2], urlsplit(self.graphql_url)[:2]}
        if urlsplit(address)[:2] not in homes or urlsplit(address).scheme not in ("https", "http"):
            raise GitHubError(f"{address} is not of {self.url}")
        request = urllib.request.Request(  # noqa: S310 -- the scheme was looked at
            address,
            method=method,
            data=None if content is None else json.dumps(content).encode(),
            headers={
                "Accept": "application/vnd.github+json",
                "Authorization": f"Bearer {self.token}",
                "Content-Type": "application/json",
                "User-Agent": "pytest-gpumem",
                "X-GitHub-Api-Version": _VERSION,
            },
        )
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=_SECONDS) as reply:
                text, headers = reply.read(), reply.headers
        except HTTPError as error:
            with error:
                raise _refused(f"{method} {address}", error) from None
        except (OSError, HTTPException) as error:
            raise UnavailableError(f"{method} {address}: {getattr(error, 'reason', error)}") from None
        try:
            return json.loads(text), _next_page(headers.get("Link", ""))
        except ValueError:
            raise UnavailableError(f"{method} {address}: the answer is not JSON") from None

    def pages(self, path: str) -> Iterator[Any]:
        """Yield the elements of a list, on all its pages. Raises `GitHubError`."""
        following: str | None = path
        while following is not None:
            plain, next_page = self.request("GET", following)
            if not isinstance(plain, list):
                raise GitHubError(f"GET {following}: expected a list, got {type(plain).__name__}")
            yield from plain
            following = next_page

    def login(self) -> str:
        """Return the owner of the token: ``github-actions[bot]``. Raises `GitHubError`.

        ``GET /user`` is not for the token of a job, and this is.
        """
        plain, _ = self.request("POST", self.graphql_url, {"query": "query { viewer { login } }"})
        try:
            login = plain["data"]["viewer"]["login"]
        except (KeyError, TypeError):
            raise GitHubError(f"GitHub does not say whose token it is: {_shortened(plain)}") from None
        return str(login)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the token along, or make a GET of a POST."""

    def redirect_request(
        self, req: urllib.request.Request, fp: object, code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


def _refused(what: str, error: HTTPError) -> GitHubError:
    message = f"{what}: {error.code} {_reason(error)}"
    after = error.headers.get("Retry-After", "")
    if error.code >= 500 or error.code == 429 or (error.code == 403 and after):
        return UnavailableError(message, float(after) if after.isdecimal() else None)
    if error.code == 403:
        return NotAllowedError(message)
    if error.code in (301, 302, 307, 308):
        return GitHubError(f"{message}; it has moved to {error.headers.get('Location')}")
    return GitHubError(message)


def _reason(error: HTTPError) -> str:
    """Return GitHub's message on a refusal, on one line."""
    try:
        plain = json.loads(error.read())
        return _shortened(plain["message"])
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return _shortened(error.reason)


def _shortened(plain: object, most: int = 300) -> str:
    text = " ".join(str(plain).split())
    return text if len(text) <= most else f"{text[:most]} ..."


def _next_page(link: str) -> str | None:
    """Return the address with ``rel="next"`` in a ``Link`` header (RFC 8288)."""
    found = re.search(r'<([^>]*)>\s*;[^,<]*\brel="?next\b', link)
    return found[1] if found else None


_WAITS = (1.0, 3.0, 9.0)
"""Seconds before each of the further tries."""
_LONGEST_WAIT = 60.0
MOST_OF_A_TITLE = 256
"""Characters of an issue's title; with more it is refused: ``title is too long (maximum is 256 characters)``."""


@dataclass(frozen=True, slots=True)
class PullRequest:
    """The pull request of a comment: ``repository`` is ``owner/name``."""

    repository: str
    number: int

    @property
    def comments(self) -> str:
        return f"/repos/{self.repository}/issues/{self.number}/comments"


def marker(name: str) -> str:
    """Return the hidden first line of the comment called ``name``, which no name can end early."""
    return f"<!-- pytest-gpumem: {quote(name, safe=' ', errors='backslashreplace').replace('--', '-%2D')} -->"


def room(name: str) -> int:
    """Return how many characters the comment called ``name`` may have beneath its marker."""
    return MOST_OF_A_COMMENT - len(marker(name)) - 1


def pull_request_of_event(file: Path) -> int | None:
    """Return the number of a job's pull request, from the file ``GITHUB_EVENT_PATH``; ``None`` when it has none.

    Raises ``ValueError`` when the file is not an event, and ``OSError``.
    """
    event = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(event, dict):
        raise ValueError(f"{file}: expected an object, got {type(event).__name__}")
    found = event.get("pull_request")
    if found is None:
        # Events of comments name the pull request as an issue.
        issue = event.get("issue")
        found = issue if isinstance(issue, dict) and issue.get("pull_request") else None
    if not isinstance(found, dict):
        return None
    number = found.get("number")
    return number if isinstance(number, int) else None


def put_comment(
    api: Api, where: PullRequest, name: str, body: str, *, sleep: Callable[[float], None] = time.sleep
) -> tuple[bool, str]:
    """Change the comment called ``name``, or make it where there is none; ``body`` has `room`.

    Tried four times while GitHub is unavailable. Each time it is looked for anew: a comment may have been made although the
    answer was lost.

    Returns:
        Whether it is new, and its address.

    Raises:
        GitHubError: GitHub refused it, or is not available.
    """
    return persistently(lambda: _put(api, where, marker(name), _marked(name, body)), sleep)


def put_issue(
    api: Api, repository: str, name: str, title: str, body: str, *, sleep: Callable[[float], None] = time.sleep
) -> tuple[bool, str]:
    """Change the open issue called ``name``, or open it where there is none; as `put_comment`."""
    content = {"title": _text(title)[:MOST_OF_A_TITLE], "body": _marked(name, body)}

    def put() -> tuple[bool, str]:
        mine = _find_issue(api, repository, marker(name))
        if mine is None:
            answer, _ = api.request("POST", f"/repos/{repository}/issues", content)
        else:
            answer, _ = api.request("PATCH", f"/repos/{repository}/issues/{mine}", content)
        return mine is None, _address(answer)

    return persistently(put, sleep)


def close_issue(api: Api, repository: str, name: str, *, sleep: Callable[[float], None] = time.sleep) -> str | None:
    """Close the open issue called ``name``, and return its address; ``None`` where there is none. Raises `GitHubError`."""

    def close() -> str | None:
        mine = _find_issue(api, repository, marker(name))
        if mine is None:
            return None
        closed = {"state": "closed", "state_reason": "completed"}
        return _address(api.request("PATCH", f"/repos/{repository}/issues/{mine}", closed)[0])

    return persistently(close, sleep)


def persistently(put: Callable[[], T], sleep: Callable[[float], None] = time.sleep) -> T:
    """Return what ``put`` returns, tried four times while GitHub is unavailable. Raises `GitHubError`."""
    for wait in _WAITS:
        try:
            return put()
        except UnavailableError as error:
            sleep(min(error.after or wait, _LONGEST_WAIT))
    return put()


def _marked(name: str, body: str) -> str:
    return _text(f"{marker(name)}\n{body}")


def _text(text: str) -> str:
    # Half of a surrogate pair is no text, and GitHub would refuse all of it.
    return text.encode(errors="backslashreplace").decode()


def _put(api: Api, where: PullRequest, first_line: str, text: str) -> tuple[bool, str]:
    mine = _find(api, where, first_line)
    if mine is None:
        answer, _ = api.request("POST", where.comments, {"body": text})
    else:
        answer, _ = api.request("PATCH", f"/repos/{where.repository}/issues/comments/{mine}", {"body": text})
    return mine is None, _address(answer)


def _address(answer: Any) -> str:
    try:
        return str(answer["html_url"])
    except (KeyError, TypeError):
        raise GitHubError("GitHub took the text, and does not say where it is") from None


def _find(api: Api, where: PullRequest, first_line: str) -> int | None:
    """Return the oldest comment of the token's owner that begins with the marker. Others may quote it."""
    mine = _first_of_mine(api, f"{where.comments}?per_page=100", first_line)
    return None if mine is None else int(mine["id"])


def _find_issue(api: Api, repository: str, first_line: str) -> int | None:
    """Return the number of the oldest open issue of the token's owner that begins with the marker."""
    asked = "state=open&sort=created&direction=asc&per_page=100"
    mine = _first_of_mine(api, f"/repos/{repository}/issues?{asked}", first_line)
    return None if mine is None else int(mine["number"])


def _first_of_mine(api: Api, path: str, first_line: str) -> Any:
    login: str | None = None
    for one in api.pages(path):
        # The list of issues has pull requests, too.
        if "pull_request" in one or not str(one.get("body", "")).startswith(first_line):
            continue
        login = login or api.login()
        if (one.get("user") or {}).get("login") == login:
            return one
    return None
