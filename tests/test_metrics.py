"""The rows of metrics against what cannot be derived from them."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

from pytest_gpumem.facts.measurement import Measurement
from pytest_gpumem.facts.metrics import METRICS, WHOLE, Kind, RealMetric, WholeMetric
from pytest_gpumem.measuring.devices.contract import Peak
from pytest_gpumem.measuring.measure.counting import Counts
from pytest_gpumem.measuring.measure.reading import Figures
from pytest_gpumem.measuring.measure.settling import have_same_peaks
from pytest_gpumem.plugin.config.marker import budget_from_arguments

LIMITS = {"bytes": ("2 kB", 2000), "ratio": (1.2, 1.2)}
"""For each unit of a metric with a budget, an argument of the marker and the limit that it sets."""


def test_no_row_says_what_another_place_contradicts():
    for name, metric in METRICS.items():
        whole = metric.unit in WHOLE
        assert type(metric) is (WholeMetric if whole else RealMetric), name
        assert getattr(Measurement, name) is metric
        # The schema of reports has this rule instead of names.
        assert name.endswith(("_time", "throughput", "imbalance")) is not whole
        assert metric.repeats is not (metric.is_timed or name == "peak_reserved"), (
            f"{name}: a clock's values are never equal"
        )
        assert metric.unit == "bytes" or not metric.peak, f"{name}: the backend's workspaces are bytes"
        assert metric.is_counted_by_operator == (name in {field.name for field in fields(Counts)}), name
        if metric.budget is not None:
            given, limit = LIMITS[metric.unit]
            assert budget_from_arguments({metric.budget: given}).limits == {name: limit}


def test_one_metric_keeps_its_column_however_narrow_a_terminal_is():
    assert [name for name, metric in METRICS.items() if metric.weight is None] == ["peak_allocated"]


def test_work_is_what_is_counted_by_operators_and_any_other_count_is_memory():
    kinds = {kind: {name for name, metric in METRICS.items() if metric.kind == kind} for kind in get_args(Kind)}
    assert kinds["work"] == {field.name for field in fields(Counts)}
    assert kinds["throughput"] == {"throughput"}
    assert kinds["time"] == {name for name in METRICS if name.endswith("_time")}
    assert WholeMetric("blocks at the peak", "count").kind == "memory"


def test_a_step_settles_by_allocated_bytes_and_not_by_reserved_bytes():
    def step(allocated, reserved):
        return {"cuda": Figures(0, 0, 0, Peak(allocated, reserved), 0, 0)}

    assert have_same_peaks(step(1000, 2000), step(1000, 4000))
    assert not have_same_peaks(step(1000, 2000), step(1001, 2000))
