"""``gpumem comment``: reports as the one comment in a pull request, or as the one issue, that is kept up to date."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.cli.streams import InputError, WholeNumber, parsed, text_of
from pytest_gpumem.gate.verdict import Outcome
from pytest_gpumem.github.comment import (
    Api,
    GitHubError,
    NotAllowedError,
    PullRequest,
    close_issue,
    pull_request_of_event,
    put_comment,
    put_issue,
    room,
)
from pytest_gpumem.reports.errors import ReportError
from pytest_gpumem.reports.escaping import block, details, plain
from pytest_gpumem.reports.github import is_github, notice_line
from pytest_gpumem.reports.json_report import from_json
from pytest_gpumem.reports.markdown import markdown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.reports.results import TestResult
    from pytest_gpumem.reports.session_report import SessionReport

DEFAULT_NAME = "gpumem"
_LONGEST_NAME = 100


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
        raise ValueError(f"it has {len(text)} characters, and may have {_LONGEST_NAME}")
    return text


@click.command()
@click.argument(
    "reports",
    metavar="REPORT...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option("--pull-request", type=WholeNumber(min=1), help="Its number; that of the workflow's event by default.")
@click.option(
    "--repository",
    metavar="OWNER/NAME",
    envvar="GITHUB_REPOSITORY",
    callback=parsed(_repository),
    help="Where the pull request or the issue is; GITHUB_REPOSITORY by default.",
)
@click.option(
    "--name",
    default=DEFAULT_NAME,
    show_default=True,
    callback=parsed(_name),
    help="Which comment or issue it is, where there are several.",
)
@click.option(
    "--issue",
    type=click.Choice(("open", "closed")),
    help="Put it into an issue instead: open one or change it, or, when all is well, close it where there is one.",
)
@click.option("--title", metavar="TEXT", default="the gate is red", show_default=True, help="What the issue is called.")
@click.option("--link", metavar="URL", default="", callback=parsed(_address), help="Where the whole report is.")
@click.option(
    "--artifact",
    metavar="NAME",
    help="The artifact of this run that has the report: where baselines made it red, how to accept from it is said.",
)
def comment(
    *,
    reports: tuple[Path, ...],
    pull_request: int | None,
    repository: str | None,
    name: str,
    issue: str | None,
    title: str,
    link: str,
    artifact: str | None,
) -> None:
    """Put a report into the pull request, as one comment that later runs change, or into an issue.

    REPORT is what pytest --gpumem-report=FILE wrote: JSON, of which the most important fits in, or Markdown, taken as it is.
    Several stand one beneath another.
    The comment is found again by its name and by who wrote it. GITHUB_TOKEN is the token, with the permission
    pull-requests: write. In a job of GitHub Actions nothing else has to be said:

    \b
        gpumem comment gpumem-report/gpumem.json

    With --issue, for a job that runs for no pull request, it is an issue of that name, and the permission is issues: write.

    A token that may only read, which is what pull requests from forks get, is no failure, and neither is a job that runs for
    no pull request: both are said.

    Exit status: 0 when the comment or issue is there, or must not be, 1 when GitHub could not be told, 2 for wrong input or
    usage.
    """
    token = os.environ.get("GITHUB_TOKEN")
    if not token:
        raise InputError("GITHUB_TOKEN is not set; in a workflow: env: {GITHUB_TOKEN: '${{ github.token }}'}")
    if repository is None:
        raise InputError("which repository is not known: give --repository OWNER/NAME")
    if issue is not None and pull_request is not None:
        raise click.UsageError("--issue and --pull-request exclude each other")
    number = None if issue is not None else pull_request or _number_of_event()
    if number is None and issue is None:
        _print("there is no comment, since this job runs for no pull request")
        return
    api = Api(
        token,
        os.environ.get("GITHUB_API_URL", "https://api.github.com"),
        os.environ.get("GITHUB_GRAPHQL_URL", "https://api.github.com/graphql"),
    )
    where = None if number is None else PullRequest(repository, number)
    try:
        if issue == "closed":
            closed = close_issue(api, repository, name)
            click.echo(f"closed {closed}" if closed else "there is no open issue to close")
            return
        accept = "" if where is None or artifact is None else _how_to_accept(reports, artifact, where.number)
        body = _body(reports, name, link, accept)
        if where is None:
            is_new, address = put_issue(api, repository, name, f"{name}: {title}", body)
        else:
            is_new, address = put_comment(api, where, name, body)
    except NotAllowedError as error:
        _print(
            "there is no comment, since the token may not write one, as for pull requests from forks; otherwise give the "
            f"job the permission pull-requests: write ({error})"
            if where is not None
            else "no issue was written, since the token may not write one: give the job the permission issues: write "
            f"({error})"
        )
    except GitHubError as error:
        what = "issue" if where is None else "comment"
        raise click.ClickException(f"the {what} could not be put: {error}") from None
    else:
        click.echo(f"{'made' if is_new else 'changed'} {address}")


def _how_to_accept(files: Sequence[Path], artifact: str, pull_request: int) -> str:
    """Return the commands that accept the figures of a report, in a paragraph; empty where no baseline would make it green."""
    run = os.environ.get("GITHUB_RUN_ID", "")
    for file in files:
        if file.suffix != ".json" or not run.isdecimal():
            continue
        report = _report(file)
        if report.passed or not any(map(_may_be_accepted, report.results)):
            continue
        folder = f"gpumem-{run}"
        commands = [
            f"git fetch origin pull/{pull_request}/merge",
            f"gh run download {run} --name {shlex.quote(artifact)} --dir {folder}",
            f'gpumem accept {shlex.quote(f"{folder}/{file.name}")} --reason "..."',
        ]
        told = block("\n".join(commands))
        return f"\n{details('To accept what was measured, in the branch of this pull request', told)}\n"
    return ""


def _may_be_accepted(result: TestResult) -> bool:
    """Return whether a baseline is what a test lacks."""
    if result.failed:
        return result.verdict.accept is not None
    return result.passed and result.verdict.outcome in (Outcome.NEW, Outcome.FOREIGN)


def _report(file: Path) -> SessionReport:
    """Read a JSON report. Raises `InputError`."""
    try:
        return from_json(text_of(file), str(file))
    except ReportError as error:
        raise InputError(str(error)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None


def _body(files: Sequence[Path], name: str, link: str, accept: str = "") -> str:
    """Return the text without its marker. Raises `InputError`."""
    above = "" if name == DEFAULT_NAME else f"**{plain(name)}**\n\n"
    beneath = f"{accept}\n[The whole report]({link})\n" if link else accept
    left = room(name) - len(above) - len(beneath) - (len(files) - 1)
    texts: dict[Path, str] = {}
    # Of JSON there is as much as the others leave room for.
    for file in sorted(files, key=lambda one: one.suffix == ".json"):
        try:
            is_json = file.suffix == ".json"
            texts[file] = markdown(_report(file), most=left) if is_json else text_of(file)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file} cannot be read: {error}") from None
        if len(texts[file]) > left:
            raise InputError(
                f"{file} has {len(texts[file]):,} characters, and a comment has room for {left:,}: give the report as JSON, "
                "of which the most important is taken"
            )
        left -= len(texts[file])
    return f"{above}{chr(10).join(texts[file] for file in files)}{beneath}"


def _number_of_event() -> int | None:
    """Return the pull request that this job runs for. Raises `InputError` when this is no job."""
    file = os.environ.get("GITHUB_EVENT_PATH")
    if not file:
        raise InputError("which pull request is not known: give --pull-request NUMBER")
    try:
        return pull_request_of_event(Path(file))
    except (OSError, ValueError) as error:
        raise InputError(f"GITHUB_EVENT_PATH: {error}") from None


def _print(sentence: str) -> None:
    """Print a sentence, in GitHub Actions as a notice of the run."""
    click.echo(notice_line(sentence) if is_github(os.environ) else f"gpumem: {sentence}")
