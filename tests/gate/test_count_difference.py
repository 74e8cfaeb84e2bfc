"""Which operators are more: nothing for a refactoring, and for one that came its own line."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.gate.count_difference import changed_tallies
from pytest_gpumem.values.operator_counts import Place, Tally, summed, total, without_places


def tally(operator: str, amount: int, line: int = 0, module: str = "h.*", file: str = "model.py") -> Tally:
    return Tally(operator, amount, Place(module, f"{file}:{line}") if line else Place())


STEP = (tally("addmm", 4, 10), tally("mul", 4, 11), tally("add", 4, 12), tally("add", 1, 30, "head"))
TALLIES = st.lists(
    st.builds(
        tally,
        st.sampled_from(["mm", "add", "mul"]),
        st.integers(1, 9),
        st.integers(0, 5),
        st.sampled_from(["h.*", "head", ""]),
        st.sampled_from(["model.py", "train.py"]),
    ),
    max_size=8,
).map(summed)


@given(TALLIES)
def test_the_same_is_no_change(tallies):
    assert changed_tallies(tallies, tallies) == ()


@given(TALLIES, TALLIES)
def test_changes_add_up_operator_by_operator(before, after):
    changes = changed_tallies(before, after)
    wanted = without_places([*after, *(replace(one, amount=-one.amount) for one in before)])
    assert without_places(changes) == wanted
    assert total(changes) == total(after) - total(before)


@given(TALLIES, TALLIES)
def test_an_operator_either_came_or_went(before, after):
    changes = changed_tallies(before, after)
    came, went = ({one.operator for one in changes if sign * one.amount > 0} for sign in (1, -1))
    assert not came & went


@given(TALLIES, TALLIES)
def test_what_came_is_where_there_is_some_of_it_now(before, after):
    there = {(one.operator, one.place): one.amount for one in after}
    for one in changed_tallies(before, after):
        if one.amount > 0:
            assert one.amount <= there[one.operator, one.place]


def moved(by: int) -> tuple[Tally, ...]:
    return tuple(
        replace(one, place=replace(one.place, site=f"model.py:{int(one.place.site[9:]) + by}")) for one in STEP
    )


def test_a_refactoring_shows_nothing():
    assert changed_tallies(STEP, moved(7)) == ()
    assert changed_tallies(STEP, [replace(one, place=replace(one.place, module="blocks.*")) for one in STEP]) == ()
    assert changed_tallies(STEP, [replace(one, place=Place("x", "layers.py:3")) for one in STEP]) == ()


def test_what_came_is_told_at_its_line():
    new = tally("softmax", 4, 13)
    assert changed_tallies(STEP, (*STEP, new)) == (new,)
    assert changed_tallies(STEP, (*moved(3), new)) == (new,)


def test_an_operator_that_was_there_is_told_where_others_came_with_it():
    came = (tally("add", 4, 16), tally("tanh", 4, 16))
    assert changed_tallies(STEP, (*moved(3), *came)) == came


def test_or_else_where_it_is_furthest_from_where_it_was():
    came = tally("add", 4, 25)
    assert changed_tallies(STEP, (*moved(1), came)) == (came,)


def test_more_of_it_at_one_line_is_told_there():
    assert changed_tallies(STEP, (*STEP[:2], tally("add", 6, 12), STEP[3])) == (tally("add", 2, 12),)


def test_one_operator_in_the_place_of_another_is_both():
    assert changed_tallies((tally("gelu", 4, 9),), (tally("tanh", 4, 9), tally("mul", 8, 9))) == (
        tally("gelu", -4, 9),
        tally("mul", 8, 9),
        tally("tanh", 4, 9),
    )


def test_a_baseline_without_lines_is_compared_by_operators():
    before = without_places(STEP)
    assert changed_tallies(before, STEP) == ()
    assert changed_tallies(before, (*STEP, tally("softmax", 4, 13))) == (tally("softmax", 4, 13),)
    assert changed_tallies(STEP, (*before, Tally("softmax", 4))) == (Tally("softmax", 4),)


def test_lines_of_a_library_are_told_by_its_files():
    def at(line: int) -> Tally:
        return Tally("mm", 2, Place("h.*", "test_it.py:9", f"gpt/model.py:{line}"))

    assert changed_tallies([at(5)], [at(6)]) == ()
    assert changed_tallies([at(5)], [at(6), at(40)]) == (at(40),)
