"""What a job of GitHub Actions is told: annotations that no text breaks out of, and a summary within its limit."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pytest_gpumem.gate.verdict import MetricVerdict, Outcome, TestVerdict
from pytest_gpumem.reports import github
from pytest_gpumem.reports.escaping import visible
from pytest_gpumem.reports.github import annotation_lines, folder_within, report_to_github
from pytest_gpumem.reports.markdown import markdown
from pytest_gpumem.reports.results import TestResult
from pytest_gpumem.reports.session_report import Terms
from pytest_gpumem.values.selection import Selection
from tests.hostile import TEXTS
from tests.reports.sessions import OK, REGRESSED, UNEXPLAINED, everything, measured, peak, result, session

UNSURE = result(
    measured(MetricVerdict("step_time", Outcome.UNCERTAIN, 0.1, 0.1, 0.004, reason="another process was there")),
    test="test_c",
)
COMMAND = re.compile(r"::(?P<kind>\w+) (?P<properties>[^:]*)::(?P<data>.*)")


def command(line: str) -> tuple[str, dict[str, str], str]:
    """A line as the runner reads it: its kind, properties and data."""
    found = COMMAND.fullmatch(line)
    assert found is not None, line
    properties = dict(one.split("=", 1) for one in found["properties"].split(","))
    return found["kind"], {name: unescaped(value) for name, value in properties.items()}, unescaped(found["data"])


def unescaped(text: str) -> str:
    for written, character in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(written, character)
    return text


def commands(report, folder: str = "") -> list[tuple[str, dict[str, str], str]]:
    return [command(line) for line in annotation_lines(report, folder)]


# Annotations


def test_a_failing_test_is_an_error_at_its_function_with_the_whole_failure():
    assert annotation_lines(
        session(OK, replace(REGRESSED, verdict=replace(REGRESSED.verdict, failure="50 % more\nso")))
    ) == ["::error file=tests/test_gpt.py,line=7,title=gpumem%3A test_b::50 %25 more%0Aso"]


def test_files_are_told_from_the_root_of_the_repository(tmp_path):
    root = tmp_path / "libs" / "model"
    root.mkdir(parents=True)
    assert folder_within(root, str(tmp_path)) == "libs/model/"
    assert folder_within(tmp_path, str(tmp_path)) == ""
    assert folder_within(tmp_path, str(root)) == ""
    assert folder_within(tmp_path, None) == ""
    ((_, properties, _),) = commands(session(REGRESSED), "libs/model/")
    assert properties["file"] == "libs/model/tests/test_gpt.py"


def test_what_makes_a_session_red_beside_its_tests_is_an_error_without_a_file():
    new = result(measured(peak(Outcome.NEW, then=None)))
    assert commands(session(new)) == [
        (
            "error",
            {"title": "gpumem"},
            "nothing was gated: 1 test new, nothing to compare with (record one with --gpumem-update=new)",
        )
    ]


def test_what_is_uncertain_or_has_no_effect_is_a_warning():
    report = session(OK, UNSURE, selection=Selection(idle_budgets=("the budget has no effect",)))
    assert commands(report) == [
        ("warning", {"title": "gpumem"}, "the budget has no effect"),
        (
            "warning",
            {"file": "tests/test_gpt.py", "line": "7", "title": "gpumem: test_c"},
            "step_time is uncertain: another process was there",
        ),
    ]


def test_a_test_that_did_not_finish_and_one_that_failed_by_itself_are_errors():
    broke = result(measured(peak(Outcome.OK)), failed_by_itself=True)
    assert [(kind, data) for kind, _, data in commands(session(broke, not_run=(("a.py", "test_z"),)))] == [
        ("error", "The test itself failed"),
        ("error", "It was selected, and did not finish"),
    ]


def test_a_green_session_has_no_annotations():
    assert annotation_lines(session(OK)) == []


def test_of_many_the_most_serious_are_shown_and_the_last_says_how_many_more():
    over = result(measured(peak(Outcome.OVER_BUDGET)), test="test_over", failure="over")
    broke = result(measured(peak(Outcome.OK)), test="test_broke", failed_by_itself=True)
    found = commands(session(*[broke] * 3, *[UNEXPLAINED] * 12, over, *[UNSURE] * 12, errors=("disk full",)))
    assert [kind for kind, _, _ in found] == ["error"] * 10 + ["warning"] * 10
    titles = [properties["title"] for _, properties, _ in found]
    assert titles[:10] == ["gpumem", "gpumem: test_over", *["gpumem: test_b"] * 7, "gpumem"]
    assert found[9][2] == "8 more, for which GitHub has no room here"
    assert found[19][2] == "3 more, for which GitHub has no room here"


def test_ten_of_a_kind_are_all_shown():
    assert len(commands(session(*[REGRESSED] * 10))) == 10


@pytest.mark.parametrize(
    "name", ["newlines", "colons", "percent", "encoded", "command", "controls", "surrogates", "nothing", "long"]
)
def test_no_text_breaks_out_of_its_command_and_none_is_lost(name):
    text = TEXTS[name]
    report = everything(text)
    lines = annotation_lines(report)
    assert len(lines) == 8
    assert all(len(line.splitlines()) == 1 and line.isprintable() for line in lines)
    found = [command(line) for line in lines]
    assert all(properties.keys() <= {"file", "line", "title"} for _, properties, _ in found)
    # The file, the id and the message of the test that failed, but for what GitHub would cut off.
    kind, properties, data = next(one for one in found if one[1].get("line") == "7")
    assert kind == "error"
    assert properties["file"] == visible(text)
    assert visible(f"gpumem: {text}")[:250] in properties["title"]
    assert "\n".join(visible(line) for line in text.split("\n"))[:4_000] in data


def test_an_id_that_is_too_long_for_a_title_stands_in_the_message():
    long = result(measured(peak(Outcome.REGRESSED)), test=f"test_[{'x' * 300}]", failure="grew")
    ((_, properties, data),) = commands(session(long))
    assert len(properties["title"]) == github.MOST_OF_A_TITLE
    assert data == f"tests/test_gpt.py::test_[{'x' * 300}]\ngrew"


# The summary


def environment(tmp_path, **more) -> dict[str, str]:
    return {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"), **more}


def test_the_report_is_added_to_what_the_summary_has(tmp_path):
    summary = tmp_path / "summary.md"
    summary.write_text("no line end", encoding="utf-8")
    assert report_to_github(session(OK), tmp_path, environment(tmp_path)) == []
    report_to_github(session(REGRESSED), tmp_path, environment(tmp_path))
    first, second = markdown(session(OK)), markdown(session(REGRESSED))
    assert summary.read_text(encoding="utf-8") == f"no line end\n{first}\n{second}"


def test_several_runs_of_a_step_stay_within_the_limit_together(tmp_path, monkeypatch):
    most = 2 * len(markdown(session(OK)).encode()) - 50
    monkeypatch.setattr(github, "MOST_OF_A_SUMMARY", most)
    summary = tmp_path / "summary.md"
    said = [report_to_github(session(OK), tmp_path, environment(tmp_path)) for _ in range(9)]
    assert summary.stat().st_size <= most
    assert "Left out for want of room" in summary.read_text(encoding="utf-8")
    assert said[0] == []
    assert said[-1] == [
        (
            f"gpumem: the step's summary was not written: the summary has {summary.stat().st_size:,} bytes already, "
            f"and GitHub shows at most {most:,}"
        )
    ]


def test_a_summary_that_cannot_be_written_is_told_beside_the_annotations(tmp_path):
    (tmp_path / "summary.md").mkdir()
    first, second = report_to_github(session(REGRESSED), tmp_path, environment(tmp_path))
    assert first.startswith("gpumem: the step's summary was not written: ")
    assert "summary.md" in first
    assert second.startswith("::error ")


def test_nothing_is_told_outside_of_github_nor_of_a_session_that_measured_nothing(tmp_path):
    outside = {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    assert report_to_github(session(REGRESSED), tmp_path, outside) == []
    assert report_to_github(session(terms=Terms()), tmp_path, environment(tmp_path)) == []
    assert not (tmp_path / "summary.md").exists()
    unmeasured = TestResult(TestVerdict("a.py", "test_z", unmeasured="no CUDA device"), passed=True)
    report_to_github(session(unmeasured, terms=Terms()), tmp_path, environment(tmp_path))
    assert (tmp_path / "summary.md").exists()
