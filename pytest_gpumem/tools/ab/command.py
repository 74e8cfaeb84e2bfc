"""``gpumem ab``: compares the time and memory of two revisions, or two sets of requirements, on this machine."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pytest_gpumem.base.git import GitError, plain_environment
from pytest_gpumem.base.processes import recorded_signals
from pytest_gpumem.base.requirements.environments import Environments, cache_folder
from pytest_gpumem.base.requirements.errors import RequirementError
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
_FILE_OPTIONS = ("-r", "--requirement")


class WithPytestArguments(click.Command):
    """A command that passes all words after ``--`` to pytest."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        separator = args.index("--") if "--" in args else len(args)
        ctx.meta[PYTEST_ARGUMENTS] = args[separator + 1 :]
        return super().parse_args(ctx, list(_join_file_options(args[:separator])))

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- PYTEST_ARGS...]"]


def _join_file_options(words: Sequence[str]) -> Iterator[str]:
    """Join ``-r`` and the file after it into a single word, so ``--base-with -r old.txt`` has the value ``-r old.txt``."""
    remaining = iter(words)
    for word in remaining:
        yield f"{word} {next(remaining, '')}" if word in _FILE_OPTIONS else word


_MOST_OF_MARKDOWN = 50_000
"""The most characters in Markdown. GitHub's limit for a comment is 65,536, and the comment contains other text as well."""
_RENDERERS: dict[str, Callable[[ComparisonResult], str]] = {
    ".json": lambda ended: to_json(_report_of(ended), finished=ended.why is None),
    ".md": lambda ended: markdown(_report_of(ended), ended.units, finished=ended.why is None, most=_MOST_OF_MARKDOWN),
}
"""The formats for ``--report``, by suffix."""
_ERROR_RENDERERS: dict[str, Callable[[str], str]] = {".json": failure_as_json, ".md": failure_as_markdown}
"""The formats for a comparison without a result, by suffix."""


def _reports(_context: click.Context, _parameter: click.Parameter, files: tuple[Path, ...]) -> tuple[Path, ...]:
    check_one_stream(files)
    for file in files:
        if suffix_of(file) not in _RENDERERS:
            raise click.BadParameter(f"{file} has to end with {' or '.join(_RENDERERS)}, which selects the format")
        if not file.absolute().parent.is_dir():
            raise click.BadParameter(f"there is no folder {file.parent}")
    return files


def _requirement_option(side: str) -> Callable[[FC], FC]:
    return click.option(
        f"--{side}-with",
        metavar="REQUIREMENT",
        multiple=True,
        help=f"Run {side.upper()} with this requirement installed on top of the current environment, for example "
        "`transformers==4.38.2` or `-r old.txt`. May be repeated.",
    )


def _python_option(side: str) -> Callable[[FC], FC]:
    return click.option(
        f"--{side}-python",
        metavar="PYTHON",
        help=f"Run {side.upper()} with this Python, for example `python3.12`, in an environment that contains only the "
        f"requirements from --{side}-with and this plugin. Default: the current Python.",
    )


def with_pip_options(command: FC) -> FC:
    """Add the option for limiting the versions of dependencies."""
    return click.option(
        "--constraint",
        "constraints",
        metavar="FILE",
        multiple=True,
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Limit the versions of dependencies by this constraints file, as `pip install --constraint` does. May be "
        "repeated.",
    )(command)


def max_slowdown_option(condition: str = "") -> Callable[[FC], FC]:
    """Return the option ``--max-slowdown``.

    Args:
        condition: A sentence for the help text on when the option is used.
    """
    return click.option(
        "--max-slowdown",
        metavar="RATIO",
        default="1.5 %",
        show_default=True,
        callback=parsed(parse_ratio),
        help=f"How much longer a step may take before it counts as slower, for example `2 %`. {condition}".strip(),
    )


setup_option = click.option(
    "--setup",
    metavar="COMMAND",
    help="Run this shell command in the checkout before each test run there, for example `pip install -e .`.",
)
report_option = click.option(
    "--report",
    "files",
    metavar="FILE",
    multiple=True,
    type=FilePath(writable=True),
    callback=_reports,
    help="Write the result to this file. `FILE.json` gets JSON, `FILE.md` gets Markdown for a comment, an issue or a job "
    "summary, and `-` writes JSON to standard output. May be repeated.",
)


def environments() -> Environments:
    """Return the environments in the user's cache."""
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
    help="Run each side at most this many times. Fewer runs are made if every test is decided earlier.",
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

    The command compares the memory and step time of tests on this machine. It checks BASE and HEAD out into temporary
    worktrees, and runs pytest with PYTEST_ARGS in both by turns: base, head, head, base, base, head. BASE and HEAD are
    branches, tags or other revisions that git knows. HEAD is the checked-out commit by default. Only commits are compared. A
    line on standard error counts the files with uncommitted changes.

    Two neighbouring runs give one ratio of the step times. Bytes and counts are compared as the gate compares them with a
    baseline. Baselines are neither read nor written.

    With --base-with, --head-with, --base-python or --head-python, a side runs with other packages. Without BASE, both sides
    then run the project in the current folder with its uncommitted changes. The folder need not be a git repository. The
    requirements are installed into cached environments (`gpumem cache`), so the current environment is not changed.

    \b
    Examples:
      gpumem ab main -- tests/test_gpt.py::test_train_step
      gpumem ab v1.0 v1.1 --setup "pip install --no-deps -e ." -- tests
      gpumem ab --head-with "transformers==4.38.2" -- tests/test_llama.py
      gpumem ab --head-with "torch==2.15.*" -- --gpumem-device=emulated:h100 tests

    Exit status: 0 if nothing regressed, 1 if something regressed or a test fails only in HEAD, 2 if nothing could be compared,
    or for wrong usage or a run that ended before its tests, 130 after Ctrl-C, 143 after SIGTERM.
    \f
    After Ctrl-C and SIGTERM, the result so far is printed. Processes, worktrees and the temporary folder are removed.

    ## Runs

    - Each run is a process of its own, `python -m pytest PYTEST_ARGS`, in the same sub-folder as the command.
    - If no time is taken (`--no-gpumem-time`, or an emulated GPU), each side runs once.
    - `--gpumem-baseline`, `--gpumem-update`, `--gpumem-store` and `--gpumem-strict` are refused in `PYTEST_ARGS`, and switched
      off if the settings set them.
    - A relative path in `PYTEST_ARGS`, such as `--junitxml=report.xml`, is a path in the worktree. The file is removed with the
      worktree.
    - A run ends the comparison if pytest reports a usage error, cannot collect the tests, or crashes.

    ## Verdicts on step time

    | verdict | meaning |
    |---|---|
    | `slower`, `faster` | the change is certain after two pairs of runs in a row |
    | `not slower` | the step is not slower by more than `--max-slowdown` |
    | `uncertain` | the interval reaches beyond twice `--max-slowdown` |

    - Each verdict has the change and its 95 % interval. The printed times are geometric means over the pairs, so their ratio is
      the change.
    - If the interval of a `not slower` reaches beyond `--max-slowdown`, the line names the slowdown up to which the runs
      would have missed a change.
    - The runs end when every test is decided, after 4 pairs at the earliest.

    ## Bytes and counts

    - The tolerances are those in `[tool.gpumem]` of `HEAD`. The marker's limits, budgets and the hook for tolerances are not
      applied.
    - If the runs of one side differ, a note says so, and the two sides' closest figures are compared.
    - Growth is explained by module and line, from the first run of each side. Changed lines come first.

    ## Tests that are not compared

    The report lists each of these tests with a reason: a test ran on one side only, was skipped, failed, or used another
    workload or device. A test is `broken` if it is measured in `BASE` and fails in every run of `HEAD`.

    ## Worktrees

    - A worktree contains the files in git: no built extensions and no uncommitted data. `--setup` can make them. Submodules
      that the checkout has are checked out. Git hooks are not run.
    - Worktrees are in the temporary folder (`TMPDIR`). If a comparison is killed (`SIGKILL`), the next comparison removes its
      worktrees.
    - `PYTHONPATH` begins with the sub-folder, the worktree's top and the `src` of either, so the tests import the
      worktree's code. If a run imports a module from another checkout of the repository, for example through an editable
      install, the command ends and names the module and the file. A virtual environment inside the checkout is fine.

    ## Sets of requirements

    - **Environments.** Requirements are installed into a virtual environment on top of the current one. pip's newest
      fitting release of each named package is installed, and only those dependencies that the current environment does not
      satisfy. So the two sides differ only in the packages that you asked for. With `--base-python` or `--head-python`, no
      current environment is used: name all packages that the tests need (`--base-with "-r requirements.txt"`).
    - **Requirements** are written as for pip: `torch==2.15.*`,
      `transformers @ git+https://github.com/huggingface/transformers@main`.
    - **Paths in a requirements file** are resolved as pip resolves them: `-e ../x` and `./x.whl` from the current folder,
      `--find-links` from the file's folder if the path exists there. Constraint files in a requirements file are applied
      like `--constraint`.
    - **Reports** shorten absolute paths to the parts that differ between the two sides: `old/gpt` and `new/gpt`.
    - **uv** installs the packages if it is on the path, otherwise pip. If a set cannot be resolved, the command shows the
      reason.
    - **Environments are cached** by their packages and the environment beneath. A set without exact releases (`torch==2.15.*`)
      is installed anew each time. `gpumem cache` lists and removes the environments.
    - **torch:** if the device is an emulated GPU (`--gpumem-device=emulated:h100` in `PYTEST_ARGS`, or `device` in the
      settings), a requirement on torch installs its CUDA build without NVIDIA's libraries. So an upgrade can be judged without
      a GPU.
    - If the tests import no package that differs, the exit status is 2.

    ## JSON

    `--report FILE.json` writes an object with these keys. Bytes, seconds and counts are numbers.

    | key | value |
    |---|---|
    | `format` | 1 |
    | `finished`, `passed` | whether the comparison ended by itself, and whether nothing regressed |
    | `exit_status` | the command's exit status |
    | `accounting` | the last line of the output: the number of tests by verdict |
    | `base`, `head` | `name` and `commit`; for a set of requirements, `name` is its text |
    | `pairs`, `max_slowdown` | the number of pairs, and `--max-slowdown` as a ratio: `0.015` |
    | `packages` | packages that differ: `name`, `base`, `head`, `requested` (named by `--head-with`), `url` |
    | `tests` | `file`, `test`, `name`, `outcome`, `notes`, `growth` and `metrics` of each test |
    | `not_compared` | `test`, `reason`, `broken` |
    | `causes`, `not_explained` | the causes of growth in several tests, as in a [session report](reports.md) |
    | `why` | the reason, if nothing could be compared |

    `growth` is that of a [session report](reports.md), or `null` without an explanation. Each of `metrics` has `metric`,
    `outcome`, `base`, `head`, `ratio`, `low`, `high`, `allowed` and `reason`.
    """
    arguments: list[str] = context.meta[PYTEST_ARGUMENTS]
    with error_reports(files, _ERROR_RENDERERS), input_errors(GitError, RequirementError):
        requirements = [
            requirement_set(lines, constraints, python) if lines or python else None
            for lines, python in ((base_with, base_python), (head_with, head_python))
        ]
        if base is None and requirements == [None, None]:
            raise click.UsageError("Missing argument 'BASE', or --base-with or --head-with.")
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
    """Print the number of files with uncommitted changes, which are not compared."""
    if files:
        click.echo(
            f"{counted(files, 'file is', 'files are')} changed and not committed: only commits are compared", err=True
        )


def _report_of(ended: ComparisonResult) -> ComparisonReport:
    assert ended.report is not None, "the comparison has a result"
    return ended.report


def _print(ended: ComparisonResult, files: Sequence[Path]) -> None:
    with text_beside(files):
        write_lines(lines(_report_of(ended), ended.units, screen()))
    write_reports(files, _RENDERERS, ended)


def write_reports(files: Sequence[Path], renderers: Mapping[str, Callable[[T], str]], result: T) -> None:
    """Write a result to each file in the format of its suffix. Raises `InputError`."""
    try:
        for file in files:
            write_file(file, renderers[suffix_of(file)](result))
    except OSError as error:
        raise InputError(f"the result could not be written: {error}") from None


@contextmanager
def error_reports(files: Sequence[Path], renderers: Mapping[str, Callable[[str], str]]) -> Iterator[None]:
    """If the command ends because of wrong input, write the error to each file in the format of its suffix."""
    try:
        yield
    except click.ClickException as error:
        write_reports(files, renderers, error.format_message())
        raise
