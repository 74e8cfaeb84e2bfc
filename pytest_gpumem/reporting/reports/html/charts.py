"""Make the data for the charts in an HTML report, as plain values in readable units. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.units import SIZES, SYSTEMS, counted, format_bytes, format_seconds
from pytest_gpumem.facts.values.categories import CATEGORIES
from pytest_gpumem.reporting.reports.escaping import visible
from pytest_gpumem.reporting.reports.explanation import PLURALS
from pytest_gpumem.reporting.reports.matrix import efficient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.base.units import UnitSystem
    from pytest_gpumem.facts.values.timeline import OverTime
    from pytest_gpumem.facts.values.times import Sample
    from pytest_gpumem.judging.gate.verdict import MetricVerdict, Verdict
    from pytest_gpumem.reporting.reports.matrix import MatrixRow

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_DIGITS = 5
"""The number of significant digits in a chart's data. A screen has too few pixels to show more."""


_FURTHEST = 2
"""A baseline or budget above this multiple of the peak has no line, because the line would flatten the areas."""


_FEWEST_POINTS = 3
"""A chart needs at least this many points. Fewer points become a sentence with their figures."""


def _sentence(text: str) -> dict[str, Any]:
    return {"kind": "sentence", "label": text}


def over_time_chart(over_time: OverTime, judged: MetricVerdict | None, units: UnitSystem) -> dict[str, Any]:
    """Return a chart with a step's memory over time, as stacked areas with the phases and the peak.

    If the verdict on the peak (``judged``) has a baseline or a budget, the chart has a line for each of them. If only one or
    two points in time were recorded, a sentence replaces the chart: ``"The step held 4.00 MB, then 8.00 MB."``
    """
    if len(over_time.time_ns) < _FEWEST_POINTS:
        held = ", then ".join(format_bytes(total, units) for total in over_time.total)
        return _sentence(f"The step held {held}.")
    size, unit = _unit_of_bytes(max(over_time.total, default=0), units)
    clock, second = _unit_of_seconds(max(over_time.time_ns, default=0) / 1e9)
    drawn = [name for name in CATEGORIES if any(over_time.categories.get(name, ()))]
    peak_at, peak = over_time.time_ns[over_time.peak], over_time.total[over_time.peak]
    within = [phase.name for phase in over_time.phases if phase.begin <= peak_at <= phase.end]
    against = () if judged is None else (("baseline", judged.baseline), ("budget", judged.budget))
    lines = [(name, value) for name, value in against if value is not None and 0 < value <= _FURTHEST * peak]
    held = "".join(f", {name} {format_bytes(int(value), units)}" for name, value in lines)
    during = f" in {visible(within[-1])}" if within else ""
    return {
        "kind": "over_time",
        "label": f"Memory over the step, by category: {format_bytes(peak, units)} at the peak{during}{held}.",
        "unit": unit,
        "clock": second,
        "time": [_short(time / 1e9 / clock) for time in over_time.time_ns],
        "series": [
            {
                "name": PLURALS.get(name, name),
                "category": name,
                "y": [_short(value / size) for value in over_time.categories[name]],
            }
            for name in drawn
        ],
        "peak": {"x": _short(peak_at / 1e9 / clock), "y": _short(peak / size), "text": format_bytes(peak, units)},
        "lines": [
            {"name": f"{name} {format_bytes(int(value), units)}", "y": _short(value / size)} for name, value in lines
        ],
        "phases": [
            {
                "name": visible(phase.name),
                "begin": _short(phase.begin / 1e9 / clock),
                "end": _short(phase.end / 1e9 / clock),
            }
            for phase in over_time.phases
        ],
    }


def rounds_chart(verdict: Verdict) -> dict[str, Any] | None:
    """Return a chart with a step's timed rounds, with each sample's median and interval, and with the baseline's median.

    If a step has only one or two rounds, a sentence replaces the chart: ``"2 rounds took 12.30 ms and 12.50 ms."``
    """
    times = verdict.measurement.times
    if times is None:
        return None
    judged = verdict.of("step_time")
    baseline = None if judged is None else judged.baseline
    drawn = [baseline or 0.0, *(timed_round.seconds for sample in times.samples for timed_round in sample.rounds)]
    if not all(map(math.isfinite, drawn)):
        return None
    against = "" if baseline is None else f", {format_seconds(baseline)} in the baseline"
    seconds = [timed_round.seconds for sample in times.samples for timed_round in sample.rounds]
    count = len(seconds)
    if count < _FEWEST_POINTS:
        took = " and ".join(map(format_seconds, seconds))
        return _sentence(f"{counted(count, 'round')} took {took}{against}.")
    clock, unit = _unit_of_seconds(max(drawn))
    return {
        "kind": "rounds",
        "label": f"Step time of {counted(count, 'round')}: median {format_seconds(times.median)}{against}.",
        "unit": unit,
        "baseline": None if baseline is None else _short(baseline / clock),
        "samples": [_sample(sample, clock) for sample in times.samples],
    }


def _sample(sample: Sample, clock: float) -> dict[str, Any]:
    low, high = sample.interval()
    return {
        "y": [_short(timed_round.seconds / clock) for timed_round in sample.rounds],
        "disturbed": [
            None if timed_round.disturbed is None else visible(timed_round.disturbed) for timed_round in sample.rounds
        ],
        "median": _short(sample.median / clock),
        "low": _short(low / clock),
        "high": _short(high / clock),
        "steps": sample.steps,
    }


def matrix_chart(title: str, rows: Sequence[MatrixRow], units: UnitSystem) -> dict[str, Any] | None:
    """Return a chart with each config's saving and cost; ``None`` if fewer than two configs have a peak and a time."""
    first = next((row for row in rows if row.peak is not None), None)
    if first is None or not first.peak or not first.time:
        return None
    best = efficient(rows)
    points = [
        {
            "config": visible(row.config),
            "saving": _short(100 * (1 - row.peak / first.peak)),
            "cost": _short(100 * (row.time / first.time - 1)),
            "text": f"{format_bytes(row.peak, units)}, {format_seconds(row.time)}",
            "efficient": number in best,
        }
        for number, row in enumerate(rows)
        if row.peak is not None and row.time is not None
    ]
    if len(points) < 2:
        return None
    named = ", ".join(str(point["config"]) for point in points if point["efficient"])
    return {
        "kind": "matrix",
        "label": f"Saving against cost of {counted(len(points), 'config')} of {visible(title)}. No other config beats {named}.",
        "first": visible(first.config),
        "points": points,
    }


def _unit_of_bytes(most: int, units: UnitSystem) -> tuple[int, str]:
    name = next((name for name in reversed(SYSTEMS[units][1]) if most >= SIZES[name]), "B")
    return SIZES[name], name


def _unit_of_seconds(most: float) -> tuple[float, str]:
    return next(((scale, name) for scale, name in _SECONDS if most >= scale), _SECONDS[-1])


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
