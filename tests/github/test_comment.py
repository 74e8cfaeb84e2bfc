"""The comment in a pull request: found again among all others, changed in place, tried again, and owed by nobody."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from click.testing import CliRunner

from pytest_gpumem.base.errors import GitHubError, NotAllowedError, UnavailableError
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.reporting.github.comment import (
    Api,
    PullRequest,
    marker,
    pull_request_of_event,
    put_comment,
    room_in_comment,
)
from pytest_gpumem.reporting.reports.json_report import to_json
from pytest_gpumem.reporting.reports.session_report import SessionReport, Terms
from pytest_gpumem.tools.main import main
from tests.fake_github import LIMIT, ME, NUMBER, REPOSITORY, TOKEN, FakeGitHub, fake_github
from tests.hostile import ALL, TEXTS
from tests.reports.sessions import OK, REGRESSED, measured, peak, result, session

HERE = PullRequest(REPOSITORY, NUMBER)
MINE = marker("gpumem")


@pytest.fixture(scope="module")
def server():
    with fake_github() as github:
        yield github


@pytest.fixture
def github(server, monkeypatch):
    """The server with nothing in it, and the environment of a job that talks to it."""
    server.__init__(server.url)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    for name in ("GITHUB_EVENT_PATH", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    return server


def api(github: FakeGitHub, token: str = TOKEN) -> Api:
    return Api(token, github.url, f"{github.url}/graphql")


def put(github: FakeGitHub, body: str = "now", name: str = "gpumem", token: str = TOKEN):
    """The comment, and how long it was waited before each further try."""
    waited: list[float] = []
    done = put_comment(api(github, token), HERE, name, body, sleep=waited.append)
    return done, waited


def test_the_first_run_makes_a_comment_and_the_next_one_changes_it(github):
    made, _ = put(github, "red")
    changed, _ = put(github, "green")
    assert (made[0], changed[0]) == (True, False)
    assert made[1] == changed[1] == github.comments[0]["html_url"]
    assert [comment["body"] for comment in github.comments] == [f"{MINE}\ngreen"]


def test_the_comment_is_found_on_the_last_page(github):
    for number in range(6):
        github.add(f"comment {number}")
    github.add(f"{MINE}\nold")
    assert not put(github)[0][0]
    assert github.comments[-1]["body"] == f"{MINE}\nnow"


@pytest.mark.parametrize(
    ("body", "login"),
    [
        pytest.param(f"{MINE}\nold", "somebody", id="of somebody else"),
        pytest.param(f"> {MINE}\n> old\n\nWhat is this?", ME, id="that quotes it"),
        pytest.param(f"{marker('gpumem-h100')}\nold", ME, id="of another name"),
    ],
)
def test_a_comment_is_left_alone(github, body, login):
    github.add(body, login)
    assert put(github)[0][0]
    assert [comment["body"] for comment in github.comments] == [body, f"{MINE}\nnow"]


def test_a_comment_without_an_author_or_text_is_passed_over(github):
    github.comments += [{"id": 1, "body": None, "user": None}, {"id": 2, "body": f"{MINE}\nold", "user": None}]
    assert put(github)[0][0]


@pytest.mark.parametrize("method", ["GET", "POST", "PATCH"])
def test_what_fails_once_is_tried_again(github, method):
    if method == "PATCH":
        github.add(f"{MINE}\nold")
    github.wrong = [(method, 502, {})]
    _, waited = put(github)
    assert waited == [1.0]
    assert [comment["body"] for comment in github.comments] == [f"{MINE}\nnow"]


def test_a_comment_that_was_made_although_the_answer_was_lost_is_not_made_twice(github):
    github.wrong, github.after = [("POST", 502, {})], True
    put(github)
    assert len(github.comments) == 1


def test_github_says_how_long_to_wait(github):
    github.wrong = [("POST", 403, {"Retry-After": "7"}), ("POST", 429, {"Retry-After": "86400"})]
    _, waited = put(github)
    assert waited == [7.0, 60.0]


def test_a_github_that_stays_down_is_given_up(github):
    github.wrong = [("GET", 503, {})] * 9
    with pytest.raises(UnavailableError, match="503 not now"):
        put(github)
    assert len(github.wrong) == 5


def test_a_github_that_cannot_be_reached_is_told(github):
    with fake_github() as gone:
        pass
    with pytest.raises(UnavailableError, match="refused"):
        put(gone)


def test_a_token_that_may_only_read_is_an_error_of_its_own_and_not_tried_again(github):
    github.read_only = True
    with pytest.raises(NotAllowedError, match="403 Resource not accessible by integration"):
        put(github)
    assert github.written == ["POST"]


def test_a_wrong_token_is_not_tried_again(github):
    with pytest.raises(GitHubError, match="401 Bad credentials"):
        put(github, token="another")
    assert len(github.requests) == 1


@pytest.mark.parametrize("status", [302, 308])
def test_the_token_is_not_taken_elsewhere(github, status):
    with fake_github() as elsewhere:
        github.wrong = [("POST", status, {"Location": f"{elsewhere.url}/"})]
        with pytest.raises(GitHubError, match=f"{status} .*moved to {elsewhere.url}"):
            put(github)
        assert elsewhere.requests == []
        with pytest.raises(GitHubError, match="does not belong to"):
            api(github).request("GET", f"{elsewhere.url}/repos")
        with pytest.raises(GitHubError, match="does not belong to"):
            api(github).request("GET", "file:///etc/hostname")
        assert elsewhere.requests == []


@pytest.mark.parametrize("name", ["gpumem", "--> <script>", "a -- b --- c ->", "", ALL])
def test_a_marker_is_one_hidden_line_whatever_the_name(name):
    line = marker(name)
    assert re.fullmatch(r"<!-- pytest-gpumem: [^\n<>]* -->", line)
    assert "--" not in line[4:-3]
    assert line.isascii()


def test_names_have_markers_of_their_own():
    names = ["a", "A", "a b", "a-b", "a--b", "a%2Db", "a-%2Db", *TEXTS.values()]
    assert len({marker(name) for name in names}) == len(set(names))


EVENTS = {
    "a pull request": ({"pull_request": {"number": 7}}, 7),
    "a comment in one": ({"issue": {"number": 7, "pull_request": {"url": "..."}}}, 7),
    "an issue": ({"issue": {"number": 7}}, None),
    "a push": ({"ref": "refs/heads/main"}, None),
}


@pytest.mark.parametrize("event", EVENTS)
def test_the_pull_request_is_that_of_the_event(event, tmp_path):
    plain, number = EVENTS[event]
    file = tmp_path / "event.json"
    file.write_text(json.dumps(plain))
    assert pull_request_of_event(file) == number


REPORT = SessionReport("2026-11-21T16:20:05Z", "0.1.0", "abc1234", Terms(baseline=True))


@pytest.fixture
def run(github, tmp_path, monkeypatch):
    """`gpumem comment` in a job for the pull request, in a folder with reports."""
    (tmp_path / "gpumem.json").write_text(to_json(REPORT))
    (tmp_path / "gpumem.md").write_text("**all is well**\n")
    (tmp_path / "event.json").write_text(json.dumps(EVENTS["a pull request"][0]))
    monkeypatch.setenv("GITHUB_EVENT_PATH", str(tmp_path / "event.json"))
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(main, ["comment", *arguments])


def test_the_report_of_a_session_is_put_with_a_link_to_all_of_it(run, github):
    done = run("gpumem.json", "--link", "https://github.com/a/b/actions/runs/1/artifacts/2")
    assert done.exit_code == 0, done.output
    assert done.output == f"made {github.comments[0]['html_url']}\n"
    text = github.comments[0]["body"]
    assert text.startswith(f"{MINE}\n")
    assert "gated nothing" in text
    assert text.endswith("\n[The whole report](https://github.com/a/b/actions/runs/1/artifacts/2)\n")


def test_what_baselines_made_fail_comes_with_the_commands_that_accept_it(run, github, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_RUN_ID", "77")
    (tmp_path / "red.json").write_text(to_json(session(replace_accept(REGRESSED), OK)))
    (tmp_path / "own.json").write_text(to_json(session(replace_accept(REGRESSED, ""), OK)))
    assert run("red.json", "--artifact", "H100 job", "--link", "https://a.b/c").exit_code == 0
    assert run("red.json", "--name", "none").exit_code == 0
    assert run("own.json", "--name", "own", "--artifact", "gpumem").exit_code == 0
    assert run("gpumem.md", "--name", "text", "--artifact", "gpumem").exit_code == 0
    (tmp_path / "new.json").write_text(
        to_json(session(result(measured(peak(Outcome.NEW))), errors=("it compared nothing",)))
    )
    assert run("new.json", "--name", "new", "--artifact", "H100's `$(y)`").exit_code == 0
    red, *others, new = (one["body"] for one in github.comments)
    # Where there are no baselines yet, nothing was gated.
    assert "gh run download 77 --name 'H100'\"'\"'s `$(y)`' --dir gpumem-77\n" in new
    assert (
        "```text\n"
        "git fetch origin pull/7/merge\n"
        "gh run download 77 --name 'H100 job' --dir gpumem-77\n"
        'gpumem accept gpumem-77/red.json --reason "..."\n'
        "```" in red
    )
    assert red.endswith("\n[The whole report](https://a.b/c)\n")
    assert len(others) == 3
    assert not any("gpumem accept" in one for one in others)


def replace_accept(result, command="pytest --gpumem-update=all"):
    return replace(result, verdict=replace(result.verdict, accept=command or None))


def test_markdown_is_put_as_it_is_under_the_name_of_the_comment(run, github):
    assert run("gpumem.md", "--name", "H100 | <b>").exit_code == 0
    assert github.comments[0]["body"] == f"{marker('H100 | <b>')}\n**H100 \\| &lt;b&gt;**\n\n**all is well**\n"


def test_markdown_that_is_too_long_is_refused_before_github_does(run, github, tmp_path):
    (tmp_path / "gpumem.md").write_text("é" * (room_in_comment("gpumem") + 1))
    done = run("gpumem.md")
    assert done.exit_code == 2
    assert "but only 65,505 more fit into the comment" in done.output
    assert github.requests == []
    (tmp_path / "gpumem.md").write_text("é" * room_in_comment("gpumem"))
    assert run("gpumem.md").exit_code == 0
    assert len(github.comments[0]["body"]) == LIMIT


def test_a_token_that_may_only_read_fails_nothing_and_is_said(run, github, monkeypatch):
    github.read_only = True
    done = run("gpumem.md")
    assert done.exit_code == 0
    assert done.output.startswith("gpumem: no comment was written, because the token may not write comments")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert run("gpumem.md").output.startswith("::notice title=gpumem::no comment was written")


def test_a_job_for_no_pull_request_fails_nothing_and_says_so(run, github, tmp_path):
    (tmp_path / "event.json").write_text(json.dumps({"ref": "refs/heads/main"}))
    done = run("gpumem.md")
    assert (done.exit_code, done.output) == (
        0,
        "gpumem: there is no comment, because this job runs for no pull request\n",
    )
    assert run("gpumem.md", "--pull-request", str(NUMBER)).exit_code == 0
    assert len(github.comments) == 1


def test_what_github_refuses_is_an_error(run, github):
    github.wrong = [("POST", 422, {})]
    done = run("gpumem.md")
    assert done.exit_code == 1
    assert done.output.startswith("Error: the comment could not be written: POST ")
    assert "422 not now" in done.output


def test_an_issue_is_opened_changed_and_closed_by_its_name_and_another_one_follows(run, github):
    github.add(f"{MINE}\na comment")
    for login, body in (("somebody", f"{MINE}\nold"), (ME, f"> {MINE}"), (ME, f"{marker('other')}\nold")):
        github.open(body, login)
    github.open(f"{MINE}\na pull request", pull_request={"url": "..."})
    opened = run("gpumem.md", "--issue", "open", "--title", "transformers 4.38.0 did it", "--link", "https://a.b/c")
    assert opened.output == f"made {github.issues[-1]['html_url']}\n"
    assert github.issues[-1]["title"] == "gpumem: transformers 4.38.0 did it"
    assert github.issues[-1]["body"] == f"{MINE}\n**all is well**\n\n[The whole report](https://a.b/c)\n"
    changed = run("gpumem.json", "gpumem.md", "--issue", "open", "--title", "x" * 300)
    assert changed.output == f"changed {github.issues[-1]['html_url']}\n"
    assert len(github.issues[-1]["title"]) == 256
    assert github.issues[-1]["body"].index("gated nothing") < github.issues[-1]["body"].index("all is well")
    assert run("gpumem.md", "--issue", "closed").output == f"closed {github.issues[-1]['html_url']}\n"
    assert [one["state"] for one in github.issues] == [*["open"] * 4, "closed"]
    assert run("gpumem.md", "--issue", "closed").output == "there is no open issue to close\n"
    assert run("gpumem.md", "--issue", "open").output.startswith("made ")
    assert len(github.comments) == 1


@pytest.mark.parametrize("state", ["open", "closed"])
def test_a_token_that_may_write_no_issue_fails_nothing_and_is_said(run, github, state):
    github.open(f"{MINE}\nold")
    github.read_only = True
    done = run("gpumem.md", "--issue", state)
    assert done.exit_code == 0
    assert done.output.startswith(
        "gpumem: no issue was written, because the token may not write issues: give the job the permission"
    )


def test_an_issue_that_github_refuses_is_an_error(run, github):
    github.wrong = [("POST", 410, {})]
    done = run("gpumem.md", "--issue", "open")
    assert done.exit_code == 1
    assert done.output.startswith("Error: the issue could not be written: POST ")


WRONG = {
    "no token": (["gpumem.md"], "GITHUB_TOKEN", "GITHUB_TOKEN is not set"),
    "no repository": (["gpumem.md"], "GITHUB_REPOSITORY", "give --repository OWNER/NAME"),
    "no event": (["gpumem.md"], "GITHUB_EVENT_PATH", "give --pull-request NUMBER"),
    "another repository": (["gpumem.md", "--repository=../user"], "", "is not a repository"),
    "a name that is a text": (["gpumem.md", f"--name={'x' * 101}"], "", "has 101 characters"),
    "a link that is none": (["gpumem.md", "--link=javascript:alert(1)"], "", "is not a web address"),
    "a file that is no report": (["event.json"], "", "event.json"),
    "an issue in a pull request": (["gpumem.md", "--issue=open", "--pull-request=7"], "", "exclude each other"),
    "neither open nor closed": (["gpumem.md", "--issue=gone"], "", "'gone' is not one of 'open', 'closed'"),
    "a file that is not there": (["gone.json"], "", "'gone.json' does not exist"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_told_and_github_is_not_asked(run, github, monkeypatch, case):
    arguments, missing, said = WRONG[case]
    if missing:
        monkeypatch.delenv(missing)
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in done.output
    assert github.requests == []


# Reports of another run, which may be a stranger's


@pytest.fixture
def other(run, github, tmp_path):
    """`gpumem comment --run 77` in a job that runs for no pull request and has the reports of one that does."""
    (tmp_path / "event.json").write_text(json.dumps({"workflow_run": {"id": 77}}))
    return lambda *arguments: run("--run", "77", *arguments)


def test_a_run_of_a_fork_gets_its_comment_in_the_pull_request_that_github_names(other, github):
    github.run()
    done = other("gpumem.json", "--artifact", "gpumem")
    assert done.output == f"made {github.comments[0]['html_url']}\n"
    assert "gated nothing" in github.comments[0]["body"]
    assert github.comments[0]["body"].endswith(
        f"\n[The whole report](https://github.com/{REPOSITORY}/actions/runs/77)\n"
    )


def test_what_can_be_accepted_is_taken_from_the_other_run(other, github, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_RUN_ID", "99")
    github.run(conclusion="failure")
    (tmp_path / "red.json").write_text(to_json(session(replace_accept(REGRESSED), OK)))
    assert other("red.json", "--artifact", "gpumem").exit_code == 0
    assert "gh run download 77 --name gpumem --dir gpumem-77\n" in github.comments[0]["body"]
    assert "from a run that failed" not in github.comments[0]["body"]


OTHERS = {
    "no pull request": {"event": "push"},
    "an event that runs with the base's token": {"event": "pull_request_target"},
    "an older commit": {"head_sha": "decade"},
    "another branch": {"head_branch": "main"},
    "another fork of the name": {"head_repository": {"id": 6, "owner": {"login": "stranger"}}},
    "somebody else's fork": {"head_repository": {"id": 5, "owner": {"login": "other&head=stranger"}}},
    "a fork that is gone": {"head_repository": None},
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_run_for_no_pull_request_that_is_open_gets_no_comment_and_says_so(other, github, case):
    github.run(**OTHERS[case])
    done = other("gpumem.json")
    assert (done.exit_code, done.output.partition(" run")[0]) == (0, "gpumem: there is no comment, because")
    assert github.comments == []


def test_a_commit_of_two_pull_requests_is_commented_in_neither(other, github):
    github.run()
    github.pull(8, sha="another")
    assert other("gpumem.json").output.startswith("made ")
    github.pull(9)
    assert other("gpumem.json").output.startswith("gpumem: there is no comment")


def test_a_run_that_github_does_not_have_is_an_error(other, github):
    done = other("gpumem.json")
    assert done.exit_code == 1
    assert "404 Not Found" in done.output
    github.run()
    del github.runs[77]["event"]
    assert "GitHub's answer on run 77 lacks its event or commit" in other("gpumem.json").output
    github.run()
    github.pulls = [{"head": {"label": "stranger:topic/a&b"}}]
    assert "GitHub's answer on pull requests from stranger:topic/a&b lacks their commits" in other("gpumem.json").output


BROKEN = {
    "missing": (None, "'gpumem.json' does not exist"),
    "cut off": ('{"format": 1', "it is cut off after 1 line;"),
    "of another program": ("[]", "it is JSON, but not a report of pytest-gpumem"),
    "that mentions somebody": ('{"format": "@maintainer", "terms": {}}', "<span>@</span>maintainer"),
    "nested": ("[" * 100_000, "its JSON is nested too deeply for a report"),
    "not UTF-8": (b"\xff", "cannot be read"),
    "large": (b" " * (32 * 2**20 + 1), "has 33,554,433 bytes, more than the limit of 33,554,432"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_report_of_another_run_that_is_missing_or_broken_is_told_in_the_comment(other, github, tmp_path, case):
    content, said = BROKEN[case]
    github.run(conclusion="failure")
    (tmp_path / "gpumem.json").unlink()
    if content is not None:
        (tmp_path / "gpumem.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert other("gpumem.json").exit_code == 0
    (comment,) = github.comments
    assert "### ❌ gpumem: nothing was gated\n" in comment["body"]
    assert said in comment["body"].replace("\\", "")


def test_a_link_in_place_of_a_report_is_not_followed(other, run, github, tmp_path):
    github.run()
    (tmp_path / "secret.json").write_text((tmp_path / "gpumem.json").read_text())
    (tmp_path / "gpumem.json").unlink()
    (tmp_path / "gpumem.json").symlink_to("secret.json")
    assert other("gpumem.json").exit_code == 0
    assert "'gpumem.json' is not a file" in github.comments[0]["body"].replace("\\", "")


def test_a_report_that_passed_does_not_hide_that_its_run_failed(other, github, tmp_path):
    (tmp_path / "gpumem.json").write_text(to_json(session(OK)))
    for conclusion, is_told in ((None, False), ("success", False), ("failure", True), ("timed_out", True)):
        github.comments.clear()
        github.run(conclusion=conclusion)
        assert other("gpumem.json").exit_code == 0
        assert ("\n[The whole report, from a run that failed](" in github.comments[0]["body"]) == is_told


def test_markdown_of_another_run_is_refused_as_it_may_say_anything(other, github):
    done = other("gpumem.md")
    assert done.exit_code == 2
    assert "gpumem.md is Markdown, which --run does not read because a stranger may have written it" in done.output
    assert github.requests == []


FOUND = {"format": 1, "found": True, "result": "transformers 4.38.0 did it: @all\nit grew", "test": "test_a.py::test_a"}


def test_an_issue_is_called_after_what_a_bisection_found(other, github, tmp_path):
    github.run(event="schedule")
    (tmp_path / "culprit.json").write_text(json.dumps(FOUND))
    assert other("culprit.json", "gpumem.json", "--issue", "open", "--name", "tomorrow").exit_code == 0
    (issue,) = github.issues
    assert issue["title"] == "tomorrow: transformers 4.38.0 did it: @all it grew"
    assert "<span>@</span>all it grew.\n\nSearched with `test_a.py::test_a`." in issue["body"]
    assert issue["body"].index("did it") < issue["body"].index("gated nothing")
    assert other("gpumem.json", "--issue", "open").output.startswith("made ")
    assert github.issues[-1]["title"] == "gpumem: the gate is red"
