"""A GitHub of our own on this machine: one pull request's comments, and issues, as the REST API gives, takes and refuses them."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlencode, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

ME = "github-actions[bot]"
REPOSITORY = "someone/project"
NUMBER = 7
ISSUES = f"/repos/{REPOSITORY}/issues"
COMMENTS = f"{ISSUES}/{NUMBER}/comments"
PULLS = f"/repos/{REPOSITORY}/pulls"
RUNS = f"/repos/{REPOSITORY}/actions/runs"
TOKEN = "a-token"
LIMIT = 65_536
LONGEST_TITLE = 256


@dataclass
class FakeGitHub:
    """``wrong`` are answers to give first, as (method, status, headers); with ``after``, when the request was carried out."""

    url: str
    comments: list[dict[str, Any]] = field(default_factory=list)
    issues: list[dict[str, Any]] = field(default_factory=list)
    runs: dict[int, dict[str, Any]] = field(default_factory=dict)
    pulls: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[tuple[str, int, dict[str, str]]] = field(default_factory=list)
    after: bool = False
    read_only: bool = False
    requests: list[tuple[str, str]] = field(default_factory=list)
    page: int = 2
    """How many comments a page has, whatever is asked for: the pages have to be followed."""

    def add(self, body: str, login: str = ME) -> int:
        number = 100 + len(self.comments)
        address = f"https://github.com/{REPOSITORY}/pull/{NUMBER}#issuecomment-{number}"
        self.comments.append({"id": number, "body": body, "user": {"login": login}, "html_url": address})
        return number

    def open(self, body: str, login: str = ME, title: str = "", **more: Any) -> int:
        """Open an issue, and return its number."""
        number = 20 + len(self.issues)
        address = f"https://github.com/{REPOSITORY}/issues/{number}"
        known = {"number": number, "title": title, "body": body, "state": "open", "user": {"login": login}}
        self.issues.append({**known, "html_url": address, **more})
        return number

    def run(self, number: int = 77, *, fork: str = "stranger", **more: Any) -> None:
        """Add a run for the newest commit of pull request `NUMBER`, whose branch is in a fork of somebody."""
        repository = {"id": 5, "owner": {"login": fork}}
        known = {"event": "pull_request", "head_sha": "c0ffee", "head_branch": "topic/a&b", "conclusion": "success"}
        address = f"https://github.com/{REPOSITORY}/actions/runs/{number}"
        self.runs[number] = {**known, "head_repository": repository, "html_url": address, **more}
        if not self.pulls:
            self.pull(NUMBER, fork=fork)

    def pull(self, number: int, *, fork: str = "stranger", sha: str = "c0ffee", repository: int = 5) -> None:
        """Open a pull request from a branch of somebody's fork."""
        head = {"label": f"{fork}:topic/a&b", "sha": sha, "repo": {"id": repository}}
        self.pulls.append({"number": number, "state": "open", "head": head})

    @property
    def written(self) -> list[str]:
        """The methods of the requests that wanted to change a comment."""
        return [method for method, path in self.requests if method in ("POST", "PATCH") and path != "/graphql"]

    def environment(self) -> dict[str, str]:
        """What a job's steps are told of where they run. No proxy lies between."""
        return {
            "GITHUB_API_URL": self.url,
            "GITHUB_GRAPHQL_URL": f"{self.url}/graphql",
            "GITHUB_REPOSITORY": REPOSITORY,
            "GITHUB_TOKEN": TOKEN,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }


@contextmanager
def fake_github() -> Iterator[FakeGitHub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.github = FakeGitHub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.github
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _query(asked: dict[str, list[str]], page: int) -> str:
    return urlencode({**{name: values[0] for name, values in asked.items()}, "page": page})


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Nobody reads it."""

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def do_PATCH(self) -> None:
        self.answer()

    def answer(self) -> None:
        github: FakeGitHub = self.server.github
        address = urlsplit(self.path)
        content = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
        github.requests.append((self.command, address.path))
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.reply(401, {"message": "Bad credentials"})
        wrong = next((one for one in github.wrong if one[0] == self.command), None)
        if wrong is not None:
            github.wrong.remove(wrong)
            if github.after:
                self.carry_out(github, address, content)
            return self.reply(wrong[1], {"message": "not now"}, wrong[2])
        return self.reply(*self.carry_out(github, address, content))

    def carry_out(self, github: FakeGitHub, address: Any, content: Any) -> tuple[Any, ...]:
        if address.path == "/graphql":
            return 200, {"data": {"viewer": {"login": ME}}}
        if self.command == "GET" and address.path.startswith(f"{RUNS}/"):
            run = github.runs.get(int(address.path.removeprefix(f"{RUNS}/")))
            return (200, run) if run is not None else (404, {"message": "Not Found"})
        if self.command == "GET" and address.path in (COMMENTS, ISSUES, PULLS):
            asked = parse_qs(address.query)
            listed = github.comments
            if address.path == PULLS:
                listed = [one for one in github.pulls if [one["head"]["label"]] == asked["head"]]
            if address.path == ISSUES:
                listed = [one for one in github.issues if one["state"] == asked.get("state", ["open"])[0]]
            number = int(asked.get("page", ["1"])[0])
            last = max(-(-len(listed) // github.page), 1)
            links = [("prev", number - 1), ("next", number + 1), ("last", last)]
            link = ", ".join(
                f'<{github.url}{address.path}?{_query(asked, page)}>; rel="{rel}"'
                for rel, page in links
                if 1 <= page <= last and not (rel == "last" and number == last)
            )
            return 200, listed[(number - 1) * github.page :][: github.page], {"Link": link} if link else {}
        if github.read_only:
            return 403, {"message": "Resource not accessible by integration"}
        return self.write(github, address, content)

    def write(self, github: FakeGitHub, address: Any, content: dict[str, Any]) -> tuple[Any, ...]:
        body = content.get("body", "")
        if len(body) > LIMIT or len(content.get("title", "")) > LONGEST_TITLE:
            return 422, {"message": "Validation Failed"}
        if self.command == "POST" and address.path == ISSUES:
            github.open(**content)
            return 201, github.issues[-1]
        for issue in github.issues:
            if (self.command, address.path) == ("PATCH", f"{ISSUES}/{issue['number']}"):
                issue.update(content)
                return 200, issue
        if self.command == "POST" and address.path == COMMENTS:
            github.add(body)
            return 201, github.comments[-1]
        for comment in github.comments:
            if (self.command, address.path) == ("PATCH", f"/repos/{REPOSITORY}/issues/comments/{comment['id']}"):
                comment["body"] = body
                return 200, comment
        return 404, {"message": "Not Found"}

    def reply(self, status: int, plain: Any, headers: dict[str, str] | None = None) -> None:
        text = json.dumps(plain).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(text))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)
