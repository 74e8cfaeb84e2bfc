"""Which operators are more: nothing for a refactoring, and for one that came its own line."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.facts.values.operator_counts import (
    OperatorSite,
    Tally,
    of_layers,
    reduced_tallies,
    sum_tallies,
    total,
    without_places,
)
from pytest_gpumem.judging.gate.count_difference import changed_tallies


def tally(operator: str, amount: int, line: int = 0, module: str = "h.*", file: str = "model.py") -> Tally:
    return Tally(operator, amount, OperatorSite(module, f"{file}:{line}") if line else OperatorSite())


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
).map(sum_tallies)


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
    modules = {(one.operator, one.place.module) for one in after} | {(one.operator, "") for one in after}
    for one in changed_tallies(before, after):
        if one.amount > 0 and one.place.where:
            assert one.amount <= there[one.operator, one.place]
        elif one.amount > 0:
            assert (one.operator, one.place.module) in modules


# Layers


def test_the_layer_that_has_more_is_named():
    others, wide = tally("mm", 30, 10, "h.{0-2}"), tally("mm", 40, 10, "h.3")
    assert changed_tallies([tally("mm", 40, 10)], [others, wide]) == (tally("mm", 30, 10, "h.3"),)
    assert changed_tallies([others, wide], [tally("mm", 20, 10, "h.{0,1}"), tally("mm", 80, 10, "h.{2,3}")]) == (
        tally("mm", 30, 10, "h.2"),
    )
    two = (tally("mm", 20, 11, "h.{0,1}"), tally("mm", 50, 11, "h.{2,3}"))
    assert changed_tallies([tally("mm", 40, 10)], two) == (tally("mm", 30, 11, "h.{2,3}"),)


def test_layers_are_folded_before_places_are_dropped():
    layers = [tally("mm", 3, 10, "h.0"), tally("mm", 9, 10, "h.{1-3}"), tally("add", 2, 11)]
    assert reduced_tallies(layers, 3) == sum_tallies(layers)
    assert reduced_tallies(layers, 2) == sum_tallies([tally("mm", 12, 10), tally("add", 2, 11)])


def test_a_baseline_from_before_layers_were_named_is_equal():
    assert changed_tallies([tally("mm", 70, 10)], [tally("mm", 30, 10, "h.{0-2}"), tally("mm", 40, 10, "h.3")]) == ()


def test_layers_are_joined_where_alike_and_told_apart_where_of_few_kinds():
    there = {"h.*": frozenset((n,) for n in range(4))}
    alike = [tally("mm", 5, 10, f"h.{n}") for n in range(4)]
    assert of_layers(alike, there) == (tally("mm", 20, 10),)
    assert of_layers(alike[1:], there) == (tally("mm", 15, 10, "h.{1-3}"),)
    different = [tally("mm", n + 1, 10, f"h.{n}") for n in range(4)]
    assert of_layers(different, there) == (tally("mm", 10, 10),)
    assert of_layers([*alike[1:], tally("mm", 7, 10)], there) == (tally("mm", 22, 10),)


# What a baseline kept of places with small amounts: the operators alone

KEPT = (tally("mm", 8, 10), tally("add", 8, 11, "head"))
MORE = tally("mm", 6, 30, "down")


@given(TALLIES, TALLIES.filter(bool), st.integers(1, 3))
def test_the_same_is_no_change_for_a_baseline_that_kept_only_some_places(tallies, others, most):
    assert changed_tallies(reduced_tallies(tallies, most), tallies) == ()
    assert total(changed_tallies(reduced_tallies(tallies, most), [*tallies, *others])) == total(others)


def test_the_rest_holds_no_more_than_it_had_and_no_call_at_a_place_that_was_kept():
    small = tuple(tally("mm", 2, line, f"small{line}") for line in range(20, 24))
    before = (*KEPT, Tally("mm", 8))
    assert changed_tallies(before, (*KEPT, *small)) == ()
    # More than at any place that was not kept, or at one that was: not in the rest.
    large = tally("mm", 9, 30, "down")
    assert changed_tallies(before, (*KEPT, *small, large)) == (large,)
    assert changed_tallies(before, (*KEPT, *small, tally("mm", 5, 11, "head"))) == (tally("mm", 5, 11, "head"),)


def test_more_than_the_rest_held_is_of_other_lines():
    small = tuple(tally("mm", 2, line, f"small{line}") for line in range(20, 24))
    before = (*KEPT, Tally("mm", 8))
    assert changed_tallies(before, (*KEPT, *small, MORE)) == (Tally("mm", 6),)
    within = [replace(one, place=replace(one.place, module="down")) for one in small]
    assert changed_tallies(before, (*KEPT, *within, MORE)) == (Tally("mm", 6, OperatorSite("down")),)


def test_an_operator_that_is_not_in_the_rest_is_told_at_its_line():
    assert changed_tallies((*KEPT, Tally("mul", 8)), (*KEPT, tally("mul", 8, 20), MORE)) == (MORE,)


def test_calls_that_moved_from_a_small_place_to_a_large_one_show_nothing():
    assert changed_tallies((*KEPT, Tally("mm", 9)), (*KEPT, tally("mm", 9, 30, "down"))) == ()


def test_lines_that_moved_are_not_blamed_where_the_rest_has_others_of_their_module():
    # As peft 0.14.0 -> 0.13.2: a line of small places was nearer to where the large one was.
    before = (tally("mm", 6, 88, "lora_A", "dora.py"), tally("mm", 4, 609, "base", "layer.py"), Tally("mm", 2))
    moved = (tally("mm", 6, 70, "lora_A", "dora.py"), tally("mm", 2, 75, "lora_A", "dora.py"))
    came = tally("mm", 5, 90, "magnitude", "dora.py")
    assert changed_tallies(before, (*moved, tally("mm", 4, 609, "base", "layer.py"), came)) == (came,)


def moved(by: int) -> tuple[Tally, ...]:
    return tuple(
        replace(one, place=replace(one.place, site=f"model.py:{int(one.place.site[9:]) + by}")) for one in STEP
    )


def test_a_refactoring_shows_nothing():
    assert changed_tallies(STEP, moved(7)) == ()
    assert changed_tallies(STEP, [replace(one, place=replace(one.place, module="blocks.*")) for one in STEP]) == ()
    assert changed_tallies(STEP, [replace(one, place=OperatorSite("x", "layers.py:3")) for one in STEP]) == ()


def test_what_came_is_told_at_its_line():
    new = tally("softmax", 4, 13)
    assert changed_tallies(STEP, (*STEP, new)) == (new,)
    assert changed_tallies(STEP, (*moved(3), new)) == (new,)


def test_an_operator_that_was_there_is_told_where_others_came_with_it():
    # Nearer to where it was than those that moved.
    came = (tally("add", 4, 13), tally("tanh", 4, 13))
    assert changed_tallies(STEP, (*moved(5), *came)) == came


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
    assert changed_tallies(before, (*STEP, tally("add", 4, 13, "head"))) == (Tally("add", 4),)


def test_lines_of_a_library_are_told_by_its_files():
    def at(line: int) -> Tally:
        return Tally("mm", 2, OperatorSite("h.*", "test_it.py:9", f"gpt/model.py:{line}"))

    assert changed_tallies([at(5)], [at(6)]) == ()
    assert changed_tallies([at(5)], [at(6), at(40)]) == (at(40),)
