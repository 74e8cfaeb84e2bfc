"""Figures of session reports for other tools: one for each metric of each measurement, with a stable name. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.command_name import command_name
from pytest_gpumem.metrics import METRICS, WHOLE
from pytest_gpumem.units import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping

    from pytest_gpumem.gate.verdict import MetricVerdict
    from pytest_gpumem.measurement import Environment, Measurement
    from pytest_gpumem.reports.session_report import SessionReport
    from pytest_gpumem.values.times import Times


_MOST_NAMED = 3


class ExportError(Exception):
    """Raised when nothing can be exported; the message says why."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One metric of one measurement. ``value`` and ``interval`` are in the metric's unit."""

    test: str
    """The test's node id."""
    measurement: str
    metric: str
    value: float
    environment: Environment
    config: str | None = None
    """The step config's text; ``None`` where the test runs its own code."""
    interval: tuple[float, float] | None = None
    """The ends of the 95 % confidence interval of a time or a throughput."""
    of: str | None = None
    """The unit of a throughput: ``samples``, ``tokens``, ``steps``, ``items``."""
    ended: str = ""
    """The end of its session, in UTC: ``2026-11-21T16:20:05Z``."""
    commit: str | None = None

    @property
    def series(self) -> tuple[str, str, str, str]:
        """The curve that it is a point of: figures of other sessions have the same, and no other figures."""
        return self.test, self.measurement, self.environment.slug, self.metric


@dataclass(frozen=True, slots=True)
class ExportedFigures:
    """The figures to export, and what is left out."""

    figures: tuple[Figure, ...]
    without: int = 0
    """Tests without a figure: not measured, not finished, or held by relations only."""
    disturbed: tuple[str, ...] = ()
    """A clause for each measurement whose times are left out, which says why."""
    not_finite: tuple[str, ...] = ()
    """A clause for each value that is left out because it is no finite number, which names it."""

    @property
    def summary(self) -> str:
        """Return a line with the numbers of tests and figures that are exported, and of those that are left out and why."""
        tests = len({(figure.test, figure.ended) for figure in self.figures})
        parts = [f"{counted(len(self.figures), 'figure')} of {counted(tests, 'test')}"]
        if self.without:
            parts.append(f"{counted(self.without, 'test')} without a figure")
        if self.disturbed:
            parts.append(f"times of {counted(len(self.disturbed), 'measurement')} left out ({self.disturbed[0]})")
        if self.not_finite:
            parts.append(f"{counted(len(self.not_finite), 'value')} left out ({self.not_finite[0]})")
        return "; ".join(parts)


def figures_of(
    reports: Mapping[str, SessionReport], metrics: Collection[str] = (), *, over_time: bool = False
) -> ExportedFigures:
    """Return the figures of ``reports``, without values that are no finite numbers and times that something disturbed.

    Args:
        reports: By name, for messages.
        metrics: The metrics to export; all if there are none.
        over_time: Whether a test may be in several reports.

    Raises:
        ExportError: There is no figure at all, or two reports have the same one.
    """
    found: list[Figure] = []
    disturbed: list[str] = []
    not_finite: list[str] = []
    without = 0
    reasons: list[str] = []
    first: dict[Hashable, str] = {}
    for name, report in reports.items():
        without += len(report.not_run)
        for result in report.results:
            test = result.verdict
            verdicts = () if test.unmeasured else test.verdicts
            without += not verdicts
            reasons += filter(None, [test.unmeasured])
            for one in verdicts:
                times = one.measurement.times
                invalid = None if times is None else times.best.invalid
                disturbed += filter(None, [invalid])
                for metric in one.metrics:
                    row = METRICS[metric.metric]
                    if (metrics and row.name not in metrics) or (invalid is not None and row.unit not in WHOLE):
                        continue
                    if not math.isfinite(metric.value):
                        not_finite.append(f"the {row.title} of {test.nodeid} is {metric.value}")
                        continue
                    figure = _figure(test.nodeid, one.measurement, metric, report)
                    point = (figure.series, figure.ended if over_time else None)
                    if point in first:
                        raise ExportError(_twice(figure, first[point], name, over_time=over_time))
                    first[point] = name
                    found.append(figure)
    if not found:
        of = f" of {', '.join(metrics)}" if 0 < len(metrics) <= _MOST_NAMED else ""
        were = f": {counted(without, 'test')} without one" if without else ""
        were += f" ({reasons[0]})" if reasons else ""
        were += f": {not_finite[0]}" if not_finite else ""
        raise ExportError(f"there is no figure{of} in {', '.join(reports)}{were}")
    return ExportedFigures(tuple(found), without, tuple(disturbed), tuple(not_finite))


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
        # The work of a step over its time: the slowest step does the least in a second.
        work = metric.value * times.median
        return work / high, work / low
    return None


def _twice(figure: Figure, earlier: str, name: str, *, over_time: bool) -> str:
    where = f"{figure.test} ({figure.measurement}) on {figure.environment.device} is in {earlier} and in {name}"
    if over_time:
        return f"{where}, which ended in the same second: export one of them"
    return f"{where}: export one of them ({command_name()} merge makes one report of shards)"


_SURROGATE = re.compile("[\ud800-\udfff]")
_AMBIGUOUS = re.compile("\\\\(?=\\\\*(?:ud[89a-f][0-9a-f]{2}|[\ud800-\udfff]))")
"""Backslashes that would be taken for a part of a spelled surrogate."""


def benchmark_name(figure: Figure) -> str:
    """Return ``"tests/test_gpt.py::test_train[fp32] (train_step) @ nvidia-h100-80gb-hbm3"``.

    With the device, since neither bytes nor times of two are to be compared; and always with the measurement, so that a
    second one in a test does not rename the first.
    """
    return utf8(f"{figure.test} ({figure.measurement}) @ {figure.environment.slug}")


def utf8(text: str) -> str:
    r"""Return ``text`` with lone surrogates spelled ``\ud800``, so that any UTF-8 reader takes it.

    No two texts become the same: backslashes before a surrogate, spelled or not, are doubled.
    """
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", _AMBIGUOUS.sub(r"\\\\", text))
