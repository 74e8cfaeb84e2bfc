"""The figures of session reports, flat: a metric of a measurement of a test each, under a name that other tools keep. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.metrics import METRICS, WHOLE

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Mapping

    from pytest_gpumem.gate.verdict import MetricVerdict, Verdict
    from pytest_gpumem.measurement import Environment
    from pytest_gpumem.reports.session_report import SessionReport
    from pytest_gpumem.values.times import Times


_MOST_NAMED = 3


class ExportError(Exception):
    """Why nothing can be exported, as a sentence."""


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
    """What a throughput is of: ``samples``, ``tokens``, ``steps``, ``items``."""
    ended: str = ""
    """When its session ended, in UTC: ``2026-11-21T16:20:05Z``."""
    commit: str | None = None

    @property
    def series(self) -> tuple[str, str, str, str]:
        """What it shares with the figures of other sessions that it may be drawn in one line with, and with nothing else."""
        return self.test, self.measurement, self.environment.slug, self.metric


@dataclass(frozen=True, slots=True)
class Figures:
    """What there is to export, and what there is not."""

    figures: tuple[Figure, ...]
    without: int = 0
    """Tests without a figure: not measured, not finished, or held by relations only."""
    disturbed: tuple[str, ...] = ()
    """Of each measurement whose times are left out, the clause that says why."""
    not_finite: tuple[str, ...] = ()
    """Of each value that is left out because it is no finite number, the clause that says which."""

    @property
    def told(self) -> str:
        """What became of every test, for the person who exports."""
        tests = len({(figure.test, figure.ended) for figure in self.figures})
        parts = [f"{_number(len(self.figures), 'figure')} of {_number(tests, 'test')}"]
        if self.without:
            parts.append(f"{_number(self.without, 'test')} without a figure")
        if self.disturbed:
            parts.append(f"times of {_number(len(self.disturbed), 'measurement')} left out ({self.disturbed[0]})")
        if self.not_finite:
            parts.append(f"{_number(len(self.not_finite), 'value')} left out ({self.not_finite[0]})")
        return "; ".join(parts)


def figures_of(
    reports: Mapping[str, SessionReport], metrics: Collection[str] = (), *, over_time: bool = False
) -> Figures:
    """The figures of ``reports``, by the names they are told by; of ``metrics`` only, if there are any.

    Times that something disturbed are left out, as they are when baselines are written, and so is what is no finite number.
    ``over_time``: a test may be in several reports.
    Raises `ExportError` where there is no figure at all, and where two reports have the same one.
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
            verdicts = () if result.verdict.unmeasured else result.verdict.verdicts
            without += not verdicts
            reasons += filter(None, [result.verdict.unmeasured])
            for one in verdicts:
                for figure in _figures(result.verdict.nodeid, one, report, metrics):
                    place = (figure.series, figure.ended if over_time else None)
                    if place in first:
                        raise ExportError(_twice(figure, first[place], name, over_time=over_time))
                    first[place] = name
                    found.append(figure)
                disturbed += filter(None, [_disturbed(one)])
                not_finite += [
                    f"the {METRICS[metric.metric].title} of {result.verdict.nodeid} is {metric.value}"
                    for metric in _wanted(one, metrics)
                    if not math.isfinite(metric.value)
                ]
    if not found:
        of = f" of {', '.join(metrics)}" if 0 < len(metrics) <= _MOST_NAMED else ""
        were = f": {_number(without, 'test')} without one" if without else ""
        were += f" ({reasons[0]})" if reasons else ""
        were += f": {not_finite[0]}" if not_finite else ""
        raise ExportError(f"there is no figure{of} in {', '.join(reports)}{were}")
    return Figures(tuple(found), without, tuple(disturbed), tuple(not_finite))


def _figures(test: str, verdict: Verdict, report: SessionReport, metrics: Collection[str]) -> Iterator[Figure]:
    measurement = verdict.measurement
    for metric in _wanted(verdict, metrics):
        if not math.isfinite(metric.value):
            continue
        yield Figure(
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


def _wanted(verdict: Verdict, metrics: Collection[str]) -> list[MetricVerdict]:
    """The metrics of a measurement that were asked for and that nothing disturbed."""
    undisturbed = _disturbed(verdict) is None
    return [
        one
        for one in verdict.metrics
        if (not metrics or one.metric in metrics) and (undisturbed or METRICS[one.metric].unit in WHOLE)
    ]


def _disturbed(verdict: Verdict) -> str | None:
    times = verdict.measurement.times
    return None if times is None else times.best.invalid


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
    return f"{where}: export one of them (gpumem merge makes one report of shards)"


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


_SURROGATE = re.compile("[\ud800-\udfff]")
_AMBIGUOUS = re.compile("\\\\(?=\\\\*(?:ud[89a-f][0-9a-f]{2}|[\ud800-\udfff]))")
"""Backslashes that would be taken for a part of a spelled surrogate."""


def benchmark_name(figure: Figure) -> str:
    """``"tests/test_gpt.py::test_train[fp32] (train_step) @ nvidia-h100-80gb-hbm3"``.

    With the device, since neither bytes nor times of two are to be compared; and always with the measurement, so that a
    second one in a test does not rename the first.
    """
    return utf8(f"{figure.test} ({figure.measurement}) @ {figure.environment.slug}")


def utf8(text: str) -> str:
    r"""``text`` as any UTF-8 reader takes it: lone surrogates are spelled ``\ud800``.

    No two texts become the same: backslashes before a surrogate, spelled or not, are doubled. `from_utf8` is the way back.
    """
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", _AMBIGUOUS.sub(r"\\\\", text))


def from_utf8(text: str) -> str:
    """The text that `utf8` made ``text`` of."""
    return re.sub(r"(\\+)(ud[89a-f][0-9a-f]{2})", _unescaped, text)


def _unescaped(found: re.Match[str]) -> str:
    half, odd = divmod(len(found[1]), 2)
    return "\\" * half + (chr(int(found[2][1:], 16)) if odd else found[2])
