"""Figures as texts for other tools: Bencher, github-action-benchmark and OpenMetrics. Pure."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Literal

from pytest_gpumem.facts.metrics import METRICS, WHOLE, Metric, Unit
from pytest_gpumem.reporting.exports.figures import ExportError, benchmark_name, utf8

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pytest_gpumem.reporting.exports.figures import Figure

Better = Literal["smaller", "bigger"]

_MEASURES = {"step_time": "latency", "throughput": "throughput"}
"""Measures that Bencher creates for every project: ``latency`` in nanoseconds, ``throughput`` in operations per second."""
_NANOSECONDS = 1e9
_LONGEST_NAME = 1024
"""Bencher's limit for a benchmark name, in bytes."""
_DIGITS = 12
_UNITS: dict[Unit, str] = {"bytes": "_bytes", "count": "", "seconds": "_seconds", "items/s": "_items_per_second"}
"""The suffix of a family's name in OpenMetrics; counts have no unit."""


def bencher(figures: Sequence[Figure]) -> str:
    """Return the figures in the [Bencher Metric Format](https://bencher.dev/docs/reference/bencher-metric-format/).

    Each ``<test> (<measurement>) @ <device>`` is a benchmark with a measure for each metric, such as ``peak-allocated``.
    Bencher creates the measures ``latency`` (`step_time`) and ``throughput`` for every project. Times are in nanoseconds.
    ``lower_value`` and ``upper_value`` are the 95 % interval of a time or throughput. Bencher refuses names with more than
    1,024 bytes, so a longer name is cut and ends in a digest.
    """
    benchmarks: dict[str, dict[str, dict[str, float]]] = {}
    for figure in figures:
        name, metric = benchmark_name(figure), figure.metric
        if len(name.encode()) > _LONGEST_NAME:
            # The digest distinguishes benchmarks whose names begin with the same text.
            digest = f"... {hashlib.sha256(name.encode()).hexdigest()[:_DIGITS]}"
            name = name.encode()[: _LONGEST_NAME - len(digest)].decode(errors="ignore") + digest
        scale = _NANOSECONDS if METRICS[metric].unit == "seconds" else 1
        ends = zip(("lower_value", "upper_value"), figure.interval or (), strict=False)
        values = {"value": figure.value * scale, **{end: value * scale for end, value in ends}}
        benchmarks.setdefault(name, {})[_MEASURES.get(metric, metric.replace("_", "-"))] = values
    return json.dumps(benchmarks, indent=1) + "\n"


def metrics_of(better: Better, among: Collection[str] = ()) -> list[str]:
    """Return the metrics for which ``better`` values are better, from ``among`` or else from all metrics.

    A file for github-action-benchmark has a single direction.

    Raises:
        ExportError: No metric in ``among`` has this direction.
    """
    names = [name for name in among or METRICS if METRICS[name].larger_is_better == (better == "bigger")]
    if not names:
        other = "smaller" if better == "bigger" else "bigger"
        raise ExportError(
            f"for {', '.join(among)} {other} values are better, and a file has one direction: add --better={other}"
        )
    return names


def github_action_benchmark(figures: Sequence[Figure]) -> str:
    """Return the figures for the tools ``customSmallerIsBetter`` and ``customBiggerIsBetter`` of
    [github-action-benchmark](https://github.com/benchmark-action/github-action-benchmark).

    The result is an array of objects with ``name`` (``<test> (<measurement>) @ <device>: <metric>``), ``unit``, ``value``,
    ``range`` (for times and throughputs, the distance from the value to the far end of the 95 % interval) and ``extra``
    (device, config, commit and environment). A file has metrics of one direction.
    """
    return json.dumps([_benchmark(figure) for figure in figures], indent=1) + "\n"


def _benchmark(figure: Figure) -> dict[str, Any]:
    benchmark: dict[str, Any] = {
        "name": f"{benchmark_name(figure)}: {figure.metric}",
        "unit": METRICS[figure.metric].unit if figure.of is None else f"{figure.of}/s",
        "value": figure.value,
    }
    if figure.interval is not None:
        low, high = figure.interval
        benchmark["range"] = f"± {max(high - figure.value, figure.value - low):.3g}"
    origin = {"device": figure.environment.device, "config": figure.config, "commit": figure.commit}
    details = {name: value for name, value in origin.items() if value is not None} | dict(figure.environment.details)
    return {**benchmark, "extra": utf8("\n".join(f"{name}: {value}" for name, value in details.items()))}


def openmetrics(figures: Sequence[Figure]) -> str:
    """Return the figures as [OpenMetrics](https://prometheus.io/docs/specs/om/open_metrics_spec/) 1.0 in UTF-8.

    The text has a family of gauges for each metric: ``gpumem_peak_allocated_bytes``, ``gpumem_step_time_seconds``,
    ``gpumem_throughput_items_per_second``, ``gpumem_flops``. The labels are ``test``, ``measurement``, ``device``,
    ``config``, and ``of`` for a throughput (``samples``). There are no timestamps, because a node exporter's text files must
    not have any.
    """
    lines = []
    for metric in METRICS.values():
        samples = [figure for figure in figures if figure.metric == metric.name]
        name = family(metric)
        if samples:
            lines.append(f"# TYPE {name} gauge")
            lines += [f"# UNIT {name} {_UNITS[metric.unit][1:]}"] if _UNITS[metric.unit] else []
            lines.append(f"# HELP {name} {metric.title} of a measured test or step")
        for figure in samples:
            value = str(int(figure.value)) if metric.unit in WHOLE else repr(float(figure.value))
            lines.append(f"{name}{{{_labels(figure)}}} {value}")
    return "\n".join([*lines, "# EOF"]) + "\n"


def family(metric: Metric) -> str:
    """Return a metric's family name: ``"gpumem_peak_allocated_bytes"``."""
    return f"gpumem_{metric.name}{_UNITS[metric.unit]}"


def _labels(figure: Figure) -> str:
    labels = {
        "test": figure.test,
        "measurement": figure.measurement,
        "device": figure.environment.slug,
        "config": figure.config or "",
        **({} if figure.of is None else {"of": figure.of}),
    }
    escaped = {
        name: utf8(text).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"') for name, text in labels.items()
    }
    return ",".join(f'{name}="{text}"' for name, text in escaped.items())
