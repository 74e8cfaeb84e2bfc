"""``gpumem export``: the figures of session reports, in the format of another tool."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.cli.streams import InputError
from pytest_gpumem.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.exports.figures import Figure, Figures
    from pytest_gpumem.exports.github_action_benchmark import Better


@click.group()
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


def _reports(command: Callable[..., None]) -> Callable[..., None]:
    """The arguments that every format takes."""
    only = click.option(
        "--metric",
        "metrics",
        multiple=True,
        metavar="NAME",
        type=click.Choice(list(METRICS)),
        help="Export this metric only (peak_allocated, step_time, ...). May be repeated.",
    )
    files = click.argument("reports", metavar="REPORT.json...", nargs=-1, required=True)
    return files(only(command))


_output = click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write it there, and not to standard output.",
)


@export.command("github-action-benchmark")
@click.option(
    "--better",
    type=click.Choice(["smaller", "bigger"]),
    default="smaller",
    show_default=True,
    help="The metrics of which less is better, for the tool customSmallerIsBetter; or those of which more is.",
)
@_output
@_reports
def for_github_action_benchmark(
    *, reports: tuple[str, ...], metrics: tuple[str, ...], output: Path | None, better: Better
) -> None:
    """JSON for github-action-benchmark.

    The action takes one direction a file: bytes, counts and times by default, throughput with --better=bigger.
    """
    from pytest_gpumem.exports.figures import ExportError
    from pytest_gpumem.exports.github_action_benchmark import github_action_benchmark, metrics_of

    try:
        one_direction = metrics_of(better, metrics)
    except ExportError as error:
        raise click.UsageError(str(error)) from None
    _export(reports, one_direction, output, github_action_benchmark)


@export.command("bencher")
@_output
@_reports
def for_bencher(*, reports: tuple[str, ...], metrics: tuple[str, ...], output: Path | None) -> None:
    """Bencher Metric Format JSON.

    For bencher run --adapter json --file FILE.
    """
    from pytest_gpumem.exports.bencher import bencher

    _export(reports, metrics, output, bencher)


@export.command("openmetrics")
@_output
@_reports
def for_openmetrics(*, reports: tuple[str, ...], metrics: tuple[str, ...], output: Path | None) -> None:
    """OpenMetrics text, as Prometheus reads it."""
    from pytest_gpumem.exports.openmetrics import openmetrics

    _export(reports, metrics, output, openmetrics)


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
    help="The folder of event files, to which this one is added.",
)
@_reports
def for_tensorboard(*, reports: tuple[str, ...], metrics: tuple[str, ...], output: Path, step: str) -> None:
    """Scalars in a folder that TensorBoard shows.

    Each report is a point of every test's curves, so give it the reports of many sessions, at once or one by one.
    """
    from pytest_gpumem.exports.figures import ExportError
    from pytest_gpumem.exports.tensorboard import commits, seconds, write_scalars

    found = _figures(reports, metrics, over_time=True)
    try:
        write_scalars(found.figures, output, seconds if step == "time" else commits(Path.cwd()))
    except (ExportError, OSError) as error:
        raise InputError(str(error)) from None
    click.echo(_legible(found.told), err=True)


def _export(
    given: Sequence[str],
    metrics: Sequence[str],
    output: Path | None,
    render: Callable[[Sequence[Figure]], str],
) -> None:
    from pytest_gpumem.exports.figures import ExportError
    from pytest_gpumem.whole_file import write_whole

    found = _figures(given, metrics, over_time=False)
    try:
        text = render(found.figures)
        if output is None:
            click.echo(text.encode(), nl=False)
        else:
            write_whole(output, text)
    except (ExportError, OSError) as error:
        raise InputError(str(error)) from None
    click.echo(_legible(found.told), err=True)


def _figures(given: Sequence[str], metrics: Sequence[str], *, over_time: bool) -> Figures:
    from pytest_gpumem.cli.streams import files_of, read_report
    from pytest_gpumem.exports.figures import ExportError, figures_of

    reports = {str(path): read_report(path) for path in files_of(given)}
    try:
        return figures_of(reports, metrics, over_time=over_time)
    except ExportError as error:
        raise InputError(str(error)) from None


def _legible(text: str) -> str:
    """``text``, which may hold ids of tests, as standard error can show it."""
    from pytest_gpumem.reports.layout import Screen

    return Screen(encoding=getattr(sys.stderr, "encoding", None) or "utf-8").legible(text)
