"""Create or update a comment in a pull request, or an issue, through GitHub's REST and GraphQL API.

Each comment or issue has a name such as ``gpumem``. The hidden first line contains this name, so a later run finds the comment
or issue and updates it.
"""

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

from pytest_gpumem.base.errors import GitHubError, NotAllowedError, UnavailableError
from pytest_gpumem.reporting.reports.markdown import COMMENT_LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from http.client import HTTPMessage
    from pathlib import Path

T = TypeVar("T")
_SECONDS = 30
"""Maximum seconds to wait for GitHub's answer to a request."""
_VERSION = "2022-11-28"
"""The version of the REST API: https://docs.github.com/en/rest/about-the-rest-api/api-versions."""


@dataclass(frozen=True, slots=True)
class Api:
    """Access to GitHub's API with a token. In a job, ``GITHUB_API_URL`` and ``GITHUB_GRAPHQL_URL`` contain the addresses."""

    token: str
    url: str = "https://api.github.com"
    graphql_url: str = "https://api.github.com/graphql"

    def request(self, method: str, path: str, content: Mapping[str, Any] | None = None) -> tuple[Any, str | None]:
        """Send a request with the token.

        Args:
            method: The HTTP method, such as ``"PATCH"``.
            path: A path that begins with a slash, or a full address on the API's host.
            content: The request's body, which is sent as JSON.

        Returns:
            The parsed JSON in GitHub's answer. If the answer is a page of a list, also the address of the next page.

        Raises:
            GitHubError: GitHub refused the request or is not available, or ``path`` is an address on another host.
        """
        address = path if "://" in path else self.url.rstrip("/") + path
        # Send the token only to the GitHub server on which the job runs.
        homes = {urlsplit(self.url)[:2], urlsplit(self.graphql_url)[:2]}
        if urlsplit(address)[:2] not in homes or urlsplit(address).scheme not in ("https", "http"):
            raise GitHubError(f"{address} does not belong to {self.url}, so the token is not sent")
        request = urllib.request.Request(  # noqa: S310 -- the scheme was checked above
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
        """Request all pages of a list, and yield the list's elements. Raises `GitHubError`."""
        following: str | None = path
        while following is not None:
            plain, next_page = self.request("GET", following)
            if not isinstance(plain, list):
                raise GitHubError(f"GET {following}: expected a list, got {type(plain).__name__}")
            yield from plain
            following = next_page

    def login(self) -> str:
        """Return the name of the token's owner, such as ``github-actions[bot]``. Raises `GitHubError`.

        The request uses GraphQL, because GitHub refuses ``GET /user`` for a job's token.
        """
        plain, _ = self.request("POST", self.graphql_url, {"query": "query { viewer { login } }"})
        try:
            login = plain["data"]["viewer"]["login"]
        except (KeyError, TypeError):
            raise GitHubError(f"GitHub does not name the token's owner: {_shortened(plain)}") from None
        return str(login)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler that does not follow redirects. A redirect could send the token to another host, or turn a POST into a GET."""

    def redirect_request(
        self, req: urllib.request.Request, fp: object, code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


def _refused(request: str, error: HTTPError) -> GitHubError:
    message = f"{request}: {error.code} {_reason(error)}"
    after = error.headers.get("Retry-After", "")
    if error.code >= 500 or error.code == 429 or (error.code == 403 and after):
        return UnavailableError(message, float(after) if after.isdecimal() else None)
    if error.code == 403:
        return NotAllowedError(message)
    if error.code in (301, 302, 307, 308):
        return GitHubError(f"{message}; it has moved to {error.headers.get('Location')}")
    return GitHubError(message)


def _reason(error: HTTPError) -> str:
    """Return GitHub's message about a refused request, on a single line."""
    try:
        plain = json.loads(error.read())
        return _shortened(plain["message"])
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return _shortened(error.reason)


def _shortened(plain: object, most: int = 300) -> str:
    text = " ".join(str(plain).split())
    return text if len(text) <= most else f"{text[:most]} ..."


def _next_page(link: str) -> str | None:
    """Return the address of the next page from an answer's ``Link`` header (RFC 8288); ``None`` on the last page."""
    match = re.search(r'<([^>]*)>\s*;[^,<]*\brel="?next\b', link)
    return match[1] if match else None


_WAITS = (1.0, 3.0, 9.0)
"""Seconds to wait before a request is sent for the second, third and fourth time."""
_LONGEST_WAIT = 60.0
TITLE_LIMIT = 256
"""Maximum characters in an issue's title. GitHub refuses more: ``title is too long (maximum is 256 characters)``."""


@dataclass(frozen=True, slots=True)
class PullRequest:
    """A pull request, for example number 12 in the ``repository`` ``"owner/name"``."""

    repository: str
    number: int

    @property
    def comments(self) -> str:
        return f"/repos/{self.repository}/issues/{self.number}/comments"


def marker(name: str) -> str:
    """Return the hidden first line of the comment or issue called ``name``.

    A ``--`` in the name is encoded, because HTML could read it as the end of the hidden line.
    """
    return f"<!-- pytest-gpumem: {quote(name, safe=' ', errors='backslashreplace').replace('--', '-%2D')} -->"


def room_in_comment(name: str) -> int:
    """Return how many characters fit into the comment called ``name``, in addition to its hidden first line."""
    return COMMENT_LIMIT - len(marker(name)) - 1


def pull_request_of_event(file: Path) -> int | None:
    """Return the number of the pull request for which a job runs, or ``None`` if the job runs for no pull request.

    Args:
        file: The JSON file that describes the job's event. In a job, ``GITHUB_EVENT_PATH`` contains its path.

    Raises:
        ValueError: The file does not describe an event.
        OSError: The file cannot be read.
    """
    event = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(event, dict):
        raise ValueError(f"{file}: expected an object, got {type(event).__name__}")
    pull_request = event.get("pull_request")
    if pull_request is None:
        # If the event is a comment on a pull request, the event lists this pull request under "issue".
        issue = event.get("issue")
        pull_request = issue if isinstance(issue, dict) and issue.get("pull_request") else None
    if not isinstance(pull_request, dict):
        return None
    number = pull_request.get("number")
    return number if isinstance(number, int) else None


def put_comment(
    api: Api, pull_request: PullRequest, name: str, body: str, *, sleep: Callable[[float], None] = time.sleep
) -> tuple[bool, str]:
    """Update the comment called ``name`` in a pull request, or create the comment if it does not exist.

    If GitHub is unavailable, the function tries again, up to four times in all. Each try searches for the comment first,
    because GitHub may have created the comment in an earlier try although no answer arrived.

    Args:
        api: The access to GitHub's API.
        pull_request: The pull request to comment on.
        name: The comment's name, which its hidden first line contains.
        body: The comment's Markdown. `room_in_comment` returns the maximum number of characters.
        sleep: Waits for the given number of seconds.

    Returns:
        Whether the comment is new, and the comment's address.

    Raises:
        GitHubError: GitHub refused the comment, or is not available.
    """
    return persistently(lambda: _put(api, pull_request, marker(name), _with_marker(name, body)), sleep)


def put_issue(
    api: Api, repository: str, name: str, title: str, body: str, *, sleep: Callable[[float], None] = time.sleep
) -> tuple[bool, str]:
    """Update the open issue called ``name``, or open a new issue. The arguments and results are as in `put_comment`."""
    content = {"title": _text(title)[:TITLE_LIMIT], "body": _with_marker(name, body)}

    def put() -> tuple[bool, str]:
        number = _find_issue(api, repository, marker(name))
        if number is None:
            answer, _ = api.request("POST", f"/repos/{repository}/issues", content)
        else:
            answer, _ = api.request("PATCH", f"/repos/{repository}/issues/{number}", content)
        return number is None, _address(answer)

    return persistently(put, sleep)


def close_issue(api: Api, repository: str, name: str, *, sleep: Callable[[float], None] = time.sleep) -> str | None:
    """Close the open issue called ``name``.

    Returns:
        The address of the closed issue; ``None`` if no open issue has this name.

    Raises:
        GitHubError: GitHub refused the request, or is not available.
    """

    def close() -> str | None:
        number = _find_issue(api, repository, marker(name))
        if number is None:
            return None
        closed = {"state": "closed", "state_reason": "completed"}
        return _address(api.request("PATCH", f"/repos/{repository}/issues/{number}", closed)[0])

    return persistently(close, sleep)


def persistently(put: Callable[[], T], sleep: Callable[[float], None] = time.sleep) -> T:
    """Call ``put`` and return its result. While GitHub is unavailable, call ``put`` again, up to four times in all.

    Raises `GitHubError`.
    """
    for wait in _WAITS:
        try:
            return put()
        except UnavailableError as error:
            sleep(min(error.after or wait, _LONGEST_WAIT))
    return put()


def _with_marker(name: str, body: str) -> str:
    return _text(f"{marker(name)}\n{body}")


def _text(text: str) -> str:
    # Replace lone surrogates, because GitHub would refuse the text.
    return text.encode(errors="backslashreplace").decode()


def _put(api: Api, pull_request: PullRequest, first_line: str, text: str) -> tuple[bool, str]:
    comment_id = _find(api, pull_request, first_line)
    if comment_id is None:
        answer, _ = api.request("POST", pull_request.comments, {"body": text})
    else:
        answer, _ = api.request(
            "PATCH", f"/repos/{pull_request.repository}/issues/comments/{comment_id}", {"body": text}
        )
    return comment_id is None, _address(answer)


def _address(answer: Any) -> str:
    try:
        return str(answer["html_url"])
    except (KeyError, TypeError):
        raise GitHubError(
            "GitHub accepted the text, but its answer does not name the address of the comment or issue"
        ) from None


def _find(api: Api, pull_request: PullRequest, first_line: str) -> int | None:
    """Return the id of the oldest comment that begins with the hidden ``first_line``, or ``None``.

    Only comments by the token's owner count, because other users may quote the line.
    """
    comment = _first_own_post(api, f"{pull_request.comments}?per_page=100", first_line)
    return None if comment is None else int(comment["id"])


def _find_issue(api: Api, repository: str, first_line: str) -> int | None:
    """Return the number of the oldest open issue that begins with the hidden ``first_line``, or ``None``.

    Only issues by the token's owner count, because other users may quote the line.
    """
    query = "state=open&sort=created&direction=asc&per_page=100"
    issue = _first_own_post(api, f"/repos/{repository}/issues?{query}", first_line)
    return None if issue is None else int(issue["number"])


def _first_own_post(api: Api, path: str, first_line: str) -> Any:
    login: str | None = None
    for post in api.pages(path):
        # Skip pull requests, because GitHub lists them among the issues.
        if "pull_request" in post or not str(post.get("body", "")).startswith(first_line):
            continue
        login = login or api.login()
        if (post.get("user") or {}).get("login") == login:
            return post
    return None
