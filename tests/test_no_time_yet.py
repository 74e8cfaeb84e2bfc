"""Verdicts on steps that were timed and whose baseline has no time yet: fine, with a note, and counted once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner

from pytest_gpumem.facts.values.times import Round, Sample, Times
from pytest_gpumem.judging.gate.failing import failing_outcomes
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.reporting.reports.html.page import page_of
from pytest_gpumem.reporting.reports.json_report import from_json, to_json
from pytest_gpumem.reporting.reports.layout import Screen
from pytest_gpumem.reporting.reports.markdown import markdown
from pytest_gpumem.reporting.reports.merging import merge_reports
from pytest_gpumem.reporting.reports.results import TestResult, accounting
from pytest_gpumem.reporting.reports.session_report import SessionReport, Terms
from pytest_gpumem.reporting.reports.terminal import terminal_text
from pytest_gpumem.tools.main import main
from tests.reports.made_up import GB, regressed, result, verdict_on
from tests.test_time_gate import Timed

TIMES = Times((Sample((Round(0.5),)),))
NOTE = "note: no baseline of time yet: --gpumem-update="


def without_time(test: str = "test_a", peak: int = GB, **more) -> TestResult:
    now = {"peak_allocated": peak, "step_time": 0.5}
    return result(verdict_on(now, {"peak_allocated": GB}, times=TIMES), test=test, **more)


def session(*results: TestResult, **terms) -> SessionReport:
    return SessionReport("2026-11-26T00:00:00Z", "0.1.0", terms=Terms(baseline=True, **terms), results=results)


def lines_of(report: SessionReport, verbosity: int = 0) -> list[str]:
    text = terminal_text(report, Screen(), verbosity)
    return ["".join(span.text for span in line) for line in (*text.tables, *text.lines)]


def test_it_is_ok_with_a_note_and_counted_once():
    report = session(without_time("test_a"), without_time("test_b"))
    assert [one.verdict.outcome for one in report.results] == [Outcome.OK] * 2
    note, *others = [line for line in lines_of(report) if line]
    assert note.startswith(NOTE)
    assert note.endswith(" (2 figures)")
    assert others == ["gpumem: 2 gated, 2 with no baseline of time yet"]
    assert lines_of(report, -1) == others
    assert report.passed


def test_its_row_is_ok_in_each_format():
    report = session(without_time())
    assert [line.split()[-1] for line in lines_of(report, 1) if "a.py::test_a" in line] == ["ok"]
    (row,) = page_of(report).tests
    assert (row.report_row.status.words, row.report_row.status.fails) == ("ok", False)
    (panel,) = row.panels
    (reason,) = (metric.reason for metric in panel.metrics if metric.texts.title == "step time")
    assert reason.startswith("no baseline of time yet")
    told = markdown(report).splitlines()
    assert told[0] == "### ✅ gpumem passed: 1 gated, 1 with no baseline of time yet"
    assert any(line.startswith(f"- {NOTE}") for line in told)
    assert any(line.startswith("| ") and "test_a" in line and line.endswith("| ok |") for line in told)


def test_what_else_was_found_is_its_verdict():
    worse, better = without_time(peak=2 * GB), without_time("test_b", peak=GB // 2)
    assert [one.verdict.outcome for one in (worse, better)] == [Outcome.REGRESSED, Outcome.IMPROVED]
    line = "gpumem: 2 gated, 1 regressed, 1 improved, 2 with no baseline of time yet"
    assert accounting([worse, better]) == line


def test_a_metric_in_bytes_that_a_baseline_lacks_is_still_new():
    now = {"peak_allocated": GB, "flops": 100, "step_time": 0.5}
    verdict = verdict_on(now, {"peak_allocated": GB}, times=TIMES)
    assert verdict.outcome is Outcome.NEW
    assert accounting([result(verdict)]) == "gpumem: 1 gated, 1 new (also gated), 1 with no baseline of time yet"


@pytest.mark.parametrize(("update", "counted"), [(None, 1), ("improved", 1), ("new", 0), ("all", 0)])
def test_an_update_that_adds_the_time_does_not_count_it(update, counted):
    report = session(without_time(), update=update)
    assert report.accounting == f"gpumem: 1 gated{', 1 with no baseline of time yet' * counted}"
    assert any("no baseline of time yet:" in line for line in lines_of(report)) == bool(counted)


def test_strict_mode_fails_it_and_calls_it_new():
    verdict = without_time().verdict
    failing = failing_outcomes(verdict, strict=True, compares=True, accepts=frozenset())
    assert failing == {Outcome.NEW}
    assert failing_outcomes(verdict, strict=False, compares=True, accepts=frozenset()) == frozenset()
    failed = TestResult(replace(verdict, failure="Not compared"), passed=False, failed=True, failed_in="call")
    report = session(failed, strict=True)
    assert report.accounting == "gpumem: 1 gated, 1 new (also gated)"
    assert page_of(report).tests[0].report_row.status.words == "new"
    assert [line.split()[-1] for line in lines_of(report) if line.startswith("a.py::test_a")] == ["new"]


def test_a_report_that_was_written_and_merged_says_the_same():
    report = session(without_time("test_a"), regressed("test_b"))
    again = from_json(to_json(report), "report.json")
    assert again == report
    whole = merge_reports([session(without_time("test_a")), session(without_time("test_b"), without_time("test_c"))])
    assert whole.accounting == "gpumem: 3 gated, 3 with no baseline of time yet"


def test_notes_on_measurements_follow_the_pages_notes_and_not_the_store():
    low = "convolutions: the peaks of 3 measurements may be too low: no cuDNN is installed"
    report = replace(session(without_time()), closing_lines=("store: 1 baseline written (new)", low))
    assert (report.of_store, report.of_measuring) == (("store: 1 baseline written (new)",), (low,))
    assert low in page_of(report).notes
    assert f"- {low}" in markdown(report)


TWO = """
@pytest.mark.parametrize("n", [1, 2])
def test_it(gpumem, n):
    gpumem.measure(step, name=f"step{n}")
"""


@pytest.fixture
def recorded(project, monkeypatch):
    """A project whose baselines have no times, on a device whose clock is a script's."""
    monkeypatch.setattr("pytest_gpumem.measuring.measure.timed_steps.SECONDS_BETWEEN_SAMPLES", 0.0)
    timed = Timed(project)
    timed.write(TWO)
    assert timed.run("--gpumem-update=new", timed=False).ret == 0
    assert "step_times" not in timed.stored()
    return timed


ACCOUNTED = "gpumem: 2 gated, 2 with no baseline of time yet"


def test_a_gate_that_is_asked_for_times_is_green_and_says_what_adds_them(recorded):
    result = recorded.run("--gpumem-baseline", "--gpumem-time", "--gpumem-report=report.json")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["note: no baseline of time yet: --gpumem-update=new adds it (2 figures)", ACCOUNTED])
    assert " new" not in result.stdout.str().partition("= gpumem =")[2].replace("=new", "")
    done = CliRunner().invoke(main, ["merge", str(recorded.path / "report.json")])
    assert done.exit_code == 0, done.output
    assert ACCOUNTED in done.output.splitlines()


def test_recording_adds_the_times_that_a_gate_compares_from_then_on(recorded):
    result = recorded.run("--gpumem-update=new")
    assert result.ret == 0
    assert "no baseline of time yet" not in result.stdout.str()
    assert recorded.stored().count("step_times") == 2
    recorded.script(0.02)
    result = recorded.run("--gpumem-baseline")
    result.assert_outcomes(failed=2)
    assert "no baseline of time yet" not in result.stdout.str()


def test_a_strict_gate_fails_and_says_that_only_the_time_was_not_compared(recorded):
    result = recorded.run("--gpumem-baseline", "--gpumem-strict")
    result.assert_outcomes(failed=2)
    why = "new, step time: no baseline of time yet: --gpumem-update=new adds it"
    result.stdout.fnmatch_lines(
        [f"Not compared (required by --gpumem-strict): {why}", "gpumem: 2 gated, 2 new (also gated)"]
    )
