"""How a table gives way to a narrow screen: names are shortened, light columns left out, and last, rows have two lines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.reports.layout import Column, Screen, Span, Table, cells, laid_out, text_of

COLUMNS = (
    Column("test", left=True, least=12),
    Column("peak"),
    Column("change", weight=1),
    Column("time", weight=0),
    Column("verdict", left=True),
)
NAME = "tests/test_gpt.py::test_train[fp32]"
TABLE = Table(
    COLUMNS,
    (
        (Span(NAME), Span("8.12 GB"), Span("+14.7 %"), Span("12.31 ms"), Span("regressed", "bad")),
        (Span("a.py::test_b"), Span("512 B"), Span(""), Span("-"), Span("ok", "good")),
    ),
)


def lines(table: Table, width: int | None, encoding: str = "utf-8") -> list[str]:
    return [text_of(line) for line in laid_out(table, Screen(width, encoding))]


def test_where_there_is_room_a_table_is_as_wide_as_its_cells():
    expected = [
        "test                                    peak   change      time  verdict",
        "tests/test_gpt.py::test_train[fp32]  8.12 GB  +14.7 %  12.31 ms  regressed",
        "a.py::test_b                           512 B                  -  ok",
    ]
    assert lines(TABLE, None) == lines(TABLE, 74) == expected


def test_the_name_is_shortened_first():
    assert lines(TABLE, 64) == [
        "test                          peak   change      time  verdict",
        "tests/te…test_train[fp32]  8.12 GB  +14.7 %  12.31 ms  regressed",
        "a.py::test_b                 512 B                  -  ok",
    ]


def test_then_the_lightest_columns_are_left_out_and_named():
    assert lines(TABLE, 40) == [
        "test                     peak  verdict",
        "tests/…t_train[fp32]  8.12 GB  regressed",
        "a.py::test_b            512 B  ok",
        "not shown, for want of width: change, time",
    ]


def test_last_a_name_has_a_line_of_its_own():
    long = Table((Column("test", left=True, least=30), *COLUMNS[1:]), TABLE.rows)
    assert lines(long, 41) == [
        "test",
        "       peak   change      time  verdict",
        "tests/test_gpt.py::test_train[fp32]",
        "    8.12 GB  +14.7 %  12.31 ms  regressed",
        "a.py::test_b",
        "      512 B                  -  ok",
    ]


def test_a_header_without_a_title_has_no_line_of_its_own():
    untitled = Table((Column("", left=True, least=30), *COLUMNS[1:]), TABLE.rows)
    assert lines(untitled, 41)[0] == "       peak   change      time  verdict"


def test_names_that_could_not_be_told_apart_any_more_are_shown_in_full():
    rows = tuple((Span(f"test_of_{what}_training_for_long"), Span("1 B")) for what in ("gpt", "vit"))
    table = Table((Column("test", left=True, least=12), Column("peak")), rows)
    assert "…" in lines(Table(table.columns, rows[:1]), 30)[1]
    assert lines(table, 30)[2::2] == ["test_of_gpt_training_for_long", "test_of_vit_training_for_long"]


def test_wide_characters_are_counted_as_two():
    rows = ((Span("漢字"), Span("1 B")), (Span("abcd"), Span("1 B")))
    table = Table((Column("test", left=True, least=12), Column("peak")), rows)
    assert lines(table, None) == ["test  peak", "漢字   1 B", "abcd   1 B"]


def test_styles_stay_with_their_texts():
    line = laid_out(TABLE, Screen())[1]
    assert line[-1] == Span("regressed", "bad")
    assert line[0] == Span(NAME)


def test_a_cell_that_cannot_be_shown_as_it_is_stays_one_cell_of_one_line():
    table = Table((Column("test", left=True), Column("peak")), ((Span("a\nb\x1b[31m"), Span("1 B")),))
    assert lines(table, None) == ["test          peak", r"a\nb\x1b[31m   1 B"]


@given(
    width=st.integers(40, 200),
    names=st.lists(st.text(st.sampled_from("ab漢é[]/")), min_size=1, max_size=5),
    encoding=st.sampled_from(["utf-8", "ascii"]),
)
def test_no_row_is_wider_than_a_screen_of_forty_cells_or_more(width, names, encoding):
    row = TABLE.rows[0][1:]
    table = Table(COLUMNS, tuple((Span(name), *row) for name in names))
    said = "not shown, for want of width: "
    assert max(cells(line) for line in lines(table, width, encoding) if not line.startswith(said)) <= width


@pytest.mark.parametrize("width", [1, 10, 20])
def test_on_a_screen_that_is_too_narrow_for_anything_nothing_raises(width):
    assert len(lines(TABLE, width)) > len(TABLE.rows)
