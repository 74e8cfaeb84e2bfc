"""``gpumem export``: writes the figures in session reports in the format of another tool, for example Prometheus."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.base.command_name import command_name
from pytest_gpumem.base.errors import ExportError
from pytest_gpumem.base.units import nearest
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.reporting.exports.figures import ExportedFigures, Figure, figures_of
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
    """A click group with a command for each format. If the user forgets the format, the error lists all formats."""

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

    A figure is the value of a metric in a measurement, for example the peak memory of a training step. The command
    exports the figures of all measured tests, whether they passed or failed. A REPORT.json comes from
    `pytest --gpumem-report=FILE.json` or from `gpumem merge`; `-` reads it from standard input.

    A line on standard error says how many figures were exported, how many tests have no figure, and which step times
    were left out because other programs disturbed the measurement.

    \b
    Examples:
      gpumem export github-action-benchmark report.json -o smaller.json
      gpumem export openmetrics --metric peak_allocated report.json
      gpumem export tensorboard --step=commits reports/*.json -o runs
      gpumem merge shard-*.json --report - | gpumem export bencher -

    Exit status: 0 if figures were exported, 1 after Ctrl-C, 2 for wrong usage, a report that cannot be read, or
    reports without a figure. If the status is 2, nothing was written.
    \f
    ## Names

    A figure has the same name in the reports of all sessions: `<test> (<measurement>) @ <slug>`. For example:
    `tests/test_gpt.py::test_train (train_step) @ nvidia-h100-80gb-hbm3`. The slug is the name of the device's folder in
    the [store](store-format.md).

    - Figures from two kinds of devices have different names, because their bytes and times cannot be compared. Figures from
      two machines with the same GPU have the same name, although their times can differ.
    - A test's id can contain a lone surrogate, which UTF-8 cannot encode. The surrogate is written `\\ud800`, and a
      backslash in front of such a text is doubled.

    ## Left out

    - Tests without a figure: the test was not measured, did not finish, or only compares two measurements.
    - Step times that are invalid because other programs disturbed the step. They are not written into baselines either.
    - Infinite values and NaN.

    ## Several reports

    - Several reports can be exported together, for example the shards of a session, or many sessions for `tensorboard`.
    - If two reports contain the same figure, the command ends with an error. `tensorboard` accepts the same figure from two
      sessions, unless both sessions ended in the same second.
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

    The GitHub action reads the file as `tool: customSmallerIsBetter`, or with --better=bigger as
    `tool: customBiggerIsBetter`. In each file, either smaller or bigger values are better. So a workflow that follows
    both memory and throughput exports two files.

    \b
    Examples:
      gpumem export github-action-benchmark report.json -o smaller.json
      gpumem export github-action-benchmark --better=bigger report.json
    \f
    The [action](https://github.com/benchmark-action/github-action-benchmark) reads a JSON array. Each item has these keys:

    | key | value |
    |---|---|
    | `name` | the figure's name and its metric: `<test> (<measurement>) @ <slug>: <metric>` |
    | `unit` | `bytes`, `count`, `seconds`, or the unit of a throughput, for example `samples/s` |
    | `value` | the value of the metric |
    | `range` | for times and throughputs: the distance from the value to the end of its 95 % interval: `± 0.00021` |
    | `extra` | device, config, commit and environment, each on its own line |
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
    In this [format](https://bencher.dev/docs/reference/bencher-metric-format/), a benchmark has the name
    `<test> (<measurement>) @ <slug>` and a measure for each metric.

    - `step_time` becomes the measure `latency`, and `throughput` becomes the measure `throughput`. Every project on Bencher
      has these two measures. Other measures are named after the metric, for example `peak-allocated`.
    - Times are in nanoseconds, the unit of Bencher's `latency`.
    - `lower_value` and `upper_value` are the ends of the 95 % interval.
    - Bencher refuses names that are longer than 1,024 bytes. In a longer name, a digest replaces the end.
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
    help="Choose the horizontal axis: `time` is the end of the session in seconds since 1970, and `commits` is the number of "
    "commits up to the report's commit.",
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

    Each figure becomes a curve, and each report adds a point to the curve. Give the reports of many sessions together, or
    call the command again after each session. The command needs TensorBoard: `pip install tensorboard`.

    \b
    Examples:
      gpumem export tensorboard reports/*.json -o runs
      gpumem export tensorboard --step=commits report.json -o runs
    \f
    - Each device gets a subfolder with its slug as the name. TensorBoard shows the subfolder as a run.
    - A scalar is named `<metric>/<test> (<measurement>)`. Its value has double precision, and its time is the end of the
      session.
    - `--step=commits` counts commits in the git repository around the current folder. It needs a full clone, because a
      shallow clone lacks old commits.
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
    # Sanitize the summary, because it may contain a test's id with control characters.
    screen = Screen(encoding=getattr(sys.stderr, "encoding", None) or "utf-8")
    click.echo(screen.legible(exported.summary), err=True)
