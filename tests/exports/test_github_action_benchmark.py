"""What github-action-benchmark is given: an array of named values, one direction a file."""

from __future__ import annotations

import json

import pytest

from pytest_gpumem.base.errors import ExportError
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.reporting.exports.figures import figures_of
from pytest_gpumem.reporting.exports.formats import github_action_benchmark, metrics_of
from tests.exports.values import PEAK, TIMED, figure, from_utf8
from tests.hostile import ALL

FIGURES = figures_of({"a.json": TIMED}).figures
NAME = "tests/test_a.py::test_train (train_step) @ nvidia-h100-80gb-hbm3"


def test_an_entry_has_a_name_a_unit_a_value_and_what_else_is_known():
    entries = {entry["name"]: entry for entry in json.loads(github_action_benchmark(FIGURES))}
    extra = "device: NVIDIA H100 80GB HBM3\nconfig: amp-bf16\ncommit: abc1234\nmachine: a box\ntorch: 2.11.0"
    assert entries[f"{NAME}: peak_allocated"] == {
        "name": f"{NAME}: peak_allocated",
        "unit": "bytes",
        "value": PEAK,
        "extra": extra,
    }
    time = entries[f"{NAME}: step_time"]
    assert (time["unit"], time["value"], time["range"]) == ("seconds", 0.0125, "± 0.0025")


def test_a_file_has_the_metrics_of_one_direction():
    assert metrics_of("bigger") == ["throughput"]
    assert set(metrics_of("smaller")) == set(METRICS) - {"throughput"}
    assert metrics_of("smaller", ["throughput", "step_time"]) == ["step_time"]


def test_a_throughput_is_of_something_a_second():
    entry = json.loads(github_action_benchmark(FIGURES))[-1]
    assert (entry["name"], entry["unit"], entry["value"]) == (f"{NAME}: throughput", "samples/s", 8000.0)


def test_metrics_of_the_other_direction_alone_are_an_error_that_says_which_it_is():
    with pytest.raises(ExportError, match=r"bigger values of throughput are better, but .*: add --better=bigger$"):
        metrics_of("smaller", ["throughput"])


def test_a_hostile_test_id_comes_back():
    (entry,) = json.loads(github_action_benchmark([figure(ALL)]).encode().decode("ascii"))
    assert from_utf8(entry["name"]) == f"{ALL} (call) @ nvidia-h100-80gb-hbm3: peak_allocated"
    entry["name"].encode()
