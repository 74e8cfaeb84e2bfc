"""What Prometheus is given, as its own parser of OpenMetrics reads it."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as older_format

from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.reporting.exports.figures import figures_of
from pytest_gpumem.reporting.exports.formats import family, openmetrics
from tests.exports.values import H100, PEAK, TIMED, called, figure, from_utf8, report, result
from tests.hostile import TEXTS

LABELS = {
    "test": "tests/test_a.py::test_train",
    "measurement": "train_step",
    "device": "nvidia-h100-80gb-hbm3",
    "config": "amp-bf16",
}


def parsed(figures):
    return {family.name: family for family in text_string_to_metric_families(openmetrics(figures))}


def test_each_metric_is_a_family_of_gauges_with_its_unit_in_its_name():
    families = parsed(figures_of({"a.json": TIMED}).figures)
    assert {name: (family.type, family.unit) for name, family in families.items()} == {
        "gpumem_peak_allocated_bytes": ("gauge", "bytes"),
        "gpumem_retained_bytes": ("gauge", "bytes"),
        "gpumem_flops": ("gauge", ""),
        "gpumem_step_time_seconds": ("gauge", "seconds"),
        "gpumem_throughput_items_per_second": ("gauge", "items_per_second"),
    }
    assert families["gpumem_step_time_seconds"].documentation == "step time of a measured test or step"


def test_a_sample_says_whose_it_is_and_keeps_every_digit():
    families = parsed(figures_of({"a.json": TIMED}).figures)
    (peak,) = families["gpumem_peak_allocated_bytes"].samples
    assert (peak.labels, peak.value, peak.timestamp) == (LABELS, PEAK, None)
    (throughput,) = families["gpumem_throughput_items_per_second"].samples
    assert (throughput.labels, throughput.value) == ({**LABELS, "of": "samples"}, 8000.0)


def test_the_samples_of_a_family_stand_together_also_from_several_reports():
    reports = {"a.json": TIMED, "b.json": report(result("test_call", called(H100)))}
    assert len(parsed(figures_of(reports).figures)["gpumem_peak_allocated_bytes"].samples) == 2


def test_every_metric_can_be_written():
    families = parsed([figure("test_a", 1, name) for name in METRICS])
    assert list(families) == [family(metric) for metric in METRICS.values()]
    assert families["gpumem_imbalance_ratio"].unit == "ratio"


@pytest.mark.parametrize("name", ["quotes", "newlines", "controls", "surrogates", "json", "nothing", "long"])
def test_a_hostile_test_id_comes_back_from_utf8(name):
    text = TEXTS[name]
    written = openmetrics([figure(text), figure("b")]).encode()
    families = list(text_string_to_metric_families(written.decode()))
    (hostile, other) = families[0].samples
    assert from_utf8(hostile.labels["test"]) == text
    assert other.labels["test"] == "b"
    assert [family.name for family in families] == ["gpumem_peak_allocated_bytes"]


def test_it_ends_as_the_format_wants_it():
    assert openmetrics([figure("a")]).endswith("} 9310000001\n# EOF\n")


@pytest.mark.parametrize("text", ["tests/test_a.py::test_b", TEXTS["quotes"], TEXTS["newlines"]])
def test_parsers_of_the_older_text_format_read_it_too(text):
    (one,) = older_format(openmetrics([figure(text)]))
    (sample,) = one.samples
    assert (one.name, one.type) == ("gpumem_peak_allocated_bytes", "gauge")
    assert (sample.labels["test"], sample.value, sample.timestamp) == (text, PEAK, None)
