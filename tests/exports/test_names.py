"""The names of figures in other tools: valid UTF-8, and different wherever they were."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.reporting.exports.figures import benchmark_name, utf8
from tests.exports.values import figure, from_utf8

_ODD = st.text(st.sampled_from("\\ud8fF0\ud800\udfffa"), max_size=12)


@given(st.one_of(_ODD, st.text(st.characters(exclude_categories=()))))
def test_any_text_becomes_utf8_and_comes_back(text):
    utf8(text).encode()
    assert from_utf8(utf8(text)) == text


@given(_ODD, _ODD)
def test_two_texts_never_become_the_same(one, other):
    assert (utf8(one) == utf8(other)) == (one == other)


@pytest.mark.parametrize("text", ["tests/test_a.py::test_b[C:\\users]", "test_b[\\u00e4]", "é", "a\nb"])
def test_what_reads_like_no_surrogate_is_left_alone(text):
    assert utf8(text) == text


def test_a_lone_surrogate_is_spelled():
    assert utf8("a\ud800b") == "a\\ud800b"
    assert utf8("a\\ud800b") == "a\\\\ud800b"


def test_a_name_has_the_test_its_measurement_and_the_device():
    assert benchmark_name(figure("tests/a.py::test_b[x]")) == "tests/a.py::test_b[x] (call) @ nvidia-h100-80gb-hbm3"
