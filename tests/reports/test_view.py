"""What is derived of a session once: every format tells the same of why a test failed, its title, its baseline and its command."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.reporting.reports.comparison import side_of_report
from pytest_gpumem.reporting.reports.failure import failure_text
from pytest_gpumem.reporting.reports.github import annotation_lines
from pytest_gpumem.reporting.reports.html.page import html, page_of
from pytest_gpumem.reporting.reports.json_report import from_json, to_json
from pytest_gpumem.reporting.reports.layout import Screen, text_of
from pytest_gpumem.reporting.reports.markdown import markdown
from pytest_gpumem.reporting.reports.results import TestResult
from pytest_gpumem.reporting.reports.session_report import Terms
from pytest_gpumem.reporting.reports.terminal import failure_lines
from pytest_gpumem.reporting.reports.view import origin_line, rows_of, shown_measurements, state_of
from tests.reports.sessions import GB, OK, ORIGIN, REGRESSED, measured, peak, result, session
from tests.reports.test_github import command

BROKEN = replace(OK.verdict, verdicts=(), unmeasured="its set-up failed", failed_by_itself=True)
OVER = result(measured(peak(Outcome.OVER_BUDGET)), failure="GPU memory over budget: peak 9.31 GB\n\n  a table")
TORN = replace(OK, passed=False, failed=True)
OTHER = result(measured(peak(Outcome.OK)), test="test_z")


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (TestResult(BROKEN, False, True, "setup"), "Its set-up failed"),
        (
            TestResult(replace(BROKEN, unmeasured="the test itself failed"), False, True, "call"),
            "The test itself failed",
        ),
        (TestResult(replace(BROKEN, unmeasured="no step was seen"), False, True, "call"), "No step was seen"),
        (replace(TORN, failed_in="subtest"), "A subtest failed"),
        (replace(TORN, failed_in="teardown"), "Its tear-down failed"),
        (replace(TORN, failed_in="worker"), "The process that ran it crashed"),
        (replace(OVER, failed_in="call"), "GPU memory over budget: peak 9.31 GB"),
        (replace(OVER, failed_in="teardown"), "GPU memory over budget: peak 9.31 GB"),
        (None, "The test was selected, but did not finish"),
    ],
    ids=[
        "set-up",
        "itself",
        "not measured",
        "subtest",
        "tear-down",
        "worker",
        "budget",
        "budget and tear-down",
        "not run",
    ],
)
def test_every_format_gives_the_same_reason_for_a_failure(result, why):
    not_run = () if result is not None else (("tests/test_gpt.py", "test_a"),)
    # As it is in what is merged, too.
    report = from_json(to_json(session(*([result] if result else []), OTHER, not_run=not_run)), "a.json")
    assert [row.headline for row in rows_of(report) if row.status.fails] == [why]
    told = [text_of(line) for line in failure_lines(report, Screen())]
    assert told == [f"{'FAILED' if result else 'NOT RUN'} tests/test_gpt.py::test_a - {why}"]
    row, _ = page_of(report).tests
    assert row.report_row.headline == why
    assert f'<h3 class="why">{why}</h3>' in html(report)
    data = [command(line)[2] for line in annotation_lines(report) if "test_a" in line]
    assert [one.split("\n")[0] for one in data] == [why]
    assert [one.why for one in side_of_report("new", report).failures] == [why]
    if result is not None:
        assert markdown(report).splitlines()[2:4] == ["❌ `tests/test_gpt.py::test_a`  ", why]


def test_the_command_that_accepts_is_the_same_everywhere_and_stands_in_the_failure():
    accept = 'pytest "tests/test_gpt.py::test_b" --gpumem-update=all'
    text = failure_text(REGRESSED.verdict, frozenset({Outcome.REGRESSED}), "si", accept)
    assert text.splitlines()[-1] == f"  accept:   {accept}"
    report = session(replace(REGRESSED, verdict=replace(REGRESSED.verdict, failure=text, accept=accept)))
    assert [row.accept for row in (*rows_of(report), *(row.report_row for row in page_of(report).tests))] == [
        accept
    ] * 2
    assert f"To accept the new figures:\n\n```text\n{accept}\n```" in markdown(report)


def test_a_baselines_origin_is_the_same_line_everywhere():
    origin = replace(ORIGIN, reason="wider layers")
    verdict = measured(peak(Outcome.REGRESSED), origin=origin)
    report = session(result(verdict, failure="regressed"))
    line = "2026-11-02, NVIDIA H100 80GB HBM3, torch 2.10.0, commit abc123456"
    assert origin_line(origin) == line
    assert f"Baseline: {line}, reason: wider layers" in markdown(report)
    assert page_of(report).tests[0].panels[0].origin == f"{line}, reason: wider layers"
    text = failure_text(report.results[0].verdict, frozenset({Outcome.REGRESSED}), "si")
    assert f"\n  baseline: {line}\n  reason:   wider layers" in text


def test_a_measurement_has_one_title():
    verdicts = [measured(peak(Outcome.IMPROVED, 7 * GB), name=name) for name in ("small", "large")]
    report = session(result(*verdicts))
    titles = ["tests/test_gpt.py::test_a (small)", "tests/test_gpt.py::test_a (large)"]
    assert [one.title for one in shown_measurements(report.results)] == titles
    text = markdown(report)
    assert all(text.count(f"<code>{title}</code>") + text.count(f"`{title}`") == 2 for title in titles)


def test_a_session_ends_in_one_way_for_every_format():
    idle = session(result(measured(peak(Outcome.RECORDED, then=None))), terms=Terms())
    for report, state, mark in (
        (session(OK), "passed", "✅"),
        (session(REGRESSED), "failed", "❌"),
        (idle, "idle", "⚪"),
    ):
        assert state_of(report) == page_of(report).verdict == state
        assert markdown(report).startswith(f"### {mark}")
