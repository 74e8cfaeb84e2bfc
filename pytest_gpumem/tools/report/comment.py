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
from pytest_gpumem.base.variables import GITHUB_TOKEN
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.reporting.github.comment import (
    Api,
    GitHubError,
    NotAllowedError,
    PullRequest,
    close_issue,
    pull_request_of_event,
    put_comment,
    put_issue,
    room_in_comment,
)
from pytest_gpumem.reporting.github.runs import find_run, pull_request_of_run
from pytest_gpumem.reporting.reports.errors import ReportError
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
        raise ValueError(f"it has {len(text)} characters; use at most {_LONGEST_NAME}")
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
    help="Comment on the pull request of this workflow run, for example `1234567`. Its artifact contains the reports. Only "
    "JSON is read, because a stranger's code may have written the reports.",
)
@click.option(
    "--pull-request",
    type=WholeNumber(min=1),
    help="Comment on this pull request, for example `12`. Default: the pull request of the workflow's event.",
)
@click.option(
    "--repository",
    metavar="OWNER/NAME",
    envvar="GITHUB_REPOSITORY",
    callback=parsed(_repository),
    help="The repository with the pull request or the issue, for example `ada/models`. Default: the variable "
    "`GITHUB_REPOSITORY`.",
)
@click.option(
    "--name",
    metavar="NAME",
    default=DEFAULT_NAME,
    show_default=True,
    callback=parsed(_name),
    help="Distinguish several comments or issues by this name, for example `nightly`. A name other than the default is also "
    "the title of the comment.",
)
@click.option(
    "--issue",
    type=click.Choice(("open", "closed")),
    help="Write an issue instead of a comment: `open` opens one or updates the open one, `closed` closes the open one.",
)
@click.option(
    "--title",
    metavar="TEXT",
    help="The issue's title, which follows the name. Default: the change that a report of `gpumem bisect` found, or "
    f"'{DEFAULT_TITLE}'.",
)
@click.option(
    "--link",
    metavar="URL",
    default="",
    callback=parsed(_address),
    help="The address of the whole report, for example `https://example.org/report.html`. Default with --run: the run.",
)
@click.option(
    "--artifact",
    metavar="NAME",
    help="The run's artifact with the report, for example `gpumem-report`. If tests failed because of their baselines, or have "
    "none, the comment contains the commands that accept the new figures.",
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

    A pull request gets a single comment, which later runs update. REPORT is a file that `pytest --gpumem-report=FILE`,
    `gpumem ab` or `gpumem bisect` wrote. JSON is shortened to its most important parts. Markdown is posted unchanged, and
    refused if it is too long. Several reports are joined in the same comment.

    The variable `GITHUB_TOKEN` contains the token. It needs the permission `pull-requests: write`, or with --issue `issues:
    write`. If the token is read-only, for example in a pull request from a fork, or if the job runs for no pull request, the
    command says so and writes nothing. This is not an error.

    A job with a pull request's tests should not have a token with write access. Comment in another job, with --run.

    \b
    Examples:
      gpumem comment gpumem-report/gpumem.json
      gpumem comment gpumem.json --run 1234567
      gpumem comment gpumem.json --issue open --name nightly

    Exit status: 0 if the comment or issue was written, the token is read-only or the job runs for no pull request, 1 if GitHub
    refused or did not answer, or after Ctrl-C, 2 for wrong usage or input.
    \f
    ## `--run`

    - The command trusts nothing that the run wrote. It asks GitHub for the run, and for the open pull request with the run's
      branch, repository and newest commit. Without exactly one such pull request there is no comment.
    - Only JSON files of at most 32 MiB are read, and their texts are escaped.
    - The comment says if a report is missing or broken, and if a report passed although its run failed.

    ## `--issue`

    An issue is for a job without a pull request, for example a scheduled job. The command looks for it among the open
    issues. A closed issue stays closed: the next red run opens another.

    ## `--artifact`

    The run is that of `--run`, or `GITHUB_RUN_ID`. The commands download the artifact and call `gpumem accept`.

    ## Rules

    - The [action for comments](../github.md#the-comment) runs this command.
    - The command finds its comment by a hidden first line with the name, among the comments of the token's owner. Other
      people's comments are not changed, even if they quote this line.
    - `GITHUB_API_URL` and `GITHUB_GRAPHQL_URL` name the GitHub server, as in every workflow.
    - If GitHub is down or limits the rate, the command tries four times.
    """
    api, repository = _api(), _known(repository)
    if issue is not None and pull_request is not None:
        raise click.UsageError("--issue and --pull-request exclude each other")
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
            else "there is no comment, because the token may not write comments, as in pull requests from forks; otherwise "
            f"give the job the permission pull-requests: write ({error})"
        )
    except GitHubError as error:
        kind = "comment" if issue is None else "issue"
        raise click.ClickException(f"the {kind} could not be written: {error}") from None
    else:
        click.echo(f"{'made' if is_new else 'changed'} {address}")


def _api() -> Api:
    token = os.environ.get(GITHUB_TOKEN)
    if not token:
        raise InputError("GITHUB_TOKEN is not set; in a workflow: env: {GITHUB_TOKEN: '${{ github.token }}'}")
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
    """A report: its result if the file is JSON, otherwise its text."""

    file: Path
    result: JobResult | None
    text: str


def _content(file: Path, *, strict: bool) -> _Content:
    """Read a report.

    Args:
        file: Its path.
        strict: False if a stranger may have written the file. The file must then be JSON. If the file is missing or broken,
            the content says so, and nothing is raised.

    Raises:
        InputError: The file cannot be used.
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
    """Return the content of a regular file of bounded size. Raises `ReportError`."""
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
    """Return a paragraph with the commands for accepting a report's figures. Empty if accepting them would not help."""
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
    """Return whether a new baseline would make a test pass."""
    if result.failed:
        return result.verdict.accept is not None
    return result.passed and result.verdict.outcome in (Outcome.NEW, Outcome.FOREIGN)


def _body(contents: Sequence[_Content], name: str, link: str, accept: str, run: Run | None) -> str:
    """Return the comment's text without its hidden first line. Raises `InputError`."""
    above = "" if name == DEFAULT_NAME else f"**{plain(name)}**\n\n"
    link = link or ("" if run is None else run.address)
    # The report may claim success, because the job wrote it. GitHub knows whether the run failed.
    passed = any(content.result is not None and content.result.passed for content in contents)
    of_run = ", from a run that failed" if run is not None and run.failed and passed else ""
    beneath = f"{accept}\n[The whole report{of_run}]({link})\n" if link else accept
    left = room_in_comment(name) - len(above) - len(beneath) - (len(contents) - 1)
    texts: dict[Path, str] = {}
    # Markdown comes first, because only JSON can be shortened to the remaining characters.
    for content in sorted(contents, key=lambda content: content.result is not None):
        texts[content.file] = content.text if content.result is None else content.result.markdown(left)
        if len(texts[content.file]) > left:
            raise InputError(
                f"{content.file} has {len(texts[content.file]):,} characters, but the comment has room for only {left:,}: give "
                "the report as JSON, which is shortened to its most important parts"
            )
        left -= len(texts[content.file])
    return f"{above}{chr(10).join(texts[content.file] for content in contents)}{beneath}"


def _number_of_event() -> int | None:
    """Return this job's pull request, if it has one. Raises `InputError` outside a job."""
    file = os.environ.get("GITHUB_EVENT_PATH")
    if not file:
        raise InputError("the pull request is not known: give --pull-request NUMBER")
    try:
        return pull_request_of_event(Path(file))
    except (OSError, ValueError) as error:
        raise InputError(f"GITHUB_EVENT_PATH: {error}") from None


def _print(sentence: str) -> None:
    """Print a sentence. In GitHub Actions, print it as a notice, which the run's page shows."""
    click.echo(notice_line(sentence) if is_github(os.environ) else f"gpumem: {sentence}")
