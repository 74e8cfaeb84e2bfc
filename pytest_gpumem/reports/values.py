"""Values of metrics as a person reads them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_gpumem.metrics import METRICS, Unit
from pytest_gpumem.units import (
    UnitSystem,
    format_bytes,
    format_count,
    format_flops,
    format_rate,
    format_ratio,
    format_seconds,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.gate.verdict import MetricVerdict

_WHOLE: dict[Unit, Callable[[str, int, UnitSystem], str]] = {
    "bytes": lambda _metric, value, units: format_bytes(value, units),
    "count": lambda metric, value, _units: format_flops(value) if metric == "flops" else format_count(value),
}


def shown(metric: str, value: float | None, units: UnitSystem, of: str | None = None) -> str:
    """A value with its unit: ``"8.12 GB"``, ``"12.31 ms"``, ``"1200 samples/s"``; empty for none."""
    if value is None:
        return ""
    unit = METRICS[metric].unit
    if unit in _WHOLE:
        # A tolerance may be infinite.
        if not math.isfinite(value):
            return str(value)
        return _WHOLE[unit](metric, int(value), units)
    return format_seconds(value) if unit == "seconds" else format_rate(value, of or "")


def difference(metric: str, change: float, units: UnitSystem) -> str:
    """A signed difference of two values, of bytes or counts: ``"+1.19 GB"``, ``"+48"``."""
    return ("+" if change >= 0 else "") + shown(metric, change, units)


def change(verdict: MetricVerdict, units: UnitSystem) -> str:
    """The change against the baseline: ``"+14.7 %"``, as it is where the baseline is 0, empty where there is none."""
    if verdict.baseline is None:
        return ""
    if verdict.baseline:
        return format_ratio(verdict.value / verdict.baseline - 1)
    return difference(verdict.metric, verdict.value, units) if verdict.value else format_ratio(0)


def allowance(verdict: MetricVerdict, units: UnitSystem) -> str:
    """The change that is tolerated: ``"+0.5 %"``, as it is where the baseline is 0."""
    if verdict.allowed is None or verdict.baseline is None:
        return ""
    if verdict.baseline:
        return format_ratio(verdict.allowed / verdict.baseline)
    return difference(verdict.metric, verdict.allowed, units)
