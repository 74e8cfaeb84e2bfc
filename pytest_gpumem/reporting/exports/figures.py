"""Collect figures from session reports for other tools. All functions are pure.

A figure is the value of a metric in a measurement, for example the ``peak_allocated`` of ``train_step`` in ``test_gpt``. A
figure has the same name in each session, so a tool can draw its values as a curve.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.base.command_name import command_name
from pytest_gpumem.base.errors import ExportError
from pytest_gpumem.base.units import counted
from pytest_gpumem.facts.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping

    from pytest_gpumem.facts.measurement import Environment, Measurement
    from pytest_gpumem.facts.values.times import Times
    from pytest_gpumem.judging.gate.verdict import MetricVerdict
    from pytest_gpumem.reporting.reports.session_report import SessionReport


_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric's value in a measurement. ``value`` and ``interval`` are in the metric's unit, for example bytes."""

    test: str
    """The test's id, for example ``"tests/test_gpt.py::test_train"``."""
    measurement: str
    metric: str
    value: float
    environment: Environment
    config: str | None = None
    """The step config as a text, for example ``"amp-bf16"``; ``None`` if the test measures its own code without a config."""
    interval: tuple[float, float] | None = None
    """The lower and the upper end of the 95 % confidence interval; ``None`` unless the metric is a time or a throughput."""
    of: str | None = None
    """For a throughput, the items that are counted: ``samples``, ``tokens``, ``steps`` or ``items``."""
    ended: str = ""
    """The time at which the session ended, in UTC: ``2026-11-21T16:20:05Z``."""
    commit: str | None = None

    @property
    def series(self) -> tuple[str, str, str, str]:
        """Return a key that is equal for the same figure in reports from several sessions."""
        return self.test, self.measurement, self.environment.slug, self.metric


@dataclass(frozen=True, slots=True)
class ExportedFigures:
    """The figures to export, and notes on figures that are left out."""

    figures: tuple[Figure, ...]
    tests_without_figure: int = 0
    """Number of tests without a figure. They were not measured, did not finish, or only compare two measurements."""
    disturbed: tuple[str, ...] = ()
    """The reason why times are invalid, for each measurement with invalid times. Example: another process used the GPU."""
    not_finite: tuple[str, ...] = ()
    """For each infinite or NaN value, a clause that names the metric and the test."""

    @property
    def summary(self) -> str:
        """Return a line with the counts, also of left-out values: ``"24 figures of 6 tests; 1 test without a figure"``."""
        tests = len({(figure.test, figure.ended) for figure in self.figures})
        parts = [f"{counted(len(self.figures), 'figure')} of {counted(tests, 'test')}"]
        if self.tests_without_figure:
            parts.append(f"{counted(self.tests_without_figure, 'test')} without a figure")
        if self.disturbed:
            parts.append(f"times of {counted(len(self.disturbed), 'measurement')} left out ({self.disturbed[0]})")
        if self.not_finite:
            parts.append(f"{counted(len(self.not_finite), 'value')} left out ({self.not_finite[0]})")
        return "; ".join(parts)


def figures_of(
    reports: Mapping[str, SessionReport], metrics: Collection[str] = (), *, over_time: bool = False
) -> ExportedFigures:
    """Return the figures in ``reports``. Invalid times, infinite values and NaN are left out.

    Args:
        reports: The reports, by a name for messages, for example the file's path.
        metrics: Names of metrics to export. If the collection is empty, all metrics are exported.
        over_time: True if several reports may contain the same figure, because their sessions ended at different times.

    Raises:
        ExportError: No report contains a figure, or two reports contain the same figure.
    """
    figures: list[Figure] = []
    disturbed: list[str] = []
    not_finite: list[str] = []
    without = 0
    reasons: list[str] = []
    report_names: dict[Hashable, str] = {}
    for name, report in reports.items():
        without += len(report.not_run)
        for result in report.results:
            test = result.verdict
            verdicts = () if test.unmeasured else test.verdicts
            without += not verdicts
            reasons += filter(None, [test.unmeasured])
            for verdict in verdicts:
                times = verdict.measurement.times
                invalid = None if times is None else times.best.invalid
                disturbed += filter(None, [invalid])
                for metric in verdict.metrics:
                    row = METRICS[metric.metric]
                    if (metrics and row.name not in metrics) or (invalid is not None and row.is_timed):
                        continue
                    if not math.isfinite(metric.value):
                        not_finite.append(f"the {row.title} of {test.nodeid} is {metric.value}")
                        continue
                    figure = _figure(test.nodeid, verdict.measurement, metric, report)
                    point = (figure.series, figure.ended if over_time else None)
                    if point in report_names:
                        raise ExportError(_twice(figure, report_names[point], name, over_time=over_time))
                    report_names[point] = name
                    figures.append(figure)
    if not figures:
        of_metrics = f" of {', '.join(metrics)}" if 0 < len(metrics) <= _MOST_NAMED else ""
        details = f": {counted(without, 'test has', 'tests have')} no figure" if without else ""
        details += f" ({reasons[0]})" if reasons else ""
        details += f": {not_finite[0]}" if not_finite else ""
        raise ExportError(f"there is no figure{of_metrics} in {', '.join(reports)}{details}")
    return ExportedFigures(tuple(figures), without, tuple(disturbed), tuple(not_finite))


def _figure(test: str, measurement: Measurement, metric: MetricVerdict, report: SessionReport) -> Figure:
    return Figure(
        test,
        measurement.name,
        metric.metric,
        metric.value,
        measurement.environment,
        measurement.workload.config,
        None if measurement.times is None else _interval(metric, measurement.times),
        metric.of,
        report.ended,
        report.commit,
    )


def _interval(metric: MetricVerdict, times: Times) -> tuple[float, float] | None:
    low, high = times.best.interval()
    if metric.metric == "step_time":
        return low, high
    if metric.metric == "throughput" and low > 0:
        # Throughput is work over time, so the slowest step has the smallest throughput.
        work = metric.value * times.median
        return work / high, work / low
    return None


def _twice(figure: Figure, earlier: str, name: str, *, over_time: bool) -> str:
    duplicate = f"{figure.test} ({figure.measurement}) on {figure.environment.device} is in {earlier} and in {name}"
    if over_time:
        return f"{duplicate}, which ended in the same second: export one of them"
    return f"{duplicate}: export one of them ({command_name()} merge makes one report of shards)"


_SURROGATE = re.compile("[\ud800-\udfff]")
_AMBIGUOUS = re.compile("\\\\(?=\\\\*(?:ud[89a-f][0-9a-f]{2}|[\ud800-\udfff]))")
"""Backslashes before a lone surrogate, or before a text that looks like a written surrogate, ``ud800``.

`utf8` doubles these backslashes. Without doubling, the text ``\\ud800`` and the surrogate itself would be written in the same
way.
"""


def benchmark_name(figure: Figure) -> str:
    """Return the name ``"tests/test_gpt.py::test_train[fp32] (train_step) @ nvidia-h100-80gb-hbm3"`` for this figure.

    The name contains the device, because bytes and times from different devices cannot be compared. The name contains the
    measurement even if the test has only one, so the name stays the same if the test gets a second measurement.
    """
    return utf8(f"{figure.test} ({figure.measurement}) @ {figure.environment.slug}")


def utf8(text: str) -> str:
    r"""Return ``text`` with each lone surrogate written as ``\ud800``, because UTF-8 cannot encode a lone surrogate.

    Backslashes before a surrogate are doubled, so two different texts never become equal.
    """
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", _AMBIGUOUS.sub(r"\\\\", text))
