"""``gpumem ab``: compares the time and memory that tests need at two revisions, or with two sets of requirements."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pytest_gpumem.base.errors import GitError, RequirementError
from pytest_gpumem.base.git import plain_environment
from pytest_gpumem.base.processes import recorded_signals
from pytest_gpumem.base.requirements.environments import Environments, cache_folder
from pytest_gpumem.base.requirements.requirement_set import requirement_set
from pytest_gpumem.base.units import counted, parse_ratio
from pytest_gpumem.reporting.reports.comparison_formats import (
    failure_as_json,
    failure_as_markdown,
    lines,
    markdown,
    to_json,
)
from pytest_gpumem.tools.ab.compare_variants import ComparisonResult, Plan, Progress, compare_variants
from pytest_gpumem.tools.ab.runs import SETUP_NOTE, reason_to_refuse
from pytest_gpumem.tools.ab.variants import Variant, without_folders
from pytest_gpumem.tools.checkout import Checkout
from pytest_gpumem.tools.console.files import FilePath, check_one_stream, suffix_of, text_beside, write_file
from pytest_gpumem.tools.console.streams import InputError, WholeNumber, input_errors, parsed, screen, write_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pytest_gpumem.base.git import Revision
    from pytest_gpumem.reporting.reports.comparison import ComparisonReport

    FC = TypeVar("FC", bound=Callable[..., Any] | click.Command)
    T = TypeVar("T")

PYTEST_ARGUMENTS = "pytest_gpumem.tools.ab.command"
"""The key under which click's ``Context.meta`` stores the words after ``--``."""
_FILE_OPTIONS = ("-r", "--requirement")


class WithPytestArguments(click.Command):
    """A click command that keeps all words after ``--`` as arguments for pytest."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        separator = args.index("--") if "--" in args else len(args)
        ctx.meta[PYTEST_ARGUMENTS] = args[separator + 1 :]
        return super().parse_args(ctx, list(_join_file_options(args[:separator])))

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- PYTEST_ARGS...]"]


def _join_file_options(words: Sequence[str]) -> Iterator[str]:
    """Join ``-r`` and the file name after it into a single word, so ``--base-with -r old.txt`` has the value ``-r old.txt``."""
    remaining = iter(words)
    for word in remaining:
        yield f"{word} {next(remaining, '')}" if word in _FILE_OPTIONS else word


_MOST_OF_MARKDOWN = 50_000
"""Maximum characters of the result in Markdown. It stays below GitHub's limit for a comment, 65,536 characters, because the
comment also contains other text.
"""
_RENDERERS: dict[str, Callable[[ComparisonResult], str]] = {
    ".json": lambda ended: to_json(_report_of(ended), finished=ended.why is None),
    ".md": lambda ended: markdown(_report_of(ended), ended.units, finished=ended.why is None, most=_MOST_OF_MARKDOWN),
}
"""Functions to write the result of a comparison for ``--report``, by the suffix of the file."""
_ERROR_RENDERERS: dict[str, Callable[[str], str]] = {".json": failure_as_json, ".md": failure_as_markdown}
"""Functions to write an error for ``--report`` if nothing could be compared, by the suffix of the file."""


def _reports(_context: click.Context, _parameter: click.Parameter, files: tuple[Path, ...]) -> tuple[Path, ...]:
    check_one_stream(files)
    for file in files:
        if suffix_of(file) not in _RENDERERS:
            raise click.BadParameter(f"{file} has to end with {' or '.join(_RENDERERS)}, which selects the format")
        if not file.absolute().parent.is_dir():
            raise click.BadParameter(f"there is no folder {file.parent}; make it, or name a file in another folder")
    return files


def _requirement_option(side: str) -> Callable[[FC], FC]:
    return click.option(
        f"--{side}-with",
        metavar="REQUIREMENT",
        multiple=True,
        help=f"For the runs of {side.upper()}, install this requirement on top of the current environment, for example "
        "`transformers==4.38.2` or `-r old.txt`. May be repeated.",
    )


def _python_option(side: str) -> Callable[[FC], FC]:
    return click.option(
        f"--{side}-python",
        metavar="PYTHON",
        help=f"Run {side.upper()} with this Python, for example `python3.12`, in a new environment with only this plugin "
        f"and the requirements in --{side}-with. Default: the current Python.",
    )


def with_pip_options(command: FC) -> FC:
    """Add the option ``--constraint``, which limits the versions of installed packages."""
    return click.option(
        "--constraint",
        "constraints",
        metavar="FILE",
        multiple=True,
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Limit the versions of installed packages by this constraints file, as `pip install --constraint` does. May be "
        "repeated.",
    )(command)


def max_slowdown_option(condition: str = "") -> Callable[[FC], FC]:
    """Return the option ``--max-slowdown``.

    Args:
        condition: A sentence for the end of the help text. It says when the option has an effect.
    """
    return click.option(
        "--max-slowdown",
        metavar="RATIO",
        default="1.5 %",
        show_default=True,
        callback=parsed(parse_ratio),
        help=f"Let a step take this much longer before it counts as slower, for example `2 %`. {condition}".strip(),
    )


setup_option = click.option(
    "--setup",
    metavar="COMMAND",
    help="Run this shell command in the temporary checkout before each run of pytest, for example `pip install -e .`.",
)
report_option = click.option(
    "--report",
    "files",
    metavar="FILE",
    multiple=True,
    type=FilePath(writable=True),
    callback=_reports,
    help="Also write the result to this file. `FILE.json` contains JSON. `FILE.md` contains Markdown for a comment, an issue "
    "or a job summary. `-` writes JSON to standard output. May be repeated.",
)


def environments() -> Environments:
    """Return the virtual environments in the user's cache, which ``gpumem ab`` and ``gpumem bisect`` made."""
    return Environments(cache_folder(), plain_environment())


@click.command(cls=WithPytestArguments)
@click.argument("base", required=False)
@click.argument("head", required=False)
@_requirement_option("base")
@_requirement_option("head")
@_python_option("base")
@_python_option("head")
@with_pip_options
@max_slowdown_option()
@click.option(
    "--rounds",
    type=WholeNumber(min=4),
    default=8,
    show_default=True,
    help="Run BASE and HEAD at most this many times each. The command stops earlier if no test needs more runs.",
)
@setup_option
@report_option
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
    """Compare two revisions, or two sets of packages, by running both.

    The command measures the memory and step time of tests at BASE and at HEAD, on this machine. BASE and HEAD are branches,
    tags or other git revisions. The default for HEAD is the checked-out commit. The command checks both out into temporary
    worktrees, and runs `pytest PYTEST_ARGS` in them by turns: base, head, head, base, base, head. Uncommitted changes are left
    out; a line on standard error counts the changed files.

    Each pair of runs gives a ratio of step times. Bytes and counts are compared as the gate compares them with a baseline. The
    command neither reads nor writes baselines.

    To compare packages, give --base-with or --head-with. If BASE is missing, the project in the current folder runs with both
    sets of packages, with its uncommitted changes and even outside a git repository. The packages are installed into cached
    environments (`gpumem cache`), so the current environment does not change.

    \b
    Examples:
      gpumem ab main -- tests/test_gpt.py::test_train_step
      gpumem ab v1.0 v1.1 --setup "pip install --no-deps -e ." -- tests
      gpumem ab --head-with "transformers==4.38.2" -- tests/test_llama.py
      gpumem ab --head-with "torch==2.15.*" -- --gpumem-device=emulated:h100 tests

    Exit status: 0 if nothing regressed, 1 if a test regressed or fails only in HEAD, 2 if nothing could be compared, for wrong
    usage, or if a run could not start its tests, 130 after Ctrl-C, 143 after SIGTERM.
    \f
    After Ctrl-C and SIGTERM, the command prints the result so far. It ends the runs, and removes the worktrees and the
    temporary folder.

    ## Runs

    - Each run is a new process, `python -m pytest PYTEST_ARGS`. It starts in the worktree's folder that corresponds to the
      current folder.
    - If steps are not timed (`--no-gpumem-time`, or an emulated GPU), `BASE` and `HEAD` run only once each.
    - `--gpumem-baseline`, `--gpumem-update`, `--gpumem-store` and `--gpumem-strict` are refused in `PYTEST_ARGS`. If the
      project's settings contain them, they are switched off.
    - A relative path in `PYTEST_ARGS`, such as `--junitxml=report.xml`, is a path in the worktree. The file is removed together
      with the worktree.
    - If pytest reports a usage error, cannot collect the tests, or crashes, the comparison ends.

    ## Verdicts on step time

    | verdict | meaning |
    |---|---|
    | `slower`, `faster` | the step is certainly slower, or faster, by more than `--max-slowdown` |
    | `not slower` | the measured slowdown is at most `--max-slowdown`, and its interval ends within twice this limit |
    | `uncertain` | a slowdown beyond `--max-slowdown` is measured but not certain, or the interval exceeds twice this limit |

    - Each verdict contains the change and its 95 % interval. The printed times are geometric means over the pairs, so the ratio
      of the two times is the change.
    - If the interval of a step that is `not slower` reaches beyond `--max-slowdown`, the line names the largest slowdown that
      these runs could have missed.
    - The runs end after 4 pairs at the earliest, when every test is decided. A test is decided if it was `slower`, or
      `faster`, after two successive pairs, or if its interval ends at `--max-slowdown` or below.

    ## Bytes and counts

    - The tolerances come from `[tool.gpumem]` in `HEAD`. The marker's limits, budgets and the hook for tolerances are not
      applied.
    - If a figure differs between the runs of `BASE`, or between the runs of `HEAD`, a note says so. The comparison then uses
      the figure of `BASE` and the figure of `HEAD` that are closest to each other. For example, 10 and 12 in `BASE` and 15 and
      14 in `HEAD` are compared as 12 and 14.
    - Growth is explained by module and line, from the first run of `BASE` and the first run of `HEAD`. Changed lines come
      first.

    ## Tests that are not compared

    The report lists these tests, each with a reason: the test ran only in `BASE` or only in `HEAD`, was skipped, failed, or
    used another workload or device. A test is `broken` if it is measured in `BASE` and fails in every run of `HEAD`.

    ## Worktrees

    - A worktree contains only files that are in git, and no built extensions or uncommitted data. A `--setup` command can make
      these files. Submodules of your checkout are checked out, too. Git hooks do not run.
    - Worktrees are in the temporary folder (`TMPDIR`). If a comparison is killed (`SIGKILL`), the next comparison removes its
      worktrees.
    - The tests import the code in the worktree, because `PYTHONPATH` begins with the folder in which pytest starts, the
      worktree's top folder, and the `src` in these folders.
    - If a run imports a module from another checkout of the repository, for example through an editable install, the command
      ends and names the module and the file. A virtual environment inside your checkout does not cause this error.

    ## Sets of requirements

    - **Environments.** Requirements are installed into a virtual environment that also contains the packages of the current
      environment. The command installs the newest release of each named package that meets the requirement, and only those
      dependencies that the current environment lacks. So `BASE` and `HEAD` differ only in the packages that you named.
    - **Another Python.** With `--base-python` or `--head-python`, the packages of the current environment are not used. Name
      all packages that the tests need (`--base-with "-r requirements.txt"`).
    - **Requirements** are written as for pip: `torch==2.15.*`,
      `transformers @ git+https://github.com/huggingface/transformers@main`.
    - **Paths in a requirements file** are resolved as pip resolves them. `-e ../x` and `./x.whl` begin in the current folder.
      `--find-links` begins in the file's folder if the path exists there. Constraint files that a requirements file names are
      applied like `--constraint`.
    - **Reports** shorten absolute paths in requirements to the parts that differ between `BASE` and `HEAD`: `old/gpt` and
      `new/gpt`.
    - **uv** installs the packages if it is on the `PATH`, otherwise pip does. If the requirements exclude each other, the
      command shows the installer's message.
    - **Cached environments** are used again for the same packages on top of the same environment. Requirements without exact
      releases (`torch==2.15.*`) are installed again in each comparison. `gpumem cache` lists and removes the environments.
    - **torch:** if the device is an emulated GPU (`--gpumem-device=emulated:h100` in `PYTEST_ARGS`, or `device` in the
      settings), a requirement on torch installs its CUDA build without NVIDIA's libraries. So you can test an upgrade without a
      GPU.
    - If the tests import none of the packages that differ, nothing is compared, and the exit status is 2.

    ## JSON

    `--report FILE.json` writes an object with these keys. Bytes, seconds and counts are numbers.

    | key | value |
    |---|---|
    | `format` | 1 |
    | `finished`, `passed` | whether the comparison ran to its end, and whether nothing regressed |
    | `exit_status` | the command's exit status |
    | `accounting` | the last line of the output: the number of tests by verdict |
    | `base`, `head` | `name` and `commit`; for a set of requirements, `name` is its text |
    | `pairs`, `max_slowdown` | the number of pairs, and `--max-slowdown` as a ratio: `0.015` |
    | `packages` | packages that differ: `name`, `base`, `head`, `requested` (named by `--head-with`), `url` |
    | `tests` | `file`, `test`, `name`, `outcome`, `notes`, `growth` and `metrics` of each test |
    | `not_compared` | `test`, `reason`, `broken` |
    | `causes`, `not_explained` | the causes of growth in several tests, as in a [session report](reports.md) |
    | `why` | if nothing could be compared: the reason |

    `growth` has the same keys as in a [session report](reports.md), or is `null` if the growth is not explained. Each entry in
    `metrics` has `metric`, `outcome`, `base`, `head`, `ratio`, `low`, `high`, `allowed` and `reason`.
    """
    arguments: list[str] = context.meta[PYTEST_ARGUMENTS]
    with error_reports(files, _ERROR_RENDERERS), input_errors(GitError, RequirementError):
        requirements = [
            requirement_set(lines, constraints, python) if lines or python else None
            for lines, python in ((base_with, base_python), (head_with, head_python))
        ]
        if base is None and requirements == [None, None]:
            raise click.UsageError("Missing argument 'BASE': name a revision, or give --base-with or --head-with.")
        if base is None:
            checkout, uncommitted = Checkout.as_it_is(Path.cwd()), 0
            revisions: list[Revision | None] = [None, None]
        else:
            checkout = Checkout.around(Path.cwd())
            revisions = [checkout.revision(base), checkout.revision(head or "HEAD")]
            uncommitted = checkout.uncommitted()
        why_not = reason_to_refuse(arguments, checkout.top)
        if why_not is not None:
            raise click.UsageError(why_not)
    variants = without_folders([Variant(*side) for side in zip(revisions, requirements, strict=True)])
    plan = Plan(checkout, variants[0], variants[1], arguments, setup, rounds, max_slowdown)
    print_uncommitted(uncommitted)
    with recorded_signals() as stop:
        ended = compare_variants(plan, environments(), stop, Progress(sys.stderr, 2 * rounds))
    if ended.report is not None:
        _print(ended, files)
    elif ended.why is not None:
        write_reports(files, _ERROR_RENDERERS, ended.why)
    if setup is not None:
        click.echo(SETUP_NOTE, err=True)
    if ended.why is not None:
        click.echo(ended.why, err=True)
    context.exit(ended.exit_status)


def print_uncommitted(files: int) -> None:
    """Print how many files have uncommitted changes, because the command does not run these changes."""
    if files:
        click.echo(
            f"{counted(files, 'file has', 'files have')} uncommitted changes, which are left out: only commits are compared",
            err=True,
        )


def _report_of(ended: ComparisonResult) -> ComparisonReport:
    assert ended.report is not None, "the comparison has a result"
    return ended.report


def _print(ended: ComparisonResult, files: Sequence[Path]) -> None:
    with text_beside(files):
        write_lines(lines(_report_of(ended), ended.units, screen()))
    write_reports(files, _RENDERERS, ended)


def write_reports(files: Sequence[Path], renderers: Mapping[str, Callable[[T], str]], result: T) -> None:
    """Write a result to each file.

    Args:
        files: The files from ``--report``.
        renderers: Functions to turn the result into the file's text, by suffix.
        result: The result to write.

    Raises:
        InputError: A file cannot be written.
    """
    try:
        for file in files:
            write_file(file, renderers[suffix_of(file)](result))
    except OSError as error:
        raise InputError(f"the result could not be written: {error}") from None


@contextmanager
def error_reports(files: Sequence[Path], renderers: Mapping[str, Callable[[str], str]]) -> Iterator[None]:
    """If the body raises a click error, write the error's message to each file, in the format of the file's suffix."""
    try:
        yield
    except click.ClickException as error:
        write_reports(files, renderers, error.format_message())
        raise
