"""``gpumem ab``: two revisions of a project in turn on this machine, and whether one is slower or needs more memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.ab.checkout import Checkout
from pytest_gpumem.ab.compare_revisions import Ended, Plan, Progress, compare_revisions
from pytest_gpumem.ab.processes import noted_signals
from pytest_gpumem.ab.runs import refused
from pytest_gpumem.cli.streams import InputError, WholeNumber, parsed, renamed, screen, write_lines
from pytest_gpumem.git import GitError
from pytest_gpumem.reports.comparison_formats import lines, markdown, to_json
from pytest_gpumem.units import counted, parse_ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.reports.comparison import Compared


_PYTEST_ARGUMENTS = "pytest_gpumem.cli.ab"


class _WithPytestArguments(click.Command):
    """A command of which everything after ``--`` is for pytest."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        mine, pytests = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
        ctx.meta[_PYTEST_ARGUMENTS] = pytests
        return super().parse_args(ctx, mine)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- PYTEST_ARGS...]"]


_RENDERERS: dict[str, Callable[[Ended], str]] = {
    ".json": lambda ended: to_json(_report_of(ended), finished=ended.why is None),
    ".md": lambda ended: markdown(_report_of(ended), ended.units, finished=ended.why is None),
}
"""The formats of `--report`, by suffix."""


def _reports(_context: click.Context, _parameter: click.Parameter, files: tuple[Path, ...]) -> tuple[Path, ...]:
    for file in files:
        if file.suffix not in _RENDERERS:
            raise click.BadParameter(f"{file} has to end with {' or '.join(_RENDERERS)}, which says the format")
        if not file.absolute().parent.is_dir():
            raise click.BadParameter(f"there is no folder {file.parent}")
    return files


@click.command(cls=_WithPytestArguments)
@click.argument("base")
@click.argument("head", default="HEAD")
@click.option(
    "--max-slowdown",
    default="1.5 %",
    show_default=True,
    callback=parsed(parse_ratio),
    help="How much longer a step of HEAD may take.",
)
@click.option(
    "--rounds",
    type=WholeNumber(min=4),
    default=8,
    show_default=True,
    help="Run each revision so many times at most; fewer when every test is decided.",
)
@click.option(
    "--setup",
    metavar="COMMAND",
    help="Run by the shell in a worktree before each run there, say 'pip install -e .'.",
)
@click.option(
    "--report",
    "files",
    metavar="FILE",
    multiple=True,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=_reports,
    help="Write the result there: .json for programs, .md for a comment. May be repeated.",
)
@renamed("--json", "--report FILE.json")
@renamed("--markdown", "--report FILE.md")
@click.pass_context
def ab(
    context: click.Context,
    *,
    base: str,
    head: str,
    max_slowdown: float,
    rounds: int,
    setup: str | None,
    files: tuple[Path, ...],
) -> None:
    """Run two revisions in turn on this machine, and judge what changed in time and memory.

    Checks BASE and HEAD out into temporary worktrees, runs pytest with PYTEST_ARGS in them in turn (base, head, head, base,
    ...), and judges by neighbouring runs what each measured test takes: step time by the ratio and its interval, bytes and
    counts exactly. Only commits are compared; baselines are neither read nor written.

    \b
    Examples:
      gpumem ab main -- tests/test_gpt.py::test_train_step
      gpumem ab v1.0 v1.1 --setup "pip install --no-deps -e ." -- tests

    Exit status: 0 when nothing regressed, 1 when something did, or fails in HEAD only, 2 when nothing could be compared,
    130 when interrupted.
    """
    arguments: list[str] = context.meta[_PYTEST_ARGUMENTS]
    try:
        checkout = Checkout.around(Path.cwd())
        plan = Plan(checkout, checkout.revision(base), checkout.revision(head), arguments, setup, rounds, max_slowdown)
        uncommitted = checkout.uncommitted()
    except GitError as error:
        raise InputError(*str(error).splitlines()) from None
    why_not = refused(arguments, checkout.top)
    if why_not is not None:
        raise click.UsageError(why_not)
    if uncommitted:
        are = "is" if uncommitted == 1 else "are"
        click.echo(
            f"{counted(uncommitted, 'file')} {are} changed and not committed: only commits are compared", err=True
        )
    with noted_signals() as stop:
        ended = compare_revisions(plan, stop, Progress(sys.stderr, 2 * rounds))
    if ended.report is not None:
        _print(ended, files)
    if setup is not None:
        click.echo(
            "--setup ran in worktrees that are gone now: what it installed may have to be installed again", err=True
        )
    if ended.why is not None:
        click.echo(ended.why, err=True)
    context.exit(ended.exit_status)


def _report_of(ended: Ended) -> Compared:
    assert ended.report is not None, "there is a result"
    return ended.report


def _print(ended: Ended, files: Sequence[Path]) -> None:
    write_lines(lines(_report_of(ended), ended.units, screen()))
    try:
        for file in files:
            file.write_text(_RENDERERS[file.suffix](ended), encoding="utf-8")
    except OSError as error:
        raise InputError(f"the result could not be written: {error}") from None
