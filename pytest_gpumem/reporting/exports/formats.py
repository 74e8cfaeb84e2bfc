"""Write figures as texts for other tools: Bencher, github-action-benchmark and OpenMetrics. All functions are pure."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Literal

from pytest_gpumem.base.errors import ExportError
from pytest_gpumem.facts.metrics import METRICS, WHOLE, Metric, Unit
from pytest_gpumem.reporting.exports.figures import benchmark_name, utf8

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pytest_gpumem.reporting.exports.figures import Figure

Better = Literal["smaller", "bigger"]

_MEASURES = {"step_time": "latency", "throughput": "throughput"}
"""Metrics with a built-in measure at Bencher: ``latency`` in nanoseconds, or ``throughput`` in operations per second."""
_NANOSECONDS = 1e9
_LONGEST_NAME = 1024
"""Maximum bytes in a benchmark's name at Bencher."""
_DIGITS = 12
_UNITS: dict[Unit, str] = {
    "bytes": "_bytes",
    "count": "",
    "ratio": "_ratio",
    "seconds": "_seconds",
    "items/s": "_items_per_second",
}
"""The suffix for a metric's name in OpenMetrics, by the metric's unit. Counts have no suffix."""


def bencher(figures: Sequence[Figure]) -> str:
    """Return the figures in the [Bencher Metric Format](https://bencher.dev/docs/reference/bencher-metric-format/).

    A benchmark has the name ``<test> (<measurement>) @ <device>`` and a measure for each metric, such as ``peak-allocated``.
    `step_time` becomes the measure ``latency``, and `throughput` the measure ``throughput``, because Bencher creates these two
    measures for every project. Times are in nanoseconds. For times and throughputs, ``lower_value`` and ``upper_value`` are
    the ends of the 95 % interval. Bencher refuses names with more than 1,024 bytes, so a longer name is cut and ends in a
    digest.
    """
    benchmarks: dict[str, dict[str, dict[str, float]]] = {}
    for figure in figures:
        name, metric = benchmark_name(figure), figure.metric
        if len(name.encode()) > _LONGEST_NAME:
            # Add a digest, because several long names may begin with the same text.
            digest = f"... {hashlib.sha256(name.encode()).hexdigest()[:_DIGITS]}"
            name = name.encode()[: _LONGEST_NAME - len(digest)].decode(errors="ignore") + digest
        scale = _NANOSECONDS if METRICS[metric].unit == "seconds" else 1
        ends = zip(("lower_value", "upper_value"), figure.interval or (), strict=False)
        values = {"value": figure.value * scale, **{end: value * scale for end, value in ends}}
        benchmarks.setdefault(name, {})[_MEASURES.get(metric, metric.replace("_", "-"))] = values
    return json.dumps(benchmarks, indent=1) + "\n"


def metrics_of(better: Better, among: Collection[str] = ()) -> list[str]:
    """Return the metrics in which smaller values are better, or the metrics in which bigger values are better.

    A file for github-action-benchmark must not contain both kinds.

    Args:
        better: ``"smaller"`` or ``"bigger"``.
        among: The metrics from which to choose. If the collection is empty, all metrics are considered.

    Raises:
        ExportError: ``among`` contains no such metric.
    """
    names = [name for name in among or METRICS if METRICS[name].larger_is_better == (better == "bigger")]
    if not names:
        other = "smaller" if better == "bigger" else "bigger"
        raise ExportError(
            f"{other} values of {', '.join(among)} are better, but this file is for metrics in which {better} values are "
            f"better: add --better={other}"
        )
    return names


def github_action_benchmark(figures: Sequence[Figure]) -> str:
    """Return the figures as JSON for [github-action-benchmark](https://github.com/benchmark-action/github-action-benchmark).

    The action reads the file with ``tool: customSmallerIsBetter`` or ``tool: customBiggerIsBetter``. So a file must not mix
    metrics in which smaller values are better with metrics in which bigger values are better.

    Returns: A JSON array whose objects have ``name`` (``<test> (<measurement>) @ <device>: <metric>``), ``unit``, ``value``,
        ``range`` and ``extra``. For times and throughputs, ``range`` is the distance from the value to the far end of the 95 %
        interval. ``extra`` contains the device, config, commit and environment.
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

    Each metric becomes a gauge family: ``gpumem_peak_allocated_bytes``, ``gpumem_step_time_seconds``,
    ``gpumem_throughput_items_per_second``, ``gpumem_imbalance_ratio``, ``gpumem_flops``. The labels are ``test``,
    ``measurement``, ``device`` and ``config``. A throughput also has the label ``of`` with the counted items (``samples``).
    There are no timestamps, because the textfile collector of a node exporter refuses them.
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
    """Return a metric's name in OpenMetrics: ``"gpumem_peak_allocated_bytes"`` for ``peak_allocated``."""
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
