"""``gpumem export``: writes the figures in session reports for another tool."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.base.command_name import command_name
from pytest_gpumem.base.units import nearest
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.reporting.exports.figures import ExportedFigures, ExportError, Figure, figures_of
from pytest_gpumem.reporting.exports.formats import Better, bencher, github_action_benchmark, metrics_of, openmetrics
from pytest_gpumem.reporting.exports.tensorboard import commits, seconds, write_scalars
from pytest_gpumem.reporting.reports.layout import Screen
from pytest_gpumem.tools.console import completion
from pytest_gpumem.tools.console.files import STANDARD, FilePath, name_of, write_file
from pytest_gpumem.tools.console.streams import files_of, input_errors, read_report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.reporting.reports.session_report import SessionReport


class _Formats(click.Group):
    """A group with a command for each format. If the user names a report instead of a format, the error lists the formats."""

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
    """Write the figures in session reports for another tool: Bencher, Prometheus, TensorBoard.

    A figure is the value of one metric in one measurement, for example the peak memory of a training step. The command
    exports every measured test, whatever its verdict. A REPORT.json comes from `pytest --gpumem-report=FILE.json` or
    from `gpumem merge`; `-` reads it from standard input.

    Standard error says how many figures were exported, and which were left out: tests without a figure are counted, and
    step times that another process disturbed are named with the reason.

    \b
    Examples:
      gpumem export github-action-benchmark report.json -o smaller.json
      gpumem export openmetrics --metric peak_allocated report.json
      gpumem export tensorboard --step=commits reports/*.json -o runs
      gpumem merge shard-*.json --report - | gpumem export bencher -

    Exit status: 0 if figures were exported, 1 after Ctrl-C, 2 for wrong usage, a report that cannot be read, or
    reports without a figure. With 2, nothing is written.
    \f
    ## Names

    A figure has the same name in each session: `<test> (<measurement>) @ <slug>`, for example
    `tests/test_gpt.py::test_train (train_step) @ nvidia-h100-80gb-hbm3`. The slug is the name of the device's folder in
    the [store](store-format.md).

    - Two devices never share a name, because neither their bytes nor their times can be compared. Two machines with the
      same GPU do share a name, although their times can differ.
    - A lone surrogate in a test's id, which UTF-8 cannot encode, is written `\\ud800`. A backslash in front of such a
      text is doubled.

    ## Left out

    - Tests without a figure: they were not measured, did not finish, or only compare two measurements.
    - Step times that a disturbance made invalid. They are not written into baselines either.
    - Infinite values and NaN.

    ## Several reports

    - Several reports are exported together, for example the shards of a session, or many sessions for `tensorboard`.
    - The same figure in two reports is an error. For `tensorboard`, it is an error only if both sessions ended in the
      same second.
    """


_reports = click.argument("reports", metavar="REPORT.json...", nargs=-1, required=True, shell_complete=completion.files)
_metrics = click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    type=click.Choice(list(METRICS)),
    help="Export only this metric, for example `peak_allocated`. May be repeated. Default: all metrics.",
)
_output = click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=FilePath(),
    default=STANDARD,
    show_default=True,
    help="Write to this file, for example `figures.json`; `-` is standard output.",
)


def _common(command: Callable[..., None]) -> Callable[..., None]:
    return _output(_metrics(_reports(command)))


@export.command("github-action-benchmark")
@click.option(
    "--better",
    type=click.Choice(["smaller", "bigger"]),
    default="smaller",
    show_default=True,
    help="Export the metrics in which a smaller value is better (bytes, counts, times), or the metrics in which a bigger value "
    "is better (throughput).",
)
@_common
def for_github_action_benchmark(
    *, reports: tuple[str, ...], metrics: tuple[str, ...], output: Path, better: Better
) -> None:
    """Write JSON for github-action-benchmark.

    The file is for the tool `customSmallerIsBetter`, or with --better=bigger for `customBiggerIsBetter`. The GitHub
    action takes one direction in a file, so a workflow that follows throughput exports two files.

    \b
    Examples:
      gpumem export github-action-benchmark report.json -o smaller.json
      gpumem export github-action-benchmark --better=bigger report.json
    \f
    The [action](https://github.com/benchmark-action/github-action-benchmark) reads an array. Each item has these keys:

    | key | value |
    |---|---|
    | `name` | the figure's name and its metric: `<test> (<measurement>) @ <slug>: <metric>` |
    | `unit` | `bytes`, `count`, `seconds`, or the unit of a throughput, for example `samples/s` |
    | `value` | the figure |
    | `range` | for times and throughputs: how far the 95 % interval reaches from the value, for example `± 0.00021` |
    | `extra` | device, config, commit and environment, a line each |
    """
    try:
        one_direction = metrics_of(better, metrics)
    except ExportError as error:
        raise click.UsageError(str(error)) from None
    _export(github_action_benchmark, reports, one_direction, output)


@export.command("bencher")
@_common
def for_bencher(*, reports: tuple[str, ...], metrics: tuple[str, ...], output: Path) -> None:
    """Write JSON in the Bencher Metric Format.

    `bencher run --adapter json --file FILE` uploads the file.

    \b
    Examples:
      gpumem export bencher report.json -o figures.json
    \f
    The [format](https://bencher.dev/docs/reference/bencher-metric-format/) has a benchmark for each
    `<test> (<measurement>) @ <slug>`, with a measure for each metric.

    - `step_time` becomes the measure `latency`, and `throughput` the measure `throughput`. Every project on Bencher has
      these two. Other measures are named after the metric: `peak-allocated`.
    - Times are in nanoseconds, because Bencher's `latency` is.
    - `lower_value` and `upper_value` are the ends of the 95 % interval.
    - Bencher refuses names longer than 1,024 bytes. The end of a longer name is replaced by a digest.
    """
    _export(bencher, reports, metrics, output)


@export.command("openmetrics")
@_common
def for_openmetrics(*, reports: tuple[str, ...], metrics: tuple[str, ...], output: Path) -> None:
    """Write OpenMetrics text, which Prometheus reads.

    The text has no timestamps, so the textfile collector of a node exporter accepts it.

    \b
    Examples:
      gpumem export openmetrics report.json -o gpumem.prom
    \f
    The text is [OpenMetrics](https://prometheus.io/docs/specs/om/open_metrics_spec/) 1.0 in UTF-8, with a family of gauges for
    each metric: `gpumem_peak_allocated_bytes`, `gpumem_step_time_seconds`, `gpumem_throughput_items_per_second`,
    `gpumem_flops`. The labels are `test`, `measurement`, `device` (the slug), `config`, and for a throughput `of`
    (`samples`).
    """
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
    help="Place a report on the horizontal axis by the end of its session (time, in seconds since 1970) or by the number of "
    "commits up to its commit (commits).",
)
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    callback=_folder,
    help="Add an event file to this folder, for example `runs`.",
)
@_metrics
@_reports
def for_tensorboard(*, reports: tuple[str, ...], metrics: tuple[str, ...], output: Path, step: str) -> None:
    """Write scalars for TensorBoard.

    Each report adds one point to each figure's curve. Give the reports of many sessions, together or one after the
    other. The command needs TensorBoard: `pip install tensorboard`.

    \b
    Examples:
      gpumem export tensorboard reports/*.json -o runs
      gpumem export tensorboard --step=commits report.json -o runs
    \f
    - Each device has a subfolder, named after its slug, which TensorBoard shows as a run.
    - A scalar is named `<metric>/<test> (<measurement>)`. Its value has double precision, and its time is the end of the
      session.
    - `--step=commits` counts in the git repository around the current folder. A shallow clone is an error.
    """
    with input_errors(ExportError, OSError):
        exported = figures_of(_read(reports), metrics, over_time=True)
        write_scalars(exported.figures, output, seconds if step == "time" else commits(Path.cwd()))
    _print(exported)


def _export(
    render: Callable[[Sequence[Figure]], str], reports: Sequence[str], metrics: Sequence[str], output: Path
) -> None:
    with input_errors(ExportError, OSError):
        exported = figures_of(_read(reports), metrics)
        text = render(exported.figures)
        write_file(output, text)
    _print(exported)


def _read(files: Sequence[str]) -> dict[str, SessionReport]:
    return {name_of(path): read_report(path) for path in files_of(files)}


def _print(exported: ExportedFigures) -> None:
    # The summary may contain ids of tests.
    screen = Screen(encoding=getattr(sys.stderr, "encoding", None) or "utf-8")
    click.echo(screen.legible(exported.summary), err=True)
