"""What a stream can show: nothing that moves the cursor, nothing that it cannot encode, and how wide a text is."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.reports.layout import Screen, cells
from tests.hostile import TEXTS

ENCODINGS = ["utf-8", "ascii", "latin-1", "cp1252", "no-such-encoding"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_hostile_text_is_one_line_that_moves_nothing_and_can_be_written(text, encoding):
    shown = Screen(encoding=encoding).legible(text)
    assert {unicodedata.category(character) for character in shown}.isdisjoint({"Cc", "Cf", "Cs", "Cn", "Zl", "Zp"})
    shown.encode("ascii" if encoding == "no-such-encoding" else encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(text=st.text())
def test_what_is_shown_of_any_text_can_be_written(text, encoding):
    shown = Screen(encoding=encoding).legible(text)
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
