"""Texts of tests in Markdown: shown character by character, and nothing of them takes effect."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.reporting.reports.escaping import (
    block,
    code,
    code_in_table,
    html_code,
    one_line,
    plain,
    table,
    visible,
)
from tests.hostile import TEXTS
from tests.reports.rendered import read

WORDS = {name: text for name, text in TEXTS.items() if name != "nothing"}
ANY = st.text() | st.lists(st.sampled_from(["`", "|", "\\", "*", "<", "&", "@", ":", "~", "_", " ", "\n", "a"])).map(
    "".join
)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("test_a[x-1]", "test_a[x-1]"),
        ("one\ntwo\ttabs", "one\\ntwo\\ttabs"),
        ("\x1b[31m\x00\x7f", "\\x1b[31m\\x00\\x7f"),
        ("\u202eevil\u200b", "\\u202eevil\\u200b"),
        ("\ud800", "\\ud800"),
        ("漢字 é", "漢字 é"),
    ],
)
def test_what_cannot_be_seen_is_shown_as_python_writes_it(text, seen):
    assert visible(text) == seen


@pytest.mark.parametrize("text", WORDS.values(), ids=WORDS)
def test_no_text_becomes_markup_and_none_is_lost(text):
    page = read(f"{code(text)}\n\n{plain(text)}\n\n<p>{html_code(text)}</p>\n\n{block(text)}")
    assert page.tags == ["p", "code", "p", "p", "code", "pre", "code"]
    lines = "\n".join(visible(line, "\t") for line in re.split("\r?\n", text))
    assert page.text == f"{visible(text)}\n{visible(one_line(text))}\n{visible(text)}\n{lines}\n\n"


STARTS = [
    "- a",
    "+ a",
    "* a",
    "1. a",
    "2) a",
    "-",
    "1.",
    "---",
    "- - -",
    "===",
    "=",
    "# a",
    "> a",
    "    a",
    "[a]: b",
    "+3 GB",
    "-1 %",
]


@pytest.mark.parametrize("text", STARTS)
def test_a_text_at_the_start_of_a_line_is_no_list_title_or_rule(text):
    page = read(f"{plain(text)}\n\na\n{plain(text)}\n\n- {plain(text)}")
    assert page.tags == ["p", "p", "ul", "li"]
    assert page.text.split("\n")[0] == one_line(text)


@given(st.text(st.sampled_from("-+=.)0123456789 #>*_~`a\t"), max_size=8))
def test_any_text_at_the_start_of_a_line_is_a_paragraph(text):
    page = read(plain(text))
    assert page.tags == (["p"] if text.strip() else [])


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_table_has_its_cells_and_each_its_text(text):
    cell = code_in_table(text)
    page = read(table(["a", "b", "c"], [[cell, plain(text), "end"], [plain(text), cell, cell]]))
    assert [len(row) for row in page.rows] == [3, 3, 3]
    assert page.rows[1] == [visible(text), visible(one_line(text)), "end"]


@given(ANY)
def test_any_text_is_its_own_in_code_in_prose_and_in_a_table(text):
    page = read(f"x {plain(text)} y\n\nx {code(text)} y\n\n{table(['a', 'b'], [[code_in_table(text), plain(text)]])}")
    assert page.tags == [
        "p",
        "p",
        *(["code"] if text else []),
        "table",
        "thead",
        "tr",
        "th",
        "th",
        "tbody",
        "tr",
        "td",
    ] + (["code", "td"] if text else ["td"])
    assert page.rows[1] == [visible(text), visible(one_line(text))]


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("@someone", "<span>@</span>someone"),
        ("see #1 and GH-2", "see <span>#</span>1 and <span>GH</span>-2"),
        ("costs $1$", "costs <span>$</span>1<span>$</span>"),
        ("a :smile: b", "a <span>:</span>smile: b"),
        ("http://x.org www.x.org", "http\\://x.org www\\.x.org"),
        ("tests/a.py::test_a: 3.5", "tests/a.py::test\\_a: 3.5"),
    ],
)
def test_what_github_acts_on_in_html_is_kept_apart_from_what_follows(text, safe):
    assert plain(text) == safe
