"""A session's report in Markdown: what stands first, what is left out first, and that no test's text takes effect."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pytest_gpumem.facts.values.composition import Composition, Explanation, Row
from pytest_gpumem.facts.values.operator_counts import OperatorSite, Tally
from pytest_gpumem.judging.gate.baseline import Key
from pytest_gpumem.judging.gate.difference import Change, Difference
from pytest_gpumem.judging.gate.verdict import Cell, MetricVerdict, Outcome, TestVerdict
from pytest_gpumem.reporting.reports.escaping import one_line, visible
from pytest_gpumem.reporting.reports.explanation import FILLED_ONCE
from pytest_gpumem.reporting.reports.markdown import COMMENT_LIMIT, LEAST_BYTES, markdown
from pytest_gpumem.reporting.reports.results import TestResult
from pytest_gpumem.reporting.reports.session_report import StoreState, Terms
from tests.hostile import TEXTS
from tests.reports.rendered import read
from tests.reports.sessions import (
    GB,
    H100,
    OK,
    REGRESSED,
    UNEXPLAINED,
    everything,
    explained,
    measured,
    peak,
    result,
    session,
)

NEW = result(measured(peak(Outcome.NEW, then=None), reason="there is no baseline for it yet"), test="test_new")
IMPROVED = result(measured(peak(Outcome.IMPROVED, 7 * GB)), test="test_less")
HARMLESS = read(markdown(everything("a text")))


def cells(text: str) -> list[list[str]]:
    return read(text).rows


# The verdict


@pytest.mark.parametrize(
    ("report", "first"),
    [
        (session(OK), "### ✅ gpumem passed: 1 gated"),
        (session(OK, REGRESSED), "### ❌ gpumem failed: 2 gated, 1 regressed"),
        (session(OK, errors=("the disk is full",)), "### ❌ gpumem failed: 1 gated"),
        (session(OK, not_run=(("a.py", "test_z"),)), "### ❌ gpumem failed: 1 gated, 1 did not finish"),
        (session(NEW), "### ❌ gpumem failed: 0 gated, 1 new"),
        (session(NEW, terms=Terms()), "### ⚪ gpumem gated nothing: 0 gated, 1 new"),
        (session(terms=Terms()), "### ⚪ gpumem gated nothing: 0 gated"),
    ],
)
def test_the_first_line_is_the_verdict(report, first):
    assert markdown(report).splitlines()[0] == first


def test_why_a_session_is_red_beside_its_tests_stands_next():
    text = markdown(session(OK, errors=("the disk is full",), ended_early="KeyboardInterrupt"))
    assert text.splitlines()[2:5:2] == ["- **the disk is full**", "- **the session ended early: KeyboardInterrupt**"]


# Tests


def test_a_failed_test_has_its_figures_its_growth_and_the_accepting_command():
    growing = everything("x").results[0].verdict.verdicts[0].difference
    verdict = measured(
        peak(Outcome.REGRESSED),
        origin=REGRESSED.verdict.verdicts[0].origin,
        difference=growing,
        measurement={"notes": ("so",)},
    )
    text = markdown(
        session(result(verdict, test="test_b", failure=REGRESSED.verdict.failure, accept=REGRESSED.verdict.accept))
    )
    assert text.splitlines()[2:9] == [
        "❌ `tests/test_gpt.py::test_b`  ",
        "GPU memory regressed: peak 9.31 GB, baseline 8.12 GB  ",
        "+5.00 GB activations at x (from x), by x in x: x",
        "",
        "<details><summary>What was measured</summary>",
        "",
        "| metric | baseline | now | change | allowed | verdict |",
    ]
    rows = cells(text)
    assert ["peak allocated", "8.12 GB", "9.31 GB", "+14.7 %", "+0.5 %", "regressed"] in rows
    assert ["activations", "", "5.00 GB", "+5.00 GB", "x", "x (from x)", "x", "24 x x", "x"] in rows
    assert ["3 other changes", "", "", "-4.00 GB", "", "", "", "", ""] in rows
    assert "\n- so\n" in text
    assert "Baseline: 2026-11-02, NVIDIA H100 80GB HBM3, torch 2.10.0, commit abc123456" in text
    assert 'To accept the new figures:\n\n```text\npytest "tests/test_gpt.py::test_b" --gpumem-update=all\n```' in text


def test_a_test_over_budget_shows_what_is_at_its_peak_and_has_nothing_to_accept():
    verdict = measured(
        replace(peak(Outcome.OVER_BUDGET, then=None), budget=GB), measurement={"explanation": explained("x")}
    )
    text = markdown(session(result(verdict, failure="Memory over budget: ...")))
    assert ["what is there at the peak", "bytes", "module", "line", "operator", "tensors"] in cells(text)
    assert ["activations", "5.00 GB", "x", "x (from x)", "x", "24 x x"] in cells(text)
    assert ["the rest", "1.00 GB", "", "", "", ""] in cells(text)
    assert "To accept the new figures" not in text
    assert f"- {FILLED_ONCE}" in text


def unfolded(text: str) -> str:
    """Return the text that is seen before anything is unfolded."""
    return re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)


ROW = Row("activation", GB, "net", "", "peft 0.17: layer.py:3", operator="mul")
FEW = Explanation(Composition(GB, (ROW,)), Composition(GB, (ROW,)))


@pytest.mark.parametrize(
    ("verdict", "first"),
    [
        (
            measured(peak(Outcome.REGRESSED), difference=Difference(0, GB, (Change(None, ROW),))),
            "+1.00 GB activations at peft 0.17: layer.py:3, by mul in net",
        ),
        (
            measured(peak(Outcome.REGRESSED), difference=Difference(0, GB, (Change(None, ROW, "", (ROW, ROW)),))),
            "+1.00 GB of one of these 2 rows, the largest at peft 0.17: layer.py:3, by mul",
        ),
        (
            measured(replace(peak(Outcome.OVER_BUDGET, then=None), budget=GB), measurement={"explanation": FEW}),
            "largest at the peak: 1.00 GB activations at peft 0.17: layer.py:3, by mul in net",
        ),
        (
            measured(MetricVerdict("retained", Outcome.OVER_BUDGET, GB, budget=1), measurement={"explanation": FEW}),
            "1.00 GB activations at peft 0.17: layer.py:3, by mul in net, kept afterwards",
        ),
        (
            measured(
                MetricVerdict("operators", Outcome.REGRESSED, 9, 5, 0),
                count_changes={
                    "operators": (Tally("mul", 4, OperatorSite("net", "model.py:3", reason="changed line")),)
                },
            ),
            "+4 operators at model.py:3, by mul in net: changed line",
        ),
        (measured(MetricVerdict("step_time", Outcome.REGRESSED, 2, 1, 0.1)), None),
    ],
    ids=["grew", "one of several", "at the peak", "kept", "work", "time"],
)
def test_the_first_row_of_the_explanation_is_seen_without_unfolding(verdict, first):
    text = unfolded(markdown(session(result(verdict, failure="it failed"))))
    lines = text.partition("❌ `tests/test_gpt.py::test_a`  \n")[2].strip().splitlines()
    assert lines == (["it failed"] if first is None else ["it failed  ", first])


@pytest.mark.parametrize(
    ("verdict", "told"),
    [
        (TestVerdict("a.py", "test_a", (measured(peak(Outcome.OK)),), failed_by_itself=True), "The test itself failed"),
        (
            TestVerdict("a.py", "test_a", (measured(peak(Outcome.OK)),)),
            "It failed in its set-up, its tear-down or a subtest",
        ),
    ],
)
def test_a_test_that_the_gate_did_not_fail_says_what_did(verdict, told):
    assert markdown(session(OK, TestResult(verdict, passed=False, failed=True))).splitlines()[2:4] == [
        "❌ `a.py::test_a`  ",
        told,
    ]


def test_what_changed_without_failing_is_told_apart_from_what_failed():
    text = markdown(session(OK, IMPROVED, REGRESSED))
    table = text[text.index("#### Changed") :].split("\n\n")[1]
    assert cells(table)[1:] == [
        ["tests/test_gpt.py::test_less", "peak allocated", "8.12 GB", "7.00 GB", "-13.8 %", "improved"]
    ]


def test_why_something_was_not_compared_is_told_once():
    unmeasured = TestResult(TestVerdict("a.py", "test_z", unmeasured="no CUDA device"), passed=True)
    lines = markdown(session(OK, NEW, NEW, unmeasured)).splitlines()
    assert "- new: there is no baseline for it yet (2 measurements)" in lines
    assert "- unmeasured: no CUDA device" in lines


def test_all_tests_are_in_a_table_that_is_folded_away():
    leaking = result(
        measured(peak(Outcome.OK, then=None), MetricVerdict("retained", Outcome.RECORDED, 512)), test="test_leak"
    )
    unmeasured = TestResult(TestVerdict("a.py", "test_z", unmeasured="no CUDA device"), passed=True)
    text = markdown(session(OK, leaking, unmeasured))
    table = text[text.index("<details><summary>All measured tests</summary>") :].split("\n\n")[1]
    assert cells(table) == [
        ["test", "peak allocated", "change", "retained", "verdict"],
        ["tests/test_gpt.py::test_a", "8.12 GB", "+0.0 %", "", "ok"],
        ["tests/test_gpt.py::test_leak", "9.31 GB", "", "512 B", "ok"],
        ["a.py::test_z", "", "", "", "unmeasured"],
    ]


@pytest.mark.parametrize(
    ("outcome", "cells_of_syncs"),
    [(Outcome.OK, []), (Outcome.IMPROVED, ["2", "-33.3 %"])],
    ids=["same", "changed"],
)
def test_counts_have_a_column_where_one_changed(outcome, cells_of_syncs):
    syncs = MetricVerdict("syncs", outcome, 2, 2 if outcome is Outcome.OK else 3, 0)
    text = markdown(session(result(measured(peak(Outcome.OK), syncs))))
    table = text[text.index("<details><summary>All measured tests</summary>") :].split("\n\n")[1]
    assert cells(table)[0] == [
        "test",
        "peak allocated",
        "change",
        *["syncs", "change"][: len(cells_of_syncs)],
        "verdict",
    ]
    assert cells(table)[1][3:-1] == cells_of_syncs


def test_a_matrix_of_configs_has_its_table():
    plain, saving = (
        result(measured(peak(Outcome.RECORDED, now, None)), test=f"t[{name}]", cell=Cell("a.py::t", name, number))
        for number, (name, now) in enumerate([("fp32", 8 * GB), ("checkpoint=blocks", 6 * GB)])
    )
    text = markdown(session(plain, saving, terms=Terms()))
    assert "<summary>Configs of <code>a.py::t</code></summary>" in text
    assert ["checkpoint=blocks", "6.00 GB", "+25.0 %", "*"] in cells(text)


def test_the_store_and_the_environment_are_told():
    unused = StoreState(((H100.slug, Key("b.py", "test_gone", "call")),), frozenset({"b.py"}))
    text = markdown(session(OK, closing_lines=("store: 1 baseline written (new)",), stored=unused, shards=3))
    assert "- store: 1 baseline written (new)" in text
    assert "1 unused baseline: b.py::test\\_gone" in text
    rows = cells(text)
    for row in (["commit", "abc123456"], ["shards", "3"], ["device", H100.device], ["torch", "2.11.0"]):
        assert row in rows


def test_people_are_shown_the_units_that_they_asked_for():
    assert "7.56 GiB" in markdown(session(OK, terms=Terms(baseline=True, units="iec")))


# Hostile texts


@pytest.mark.parametrize(
    "name", ["tags", "entities", "pipes", "backticks", "fence", "emphasis", "blocks", "bidi", "long"]
)
def test_no_text_of_a_test_adds_a_tag_a_cell_or_an_attribute_and_none_is_lost(name):
    text = TEXTS[name]
    harmless, page = HARMLESS, read(markdown(everything(text)))
    assert page.tags == harmless.tags
    assert [len(row) for row in page.rows] == [len(row) for row in harmless.rows]
    assert page.attributes == harmless.attributes
    ids = [f"{text}::{text}", f"{text}::b{text} ({text})"]
    for shown in (*map(visible, ids), visible(one_line(text))):
        assert shown in page.text


# Room


def many(count: int) -> tuple[TestResult, ...]:
    return tuple(
        replace(one, verdict=replace(one.verdict, test=f"test_{number:04}[{'é' * 40}]"))
        for number, one in enumerate([UNEXPLAINED] * count)
    )


@pytest.mark.parametrize("most", [LEAST_BYTES, 3_000, COMMENT_LIMIT])
def test_it_stays_within_its_limit_and_is_well_formed(most):
    text = markdown(session(*many(400)), most=most)
    assert most / 2 < len(text.encode()) <= most
    assert text.startswith("### ❌ gpumem failed: 400 gated, 400 regressed\n")
    assert "*Left out, because the text would be too long: " in text
    read(text)


def test_whole_parts_are_left_out_the_least_important_first_and_it_says_which():
    report = session(OK, IMPROVED, NEW, *many(2))
    whole = markdown(report)
    size = len(whole.encode())
    gone = []
    # Each part has a text that only it has.
    parts = {
        "All measured": "the table of all tests",
        "Environment<": "the environment",
        "- new: ": "what was not compared",
        "#### Changed": "what changed without failing",
        "To accept the new figures": "details",
        "❌ `": "test",
    }
    for most in range(size - 1, LEAST_BYTES, -50):
        text = markdown(report, most=most)
        read(text)
        gone += [part for part in parts if part not in text and part not in gone]
        note = text.splitlines()[-1]
        assert all((parts[part] in note) for part in gone)
    assert gone == list(parts)


def test_what_fits_is_left_whole():
    whole = markdown(session(OK))
    assert markdown(session(OK), most=len(whole.encode())) == whole


def test_a_verdict_has_room_even_where_reasons_do_not():
    endless = TestResult(TestVerdict("a.py", "test_z", unmeasured="x" * 10_000), passed=True)
    text = markdown(session(endless), most=LEAST_BYTES)
    assert text.startswith("### ❌ gpumem failed\n")
    assert len(text.encode()) <= LEAST_BYTES
    with pytest.raises(ValueError, match="must be at least 300 bytes"):
        markdown(session(OK), most=LEAST_BYTES - 1)
