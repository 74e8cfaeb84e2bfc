"""Growth among rows that a baseline only sums up: a line is named if the sums prove it, else all rows that it may be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_gpumem.facts.values.composition import REST, Composition, Row, merge_rows
from pytest_gpumem.facts.values.module_calls import Calls
from pytest_gpumem.facts.values.plain import from_plain, to_plain
from pytest_gpumem.judging.gate.difference import CHANGED_LINE, Change, Difference, difference, with_changed_lines
from pytest_gpumem.judging.gate.smaller_rows import MOST_ALTERNATIVES

MB = 10**6


def made_of(*rows: Row) -> Composition:
    return Composition(sum(row.nbytes for row in rows), rows)


def row(name: str, nbytes: int, count: int = 4, category: str = "activation", tensor: str = "") -> Row:
    return Row(category, nbytes, f"layers.*.{name}", f"{name}.py:1", "", "mm", tensor or f"float32[{nbytes}]", count)


def stored(composition: Composition, listed: int) -> Composition:
    """A baseline that lists so many rows, as versions did that split ties."""
    rests = merge_rows(
        Row(row.category, row.nbytes, operator=REST, count=row.count) for row in composition.rows[listed:]
    )
    return replace(composition, rows=(*composition.rows[:listed], *rests))


def as_older_versions(composition: Composition, listed: int) -> Composition:
    """A baseline whose sum of smaller rows has neither categories nor a number of blocks."""
    return replace(composition, rows=composition.rows[:listed])


SCORES = row("attend", 100 * MB)
TO_Q, TO_K, TO_V, LAST_HIDDEN = (row(name, 25 * MB) for name in ("to_q", "to_k", "to_v", "last_hidden"))
NORM = row("norm", MB)
ATTENTION = made_of(SCORES, TO_Q, TO_K, TO_V, NORM)


def grown(*more: Row, listed: int = 3, before: Composition = ATTENTION) -> Difference:
    return difference(stored(before, listed), made_of(*before.rows, *more))


def named(found: Difference) -> list[tuple[str, int]]:
    return [(change.row.module, change.nbytes) for change in found.changes if change.row.operator != REST]


# Ties at the cut


def test_of_two_equal_rows_that_are_not_listed_neither_is_named():
    (change,) = grown(LAST_HIDDEN).changes
    assert (change.row.operator, change.nbytes) == (REST, 25 * MB)
    assert change.alternatives == (LAST_HIDDEN, TO_V)


@pytest.mark.parametrize("category", ["gradient", "optimizer state", "parameter", "temporary"])
def test_ties_of_every_category_are_alternatives(category):
    of_category = [replace(each, category=category) for each in (TO_Q, TO_K, TO_V, LAST_HIDDEN)]
    (change,) = grown(of_category[3], before=made_of(SCORES, *of_category[:3], NORM)).changes
    assert set(change.alternatives) == set(of_category[2:])


def test_a_tie_that_the_baseline_lists_leaves_one_row():
    assert difference(ATTENTION.kept(), made_of(*ATTENTION.rows, LAST_HIDDEN)).changes == (Change(None, LAST_HIDDEN),)


def test_more_layers_of_a_smaller_row_are_named_unless_another_row_has_its_size():
    some = replace(TO_V, nbytes=50 * MB, count=8, layers=((0, 1),))
    every = replace(some, nbytes=100 * MB, count=16, layers=())
    wide = row("wide", 110 * MB)
    (change,) = difference(stored(made_of(wide, some, NORM), 1), made_of(wide, every, NORM)).changes
    assert (change.row, change.nbytes) == (every, 50 * MB)
    assert change.reason == "8 -> 16 tensors; among smaller rows in the baseline"
    equal = row("other", 50 * MB, count=8)
    (change,) = difference(stored(made_of(wide, some, equal, NORM), 1), made_of(wide, every, equal, NORM)).changes
    assert change.alternatives == (every, equal)


def test_of_three_equal_rows_two_may_be_new():
    more = row("more", 25 * MB)
    (change,) = grown(LAST_HIDDEN, more).changes
    assert (change.nbytes, len(change.alternatives)) == (50 * MB, 3)


def test_a_row_with_more_blocks_of_the_size_may_have_grown_as_well():
    twice = replace(TO_V, nbytes=50 * MB, count=8)
    before = made_of(SCORES, row("wide", 60 * MB), twice, NORM)
    (change,) = grown(LAST_HIDDEN, before=before, listed=2).changes
    assert change.alternatives == (twice, LAST_HIDDEN)


# What the sums prove


def test_a_row_is_named_if_no_other_has_its_bytes():
    assert named(grown(row("new", 24 * MB))) == [("layers.*.new", 24 * MB)]
    smaller_than_to_v_and_larger_than_norm = row("new", 2 * MB)
    assert named(grown(smaller_than_to_v_and_larger_than_norm)) == [("layers.*.new", 2 * MB)]


def test_several_rows_are_named_if_their_blocks_are_the_largest():
    before = made_of(SCORES, row("wide", 90 * MB), row("one", 3 * MB), row("two", 2 * MB))
    found = grown(row("new", 4 * MB), row("newer", 5 * MB), before=before, listed=2)
    assert named(found) == [("layers.*.newer", 5 * MB), ("layers.*.new", 4 * MB)]
    assert len(found.changes) == 2


def test_a_row_that_has_more_blocks_is_told_with_those_that_it_had():
    more = replace(TO_V, nbytes=75 * MB, count=12)
    before = made_of(SCORES, row("wide", 90 * MB), TO_V, NORM)
    (change,) = difference(stored(before, 2), made_of(SCORES, row("wide", 90 * MB), more, NORM)).changes
    assert (change.before, change.after) == (TO_V, more)
    assert change.reason == "4 -> 12 tensors; among smaller rows in the baseline"


def test_two_rows_that_add_up_to_a_third_leave_all_of_them_open():
    before = made_of(SCORES, row("wide", 90 * MB), row("high", 30 * MB), row("two", 20 * MB, count=4), NORM)
    found = grown(row("ten", 12 * MB, count=2), row("six", 8 * MB, count=2), before=before, listed=2)
    assert named(found) == []


def test_a_row_that_grew_among_the_smaller_ones_is_one_of_those_that_may_have():
    first, second = row("first", 131072, count=1), row("second", 65536, count=1)
    wider = row("second", 196608, count=1)
    (change,) = difference(stored(made_of(SCORES, first, second), 1), made_of(SCORES, first, wider)).changes
    assert (change.row.operator, change.alternatives) == (REST, (wider, first))


def test_a_row_with_fewer_blocks_than_are_new_has_not_grown_alone():
    old = row("old", 8 * MB, count=1)
    new = [row(f"m{number}", (800 + 20 * number) * 1000, count=1) for number in range(11)]
    (change,) = grown(*new, before=made_of(SCORES, old), listed=1).changes
    assert (change.row.operator, change.nbytes) == (REST, 9_900_000)
    assert change.alternatives == (old, new[-1])


def test_baselines_of_older_versions_prove_less():
    older = as_older_versions(ATTENTION, 3)
    (change,) = difference(older, made_of(*ATTENTION.rows, LAST_HIDDEN)).changes
    assert (change.row.category, change.alternatives) == ("other", (LAST_HIDDEN, TO_V))
    (change,) = difference(older, made_of(*ATTENTION.rows, row("new", 24 * MB))).changes
    assert {each.module for each in change.alternatives} == {"layers.*.new", "layers.*.to_v"}
    assert difference(older, ATTENTION).changes == ()


def test_of_too_many_rows_none_is_an_alternative():
    small = [row(f"m{number}", MB, tensor=f"float32[{number}]") for number in range(MOST_ALTERNATIVES)]
    (change,) = grown(row("new", MB), before=made_of(SCORES, *small), listed=1).changes
    assert (change.row.operator, change.nbytes, change.alternatives) == (REST, MB, ())


# In proportion to the sum


@pytest.mark.parametrize("largest", ["parameter", "workspace"])
@pytest.mark.parametrize("keep", [stored, as_older_versions])
def test_a_row_that_the_sum_has_no_room_for_is_named_beside_whatever_is_listed(largest, keep):
    """One row of 33.5 MB, as of cuBLAS's workspaces, does not hide 6.5 MB beside a sum of 131 kB."""
    listed = row("weights", 33_554_432, count=1, category=largest)
    first, second = (row(name, 65536, 1, "temporary") for name in ("first", "second"))
    wider = row("second", 6_553_600, 1, "temporary")
    found = difference(keep(made_of(listed, first, second), 1), made_of(listed, first, wider))
    assert found.changes[0].row == wider
    assert found.changes[0].nbytes == 6_553_600 - 65536
    assert "among smaller rows in the baseline" in found.changes[0].reason
    assert sum(change.nbytes for change in found.changes) == found.nbytes


# Lines that changed


def marking(has_changed):
    """Return what marks rows that have changed."""
    return lambda each: CHANGED_LINE if has_changed(each) else ""


def test_the_alternative_at_a_changed_line_is_the_row_that_grew():
    found = with_changed_lines(grown(LAST_HIDDEN), marking(lambda each: each.site == "last_hidden.py:1"))
    assert found.changes == (Change(None, LAST_HIDDEN, "changed line"),)


def test_alternatives_at_changed_lines_are_all_that_remain():
    found = with_changed_lines(grown(LAST_HIDDEN, row("more", 25 * MB)), marking(lambda each: "to_v" not in each.site))
    (change,) = found.changes
    assert {each.module for each in change.alternatives} == {"layers.*.last_hidden", "layers.*.more"}
    assert with_changed_lines(found, marking(lambda _: False)) == found


def test_an_alternative_that_is_less_or_more_than_the_growth_leaves_the_rest():
    larger = Change(Row("activation", 30, operator=REST), Row("activation", 40, operator=REST), "", (row("a", 15),))
    smaller = larger._replace(alternatives=(row("a", 4),))
    for change, before, changes in ((larger, 5, 1), (smaller, 0, 2)):
        found = with_changed_lines(Difference(30, 40, (change,)), marking(lambda _: True))
        assert found.changes[0].row.module == "layers.*.a"
        assert (found.changes[0].before.nbytes if found.changes[0].before else 0) == before
        earlier = "changed line; among smaller rows in the baseline"
        assert found.changes[0].reason == (earlier if before else "changed line")
        assert sum(each.nbytes for each in found.changes) == 10
        assert len(found.changes) == changes


# Lost grad modes


def lost_no_grad(before: Composition, after: Composition, calls: int = 4, path: str = LAST_HIDDEN.module) -> Difference:
    """What changed if autograd recorded none of a module's calls, or not each of them, and records all now."""
    off, on = Calls(calls, 4), Calls(0, 4)
    return difference(replace(stored(before, 3), no_grad={path: off}), replace(after, no_grad={path: on}))


def test_the_row_of_a_lost_no_grad_is_new_beside_rows_of_its_size():
    found = lost_no_grad(ATTENTION, made_of(*ATTENTION.rows, LAST_HIDDEN))
    assert found.changes == (Change(None, LAST_HIDDEN),)
    assert [change.module for change in found.graph] == [LAST_HIDDEN.module]


def test_beside_the_row_of_a_lost_no_grad_the_other_rows_stay_open():
    more = row("more", 25 * MB)
    found = lost_no_grad(ATTENTION, made_of(*ATTENTION.rows, LAST_HIDDEN, more))
    assert named(found) == [(LAST_HIDDEN.module, 25 * MB)]
    (rest,) = (change for change in found.changes if change.row.operator == REST)
    assert (rest.nbytes, set(rest.alternatives)) == (25 * MB, {TO_V, more})


def test_of_rows_of_a_lost_no_grad_that_are_more_than_the_growth_one_grew():
    first, second = row("to_w", 25 * MB), replace(row("to_w", 25 * MB), operator="mul")
    before = made_of(SCORES, TO_Q, TO_K, TO_V, second)
    (change,) = lost_no_grad(before, made_of(*before.rows, first), path=first.module).changes
    assert set(change.alternatives) == {first, second}


def test_a_no_grad_that_some_calls_had_does_not_prove_a_row():
    (change,) = lost_no_grad(ATTENTION, made_of(*ATTENTION.rows, LAST_HIDDEN), calls=3).changes
    assert set(change.alternatives) == {LAST_HIDDEN, TO_V}


def test_temporary_tensors_of_a_lost_no_grad_may_have_been_there():
    before, temporary = (
        made_of(*(replace(each, category="temporary") for each in rows))
        for rows in (ATTENTION.rows, [*ATTENTION.rows, LAST_HIDDEN])
    )
    (change,) = lost_no_grad(before, temporary).changes
    assert len(change.alternatives) == 2


# Properties

SIZES = st.sampled_from([64, 128, 192, 256, 512, 1024, 4096, 65536])
BLOCKS = st.tuples(SIZES, st.integers(1, 4), st.sampled_from(["activation", "gradient", "temporary"]))


def rows_of(blocks: list[tuple[int, int, str]], name: str) -> list[Row]:
    return [
        row(f"{name}{number}", size * count, count, category, f"{name}[{number}]")
        for number, (size, count, category) in enumerate(blocks)
    ]


KEPT = st.sampled_from([Composition.kept, lambda whole: stored(whole, 2), lambda whole: as_older_versions(whole, 2)])


@given(st.lists(BLOCKS, min_size=1, max_size=20), st.lists(BLOCKS, max_size=2), KEPT)
@example([(64, 1, "activation")] * 3, [(64, 1, "activation")], lambda whole: stored(whole, 2))
def test_a_row_that_is_named_is_new_and_a_new_row_is_named_or_an_alternative(before, more, keep):
    whole, new = made_of(*rows_of(before, "old")), rows_of(more, "new")
    found = difference(keep(whole), made_of(*whole.rows, *new))
    assert sum(change.nbytes for change in found.changes) == found.nbytes == sum(each.nbytes for each in new)
    listed = {change.after for change in found.changes if change.row.operator != REST}
    assert listed <= {*new, None}
    alternatives = {each for change in found.changes for each in change.alternatives}
    if len(new) == 1:
        assert {*new} <= listed | alternatives


@given(st.lists(BLOCKS, min_size=1, max_size=20), st.lists(BLOCKS, max_size=8), KEPT)
def test_growth_without_a_line_is_in_proportion_to_the_sum(before, more, keep):
    whole, new = made_of(*rows_of(before, "old")), rows_of(more, "new")
    kept = keep(whole)
    for change in difference(kept, made_of(*whole.rows, *new)).changes:
        if change.row.operator == REST and not change.alternatives and change.nbytes > 0:
            in_sum = kept.rest + sum(each.nbytes for each in kept.rows if each.operator == REST)
            assert all(each.nbytes <= in_sum for each in new if each.category == change.row.category)
            # Only many rows that are each a small part of it have no line, and what is negligible.
            small = all(each.nbytes < 0.1 * change.nbytes for each in new if each.category == change.row.category)
            assert small or change.nbytes <= 0.01 * in_sum


@given(st.lists(BLOCKS, max_size=20), st.integers(0, 9), KEPT)
def test_unchanged_and_refactored_code_has_no_growth_and_no_alternatives(blocks, lines, keep):
    whole = made_of(*rows_of(blocks, "old"))
    moved = [
        replace(each, site=f"new.py:{1 + lines}", module=each.module.replace("layers", "net.layers"))
        for each in whole.rows
    ]
    assert difference(keep(whole), whole).changes == ()
    assert difference(keep(whole), made_of(*merge_rows(moved))).changes == ()


@given(st.lists(BLOCKS, min_size=1, max_size=9), st.lists(BLOCKS, min_size=1, max_size=9))
def test_two_stored_sides_add_up_and_travel_as_plain_values(before, after):
    old, new = (stored(made_of(*rows_of(blocks, "m")), 2) for blocks in (before, after))
    found = difference(old, new)
    assert sum(change.nbytes for change in found.changes) == found.nbytes
    assert from_plain(Difference, to_plain(found)) == found


def test_a_change_from_a_report_of_an_older_version_has_no_alternatives():
    plain = to_plain(grown(LAST_HIDDEN))
    older = {**plain, "changes": [change[:3] for change in plain["changes"]]}
    assert [change.alternatives for change in from_plain(Difference, older).changes] == [()]
