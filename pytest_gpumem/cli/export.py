"""``gpumem export``: the figures of session reports, in the format of another tool."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.cli import completion
from pytest_gpumem.cli.files import STANDARD, FilePath, name_of, write_file
from pytest_gpumem.cli.streams import files_of, input_errors, read_report
from pytest_gpumem.command_name import command_name
from pytest_gpumem.exports.figures import ExportedFigures, ExportError, Figure, figures_of
from pytest_gpumem.exports.formats import Better, bencher, github_action_benchmark, metrics_of, openmetrics
from pytest_gpumem.exports.tensorboard import commits, seconds, write_scalars
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports.layout import Screen
from pytest_gpumem.units import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.reports.session_report import SessionReport


class _Formats(click.Group):
    """The formats, each a command: told to who gives a report in place of one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if ctx.resilient_parsing or name in self.commands or name.startswith("-"):
            return super().resolve_command(ctx, args)
        formats = list(self.commands)
        if name == str(STANDARD) or name.endswith(".json") or Path(name).exists():
            typed = f"{command_name()} export {formats[1]} {' '.join(args)}"
            raise click.UsageError(f"name the format before {name}, like {typed}; formats: {', '.join(formats)}", ctx)
        raise click.UsageError(f"no such format: {name}; {nearest(name, formats)}", ctx)


@click.group(cls=_Formats)
def export() -> None:
    """Give the figures of reports to another tool.

    A REPORT is what pytest --gpumem-report=FILE.json wrote. Every test that was measured is exported, whatever its verdict;
    those that were not are counted. Times that something disturbed are left out, as they are when baselines are written.

    \b
    Examples:
      gpumem export github-action-benchmark report.json -o smaller.json
      gpumem export tensorboard --step=commits reports/*.json -o runs

    Exit status: 0 when figures were exported, 2 when there were none, a report could not be read, or wrong usage.
    """


_reports = click.argument("reports", metavar="REPORT.json...", nargs=-1, required=True, shell_complete=completion.files)
_metrics = click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    type=click.Choice(list(METRICS)),
    help="Export this metric only (peak_allocated, step_time, ...). May be repeated.",
)
_output = click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=FilePath(),
    default=STANDARD,
    help="Write it there. The default, -, is standard output.",
)


def _common(command: Callable[..., None]) -> Callable[..., None]:
    return _output(_metrics(_reports(command)))


@export.command("github-action-benchmark")
@click.option(
    "--better",
    type=click.Choice(["smaller", "bigger"]),
    default="smaller",
    show_default=True,
    help="The metrics of which less is better, for the tool customSmallerIsBetter; or those of which more is.",
)
@_common
def for_github_action_benchmark(
    *, reports: tuple[str, ...], metrics: tuple[str, ...], output: Path, better: Better
) -> None:
    """JSON for github-action-benchmark.

    The action takes one direction a file: bytes, counts and times by default, throughput with --better=bigger.
    """
    try:
        one_direction = metrics_of(better, metrics)
    except ExportError as error:
        raise click.UsageError(str(error)) from None
    _export(github_action_benchmark, reports, one_direction, output)


@export.command("bencher")
@_common
def for_bencher(*, reports: tuple[str, ...], metrics: tuple[str, ...], output: Path) -> None:
    """Bencher Metric Format JSON.

    For bencher run --adapter json --file FILE.
    """
    _export(bencher, reports, metrics, output)


@export.command("openmetrics")
@_common
def for_openmetrics(*, reports: tuple[str, ...], metrics: tuple[str, ...], output: Path) -> None:
    """OpenMetrics text, as Prometheus reads it."""
    _export(openmetrics, reports, metrics, output)


def _folder(_context: click.Context, _parameter: click.Parameter, value: Path) -> Path:
    if value == STANDARD:
        raise click.BadParameter("event files are written into a folder, and not to standard output")
    return value


@export.command("tensorboard")
@click.option(
    "--step",
    type=click.Choice(["time", "commits"]),
    default="time",
    show_default=True,
    help="What a point stands over: seconds since 1970, or how many commits there are up to the report's.",
)
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    callback=_folder,
    help="The folder of event files, to which this one is added.",
)
@_metrics
@_reports
def for_tensorboard(*, reports: tuple[str, ...], metrics: tuple[str, ...], output: Path, step: str) -> None:
    """Scalars in a folder that TensorBoard shows.

    Each report is a point of every test's curves, so give it the reports of many sessions, at once or one by one.
    """
    with input_errors(ExportError, OSError):
        found = figures_of(_read(reports), metrics, over_time=True)
        write_scalars(found.figures, output, seconds if step == "time" else commits(Path.cwd()))
    _print(found)


def _export(
    render: Callable[[Sequence[Figure]], str], reports: Sequence[str], metrics: Sequence[str], output: Path
) -> None:
    with input_errors(ExportError, OSError):
        found = figures_of(_read(reports), metrics)
        text = render(found.figures)
        write_file(output, text)
    _print(found)


def _read(files: Sequence[str]) -> dict[str, SessionReport]:
    return {name_of(path): read_report(path) for path in files_of(files)}


def _print(found: ExportedFigures) -> None:
    # It may hold ids of tests.
    screen = Screen(encoding=getattr(sys.stderr, "encoding", None) or "utf-8")
    click.echo(screen.legible(found.summary), err=True)
