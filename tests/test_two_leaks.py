"""Two leaks of one size in one test: the new leak is told, or that it is one of these."""

from __future__ import annotations

import html
import json

import pytest

from tests.test_explain import COMPARE, RECORD, place

STORES = """
import torch

FIRST, SECOND, TABLE = [], [], {}
X = torch.ones(256, 256)


def one(x):
    y = x @ x
    FIRST_KEEPS
    return y


def other(x):
    z = x.exp()
    SECOND_KEEPS
    return z
"""
STEP = """
import stores


def test_it(gpumem):
    x = torch.ones(256, 256)
    gpumem.measure(lambda: (stores.one(x) + stores.other(x)).sum())
"""
MARKED = """
import stores


@pytest.mark.gpumem
def test_it():
    x = torch.ones(256, 256)
    (stores.one(x) + stores.other(x)).sum()
"""
IN_FIRST, IN_SECOND = "FIRST.append(y)", "SECOND.append(z)"
REPORTS = [f"--gpumem-report=r.{suffix}" for suffix in ("json", "html", "md")]


def write(project, first: str, second: str) -> None:
    project.write(STORES.replace("FIRST_KEEPS", first).replace("SECOND_KEEPS", second), "stores.py")


def red(project, before: tuple[str, str], test: str) -> tuple[list[str], dict[str, object], list[str]]:
    """Return the terminal's lines, the report, and the texts of pages if both leaks follow one of them."""
    project.write(test)
    write(project, *before)
    project.run(*RECORD)
    write(project, IN_FIRST, IN_SECOND)
    result = project.run(*COMPARE, *REPORTS)
    result.assert_outcomes(failed=1)
    pages = [html.unescape((project.path / f"r.{suffix}").read_text(encoding="utf-8")) for suffix in ("html", "md")]
    report = json.loads((project.path / "r.json").read_text(encoding="utf-8"))
    return [line.strip() for line in result.outlines], report, [page.replace("\\", "") for page in pages]


@pytest.mark.parametrize(
    ("before", "text", "holder"),
    [(("pass", IN_SECOND), "x @ x", "stores.FIRST[...]"), ((IN_FIRST, "pass"), "x.exp()", "stores.SECOND[...]")],
    ids=["the first", "the second"],
)
def test_the_leak_that_the_baseline_lacks_is_first_everywhere(project, before, text, holder):
    lines, report, pages = red(project, before, STEP)
    line = place(project, text, "stores.py")
    first = next(number for number, text in enumerate(lines) if text.startswith("kept by each step"))
    assert line in lines[first + 1]
    assert next(text for text in lines if text.startswith("kept in")).startswith(f"kept in: {holder}")
    assert "note: 262.14 kB of this was already kept in the baseline; new rows come first" in lines
    (cause,) = report["causes"]
    assert (cause["kept_in"], cause["lines"]) == (holder, [line])
    assert {share["metric"] for share in cause["shares"]} == {"growth", "peak_allocated"}
    for page in pages:
        assert page.index(f"kept in: {holder}") == page.index("kept in: stores.")
    assert f"262.14 kB at {line}, by" in pages[1]


def test_two_leaks_that_cannot_be_told_apart_are_one_of_two(project):
    lines, report, pages = red(project, (IN_FIRST, "pass"), MARKED)
    note = "262.14 kB of this was already kept in the baseline; one of these 2 rows is new, and nothing proves which"
    assert f"note: {note}" in lines
    assert report["causes"] == []
    assert all(note in page for page in pages)
    assert "262.14 kB in one of these 2 rows" in pages[1]


def test_leaks_in_a_closure_and_in_a_module_have_their_lines_at_the_peak(project):
    closure = STEP.replace("    gpumem", "    seen = []\n\n    def step():\n        PLANT\n\n    gpumem")
    closure = closure.replace("    x = torch.ones(256, 256)\n", "").replace(
        "lambda: (stores.one(x) + stores.other(x)).sum()", "step"
    )
    step = "y = stores.one(stores.X)\n        {keep}\n        return (y + stores.other(stores.X)).sum()"
    write(project, "pass", "pass")
    project.write(closure.replace("PLANT", step.format(keep="len(seen)")))
    project.run(*RECORD)
    write(project, "pass", "TABLE[len(TABLE)] = z")
    project.write(closure.replace("PLANT", step.format(keep="seen.append(y)")))
    result = project.run(*COMPARE, *REPORTS)
    result.assert_outcomes(failed=1)
    causes = json.loads((project.path / "r.json").read_text(encoding="utf-8"))["causes"]
    assert {(cause["kept_in"], *cause["lines"]) for cause in causes} == {
        ("test_it.<locals>.seen[...]", place(project, "x @ x", "stores.py")),
        ("stores.TABLE[...]", place(project, "x.exp()", "stores.py")),
    }
    assert all({share["metric"] for share in cause["shares"]} == {"growth", "peak_allocated"} for cause in causes)
