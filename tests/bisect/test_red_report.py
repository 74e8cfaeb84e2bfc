"""The search that a red report asks for, of a comparison and of a session."""

from __future__ import annotations

import json

import pytest

from pytest_gpumem.base.errors import NothingToSearch, ReportError
from pytest_gpumem.tools.bisect.red_report import regressed_test_of


def change(metric: str, outcome: str = "regressed") -> dict[str, str]:
    return {"metric": metric, "outcome": outcome}


def a_test(name: str, *metrics: dict[str, str], outcome: str = "regressed") -> dict[str, object]:
    return {"file": "test_it.py", "test": name, "name": "call", "outcome": outcome, "metrics": list(metrics)}


def package(name: str, base: str | None, head: str | None, *, requested: bool = True, url: str | None = None):
    return {"name": name, "base": base, "head": head, "requested": requested, "url": url}


def comparison(*tests, packages=(), not_compared=(), **more):
    return json.dumps({"tests": list(tests), "packages": list(packages), "not_compared": list(not_compared), **more})


SLOWER = a_test("test_a", change("step_time"))
GROWN = a_test("test_b", change("step_time"), change("peak_allocated"), change("flops", "ok"))
FINE = a_test("test_c", change("peak_allocated", "ok"), outcome="ok")


def test_a_test_with_more_bytes_or_counts_comes_before_a_slower_test():
    red = regressed_test_of(comparison(FINE, SLOWER, GROWN), "a.json")
    assert (red.nodeid, red.metrics, red.metric) == ("test_it.py::test_b", ("step_time", "peak_allocated"), None)
    assert red.notes == ["searched with test_it.py::test_b, the first test that regressed; 1 other test also regressed"]
    alone = regressed_test_of(comparison(SLOWER), "a.json")
    assert (alone.metric, alone.notes) == (
        "step_time",
        ["searched with test_it.py::test_a, the first test that regressed"],
    )


def test_requested_packages_are_searched_and_their_dependencies_follow():
    packages = [
        package("hub", "0.36", "1.0", requested=False),
        package("models", "4.57", "5.0.dev0", url="git+https://example.org/models@main"),
        package("new", None, "1.0"),
    ]
    red = regressed_test_of(comparison(GROWN, packages=packages), "a.json")
    assert (red.good_releases, red.bad_releases) == (
        {"models": "4.57"},
        {"models": "@ git+https://example.org/models@main"},
    )
    assert not red.gated


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (comparison(FINE), "no test in a.json regressed, so there is nothing to search for"),
        (
            comparison(not_compared=[{"test": "test_c", "reason": "it failed, in head", "broken": True}]),
            "nothing to search for; test_c: it failed, in head",
        ),
        (comparison(why="torch==9 cannot be installed: no\nmore"), "search for; torch==9 cannot be installed: no"),
    ],
)
def test_a_report_without_a_regression_is_told_with_why_it_is_red(text, said):
    with pytest.raises(NothingToSearch) as told:
        regressed_test_of(text, "a.json")
    assert str(told.value).endswith(said)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "{}", '{"not_compared": [], "tests": [{}]}', '{"not_compared": 1}', "\0", "[" * 100_000]
)
def test_what_is_no_report_is_told_with_its_name(text):
    with pytest.raises(ReportError, match=r"^a\.json: "):
        regressed_test_of(text, "a.json")
