"""What an HTML report shows: order, figures, bars, data of charts and links; and that its text cannot be anything but text."""

from __future__ import annotations

import base64
import hashlib
import html as entities
import json
import re
from dataclasses import replace
from importlib import resources
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.facts.values.composition import Composition, Explanation, Holder, Row
from pytest_gpumem.facts.values.timeline import OverTime, PhaseSpan
from pytest_gpumem.facts.values.times import Round, Sample, Times
from pytest_gpumem.judging.gate.difference import Change, Difference
from pytest_gpumem.judging.gate.verdict import Cell, MetricVerdict, Outcome
from pytest_gpumem.reporting.reports.html.charts import matrix_chart, over_time_chart, rounds_chart
from pytest_gpumem.reporting.reports.html.page import HtmlCell, anchor_of, html, page_of, unique
from pytest_gpumem.reporting.reports.html.panels import MOST_ROWS, Bar, bar_of, panel_of
from pytest_gpumem.reporting.reports.matrix import MatrixRow
from pytest_gpumem.reporting.reports.results import TestResult
from pytest_gpumem.reporting.reports.session_report import Terms
from tests.hostile import ALL
from tests.reports.sessions import GB, OK, REGRESSED, everything, measured, peak, result, session

unhurried = settings(deadline=None)


@pytest.fixture(scope="module")
def page() -> str:
    """The page of a session that has everything, with every hostile text wherever a text may stand."""
    return html(everything(ALL))


# What the page says.


def test_tests_that_fail_come_first_and_the_worst_before_others():
    over = result(measured(peak(Outcome.OVER_BUDGET, budget=9 * GB)), test="test_z", failure="over budget")
    new = result(measured(peak(Outcome.NEW, then=None)), test="test_n")
    rows = page_of(session(OK, new, REGRESSED, over, not_run=(("a.py", "test_x"),))).tests
    assert [(row.report_row.test, row.report_row.status.words) for row in rows] == [
        ("test_x", "not run"),
        ("test_z", "over budget"),
        ("test_b", "regressed"),
        ("test_n", "new"),
        ("test_a", "ok"),
    ]
    assert [row.report_row.status.fails for row in rows] == [True, True, True, False, False]


def test_the_headline_is_the_gates_and_nothing_gated_is_no_pass():
    recorded = result(measured(peak(Outcome.RECORDED, then=None)))
    assert page_of(session(OK)).headline == "The gate passed"
    assert page_of(session(REGRESSED)).headline == "The gate failed"
    assert page_of(session(recorded, terms=Terms())).headline == "Nothing was gated"
    assert page_of(session(OK, errors=("disk full",))).headline == "The gate failed"


def test_why_it_failed_counts_tests_and_tells_what_else_went_wrong():
    report = session(OK, REGRESSED, not_run=(("a.py", "test_x"),), errors=("baselines were not written: disk full",))
    assert page_of(report).problems == (
        "baselines were not written: disk full",
        "1 test failed",
        "1 test did not finish",
    )


def test_the_table_shows_the_worst_measurement_of_a_test_and_names_it():
    test = result(
        measured(peak(Outcome.OK, 1 * GB, 1 * GB), name="small"), measured(peak(Outcome.REGRESSED), name="large")
    )
    (row,) = page_of(session(test)).tests
    assert row.part == "large"
    assert [cell.text for cell in row.cells] == ["9.31 GB", "+14.7 %", "", ""]
    assert [cell.bad for cell in row.cells[:2]] == [False, True]
    (alone,) = page_of(session(OK)).tests
    assert alone.part == ""


def test_a_baseline_of_nothing_has_a_change_that_is_told_and_not_sorted_by():
    grown = measured(MetricVerdict("peak_allocated", Outcome.REGRESSED, 2 * GB, 0, 1))
    (row,) = page_of(session(result(grown))).tests
    assert (row.cells[1].text, row.cells[1].sort) == ("+2.00 GB", None)


def test_a_failed_metric_without_a_column_stands_in_place_of_the_peaks_change():
    kept = MetricVerdict("retained", Outcome.REGRESSED, 4 * GB, GB, 64_000)
    fallen = MetricVerdict("throughput", Outcome.OVER_BUDGET, 10, budget=20, of="steps")
    slower = MetricVerdict("step_time", Outcome.REGRESSED, 2, 1, 0.1)
    same = peak(Outcome.OK, GB, GB)
    rows = page_of(
        session(*(result(measured(same, one), test=f"test_{one.metric}") for one in (kept, fallen, slower)))
    ).tests
    assert {row.report_row.test: row.cells[1] for row in rows} == {
        "test_retained": HtmlCell("+300.0 %", 3.0, bad=True, metric="retained"),
        "test_throughput": HtmlCell("10 steps/s", None, bad=True, metric="throughput"),
        "test_step_time": HtmlCell("+0.0 %", 0.0),
    }
    assert '<span class="metric">retained</span>+300.0 %</td>' in html(session(result(measured(same, kept))))


@pytest.mark.parametrize(
    ("results", "opened"),
    [
        ((OK, REGRESSED), anchor_of("tests/test_gpt.py::test_b")),
        ((OK,), ""),
        ((REGRESSED, result(measured(peak(Outcome.OVER_BUDGET)), test="test_c", failure="over")), ""),
    ],
    ids=["one failed", "none failed", "two failed"],
)
def test_the_only_test_that_failed_is_open(results, opened):
    report = session(*results)
    assert page_of(report).opened == opened
    assert html(report).count('" data-opened data-outcome') == bool(opened)


SPARED = "the verdict did not fail the test: "
NOT_THE_MEASUREMENT = "the test failed for a reason other than its measurements"


@pytest.mark.parametrize(
    ("passed", "failure", "update", "note", "said"),
    [
        (
            False,
            "over budget",
            None,
            "not failed",
            f"{SPARED}the test is expected to fail (xfail), or passed when it ran again",
        ),
        (True, None, None, "not failed", f"{SPARED}the test is expected to fail (xfail), or passed when it ran again"),
        (
            True,
            None,
            "new",
            "not failed",
            f"{SPARED}--gpumem-update=new compares only to choose baselines to write",
        ),
    ],
)
def test_what_did_not_fail_for_a_regression_says_so_and_why(passed, failure, update, note, said):
    verdict = replace(REGRESSED.verdict, failure=failure)
    report = session(TestResult(verdict, passed=passed, failed=False), terms=Terms(baseline=True, update=update))
    (row,) = page_of(report).tests
    assert (row.report_row.status.note, row.report_row.notes) == (note, (said,))
    text = html(report)
    assert said in text
    assert '<b class="spared">not failed</b>' in text


def test_what_failed_beside_its_measurement_says_where():
    (row,) = page_of(session(TestResult(OK.verdict, passed=False, failed=True))).tests
    assert (row.report_row.status.note, row.report_row.notes) == ("failed", (NOT_THE_MEASUREMENT,))
    (gated,) = page_of(session(REGRESSED)).tests
    assert (gated.report_row.status.note, gated.report_row.notes) == ("", ())


def test_what_failed_before_it_was_measured_is_not_said_to_be_measured():
    unmeasured = replace(OK.verdict, verdicts=(), unmeasured="its set-up failed", failed_by_itself=True)
    (row,) = page_of(session(TestResult(unmeasured, passed=False, failed=True, failed_in="setup"))).tests
    assert (row.report_row.headline, row.report_row.notes) == ("Its set-up failed", ())


def test_what_a_text_says_to_be_the_command_that_accepts_cannot_be_copied():
    failure = "GPU memory over budget\n\n  accept:   pytest -k all\n\n  accept:   rm -r /"
    (row,) = page_of(session(result(measured(peak(Outcome.OVER_BUDGET)), failure=failure))).tests
    assert (row.report_row.accept, row.report_row.result.verdict.failure) == ("", failure)


# Bars.


def test_a_bar_is_from_nothing_to_twice_what_it_is_held_against():
    metric = MetricVerdict("peak_allocated", Outcome.REGRESSED, 5, baseline=4, allowed=1, budget=8)
    assert bar_of(metric) == Bar(value=0.625, baseline=0.5, limit=0.625, budget=1.0)
    assert bar_of(MetricVerdict("peak_allocated", Outcome.OK, 2, budget=8)) == Bar(value=0.125, budget=0.5)


def test_the_same_bytes_are_as_long_whatever_the_budget_and_a_regression_is_longer():
    far, near, steady = (
        bar_of(MetricVerdict("peak_allocated", Outcome.REGRESSED, now, 100, 2, budget))
        for now, budget in ((135, 1000), (135, None), (100, None))
    )
    assert (far.value, far.baseline, far.limit) == (near.value, near.baseline, near.limit)
    assert far.value > near.baseline == steady.value
    assert near.value / steady.value == 1.35


@pytest.mark.parametrize(("budget", "told"), [(770, "7.7 x"), (500_000, "5,000 x"), (10**9, "> 9,999 x")])
def test_a_budget_far_off_is_told_and_has_no_place_on_the_track(budget, told):
    bar = bar_of(MetricVerdict("peak_allocated", Outcome.OK, 100, 100, 2, budget))
    assert (bar.budget, bar.beyond, bar.cut) == (None, told, False)
    text = html(session(result(measured(MetricVerdict("peak_allocated", Outcome.OK, 100, 100, 2, budget)))))
    assert f">{entities.escape(told)}</text>" in text
    assert "bars end at twice the baseline, else the budget" in text
    assert "scale of its own" not in text


def test_what_is_longer_than_its_track_is_cut_off_and_said_to_be():
    assert bar_of(MetricVerdict("peak_allocated", Outcome.OK, 200, 100, 2)).cut is False
    far = MetricVerdict("peak_allocated", Outcome.REGRESSED, 201, 100, 2)
    assert bar_of(far) == Bar(1.0, 0.5, 0.51, cut=True)
    text = html(session(result(measured(far))))
    assert text.count('class="cut"') == 2
    assert "value longer than the bar" in text


@pytest.mark.parametrize(
    "metric",
    [
        MetricVerdict("forward_time", Outcome.RECORDED, 0.1),
        MetricVerdict("retained", Outcome.REGRESSED, 100, 0, 0),
        MetricVerdict("step_time", Outcome.UNCERTAIN, float("nan"), 0.1, 0.01),
    ],
)
def test_what_is_held_against_nothing_has_no_bar(metric):
    assert bar_of(metric) is None


def test_the_limit_of_what_is_better_when_larger_lies_below_its_baseline():
    bar = bar_of(MetricVerdict("throughput", Outcome.OK, 90, baseline=100, allowed=20))
    assert bar == Bar(value=0.45, baseline=0.5, limit=0.4)


@unhurried
@given(*[st.one_of(st.none(), st.floats(0, 1e15))] * 3, st.floats(0, 1e15))
def test_no_bar_is_longer_than_its_track(baseline, allowed, budget, value):
    bar = bar_of(MetricVerdict("peak_allocated", Outcome.OK, value, baseline, allowed, budget))
    if bar is not None:
        assert all(0 <= part <= 1 for part in (bar.value, bar.baseline, bar.limit, bar.budget) if part is not None)


# Charts.

STEP = OverTime(
    (0, 2_000_000, 5_000_000),
    (3_000_000, 8_123_456_789, 10),
    {"activation": (0, 5_123_456_789, 0), "parameter": (3_000_000, 3_000_000_000, 10), "buffer": (0, 0, 0)},
    1,
    (PhaseSpan("forward", 0, 1_000_000), PhaseSpan("backward", 1_000_000, 5_000_000)),
)


def test_memory_over_a_step_is_in_units_that_fit_and_without_what_was_never_there():
    chart = over_time_chart(STEP, None, "si")
    assert (chart["unit"], chart["clock"]) == ("GB", "ms")
    assert chart["time"] == [0, 2, 5]
    assert chart["series"] == [
        {"name": "parameters", "category": "parameter", "y": [0.003, 3, 1e-8]},
        {"name": "activations", "category": "activation", "y": [0, 5.1235, 0]},
    ]
    assert chart["peak"] == {"x": 2, "y": 8.1235, "text": "8.12 GB"}
    assert chart["phases"][1] == {"name": "backward", "begin": 1, "end": 5}
    assert chart["label"] == "Memory over the step, by category: 8.12 GB at the peak in backward."


@pytest.mark.parametrize(("total", "said"), [((GB, 2 * GB), "1.00 GB, then 2.00 GB"), ((GB,), "1.00 GB")])
def test_a_step_of_one_or_two_moments_is_a_sentence_and_no_chart(total, said):
    few = OverTime(tuple(range(len(total))), total, {"activation": total}, len(total) - 1)
    assert over_time_chart(few, None, "si") == {"kind": "sentence", "label": f"The step held {said}."}
    explanation = Explanation(Composition(2 * GB, ()), over_time=few)
    text = html(session(result(measured(peak(Outcome.OK), measurement={"explanation": explanation}))))
    assert f"<p>The step held {said}.</p>" in text
    assert "<figure" not in text


def test_one_or_two_rounds_are_a_sentence_and_no_chart():
    few = Times((Sample((Round(0.5),)), Sample((Round(0.51),))))
    time = MetricVerdict("step_time", Outcome.OK, 0.505, 0.4, 0.1)
    chart = rounds_chart(measured(time, measurement={"times": few}))
    assert chart == {"kind": "sentence", "label": "2 rounds took 500.00 ms and 510.00 ms, 400.00 ms in the baseline."}


def test_tables_that_explain_a_metric_that_changed_are_apart_from_the_others():
    kept = Composition(GB, (Row("other", GB, site="cache.py:5"),))
    explanation = Explanation(kept, kept, kept, ("a -> b",), holders=(Holder("cache.kept[...]", kept),))
    growth = Difference(GB, 2 * GB, (Change(None, kept.rows[0]),))

    def titles(*metrics: MetricVerdict) -> tuple[list[str], list[str]]:
        panel = panel_of(measured(*metrics, difference=growth, measurement={"explanation": explanation}), "si")
        assert not any("kept in" in note for note in panel.notes)
        return [table.title for table in panel.changes], [table.title for table in panel.compositions]

    retained = "What was retained: 1.00 GB"
    changed, made_of = "What changed at the peak: +1.00 GB", "What the peak is made of: 1.00 GB"
    cycles = "What only the cyclic collector freed: 1.00 GB"
    leak = MetricVerdict("retained", Outcome.REGRESSED, GB, 0, 64_000)
    assert titles(peak(Outcome.OK), leak) == ([retained], [changed, made_of, cycles])
    assert titles(peak(Outcome.REGRESSED), leak) == ([retained, changed], [made_of, cycles])
    assert titles(peak(Outcome.REGRESSED)) == ([changed], [made_of, retained, cycles])
    garbage = MetricVerdict("cyclic_garbage", Outcome.UNCERTAIN, GB, 0, 64_000)
    assert titles(peak(Outcome.OK), garbage) == ([cycles], [changed, made_of, retained])


def test_binary_units_are_binary_in_charts_too():
    chart = over_time_chart(replace(STEP, total=(0, 2**30, 0), categories={"input": (0, 2**30, 0)}), None, "iec")
    assert (chart["unit"], chart["peak"]["y"], chart["peak"]["text"]) == ("GiB", 1, "1.00 GiB")


def test_rounds_stand_with_what_disturbed_them_their_median_and_the_baselines():
    rounds = (*(Round(0.010 + 0.001 * number) for number in range(7)), Round(0.030, None, "it was hot"))
    time = MetricVerdict("step_time", Outcome.OK, 0.013, 0.012, 0.001)
    chart = rounds_chart(measured(time, measurement={"times": Times((Sample(rounds, 3),))}))
    (sample,) = chart["samples"]
    assert (chart["unit"], chart["baseline"]) == ("ms", 12)
    assert sample["y"] == [10, 11, 12, 13, 14, 15, 16, 30]
    assert sample["disturbed"] == [None] * 7 + ["it was hot"]
    assert (sample["low"], sample["median"], sample["high"]) == (10, 13, 16)
    assert chart["label"] == "Step time of 8 rounds: median 13.00 ms, 12.00 ms in the baseline."


@pytest.mark.parametrize("seconds", [None, (0.5, float("nan")), (float("nan"), 0.5), (0.5, float("inf"))])
def test_a_step_without_rounds_or_with_one_that_has_no_length_has_no_chart_of_them(seconds):
    times = seconds and Times((Sample(tuple(map(Round, seconds))),))
    assert rounds_chart(measured(peak(Outcome.OK), measurement={"times": times})) is None


CONFIGS = [
    MatrixRow("fp32", 100, 1.0),
    MatrixRow("bf16", 50, 1.5),
    MatrixRow("slow", 100, 2.0),
    MatrixRow("tf32", why_not="-"),
]


def test_a_matrix_is_drawn_by_saving_and_cost_with_those_that_none_beats():
    chart = matrix_chart("test_m", CONFIGS, "si")
    assert [(one["config"], one["saving"], one["cost"], one["efficient"]) for one in chart["points"]] == [
        ("fp32", 0, 0, True),
        ("bf16", 50, 50, True),
        ("slow", 0, 100, False),
    ]
    assert chart["first"] == "fp32"


@pytest.mark.parametrize("rows", [[], CONFIGS[:1], CONFIGS[3:], [MatrixRow("a", 1), MatrixRow("b", 2)]])
def test_a_matrix_without_two_configs_of_known_cost_is_a_table_only(rows):
    assert matrix_chart("test_m", rows, "si") is None


def test_a_matrix_has_its_table_too():
    cells = [Cell("t.py::test_m", config, number) for number, config in enumerate(("fp32", "bf16"))]
    tests = [result(measured(peak(Outcome.OK)), test=f"test_m[{one.config}]", cell=one) for one in cells]
    (matrix,) = page_of(session(*tests)).matrices
    assert matrix.header == ("config", "peak", "saving", "")
    assert [row[0] for row in matrix.rows] == ["fp32", "bf16"]
    assert matrix.chart is None


# Tables that explain.


def test_what_a_table_does_not_show_is_in_its_last_row():
    rows = [Row("activation", 1_000_000 * (number + 1), f"m{number}") for number in range(MOST_ROWS + 2)]
    growth = Difference(0, sum(row.nbytes for row in rows), tuple(Change(None, row) for row in reversed(rows)))
    table = panel_of(measured(peak(Outcome.REGRESSED), difference=growth), "si").changes[0]
    assert len(table.parts) == MOST_ROWS
    assert table.parts[0].figures[-1] == "+32.00 MB"
    assert table.rest == "+3.00 MB"
    assert [row.share for row in table.parts[:2]] == [1.0, 31 / 32]


def test_what_a_peak_is_made_of_adds_up_to_it():
    explanation = everything("x").results[0].verdict.verdicts[0].measurement.explanation
    whole = replace(explanation, peak=Composition(9 * GB, (Row("activation", 5 * GB),)))
    table = panel_of(measured(peak(Outcome.OK), measurement={"explanation": whole}), "si").compositions[0]
    assert [(part.name, part.bar) for part in table.parts] == [("activations", "c-activation")]
    assert [part.figures for part in table.parts] == [("5.00 GB",)]
    assert table.rest == "4.00 GB"


# Links.


@unhurried
@given(st.text(), st.text())
def test_links_are_plain_words_and_tell_tests_apart(one, other):
    assert re.fullmatch(r"[A-Za-z0-9_-]+", anchor_of(one))
    assert (anchor_of(one) == anchor_of(other)) == (one == other)


@given(st.lists(st.sampled_from("abc")))
def test_a_test_that_is_there_twice_has_two_links(anchors):
    assert len(set(unique(anchors))) == len(anchors)


# The page as text.


def test_the_page_is_the_same_each_time_and_can_be_written(page):
    assert html(everything(ALL)) == page
    assert page.encode("utf-8").decode("utf-8") == page


def test_the_policy_allows_the_scripts_of_the_page_alone_and_to_fetch_nothing(page):
    policy = entities.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', page).group(1))
    scripts = re.findall(r'<script(?: type="text/plain" id="plotly")?>(.*?)</script>', page, flags=re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    assert len(scripts) == 3
    assert set(re.findall(r"'sha256-([^']*)'", policy)) == set(hashes)
    assert policy.startswith("default-src 'none'; ")
    assert "connect-src" not in policy
    assert "unsafe-eval" not in policy


def test_no_data_of_a_chart_can_end_its_script(page):
    data = re.findall(r'<script type="application/json">(.*?)</script>', page, flags=re.DOTALL)
    assert len(data) >= 4
    for one in data:
        assert not re.search("[<>&]", one)
        json.loads(one)


def test_the_tags_of_a_page_do_not_depend_on_its_texts(page):
    def tags(text: str) -> list[str]:
        return re.findall(r"<(?:[a-zA-Z/][\w-]*|!)", re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL))

    assert tags(page) == tags(html(everything("x")))


def test_colours_can_be_read():
    css = resources.files("pytest_gpumem.reporting.reports.html").joinpath("page.css").read_text(encoding="utf-8")
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in css.split("@media (prefers-color-scheme: dark)")
    )
    for theme in (light, dark):
        for ink in ("ink", "muted", "accent", "bad", "good", "doubt"):
            for paper in ("paper", "raised"):
                assert contrast(theme[ink], theme[paper]) >= 4.5, (ink, paper)
        assert contrast(theme["ink"], theme["wash"]) >= 4.5
        series = [theme[f"c-{name}"] for name in ("parameter", "buffer", "gradient", "activation", "temporary")]
        assert all(one != other for one, other in pairwise(sorted(series)))


def contrast(one: str, other: str) -> float:
    """As WCAG 2.1 defines it; 4.5 is what level AA asks for."""

    def luminance(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


# What it takes.

FOLDER = resources.files("pytest_gpumem.reporting.reports.html")


def test_the_page_has_the_charts_library_of_the_release_that_its_origin_names(page):
    origin = json.loads(FOLDER.joinpath("plotly/origin.json").read_text(encoding="utf-8"))
    library = FOLDER.joinpath("plotly/plotly-basic.min.js").read_text(encoding="utf-8")
    assert library.startswith(f"/**\n* plotly.js (basic - minified) v{origin['version']}\n")
    assert library in page
    assert "MIT License" in FOLDER.joinpath("plotly/LICENSE").read_text(encoding="utf-8")


def test_the_charts_are_of_kinds_that_the_basic_library_has():
    kinds = re.findall(r'\btype: "(\w+)"', FOLDER.joinpath("charts.js").read_text(encoding="utf-8"))
    assert {"scatter"} <= set(kinds) <= {"scatter", "bar", "pie", "rect"}


def test_a_run_writes_its_page(project):
    project.write("@pytest.mark.gpumem(max_gb=1)\ndef test_it():\n    torch.ones(1000)\n")
    project.run("--gpumem-report=reports/a.html").assert_outcomes(passed=1)
    text = (project.path / "reports" / "a.html").read_text(encoding="utf-8")
    assert "<bdi>test_it</bdi>" in text
    assert "4.00 kB" in text
    assert "The gate passed" in text
