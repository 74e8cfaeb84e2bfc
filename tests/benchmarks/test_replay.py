"""Tests of the replayed regressions: their files are valid, and results of others stay in the table. Nothing is installed."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import replay

from pytest_gpumem.base.requirements.requirement_set import requirement_set
from pytest_gpumem.facts.metrics import METRICS

ROOT = Path(__file__).parents[2]
KNOWN = replay.replays()
DEVICES = ("cpu", "emulated:h100", "emulated:b200")


@pytest.mark.parametrize("one", KNOWN, ids=lambda one: one.name)
def test_a_replay_names_files_releases_metrics_and_devices_that_there_are(one):
    assert [node.name for node in ast.parse(one.test.read_text()).body if getattr(node, "name", "").startswith("test_")]
    for requirements in (one.good, one.bad):
        assert requirement_set(requirements).is_exact
        assert one.package in requirement_set(requirements).names
    assert len({*one.releases}) == 2
    assert one.thread.startswith("https://github.com/")
    assert one.metric in METRICS
    assert one.cause
    assert not one.cause.endswith(".")
    assert {*one.devices} <= {*DEVICES}
    assert one.devices
    assert all(one.lines)
    assert all(line.startswith(f"{one.package} {one.releases[1]}: ") for line in one.lines if ":" in line)


def test_each_test_of_the_folder_is_that_of_a_replay():
    assert {*replay.HERE.glob("test_*.py")} == {one.test for one in KNOWN}


def result(name: str, device: str = "cpu", **changes) -> replay.Result:
    made = replay.Result(name, device, 10e6, 20e6, True, 0, 0.0, 12.3, "2026-01-02", "a machine")
    return replace(made, **changes)


def test_a_result_replaces_its_earlier_one_and_no_other(tmp_path):
    known = {one.name: one for one in KNOWN}
    first, second = list(known)[:2]
    replay.write([result(first), result(second), result(first, "emulated:h100")], tmp_path, known)
    replay.write([result(first, caught=False, place=None, control=8.0)], tmp_path, known)
    page = (tmp_path / replay.TABLE).read_text(encoding="utf-8")
    assert "2 of 3 are caught" in page
    assert "2 of 3 controls are equal" in page
    assert len((tmp_path / replay.RECORD).read_text(encoding="utf-8").splitlines()) == 3


def test_a_regression_that_is_missed_is_shown_as_missed():
    known = {one.name: one for one in KNOWN}
    missed = result(KNOWN[0].name, caught=False, place=None)
    assert "| no |" in replay.table([missed], known)[-1]
    assert "no: it was refused" in replay.table([replace(missed, why_not="it was refused")], known)[-1]


def test_the_table_and_the_figures_of_the_readmes_are_those_of_the_record():
    known = {one.name: one for one in KNOWN}
    results = replay.recorded(replay.RESULTS, known)
    assert {one.name for one in results} == {*known}
    table = replay.short_table(results, known)
    benchmarks, first = ((folder / "README.md").read_text(encoding="utf-8") for folder in (ROOT / "benchmarks", ROOT))
    assert [line for line in benchmarks.splitlines() if line in table] == table
    caught = {one.name for one in results if one.caught}
    assert f"for {len(caught)} of [{len(known)} pairs of releases]" in " ".join(first.split())
    in_python = {name for name, one in known.items() if one.lines}
    # On every device that it is run on.
    named_first = in_python - {one.name for one in results if one.place != 0}
    assert f"first for {len(named_first)} of the {len(in_python)} whose change is in Python" in " ".join(first.split())
