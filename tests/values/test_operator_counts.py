"""What counts are made of: added up, written and read back, and few enough to be kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.facts.values.operator_counts import (
    NOWHERE,
    OperatorSite,
    Tally,
    each_layer,
    from_texts,
    reduced_tallies,
    sum_tallies,
    tallies_without_callers,
    to_texts,
    total,
    without_places,
)
from tests.hostile import TEXTS

# Neither an upright stroke, which separates, nor a comma, which does so within an operator's name.
NAMES = st.text(st.characters(exclude_characters="|")).filter(lambda text: " | " not in text)
OPERATORS = st.text(st.characters(exclude_characters="|,"), min_size=1)
PLACES = st.builds(OperatorSite, NAMES, st.sampled_from(["", "model.py:9", "model.py:10", "train.py:2"]) | NAMES, NAMES)
TALLIES = st.lists(st.builds(Tally, OPERATORS, st.integers(-(10**15), 10**15), PLACES), max_size=6)


def at(line: str, module: str = "h.*") -> OperatorSite:
    return OperatorSite(module, line)


def test_tallies_of_one_operator_at_one_place_are_one_and_those_of_nothing_go():
    here, there = at("m.py:1"), at("m.py:2")
    tallies = [
        Tally("mm", 2, here),
        Tally("mm", 3, here),
        Tally("mm", 1, there),
        Tally("add", 1, there),
        Tally("add", -1, there),
    ]
    assert sum_tallies(tallies) == (Tally("mm", 5, here), Tally("mm", 1, there))


def test_they_are_in_the_order_of_files_and_lines_and_last_what_has_no_place():
    tallies = [
        Tally("mm", 1),
        Tally("mm", 1, at("m.py:10")),
        Tally("mm", 1, at("m.py:9")),
        Tally("add", 1, at("m.py:9")),
    ]
    assert [(one.place.site, one.operator) for one in sum_tallies(tallies)] == [
        ("m.py:9", "add"),
        ("m.py:9", "mm"),
        ("m.py:10", "mm"),
        ("", "mm"),
    ]


def test_a_place_is_a_line_and_what_has_none_a_line_an_operator():
    tallies = [Tally("mm", 8, at("m.py:9")), Tally("addmm", 4, at("m.py:9")), Tally("add", 2), Tally("mul", 1)]
    assert to_texts(tallies) == ["h.* | m.py:9 |  | 4 addmm, 8 mm", " |  |  | 2 add", " |  |  | 1 mul"]


def test_a_tally_of_several_layers_is_one_of_each_that_add_up_to_it():
    assert each_layer(Tally("mm", 6, at("m.py:9", "h.{0,2}"))) == [
        Tally("mm", 3, at("m.py:9", f"h.{layer}")) for layer in (0, 2)
    ]
    odd = Tally("mm", 5, at("m.py:9", "h.{0,2}"))
    assert each_layer(odd) == [odd]


@given(TALLIES)
def test_what_was_written_is_read_back(tallies):
    assert from_texts(to_texts(tallies)) == sum_tallies(tallies)


@pytest.mark.parametrize("name", ["pipes", "blocks", "colons", "newlines", "spaces", "nothing", "long"])
def test_any_name_leaves_amounts_as_they_are(name):
    text = TEXTS[name]
    tallies = [Tally(text, 3, OperatorSite(text, text, text)), Tally("mm", 4)]
    once = from_texts(to_texts(tallies))
    assert sorted(one.amount for one in once) == [3, 4]
    assert from_texts(to_texts(once)) == once


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4 mm", r"'4 mm' has 1 parts, expected 4: module \| line \| library's line \| 4 operator, 8 operator"),
        ("a | b | c | d | e", "has 5 parts"),
        ("a | b | c | mm", "'mm' is no count of an operator, like '4 addmm'"),
        ("a | b | c | 4 mm, add", "'add' is no count"),
        ("a | b | c | ² mm", "'² mm' is no count"),
        ("a | b | c | 4.5 mm", "'4.5 mm' is no count"),
        ("a | b | c | ", "'' is no count"),
        (f"a | b | c | {'9' * 5000} mm", "is no count"),
    ],
)
def test_what_is_no_tally_is_told(text, message):
    with pytest.raises(ValueError, match=message):
        from_texts([text])


@given(TALLIES, st.integers(0, 4))
def test_what_is_kept_has_the_same_operators_at_few_places(tallies, most):
    few = reduced_tallies(tallies, most)
    assert total(few) == total(tallies)
    assert without_places(few) == without_places(tallies)
    assert len({one.place for one in few} - {NOWHERE}) <= most
    assert reduced_tallies(few, most) == few


def test_the_places_with_most_are_kept():
    tallies = [Tally("mm", amount, at(f"m.py:{amount}")) for amount in (1, 5, 3)]
    assert reduced_tallies(tallies, 2) == (Tally("mm", 3, at("m.py:3")), Tally("mm", 5, at("m.py:5")), Tally("mm", 1))


def test_callers_of_operators_leave_a_process_and_no_baseline_has_them():
    chains = (("lib 2.0: model.py:8", "train.py:9"), ("train.py:7",))
    place = OperatorSite("h.*", "train.py:9", "lib 2.0: ops.py:2", chains, "train.py:7", "changed line")
    tallies = [Tally("mm", 2, place), Tally("add", 1, place), Tally("mul", 3, at("model.py:9")), Tally("div", 1)]
    read = {tally.operator: tally.place for tally in from_texts(to_texts(tallies, with_callers=True))}
    assert (read["mm"].callers, read["mm"].named, read["mm"].reason) == (chains, "train.py:7", "changed line")
    assert read["add"].callers == chains
    assert read["mul"].callers == ()
    assert all(tally.place.callers == () for tally in from_texts(to_texts(tallies)))
    assert tallies_without_callers(tallies)[0].place.callers == ()


def test_calls_at_one_line_have_the_callers_of_all_of_them():
    one, other = (OperatorSite("h", "m.py:1", "", ((line,),)) for line in ("a.py:1", "b.py:1"))
    (tally,) = sum_tallies([Tally("mm", 2, one), Tally("mm", 3, other)])
    assert (tally.amount, tally.place.callers) == (5, (("a.py:1",), ("b.py:1",)))
