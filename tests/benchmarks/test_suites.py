"""Tests of the benchmark with other people's suites: its results, and the order in which it takes tests."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import suites


def result(name: str, *, passed: int = 30):
    return suites.Result(name, "1.0", 30, passed, 30, 90, {}, {})


def kept(folder) -> dict:
    (place,) = folder.glob("cpu-*/suites.json")
    return json.loads(place.read_text(encoding="utf-8"))


@pytest.fixture
def versions(monkeypatch) -> dict[str, str]:
    found = {"torch": "2.13.0", "pytest": "9", "numpy": "2", "transformers": "5"}
    monkeypatch.setattr(suites, "version", found.__getitem__)
    return found


def test_a_suite_that_runs_alone_is_kept_beside_the_other(tmp_path, versions):
    suites.write([result("accelerate"), result("torch_geometric", passed=29)], tmp_path)
    suites.write([result("torch_geometric")], tmp_path)
    assert [(one["suite"], one["passed"]) for one in kept(tmp_path)["suites"]] == [
        ("torch_geometric", 30),
        ("accelerate", 30),
    ]


def test_what_other_versions_gave_is_not_kept(tmp_path, versions):
    suites.write([result("accelerate")], tmp_path)
    versions["torch"] = "2.14.0"
    suites.write([result("torch_geometric")], tmp_path)
    assert kept(tmp_path)["torch"] == "2.14.0"
    assert [one["suite"] for one in kept(tmp_path)["suites"]] == ["torch_geometric"]


def test_tests_of_each_file_are_taken_in_turns():
    assert suites.in_turns(["a::1", "a::2", "a::3", "b::1", "c::1", "c::2"]) == [
        *("a::1", "b::1", "c::1"),
        *("a::2", "c::2"),
        "a::3",
    ]


def test_outcomes_or_figures_that_differ_do_not_hold():
    assert result("accelerate").holds
    for name, value in {"measured": 29, "other_outcomes": {"t": "failed"}, "other_figures": {"t": "1"}}.items():
        assert not replace(result("accelerate"), **{name: value}).holds
