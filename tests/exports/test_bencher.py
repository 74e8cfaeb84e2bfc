"""What Bencher is given: benchmarks, their measures, and values with bounds."""

from __future__ import annotations

import json

import pytest
from jsonschema import validate

from pytest_gpumem.reporting.exports.figures import figures_of
from pytest_gpumem.reporting.exports.formats import bencher
from tests.exports.values import PEAK, TIMED, figure, from_utf8
from tests.hostile import TEXTS

_METRIC = {
    "type": "object",
    "properties": {name: {"type": "number"} for name in ("value", "lower_value", "upper_value")},
    "required": ["value"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "additionalProperties": {"type": "object", "minProperties": 1, "additionalProperties": _METRIC},
}
"""As https://bencher.dev/bmf.json, and closed."""


def test_a_benchmark_has_a_measure_for_each_metric_and_times_in_nanoseconds():
    benchmarks = json.loads(bencher(figures_of({"a.json": TIMED}).figures))
    validate(benchmarks, SCHEMA)
    assert benchmarks == {
        "tests/test_a.py::test_train (train_step) @ nvidia-h100-80gb-hbm3": {
            "peak-allocated": {"value": PEAK},
            "retained": {"value": 0},
            "flops": {"value": 12},
            "latency": {"value": pytest.approx(12.5e6), "lower_value": 10e6, "upper_value": 15e6},
            "throughput": {
                "value": 8000.0,
                "lower_value": pytest.approx(100 / 0.015),
                "upper_value": pytest.approx(10000),
            },
        }
    }


def test_the_name_of_a_phase_is_its_measure():
    (measures,) = json.loads(bencher([figure("test_a", 0.1, "forward_time")])).values()
    assert list(measures) == ["forward-time"]


@pytest.mark.parametrize("name", ["newlines", "surrogates", "json", "nothing"])
def test_a_hostile_test_id_comes_back(name):
    (found,) = json.loads(bencher([figure(TEXTS[name])]))
    assert from_utf8(found) == f"{TEXTS[name]} (call) @ nvidia-h100-80gb-hbm3"
    found.encode()


def test_a_name_that_bencher_would_refuse_is_cut_and_stays_its_own():
    names = list(json.loads(bencher([figure("é" * 2000), figure("é" * 2001)])))
    assert len(set(names)) == 2
    for name in names:
        assert name.startswith("é" * 500)
        assert len(name.encode()) <= 1024
