"""A comparison as a table, Markdown and JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pytest_gpumem.base.git import Revision
from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.judging.gate.baseline import Key
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.judging.times.intervals import Interval
from pytest_gpumem.plugin.config.settings import DEFAULT_TOLERANCES
from pytest_gpumem.reporting.reports.comparison import (
    ChangedPackage,
    ComparedChange,
    ComparedRow,
    ComparisonReport,
    OmittedTest,
    changes_of,
)
from pytest_gpumem.reporting.reports.comparison_formats import lines, markdown, to_json
from pytest_gpumem.reporting.reports.layout import Screen, text_of
from tests.ab.values import BASE, HEAD

RUNS = "5 pairs of runs, base main (1f3c9ab), head HEAD (2b4d8ce), slowdown tolerated 2.0 %"
SLOWER = ComparedChange("step_time", 0.1, 0.105, Outcome.REGRESSED, 0.002, interval=Interval(1.05, 1.045, 1.056))
SAME = ComparedChange("step_time", 0.1, 0.1, Outcome.OK, 0.002, interval=Interval(1.0, 0.996, 1.004))
UNSURE = ComparedChange(
    "step_time", 0.1, 0.11, Outcome.UNCERTAIN, reason="another process was there", interval=Interval(1.1, 0.9, 1.2)
)
PEAK = ComparedChange("peak_allocated", 10_000_000, 10_000_000, Outcome.OK, 1_000_000)
GROWN = ComparedChange("peak_allocated", 8_120_000_000, 9_310_000_000, Outcome.REGRESSED, 1e6)
LEAK = ComparedChange("retained", 0, 4_000_000, Outcome.REGRESSED, 1e6)


def report(*rows, omitted_tests=(), pairs=5):
    return ComparisonReport(BASE, HEAD, tuple(rows), tuple(omitted_tests), pairs=pairs, tolerance=0.02)


def row(test, *changes, notes=(), only_one=True):
    key = Key("test_it.py", test, "call")
    return ComparedRow(key, "toy", f"test_it.py::{test}" if only_one else str(key), changes, notes=notes)


def table(report, units):
    """What a terminal of any width shows."""
    return [line if isinstance(line, str) else text_of(line) for line in lines(report, units, Screen())]


def test_the_table_shows_times_with_their_intervals_and_of_bytes_what_changed():
    lines = table(report(row("test_a", SLOWER, PEAK), row("test_b", SAME, GROWN, LEAK)), "si")
    assert lines[:5] == [
        "test                metric               base       head    change          interval  verdict",
        "test_it.py::test_a  step time       100.00 ms  105.00 ms    +5.0 %  +4.5 % to +5.6 %  slower",
        "test_it.py::test_b  step time       100.00 ms  100.00 ms    +0.0 %  -0.4 % to +0.4 %  not slower",
        "test_it.py::test_b  peak allocated    8.12 GB    9.31 GB   +14.7 %                    regressed",
        "test_it.py::test_b  retained              0 B    4.00 MB  +4.00 MB                    regressed",
    ]


def test_a_test_of_which_nothing_is_timed_and_nothing_changed_is_shown_with_its_peak():
    lines = table(report(row("test_a", PEAK)), "iec")
    assert lines[1].split("  ")[-1] == "ok"
    assert "9.54 MiB" in lines[1]


def test_what_grew_from_nothing_is_shown_in_its_unit():
    _, line, *_ = table(report(row("test_a", ComparedChange("flops", 0, 2 * 10**9, Outcome.REGRESSED, 0.0))), "si")
    assert "0 FLOP  2.00 GFLOP  +2.00 GFLOP" in line


def test_a_metric_that_one_side_lacks_is_told_in_every_format():
    def side(**metrics: int) -> Measurement:
        return Measurement("call", Workload("call"), Environment("toy", "toy", {"torch": "2.13.0"}), metrics)

    old, new = side(peak_allocated=5, launches=7, peak_forward=5), side(peak_allocated=5, flops=3)
    changes, _ = changes_of(old, new, DEFAULT_TOLERANCES)
    compared = report(row("test_a", *changes), pairs=None)
    told = [
        "new: test_it.py::test_a: FLOPs: not compared: the old side has no value",
        "note: test_it.py::test_a: kernel launches: not compared: the new side has no value",
    ]
    assert [line for line in table(compared, "si") if "not compared" in line] == told
    marked = markdown(compared, "si").replace("\\", "").splitlines()
    assert [line for line in marked if "not compared" in line] == [f"- {one}" for one in told]
    reasons = {one["metric"]: one["reason"] for one in json.loads(to_json(compared))["tests"][0]["metrics"]}
    assert reasons == {
        "peak_allocated": None,
        "peak_forward": None,
        "flops": "not compared: the old side has no value",
        "launches": "not compared: the new side has no value",
    }


def test_what_is_slower_stands_out_where_there_are_colours():
    shown = lines(report(row("test_a", SLOWER), row("test_b", SAME)), "si", Screen())
    styles = [{span.style for span in line if span.text.strip()} for line in shown[1:3]]
    assert styles == [{"bad"}, {None}]


def test_uncompared_measurements_have_a_reason_and_all_are_accounted_for():
    lines = table(
        report(
            row("test_a", UNSURE, notes=("measured in 4 of 5 runs of head",), only_one=False),
            omitted_tests=[
                OmittedTest("test_it.py::test_b", "not compared", "it ran in head only"),
                OmittedTest("test_it.py::test_c", "broken", "it failed by itself, in head"),
            ],
        ),
        "si",
    )
    assert lines[-5:] == [
        "uncertain: test_it.py::test_a (call): step time: another process was there",
        "note: test_it.py::test_a (call): measured in 4 of 5 runs of head",
        "not compared: test_it.py::test_b: it ran in head only",
        "broken: test_it.py::test_c: it failed by itself, in head",
        f"gpumem ab: 1 compared, 1 uncertain, 1 broken, 1 not compared; step times: 1 uncertain; {RUNS}",
    ]


def test_a_report_without_a_row_has_no_table():
    assert table(report(pairs=1), "si") == [f"gpumem ab: 0 compared; {RUNS.replace('5 pairs', '1 pair')}"]


def test_a_revision_that_was_named_by_its_hash_is_not_said_twice():
    assert str(Revision("1f3c9ab", "1f3c9ab00000")) == "1f3c9ab"


def cells(line: str) -> list[str]:
    """The cells of a row as GitHub splits it: at every pipe that is not escaped."""
    return line.replace("\\|", "\0").strip("|").split("|")


@pytest.mark.parametrize(
    ("test", "code"),
    [
        ("test_a[x|y]", "`test_it.py::test_a[x\\|y]`"),
        ("test_a[`]", "``test_it.py::test_a[`]``"),
        ("test_a`", "`` test_it.py::test_a` ``"),
        ("test_a[<script>]", "`test_it.py::test_a[<script>]`"),
        ("test_a[x\ny]", "`test_it.py::test_a[x\\ny]`"),
    ],
)
def test_a_test_id_is_a_code_span_within_its_cell_whatever_it_has(test, code):
    text = markdown(report(row(test, SLOWER)), "si", finished=True)
    (line,) = (line for line in text.splitlines() if "slower" in line and line.startswith("|"))
    assert len(cells(line)) == 7
    assert line.startswith(f"| {code} |")


def test_no_reason_or_revision_becomes_markup():
    left_out = OmittedTest("test[<b>]", "not compared", "see @me\n# and [x](y)")
    named = ComparisonReport(Revision("a_*b*_`c`", "1f3c9ab0"), HEAD, (), (left_out,), pairs=4, tolerance=0.02)
    text = markdown(named, "si", finished=True)
    assert "### gpumem ab: a\\_\\*b\\*\\_\\`c\\` (1f3c9ab) and HEAD" in text
    assert "- not compared: test\\[&lt;b&gt;\\]: see <span>@</span>me <span>#</span> and \\[x\\](y)" in text
    assert "<b>" not in text


def test_markdown_says_when_it_was_not_finished():
    unfinished = markdown(report(row("test_a", SLOWER)), "si", finished=False)
    assert "Not finished" in unfinished
    assert "Not finished" not in markdown(report(row("test_a", SLOWER)), "si", finished=True)


def test_markdown_has_as_much_as_there_is_room_for_and_says_so():
    many = report(*(row(f"test_{number}", GROWN) for number in range(100)))
    whole, part = markdown(many, "si"), markdown(many, "si", most=3_000)
    assert len(part) <= 3_000 < len(whole)
    assert part.startswith(whole[:1_000])
    assert part.endswith("\nThe text is shortened, because the full text would be too long.\n")
    assert markdown(many, "si", most=len(whole)) == whole


def test_packages_are_told_in_markdown_and_json():
    moved = ChangedPackage("torch", "2.13.0", "2.15.0", requested=True)
    compared = replace(report(row("test_a", GROWN)), packages=(moved, ChangedPackage("extra", None, "1.0")))
    assert "- packages: torch 2.15.0, was 2.13.0; extra 1.0, was not installed\n" in markdown(compared, "si")
    told = json.loads(to_json(compared))["packages"]
    assert told[0] == {"name": "torch", "base": "2.13.0", "head": "2.15.0", "requested": True, "url": None}


def test_json_has_every_figure_and_everything_that_was_left_out():
    plain = json.loads(
        to_json(
            report(
                row("test_a", SLOWER, PEAK),
                row("test_b", LEAK),
                omitted_tests=[OmittedTest("test_c", "broken", "gone")],
            ),
            finished=True,
        )
    )
    assert plain["tests"][0]["metrics"] == [
        {
            "metric": "step_time",
            "outcome": "regressed",
            "base": 0.1,
            "head": 0.105,
            "ratio": 1.05,
            "low": 1.045,
            "high": 1.056,
            "allowed": 0.002,
            "reason": None,
        },
        {
            "metric": "peak_allocated",
            "outcome": "ok",
            "base": 10_000_000,
            "head": 10_000_000,
            "ratio": 1.0,
            "low": None,
            "high": None,
            "allowed": 1_000_000,
            "reason": None,
        },
    ]
    assert plain["tests"][1]["metrics"][0]["ratio"] is None
    assert plain["not_compared"] == [{"test": "test_c", "reason": "gone", "broken": True}]
    assert (plain["format"], plain["exit_status"], plain["finished"], plain["pairs"]) == (1, 1, True, 5)
    assert plain["head"] == {"name": "HEAD", "commit": HEAD.commit}
