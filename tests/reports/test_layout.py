"""How a table gives way to a narrow screen: names are shortened, light columns left out, and last, rows have two lines."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_gpumem.reporting.reports.layout import Column, Screen, Span, Table, cells, laid_out, text_of
from tests.hostile import ALL

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
        "too narrow to show: change, time",
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
    said = "too narrow to show: "
    assert max(cells(line) for line in lines(table, width, encoding) if not line.startswith(said)) <= width


@pytest.mark.parametrize("width", [1, 10, 20])
def test_on_a_screen_that_is_too_narrow_for_anything_nothing_raises(width):
    assert len(lines(TABLE, width)) > len(TABLE.rows)


# What a stream can show


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp1252", "no-such-encoding"])
@given(text=st.text())
@example(text=ALL)
def test_any_text_is_one_line_that_moves_nothing_and_can_be_written(text, encoding):
    shown = Screen(encoding=encoding).legible(text)
    assert {unicodedata.category(character) for character in shown}.isdisjoint({"Cc", "Cf", "Cs", "Cn", "Zl", "Zp"})
    assert len(shown.splitlines()) <= 1
    shown.encode("ascii" if encoding == "no-such-encoding" else encoding)


def test_what_is_not_shown_as_it_is_is_escaped_as_in_python():
    assert Screen().legible("a\nb\t\x1b[31m\u202e\ud800") == r"a\nb\t\x1b[31m\u202e\ud800"


def test_what_can_be_shown_stays():
    text = "µs 漢字 e\u0301 שלום a\u00a0b \\n"
    assert Screen().legible(text) == text


def test_what_a_stream_cannot_encode_is_replaced_or_escaped():
    assert Screen(encoding="ascii").legible("840.00 µs 漢…") == r"840.00 us \u6f22..."
    assert Screen(encoding="latin-1").legible("840.00 µs 漢") == r"840.00 µs \u6f22"


def test_a_wide_character_takes_two_cells_and_a_combining_one_none():
    assert (cells("abc"), cells("漢字"), cells("e\u0301")) == (3, 4, 1)


def test_a_text_is_shortened_in_its_middle_and_its_end_tells_more():
    text = "tests/models/test_gpt.py::TestTrain::test_step[amp-bf16-ckpt-blocks]"
    assert Screen().shortened(text, 30) == "tests/mod…amp-bf16-ckpt-blocks]"[:9] + "…" + text[-20:]
    assert Screen().shortened(text, len(text)) == text
    assert Screen(encoding="ascii").shortened(text, 30) == text[:9] + "..." + text[-18:]


@given(text=st.text(st.sampled_from("ab漢字\u0301é[]")), width=st.integers(0, 40))
def test_a_shortened_text_fits(text, width):
    assert cells(Screen().shortened(text, width)) <= max(width, 1)


def test_no_mark_is_left_without_its_character():
    text = "x" * 20 + "e\u0301" * 10
    assert not any("…\u0301" in Screen().shortened(text, width) for width in range(1, cells(text)))
