"""Format metric values as texts with units. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import (
    UnitSystem,
    format_bytes,
    format_count,
    format_factor,
    format_flops,
    format_rate,
    format_ratio,
    format_seconds,
)
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.judging.gate.verdict import Outcome

if TYPE_CHECKING:
    from collections.abc import Collection

    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.judging.gate.verdict import MetricVerdict, Verdict


@dataclass(frozen=True, slots=True)
class MetricTexts:
    """A metric's value, baseline and budget as texts. A missing value is an empty text."""

    title: str
    baseline: str
    value: str
    change: str
    allowed: str
    budget: str
    words: str
    """The outcome in words."""


def remarks_on(measurement: Measurement) -> tuple[str, ...]:
    """Return the details of a measurement's process and the notes, each a clause."""
    details = () if measurement.process is None else (measurement.process.text,)
    return (*details, *measurement.notes)


def texts_of(verdict: MetricVerdict, units: UnitSystem) -> MetricTexts:
    """Return the texts for a metric's row in a table."""
    return MetricTexts(
        METRICS[verdict.metric].title + on_device(verdict),
        "" if verdict.at_same_time else shown(verdict.metric, verdict.baseline, units, verdict.of),
        shown(verdict.metric, verdict.value, units, verdict.of),
        change(verdict, units),
        tolerated(verdict.metric, verdict.allowed, verdict.baseline, units),
        shown(verdict.metric, verdict.budget, units, verdict.of),
        "" if verdict.outcome is Outcome.RECORDED else verdict.outcome.words,
    )


def on_device(verdict: MetricVerdict) -> str:
    """Return words after a metric's name: ``" on cuda:1"`` if the step used several GPUs, and ``" at the same time"`` for the
    bytes that several processes held together.
    """
    gpu = "" if verdict.gpu is None else f" on {verdict.gpu}"
    return f"{gpu} at the same time" if verdict.at_same_time else gpu


def peaks_by_device(measurement: Measurement, units: UnitSystem) -> str | None:
    """Return the peaks on all GPUs: ``"peak 3.2 GB on cuda:1 (cuda:0 2.9 GB)"``; ``None`` if the step used a single GPU."""
    peaks = {device: metrics["peak_allocated"] for device, metrics in measurement.by_device.items()}
    if len(peaks) < 2:
        return None
    largest, *smaller = sorted(peaks, key=lambda device: -peaks[device])
    rest = ", ".join(f"{device} {format_bytes(peaks[device], units)}" for device in smaller)
    return f"peak {format_bytes(peaks[largest], units)} on {largest} ({rest})"


def shown(metric: str, value: float | None, units: UnitSystem, of: str | None = None) -> str:
    """Return a value with its unit: ``"8.12 GB"``, ``"12.31 ms"``, ``"1200 samples/s"``, ``"1.25"``; empty for ``None``."""
    if value is None:
        return ""
    unit = METRICS[metric].unit
    if METRICS[metric].is_timed:
        return format_seconds(value) if unit == "seconds" else format_rate(value, of or "")
    if unit == "ratio":
        return format_factor(value)
    # A tolerance can be infinite.
    if not math.isfinite(value):
        return str(value)
    if unit == "bytes":
        return format_bytes(int(value), units)
    return format_flops(int(value)) if metric == "flops" else format_count(int(value))


def has_column(metric: str, values: Collection[float], *, changed: bool = False) -> bool:
    """Return whether a table has a column for a metric.

    Args:
        metric: The metric's name.
        values: The values of the measurements in the table.
        changed: Whether a value in the table differs from its baseline, or the table should have all columns.
    """
    mode = METRICS[metric].shown
    if mode == "if changed":
        return changed
    return any(values) if mode == "if nonzero" else mode == "always" and bool(values)


def difference(metric: str, change: float, units: UnitSystem) -> str:
    """Return a signed difference in bytes, counts or ratios: ``"+1.19 GB"``, ``"+48"``, ``"+0.25"``."""
    return ("+" if change >= 0 else "") + shown(metric, change, units)


def moved(metric: str, old: float, new: float, units: UnitSystem) -> str:
    """Return the change from ``old`` to ``new`` as ``"+14.7 %"``, or in the metric's unit if ``old`` is 0 or tiny."""
    return _relative(metric, new - old, old, units)


def _relative(metric: str, change: float, old: float, units: UnitSystem) -> str:
    amount = difference(metric, change, units)
    return format_ratio(change / old, large=amount) if old else amount


def change(verdict: MetricVerdict, units: UnitSystem) -> str:
    """Return the change since the baseline: ``"+14.7 %"``, or ``"+4.00 MB"`` if the baseline is 0; empty without a baseline."""
    if verdict.baseline is None or verdict.at_same_time:
        return ""
    if not verdict.baseline and not verdict.value:
        return format_ratio(0)
    return moved(verdict.metric, verdict.baseline, verdict.value, units)


def deciding_change(verdict: Verdict, units: UnitSystem) -> str:
    """Return the change in the deciding metric of a measurement.

    For example, ``"+14.7 %"`` is a change in the peak. A metric other than the peak is named: ``"retained +4.00 MB"``, or
    ``"retained 4.00 MB"`` if the metric has a budget but no baseline.
    """
    metric = verdict.deciding or verdict.of("peak_allocated")
    if metric is None or metric.metric == "peak_allocated":
        return "" if metric is None else change(metric, units)
    return f"{METRICS[metric.metric].title} {change_or_value(metric, units)}"


def change_or_value(verdict: MetricVerdict, units: UnitSystem) -> str:
    """Return the change since the baseline, or the metric's value if it has no baseline."""
    return change(verdict, units) or shown(verdict.metric, verdict.value, units, verdict.of)


def tolerated(metric: str, allowed: float | None, old: float | None, units: UnitSystem) -> str:
    """Return the tolerated change as ``"+0.5 %"``, or in the metric's unit if ``old`` is 0 or tiny.

    The text is empty if there is no old value or no tolerance.
    """
    return "" if allowed is None or old is None else _relative(metric, allowed, old, units)
