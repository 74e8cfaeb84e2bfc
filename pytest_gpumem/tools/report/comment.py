"""``gpumem comment``: posts reports in a pull request or an issue on GitHub, and updates the post after later runs."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.base.command_name import command_name
from pytest_gpumem.base.errors import GitHubError, NotAllowedError, ReportError
from pytest_gpumem.base.variables import GITHUB_TOKEN
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.reporting.github.comment import (
    Api,
    PullRequest,
    close_issue,
    pull_request_of_event,
    put_comment,
    put_issue,
    room_in_comment,
)
from pytest_gpumem.reporting.github.runs import find_run, pull_request_of_run
from pytest_gpumem.reporting.reports.escaping import block, details, plain
from pytest_gpumem.reporting.reports.github import is_github, notice_line
from pytest_gpumem.reporting.reports.job_result import MOST_BYTES, job_result
from pytest_gpumem.tools.console.files import STANDARD, FilePath, name_of, read_text, suffix_of
from pytest_gpumem.tools.console.streams import InputError, WholeNumber, parsed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.reporting.github.runs import Run
    from pytest_gpumem.reporting.reports.job_result import JobResult
    from pytest_gpumem.reporting.reports.results import TestResult

DEFAULT_NAME = "gpumem"
DEFAULT_TITLE = "the gate is red"
_LONGEST_NAME = 100
_LONGEST_REASON = 1_000
_NO_PULL_REQUEST = "there is no comment, because run {} was not for the newest commit of exactly one open pull request"


def _address(text: str) -> str:
    if text and not re.fullmatch(r"https?://[^\s<>()\[\]\"'`]+", text):
        raise ValueError(f"{text!r} is not a web address")
    return text


def _repository(text: str) -> str:
    if not re.fullmatch(r"[\w-]+/(?!\.{1,2}$)[\w.-]+", text, flags=re.ASCII):
        raise ValueError(f"{text!r} is not a repository; write it like 'owner/name'")
    return text


def _name(text: str) -> str:
    if len(text) > _LONGEST_NAME:
        raise ValueError(f"the name has {len(text)} characters; use at most {_LONGEST_NAME}")
    return text


@click.command()
@click.argument(
    "reports",
    metavar="REPORT...",
    nargs=-1,
    required=True,
    type=FilePath(),
)
@click.option(
    "--run",
    metavar="ID",
    type=WholeNumber(min=1),
    help="Comment on the pull request for which this workflow run was started, for example `1234567`. REPORT comes from an "
    "artifact of the run. Only JSON is read, because a stranger's code may have written the reports.",
)
@click.option(
    "--pull-request",
    type=WholeNumber(min=1),
    help="Comment on this pull request, for example `12`. Default: the pull request for which the current job was started.",
)
@click.option(
    "--repository",
    metavar="OWNER/NAME",
    envvar="GITHUB_REPOSITORY",
    callback=parsed(_repository),
    help="Write into this repository, for example `ada/models`. Default: the environment variable `GITHUB_REPOSITORY`.",
)
@click.option(
    "--name",
    metavar="NAME",
    default=DEFAULT_NAME,
    show_default=True,
    callback=parsed(_name),
    help="Give the comment or issue this name, for example `nightly`. A run updates only the comment with its own name, so "
    "several jobs can comment on a pull request. A name other than the default is the heading of the comment.",
)
@click.option(
    "--issue",
    type=click.Choice(("open", "closed")),
    help="Write an issue instead of a comment. `open` opens an issue, or updates it if it is already open. `closed` closes the "
    "open issue.",
)
@click.option(
    "--title",
    metavar="TEXT",
    help="Give the issue this title, after its name. Default: the change that `gpumem bisect` found, if REPORT comes from "
    f"`gpumem bisect`, otherwise '{DEFAULT_TITLE}'.",
)
@click.option(
    "--link",
    metavar="URL",
    default="",
    callback=parsed(_address),
    help="Link to the whole report at this address, for example `https://example.org/report.html`. Default with --run: the "
    "page of the run.",
)
@click.option(
    "--artifact",
    metavar="NAME",
    help="Name the run's artifact with the report, for example `gpumem-report`. If a test failed because of its "
    "baseline, or has no baseline, the comment shows how to download this artifact and accept the new figures.",
)
def comment(
    *,
    reports: tuple[Path, ...],
    run: int | None,
    pull_request: int | None,
    repository: str | None,
    name: str,
    issue: str | None,
    title: str | None,
    link: str,
    artifact: str | None,
) -> None:
    """Post a report in a pull request on GitHub, or in an issue.

    The first run creates a comment in the pull request, and later runs update it. REPORT is a file that
    `pytest --gpumem-report=FILE`, `gpumem ab` or `gpumem bisect` wrote, in JSON or Markdown. If a JSON report is too long for a
    comment, its most important parts are posted. Markdown is posted unchanged, and refused if it is too long. Several reports
    are joined in the same comment.

    The command reads a token from the environment variable `GITHUB_TOKEN`. The token needs the permission
    `pull-requests: write`, or with --issue `issues: write`. If the token is read-only, as in a pull request from a fork, or if
    the job runs for no pull request, the command prints a notice and writes nothing. This is not an error.

    If a job runs a pull request's code, it should not have a token with write access. So run the tests in one job, and comment
    in another job with --run.

    \b
    Examples:
      gpumem comment gpumem-report/gpumem.json
      gpumem comment gpumem.json --run 1234567
      gpumem comment gpumem.json --issue open --name nightly

    Exit status: 0 if the comment or issue was written, the token is read-only or the job runs for no pull request, 1 if GitHub
    refused the request or did not answer, or after Ctrl-C, 2 for wrong usage or a report that cannot be read.
    \f
    ## `--run`

    - The command trusts nothing that the run wrote. It asks GitHub about the run, and searches the open pull requests for a
      pull request whose branch, repository and newest commit were run. If there is not exactly one, the command writes no
      comment.
    - Only JSON files with at most 32 MiB are read, and their texts are escaped.
    - If a report is missing or broken, the comment says so. The comment also says if a report passed although its run failed.

    ## `--issue`

    Use an issue for a job without a pull request, for example a scheduled job. The command searches only the open issues. A
    closed issue stays closed, and the next failure opens a new issue.

    ## `--artifact`

    The artifact belongs to the run in `--run`, or else to the current run (`GITHUB_RUN_ID`). The commands in the comment
    download the artifact and call `gpumem accept`.

    ## Rules

    - The [action for comments](../github.md#the-comment) runs this command.
    - The first line of the comment is hidden and contains the name. The command finds its comment by this line, among the
      comments by the token's owner. It does not change other people's comments, even if they quote the line.
    - `GITHUB_API_URL` and `GITHUB_GRAPHQL_URL` name the GitHub server. GitHub sets them in every workflow.
    - If GitHub is down or limits the request rate, the command tries up to four times.
    """
    api, repository = _api(), _known(repository)
    if issue is not None and pull_request is not None:
        raise click.UsageError("--issue and --pull-request exclude each other: leave out one of them")
    contents = [_content(file, strict=run is None) for file in reports]
    is_of_event = issue is None and pull_request is None and run is None
    number = _number_of_event() if is_of_event else pull_request
    if is_of_event and number is None:
        _print("there is no comment, because this job runs for no pull request")
        return
    try:
        if issue == "closed":
            closed = close_issue(api, repository, name)
            click.echo(f"closed {closed}" if closed else "there is no open issue to close")
            return
        ran = None if run is None else find_run(api, repository, run)
        if ran is not None and issue is None and number is None:
            number = pull_request_of_run(api, repository, ran)
            if number is None:
                _print(_NO_PULL_REQUEST.format(ran.number))
                return
        accept = "" if number is None or artifact is None else _how_to_accept(contents, run, artifact, number)
        body = _body(contents, name, link, accept, ran)
        if number is None:
            is_new, address = put_issue(api, repository, name, f"{name}: {title or _title(contents)}", body)
        else:
            is_new, address = put_comment(api, PullRequest(repository, number), name, body)
    except NotAllowedError as error:
        _print(
            "no issue was written, because the token may not write issues: give the job the permission issues: write "
            f"({error})"
            if issue is not None
            else "no comment was written, because the token may not write comments. This is usual in a pull request from a "
            f"fork. In other jobs, set the permission pull-requests: write ({error})"
        )
    except GitHubError as error:
        kind = "comment" if issue is None else "issue"
        raise click.ClickException(f"the {kind} could not be written: {error}") from None
    else:
        click.echo(f"{'made' if is_new else 'changed'} {address}")


def _api() -> Api:
    token = os.environ.get(GITHUB_TOKEN)
    if not token:
        raise InputError(
            "GITHUB_TOKEN is not set; in a workflow, add env: {GITHUB_TOKEN: '${{ github.token }}'} to the step"
        )
    return Api(
        token,
        os.environ.get("GITHUB_API_URL", "https://api.github.com"),
        os.environ.get("GITHUB_GRAPHQL_URL", "https://api.github.com/graphql"),
    )


def _known(repository: str | None) -> str:
    if repository is None:
        raise InputError("the repository is not known: give --repository OWNER/NAME")
    return repository


def _title(contents: Sequence[_Content]) -> str:
    titles = [content.result.title for content in contents if content.result is not None and content.result.title]
    return titles[0] if titles else DEFAULT_TITLE


@dataclass(frozen=True, slots=True)
class _Content:
    """The content of a report file: ``result`` if the file is JSON, or ``text`` if the file is Markdown."""

    file: Path
    result: JobResult | None
    text: str


def _content(file: Path, *, strict: bool) -> _Content:
    """Read a report file.

    Args:
        file: The path of the file.
        strict: False if a stranger may have written the file. Then only JSON is accepted, and a missing or broken file raises
            no error. Instead, the returned text reports the problem in the comment.

    Raises:
        InputError: The file is Markdown and ``strict`` is false, or the file cannot be read and ``strict`` is true.
    """
    if not strict and suffix_of(file) != ".json":
        raise InputError(
            f"{file} is Markdown, which --run does not read because a stranger may have written it; give the report as JSON"
        )
    try:
        text = _text(file)
        is_json = suffix_of(file) == ".json"
        return _Content(file, job_result(text, file.name), "") if is_json else _Content(file, None, text)
    except ReportError as error:
        if strict:
            raise InputError(str(error)) from None
        return _Content(file, None, f"### \u274c gpumem: nothing was gated\n\n{plain(str(error)[:_LONGEST_REASON])}.\n")


def _text(file: Path) -> str:
    """Return the content of a report file. Raises `ReportError` for a link, a folder or a file with more than 32 MiB."""
    if file != STANDARD and (file.is_symlink() or not file.is_file()):
        kind = "is not a file" if file.is_symlink() or file.exists() else "does not exist"
        raise ReportError(f"{str(file)!r} {kind}")
    if file != STANDARD and file.stat().st_size > MOST_BYTES:
        raise ReportError(f"{file} has {file.stat().st_size:,} bytes, more than the limit of {MOST_BYTES:,}")
    try:
        return read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{name_of(file)} cannot be read: {error}") from None


def _how_to_accept(contents: Sequence[_Content], run: int | None, artifact: str, pull_request: int) -> str:
    """Return a paragraph with the commands for accepting a report's figures. Empty if no test would pass with new baselines."""
    number = os.environ.get("GITHUB_RUN_ID", "") if run is None else str(run)
    for content in contents:
        report = None if content.result is None else content.result.session
        if report is None or not number.isdecimal() or report.passed or not any(map(_may_be_accepted, report.results)):
            continue
        folder = f"gpumem-{number}"
        commands = [
            f"git fetch origin pull/{pull_request}/merge",
            f"gh run download {number} --name {shlex.quote(artifact)} --dir {folder}",
            f'{command_name()} accept {shlex.quote(f"{folder}/{content.file.name}")} --reason "..."',
        ]
        code = block("\n".join(commands))
        return f"\n{details('To accept the measured figures in the branch of this pull request', code)}\n"
    return ""


def _may_be_accepted(result: TestResult) -> bool:
    """Return whether a new baseline would make the test pass, or would be the test's first baseline."""
    if result.failed:
        return result.verdict.accept is not None
    return result.passed and result.verdict.outcome in (Outcome.NEW, Outcome.FOREIGN)


def _body(contents: Sequence[_Content], name: str, link: str, accept: str, run: Run | None) -> str:
    """Return the comment's text without its hidden first line. Raises `InputError` if a report is too long."""
    above = "" if name == DEFAULT_NAME else f"**{plain(name)}**\n\n"
    link = link or ("" if run is None else run.address)
    # The run itself wrote the report, so a failed run could claim success. GitHub knows whether the run failed.
    passed = any(content.result is not None and content.result.passed for content in contents)
    of_run = ", from a run that failed" if run is not None and run.failed and passed else ""
    beneath = f"{accept}\n[The whole report{of_run}]({link})\n" if link else accept
    left = room_in_comment(name) - len(above) - len(beneath) - (len(contents) - 1)
    texts: dict[Path, str] = {}
    # Render Markdown reports first. They cannot be shortened, but JSON reports can be shortened to the remaining characters.
    for content in sorted(contents, key=lambda content: content.result is not None):
        texts[content.file] = content.text if content.result is None else content.result.markdown(left)
        if len(texts[content.file]) > left:
            raise InputError(
                f"{content.file} has {len(texts[content.file]):,} characters, but only {left:,} more fit into the comment: "
                "give the report as JSON, which is shortened to its most important parts"
            )
        left -= len(texts[content.file])
    return f"{above}{chr(10).join(texts[content.file] for content in contents)}{beneath}"


def _number_of_event() -> int | None:
    """Return the number of the pull request for which this job runs, or ``None`` if there is none.

    Raises:
        InputError: This process runs in no GitHub job, or the job's event cannot be read.
    """
    file = os.environ.get("GITHUB_EVENT_PATH")
    if not file:
        raise InputError("the pull request is not known: give --pull-request NUMBER")
    try:
        return pull_request_of_event(Path(file))
    except (OSError, ValueError) as error:
        raise InputError(
            f"the job's event in GITHUB_EVENT_PATH cannot be read: {error}; give --pull-request NUMBER"
        ) from None


def _print(sentence: str) -> None:
    """Print a sentence. In GitHub Actions, print it as a notice, because the page of the workflow run shows notices."""
    click.echo(notice_line(sentence) if is_github(os.environ) else f"gpumem: {sentence}")
