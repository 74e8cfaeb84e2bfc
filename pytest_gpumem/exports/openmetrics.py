"""Figures as OpenMetrics text: a family of gauges a metric. Pure.

Version 1.0 of https://prometheus.io/docs/specs/om/open_metrics_spec/, and read by parsers of Prometheus' older text format,
too: no timestamps, which a node exporter's text files must not have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.exports.figures import utf8
from pytest_gpumem.metrics import METRICS, WHOLE, Metric, Unit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpumem.exports.figures import Figure

_UNITS: dict[Unit, str] = {"bytes": "bytes", "seconds": "seconds", "items/s": "items_per_second"}
"""What a family's name ends in; counts have no unit."""


def openmetrics(figures: Sequence[Figure]) -> str:
    """The figures by metric, labelled with test, measurement, device and config, and a throughput with what it is of."""
    lines = []
    for metric in METRICS.values():
        samples = [figure for figure in figures if figure.metric == metric.name]
        if samples:
            lines += [*_metadata(metric), *map(_sample, samples)]
    return "\n".join([*lines, "# EOF"]) + "\n"


def family(metric: Metric) -> str:
    """The name of a metric's family: ``"gpumem_peak_allocated_bytes"``."""
    unit = _UNITS.get(metric.unit)
    return f"gpumem_{metric.name}" if unit is None else f"gpumem_{metric.name}_{unit}"


def _metadata(metric: Metric) -> Iterator[str]:
    name, unit = family(metric), _UNITS.get(metric.unit)
    yield f"# TYPE {name} gauge"
    if unit is not None:
        yield f"# UNIT {name} {unit}"
    yield f"# HELP {name} {metric.title} of a measured test or step"


def _sample(figure: Figure) -> str:
    labels = {
        "test": figure.test,
        "measurement": figure.measurement,
        "device": figure.environment.slug,
        "config": figure.config or "",
        **({} if figure.of is None else {"of": figure.of}),
    }
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    metric = METRICS[figure.metric]
    value = str(int(figure.value)) if metric.unit in WHOLE else repr(float(figure.value))
    return f"{family(metric)}{{{pairs}}} {value}"


def _escaped(value: str) -> str:
    return utf8(value).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
