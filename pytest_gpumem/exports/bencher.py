"""Figures as Bencher Metric Format, for ``bencher run --adapter json``. Pure.

An object of benchmarks, each an object of measures with ``value`` and, where it is known, ``lower_value`` and
``upper_value``. See https://bencher.dev/docs/reference/bencher-metric-format/.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from pytest_gpumem.exports.figures import benchmark_name
from pytest_gpumem.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.exports.figures import Figure

_MEASURES = {"step_time": "latency", "throughput": "throughput"}
"""Those that every project on Bencher has from the start: nanoseconds, and operations a second."""
_NANOSECONDS = 1e9
_LONGEST_NAME = 1024
"""Bytes that the name of a benchmark may have."""
_DIGITS = 12


def bencher(figures: Sequence[Figure]) -> str:
    """The figures by benchmark and measure: seconds as nanoseconds, as Bencher has them, all else in the metric's unit."""
    benchmarks: dict[str, dict[str, dict[str, float]]] = {}
    for figure in figures:
        benchmarks.setdefault(_shortened(benchmark_name(figure)), {})[measure(figure.metric)] = _metric(figure)
    return json.dumps(benchmarks, indent=1) + "\n"


def measure(metric: str) -> str:
    """The slug of the measure that a metric is: ``"latency"``, ``"peak-allocated"``."""
    return _MEASURES.get(metric, metric.replace("_", "-"))


def _metric(figure: Figure) -> dict[str, float]:
    scale = _NANOSECONDS if METRICS[figure.metric].unit == "seconds" else 1
    if figure.interval is None:
        return {"value": figure.value * scale}
    low, high = figure.interval
    return {"value": figure.value * scale, "lower_value": low * scale, "upper_value": high * scale}


def _shortened(name: str) -> str:
    """``name``, the end of one that is too long replaced with a digest of the whole, so that it stays its own."""
    encoded = name.encode()
    if len(encoded) <= _LONGEST_NAME:
        return name
    digest = f"... {hashlib.sha256(encoded).hexdigest()[:_DIGITS]}"
    return encoded[: _LONGEST_NAME - len(digest)].decode(errors="ignore") + digest
