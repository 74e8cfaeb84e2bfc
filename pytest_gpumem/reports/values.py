"""Values of metrics as a person reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.metrics import METRICS
from pytest_gpumem.units import UnitSystem, format_bytes, format_bytes_change, format_rate, format_ratio, format_seconds

if TYPE_CHECKING:
    from pytest_gpumem.gate.verdict import MetricVerdict


def shown(metric: str, value: float | None, units: UnitSystem) -> str:
    """A value with its unit: ``"8.12 GB"``, ``"12.31 ms"``, ``"1200 /s"``; empty for none."""
    if value is None:
        return ""
    unit = METRICS[metric].unit
    if unit == "bytes":
        return format_bytes(int(value), units)
    return format_seconds(value) if unit == "seconds" else format_rate(value)


def change(verdict: MetricVerdict, units: UnitSystem) -> str:
    """The change against the baseline: ``"+14.7 %"``, in bytes where the baseline is 0, empty where there is none."""
    if verdict.baseline is None:
        return ""
    if verdict.baseline:
        return format_ratio(verdict.value / verdict.baseline - 1)
    return format_bytes_change(int(verdict.value), units) if verdict.value else format_ratio(0)


def allowance(verdict: MetricVerdict, units: UnitSystem) -> str:
    """The change that is tolerated: ``"+0.5 %"``, in bytes where the baseline is 0."""
    if verdict.allowed is None or verdict.baseline is None:
        return ""
    if verdict.baseline:
        return format_ratio(verdict.allowed / verdict.baseline)
    return format_bytes_change(int(verdict.allowed), units)
