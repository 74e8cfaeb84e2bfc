"""``gpumem ab``: two revisions, or sets of requirements, on this machine, and whether one is slower or needs more memory."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pytest_gpumem.ab.checkout import Checkout
from pytest_gpumem.ab.compare_variants import Ended, Plan, Progress, compare_variants
from pytest_gpumem.ab.runs import AFTER_SETUP, refused
from pytest_gpumem.ab.variants import Variant, without_folders
from pytest_gpumem.cli.files import FilePath, check_one_stream, suffix_of, text_beside, write_file
from pytest_gpumem.cli.streams import InputError, WholeNumber, input_errors, parsed, renamed, screen, write_lines
from pytest_gpumem.git import GitError, plain_environment
from pytest_gpumem.processes import noted_signals
from pytest_gpumem.reports.comparison_formats import (
    lines,
    markdown,
    nothing_as_json,
    nothing_as_markdown,
    to_json,
)
from pytest_gpumem.requirements.environments import Environments, cache_folder
from pytest_gpumem.requirements.errors import RequirementError
from pytest_gpumem.requirements.requirement_set import requirement_set
from pytest_gpumem.units import counted, parse_ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pytest_gpumem.git import Revision
    from pytest_gpumem.reports.comparison import Compared

    FC = TypeVar("FC", bound=Callable[..., Any] | click.Command)
    T = TypeVar("T")

PYTEST_ARGUMENTS = "pytest_gpumem.cli.ab"
_OF_FILES = ("-r", "--requirement")


class WithPytestArguments(click.Command):
    """A command of which everything after ``--`` is for pytest."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        mine, pytests = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
        ctx.meta[PYTEST_ARGUMENTS] = pytests
        return super().parse_args(ctx, list(_with_files(mine)))

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- PYTEST_ARGS...]"]


def _with_files(words: Sequence[str]) -> Iterator[str]:
    """Yield words of a command line with ``-r`` and the file after it as one: ``--base-with -r old.txt``."""
    left = iter(words)
    for word in left:
        yield f"{word} {next(left, '')}" if word in _OF_FILES else word


_MOST_OF_MARKDOWN = 50_000
"""Characters: something of a comment is left for what else is in it."""
_RENDERERS: dict[str, Callable[[Ended], str]] = {
    ".json": lambda ended: to_json(_report_of(ended), finished=ended.why is None),
    ".md": lambda ended: markdown(_report_of(ended), ended.units, finished=ended.why is None, most=_MOST_OF_MARKDOWN),
}
"""The formats of `--report`, by suffix."""
_OF_NOTHING: dict[str, Callable[[str], str]] = {".json": nothing_as_json, ".md": nothing_as_markdown}
"""The same of a comparison that came to nothing."""


def _reports(_context: click.Context, _parameter: click.Parameter, files: tuple[Path, ...]) -> tuple[Path, ...]:
    check_one_stream(files)
    for file in files:
        if suffix_of(file) not in _RENDERERS:
            raise click.BadParameter(f"{file} has to end with {' or '.join(_RENDERERS)}, which says the format")
        if not file.absolute().parent.is_dir():
            raise click.BadParameter(f"there is no folder {file.parent}")
    return files


def _with(side: str) -> Callable[[FC], FC]:
    return click.option(
        f"--{side}-with",
        metavar="REQUIREMENT",
        multiple=True,
        help=f"Run {side.upper()} with this requirement ('transformers==4.38.2', '-r old.txt') above what is installed here. "
        "May be repeated.",
    )


def _python(side: str) -> Callable[[FC], FC]:
    return click.option(
        f"--{side}-python",
        metavar="PYTHON",
        help=f"Run {side.upper()} with this Python, in an environment that has its requirements and this plugin only.",
    )


def with_pip_options(command: FC) -> FC:
    """Add the option that limits what requirements bring along."""
    return click.option(
        "--constraint",
        "constraints",
        metavar="FILE",
        multiple=True,
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Limit what requirements bring along by this file, as pip's option does. May be repeated.",
    )(command)


def max_slowdown_option(told: str) -> Callable[[FC], FC]:
    """Return the option of the tolerated slowdown, whose help is what is ``told``."""
    return click.option("--max-slowdown", default="1.5 %", show_default=True, callback=parsed(parse_ratio), help=told)


def report_option(told: str) -> Callable[[FC], FC]:
    """Return the option of the files for the result, whose help is what is ``told``."""
    return click.option(
        "--report",
        "files",
        metavar="FILE",
        multiple=True,
        type=FilePath(writable=True),
        callback=_reports,
        help=told,
    )


def environments() -> Environments:
    """Return the environments of the user's cache."""
    return Environments(cache_folder(), plain_environment())


@click.command(cls=WithPytestArguments)
@click.argument("base", required=False)
@click.argument("head", required=False)
@_with("base")
@_with("head")
@_python("base")
@_python("head")
@with_pip_options
@max_slowdown_option("How much longer a step of HEAD may take.")
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
@report_option("Write the result there: .json for programs, .md for a comment. May be repeated.")
@renamed("--json", "--report FILE.json")
@renamed("--markdown", "--report FILE.md")
@click.pass_context
def ab(
    context: click.Context,
    *,
    base: str | None,
    head: str | None,
    base_with: tuple[str, ...],
    head_with: tuple[str, ...],
    base_python: str | None,
    head_python: str | None,
    constraints: tuple[Path, ...],
    max_slowdown: float,
    rounds: int,
    setup: str | None,
    files: tuple[Path, ...],
) -> None:
    """Run two revisions, or two sets of requirements, on this machine, and judge what changed in time and memory.

    Checks BASE and HEAD out into temporary worktrees, runs pytest with PYTEST_ARGS in them in turn (base, head, head, base,
    ...), and judges by neighbouring runs what each measured test takes: step time by the ratio and its interval, bytes and
    counts exactly. Where no time is taken each runs once. Of revisions only commits are compared; baselines are neither read
    nor written.

    With --base-with or --head-with and no revision, the checkout is run as it is. Requirements are installed above what is
    installed here, which stays as it is, into environments that are kept (`gpumem cache`).

    \b
    Examples:
      gpumem ab main -- tests/test_gpt.py::test_train_step
      gpumem ab v1.0 v1.1 --setup "pip install --no-deps -e ." -- tests
      gpumem ab --base-with "transformers==4.37.2" --head-with "transformers==4.38.2" -- tests/test_llama.py
      gpumem ab --head-with "torch==2.15.*" -- --gpumem-device=emulated:h100 tests

    Exit status: 0 when nothing regressed, 1 when something did, or fails in HEAD only, 2 when nothing could be compared,
    130 when interrupted.
    """
    arguments: list[str] = context.meta[PYTEST_ARGUMENTS]
    with told_in(files, _OF_NOTHING), input_errors(GitError, RequirementError):
        wanted = [
            requirement_set(given, constraints, python) if given or python else None
            for given, python in ((base_with, base_python), (head_with, head_python))
        ]
        if base is None and wanted == [None, None]:
            raise click.UsageError("Missing argument 'BASE', or --base-with or --head-with.")
        if base is None:
            checkout, uncommitted = Checkout.as_it_is(Path.cwd()), 0
            revisions: list[Revision | None] = [None, None]
        else:
            checkout = Checkout.around(Path.cwd())
            revisions = [checkout.revision(base), checkout.revision(head or "HEAD")]
            uncommitted = checkout.uncommitted()
        why_not = refused(arguments, checkout.top)
        if why_not is not None:
            raise click.UsageError(why_not)
    variants = without_folders([Variant(*one) for one in zip(revisions, wanted, strict=True)])
    plan = Plan(checkout, variants[0], variants[1], arguments, setup, rounds, max_slowdown)
    tell_uncommitted(uncommitted)
    with noted_signals() as stop:
        ended = compare_variants(plan, environments(), stop, Progress(sys.stderr, 2 * rounds))
    if ended.report is not None:
        _print(ended, files)
    elif ended.why is not None:
        write_reports(files, _OF_NOTHING, ended.why)
    if setup is not None:
        click.echo(AFTER_SETUP, err=True)
    if ended.why is not None:
        click.echo(ended.why, err=True)
    context.exit(ended.exit_status)


def tell_uncommitted(files: int) -> None:
    """Tell of how many files changes are left out, since they are not committed."""
    if files:
        click.echo(
            f"{counted(files, 'file is', 'files are')} changed and not committed: only commits are compared", err=True
        )


def _report_of(ended: Ended) -> Compared:
    assert ended.report is not None, "there is a result"
    return ended.report


def _print(ended: Ended, files: Sequence[Path]) -> None:
    with text_beside(files):
        write_lines(lines(_report_of(ended), ended.units, screen()))
    write_reports(files, _RENDERERS, ended)


def write_reports(files: Sequence[Path], renderers: Mapping[str, Callable[[T], str]], told: T) -> None:
    """Write what is ``told`` into ``files``, by suffix. Raises `InputError`."""
    try:
        for file in files:
            write_file(file, renderers[suffix_of(file)](told))
    except OSError as error:
        raise InputError(f"the result could not be written: {error}") from None


@contextmanager
def told_in(files: Sequence[Path], renderers: Mapping[str, Callable[[str], str]]) -> Iterator[None]:
    """Write the reason into ``files``, by suffix, where the command ends because of wrong input."""
    try:
        yield
    except click.ClickException as error:
        write_reports(files, renderers, error.format_message())
        raise
