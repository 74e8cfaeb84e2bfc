"""A job's JSON is shown in full if it is valid, and refused if it is not, whoever wrote it."""

from __future__ import annotations

import json

import pytest

from pytest_gpumem.base.errors import ReportError
from pytest_gpumem.reporting.reports.comparison_formats import failure_as_json
from pytest_gpumem.reporting.reports.job_result import job_result
from pytest_gpumem.reporting.reports.json_report import to_json
from tests.hostile import TEXTS
from tests.reports.sessions import OK, REGRESSED, session

METRIC = {"metric": "peak_allocated", "outcome": "regressed", "base": 10_000_000, "head": 12_000_000, "ratio": 1.2}
AB = {
    "format": 1,
    "accounting": "gpumem ab: 2 compared, 1 regressed",
    "passed": False,
    "tests": [{"file": "test_a.py", "test": "test_a", "metrics": [METRIC, {**METRIC, "outcome": "ok"}]}],
    "not_compared": [{"test": "test_b.py::test_b", "reason": "it failed", "broken": True}],
    "packages": [{"name": "tiny", "base": "1.0", "head": None}],
}
BISECT = {"format": 1, "found": True, "result": "tiny 1.1 did it", "test": None}


def shown(plain, most: int = 10_000) -> str:
    return job_result(json.dumps(plain), "it.json").markdown(most)


def test_a_comparison_is_a_table_of_what_changed():
    assert shown(AB) == (
        "### gpumem ab: 2 compared, 1 regressed\n\n"
        "Packages: tiny gone, was 1.0\n\n"
        "| test | metric | base | head | change | verdict |\n"
        "| --- | --- | ---: | ---: | ---: | --- |\n"
        "| `test_a.py::test_a` | peak allocated | 10.00 MB | 12.00 MB | +20.0 % | regressed |\n\n"
        "- test\\_b.py::test\\_b: it failed\n"
    )


def test_a_comparison_that_came_to_nothing_says_why():
    result = job_result(failure_as_json("tiny==9 cannot be installed\na log"), "it.json")
    assert not result.passed
    assert result.markdown(1_000) == "### gpumem ab: nothing was compared\n\ntiny==9 cannot be installed\n"


def test_a_bisection_is_a_sentence_or_why_there_is_none():
    assert shown(BISECT) == "### gpumem bisect\n\ntiny 1.1 did it.\n"
    nothing = {"format": 1, "found": False, "culprit": None, "why": "no test regressed\nlog"}
    assert shown(nothing) == "### gpumem bisect: nothing was found\n\nno test regressed\n"


def test_the_report_of_a_session_is_what_it_is_elsewhere():
    result = job_result(to_json(session(REGRESSED, OK)), "it.json")
    assert result.session is not None
    assert not result.passed
    assert "regressed" in result.markdown(60_000)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_texts_of_a_stranger_take_no_effect(text):
    test = {"file": text, "test": text, "metrics": [METRIC]}
    package = {"name": text, "base": text, "head": text}
    hostile = {**AB, "accounting": text, "why": text, "tests": [test], "packages": [package]}
    hostile["not_compared"] = [{"test": text, "reason": text}]
    for plain in (hostile, {**BISECT, "result": text, "test": text}, {**BISECT, "found": False, "why": text}):
        markdown = shown(plain)
        assert "@maintainer" not in markdown
        assert not any(line.startswith(("#", "- ")) for line in markdown.splitlines()[1:] if "SECRET" in line)
        assert markdown.isprintable() or set(markdown) - {"\n"} == {one for one in markdown if one.isprintable()}


WRONG = {
    "another format": ({**AB, "format": 2}, "its format is not what"),
    "no texts": ({**AB, "accounting": 1}, "its accounting is not what"),
    "a metric of nobody": (
        {**AB, "tests": [{"file": "", "test": "", "metrics": [{**METRIC, "metric": "x"}]}]},
        "metric",
    ),
    "too much": ({**AB, "tests": [{"file": "", "test": "", "metrics": [{**METRIC, "base": 10**400}]}]}, "base is not"),
    "no number": ({**AB, "tests": [{"file": "", "test": "", "metrics": [{**METRIC, "ratio": "x"}]}]}, "ratio is not"),
    "no tests": ({**AB, "tests": {}}, "its tests is not what"),
    "a bisection of no result": ({**BISECT, "result": []}, "its result is not what"),
    "something else": ({"format": 1}, "not a report of pytest-gpumem"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_no_command_writes_is_refused_with_its_place(case):
    plain, said = WRONG[case]
    with pytest.raises(ReportError, match=said):
        job_result(json.dumps(plain), "it.json")


def test_numbers_that_json_does_not_have_are_shown_as_nothing():
    metric = {**METRIC, "base": "NaN", "ratio": "Infinity"}
    markdown = shown({**AB, "tests": [{"file": "a", "test": "b", "metrics": [metric]}]})
    assert "| `a::b` | peak allocated |  | 12.00 MB |  | regressed |" in markdown
    with pytest.raises(ReportError):
        job_result('{"format": 1, "not_compared": [], "tests": NaN}', "it.json")


def test_of_too_much_whole_parts_are_left_out():
    many = {**AB, "tests": [{"file": "a", "test": "b" * 5_000, "metrics": [METRIC] * 60}]}
    whole = shown(many, 10**6)
    assert "10 more rows in the whole report." in whole
    assert len(whole) < 100_000
    least = shown(many, 300)
    assert least.startswith("### gpumem ab: 2 compared, 1 regressed\n")
    assert least.endswith("The text is shortened, because the full text would be too long.\n")
    assert len(least) < 300
