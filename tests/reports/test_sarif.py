"""SARIF: a result for each test that failed, at the line of the project that grew, and nothing of a green session."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from pytest_gpumem.facts.values.composition import Composition, Explanation, Holder, Row
from pytest_gpumem.facts.values.operator_counts import OperatorSite, Tally
from pytest_gpumem.judging.gate.difference import Change, Difference
from pytest_gpumem.judging.gate.verdict import MetricVerdict, Outcome
from pytest_gpumem.reporting.reports.escaping import visible
from pytest_gpumem.reporting.reports.sarif import MOST_RELATED, sarif
from tests.hostile import TEXTS
from tests.reports.sessions import GB, OK, REGRESSED, everything, measured, peak, result, session


def run_of(report):
    (run,) = json.loads(sarif(report))["runs"]
    return run


def shown(message):
    """The text that a viewer shows of a message, by sections 3.11.5 and 3.11.6; a link or a placeholder is an error."""
    text = message["text"]
    assert re.search(r"(?<!\\)(\\\\)*\[.*(?<!\\)(\\\\)*\]\(", text, re.DOTALL) is None
    assert "{" not in text.replace("{{", "")
    assert "}" not in text.replace("}}", "")
    return re.sub(r"\\([\\\[\]])", r"\1", text).replace("{{", "{").replace("}}", "}")


def places(located):
    found = [one["physicalLocation"] for one in located]
    return [(one["artifactLocation"]["uri"], one["region"]["startLine"]) for one in found]


def grown(*sites: str, **changes):
    """A test that regressed by rows at these lines, the first by the most bytes."""
    rows = [Row("activation", (len(sites) - place) * GB, site=site) for place, site in enumerate(sites)]
    growth = Difference(1, 2 * GB, tuple(Change(None, row) for row in reversed(rows)))
    return result(
        measured(peak(Outcome.REGRESSED), difference=growth, **changes), test="test_b", failure="it grew\n\nby GB"
    )


def test_a_green_session_has_a_run_without_results():
    run = run_of(session(OK))
    assert (run["results"], run["tool"]["driver"]["rules"]) == ([], [])
    assert run["invocations"][0] == {"executionSuccessful": True, "endTimeUtc": "2026-11-21T16:20:05Z"}


def test_a_failure_is_an_error_at_the_line_that_grew_most_and_names_other_lines():
    (one,) = run_of(session(OK, grown("model.py:88", "layers/mlp.py:7")))["results"]
    assert (one["ruleId"], one["level"]) == ("gpumem/regressed", "error")
    assert one["message"]["text"] == "tests/test_gpt.py::test_b: it grew\n\nby GB"
    assert places(one["locations"]) == [("model.py", 88)]
    assert places(one["relatedLocations"]) == [("layers/mlp.py", 7), ("tests/test_gpt.py", 7)]


def test_a_count_that_grew_is_at_its_line_too():
    changes = {
        "operators": (Tally("bmm", 4, OperatorSite("attn", "model.py:9")), Tally("mm", -4, OperatorSite(site="b.py:1")))
    }
    (one,) = run_of(session(grown(count_changes=changes)))["results"]
    assert places(one["locations"]) == [("model.py", 9)]


def test_what_is_kept_is_at_the_line_that_made_it():
    kept = Composition(GB, (Row("other", GB, site="cache.py:5"),))
    explanation = Explanation(Composition(0, ()), kept, holders=(Holder("cache.kept[...]", kept),))
    retained = MetricVerdict("retained", Outcome.REGRESSED, GB, 0, 64_000)
    failed = result(
        measured(retained, measurement={"explanation": explanation}),
        test="test_b",
        failure="it kept\n\n  kept in: cache",
    )
    (one,) = run_of(session(failed))["results"]
    assert places(one["locations"]) == [("cache.py", 5)]
    assert "kept in: cache" in one["message"]["text"]


@pytest.mark.parametrize("site", ["", "/usr/lib/torch/nn.py:3", "../other/model.py:3", "C:\\lib\\nn.py:3", "no line"])
def test_what_is_in_no_file_of_the_project_is_at_the_test(site):
    (one,) = run_of(session(grown(site)))["results"]
    assert places(one["locations"]) == [("tests/test_gpt.py", 7)]
    assert "relatedLocations" not in one


def test_many_lines_are_cut_where_a_page_would_not_show_them():
    (one,) = run_of(session(grown(*(f"model.py:{line}" for line in range(1, 60)))))["results"]
    assert len(one["relatedLocations"]) == MOST_RELATED
    assert [related["id"] for related in one["relatedLocations"]] == [*range(MOST_RELATED)]


def test_an_alert_stays_the_same_one_when_figures_and_lines_move():
    first, second = (
        run_of(session(one))["results"][0]["partialFingerprints"]
        for one in (grown("a.py:1"), grown("a.py:9", "b.py:2"))
    )
    assert first == second == {"gpumemTest/v1": "tests/test_gpt.py::test_b regressed"}


def test_uncertain_is_a_warning_and_the_sessions_failure_belongs_to_the_run():
    unsure = result(
        measured(MetricVerdict("step_time", Outcome.UNCERTAIN, 0.1, 0.1, 0.004, reason="busy")), test="test_c"
    )
    run = run_of(session(unsure, not_run=(("tests/test_z.py", "test_z"),), errors=("disk full",)))
    assert [(one["level"], one["ruleId"]) for one in run["results"]] == [
        ("warning", "gpumem/uncertain"),
        ("error", "gpumem/not-run"),
    ]
    assert places(run["results"][1]["locations"]) == [("tests/test_z.py", 1)]
    told = run["invocations"][0]
    assert (told["executionSuccessful"], told["toolExecutionNotifications"][0]["message"]["text"]) == (
        False,
        "disk full",
    )
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} == {one["ruleId"] for one in run["results"]}


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_is_written_as_text(text):
    read = json.dumps(run_of(everything(text)), ensure_ascii=False)
    assert "\ud800" not in read
    assert "\x1b" not in read


@pytest.mark.parametrize(
    "text", [*TEXTS.values(), "test_a[0](https://evil.example)", "a{0}b", "\\[x](1)", "\\\\[x\\](1)"]
)
def test_no_text_is_a_link_or_a_placeholder_in_a_message(text):
    run = run_of(everything(text))
    told = [one["message"] for one in run["invocations"][0]["toolExecutionNotifications"]]
    texts = [shown(message) for message in (*told, *(one["message"] for one in run["results"]))]
    assert any(visible(text, keep="\n") in one for one in texts)


def test_a_parametrised_id_keeps_its_brackets_in_a_message():
    failed = replace(REGRESSED, verdict=replace(REGRESSED.verdict, test="test_b[amp](x)", failure="it grew"))
    (one,) = run_of(session(failed))["results"]
    assert one["message"]["text"] == "tests/test_gpt.py::test_b\\[amp\\](x): it grew"
    assert shown(one["message"]) == "tests/test_gpt.py::test_b[amp](x): it grew"


def test_a_file_with_spaces_is_an_address():
    named = replace(REGRESSED, verdict=replace(REGRESSED.verdict, location=None, file="my tests/test a.py"))
    assert places(run_of(session(named))["results"][0]["locations"]) == [("my%20tests/test%20a.py", 1)]
