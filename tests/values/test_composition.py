"""Compositions: rows as text and back, what is asked of them, and what a baseline keeps of them."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pytest_gpumem.base.errors import CompositionError
from pytest_gpumem.facts.values.composition import (
    CATEGORIES,
    KEPT_SHARE,
    MOST_KEPT,
    MOST_TIED,
    REST,
    Composition,
    Explanation,
    Holder,
    Row,
    explanation_without_callers,
    holder_at,
    join_layers,
    merge_rows,
    row_from_text,
    text_with_callers,
)
from pytest_gpumem.facts.values.module_calls import Calls
from pytest_gpumem.facts.values.plain import from_plain, to_plain
from pytest_gpumem.facts.values.source_lines import MOST_CHAINS

unhurried = settings(deadline=None)

ATTENTION = Row(
    "activation",
    5_100_000_000,
    module="blocks.*.attn",
    site="model.py:88",
    operator="_softmax",
    tensor="float32[8, 12, 1024, 1024]",
    count=24,
)

# What stands in a row is a name, a path or a line: never an upright stroke, which its text would show as a slash.
NAMES = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="|"), max_size=12)
TENSORS = st.sampled_from(["", "float32[8, 12, 64]", "bool[]", "int64[3]"]) | NAMES.filter(lambda text: text != "block")
ROWS = st.builds(
    Row,
    category=st.sampled_from([*CATEGORIES]),
    nbytes=st.integers(0, 2**60),
    module=NAMES,
    site=NAMES,
    library=NAMES,
    operator=NAMES,
    tensor=TENSORS,
    count=st.integers(0, 10**6),
)
UNATTRIBUTED = st.builds(Row, st.just("unattributed"), st.integers(-(2**60), -1))


def composition_of(*rows: Row, more: int = 0) -> Composition:
    return Composition(sum(row.nbytes for row in rows) + more, rows)


# Rows


def test_a_row_reads_as_what_it_is_who_made_it_where_and_how_much():
    assert ATTENTION.text() == (
        "activation | blocks.*.attn | _softmax | model.py:88 |  | 24 x float32[8, 12, 1024, 1024] | 5100000000"
    )


@unhurried
@given(ROWS | UNATTRIBUTED)
def test_the_text_of_a_row_says_all_of_it(row):
    assert row_from_text(row.text()) == row


@pytest.mark.parametrize("field", ["module", "site", "library", "operator", "tensor"])
def test_an_upright_stroke_in_a_row_is_shown_as_a_slash_and_does_not_part_the_text(field):
    row = Row("input", 8, **{field: "a | b|"})
    assert row_from_text(row.text()) == Row("input", 8, **{field: "a / b/"})


def test_a_row_of_which_little_is_known_can_be_written_and_read():
    row = Row("unattributed", -4096)
    assert row.text() == "unattributed |  |  |  |  | 1 x block | -4096"
    assert row_from_text(row.text()) == row


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has 1 parts, expected 7: category | module | operator | line | library's line | count x dtype"),
        ("activation | attn | 4096", "has 3 parts, expected 7"),
        (f"{ATTENTION.text()} | more", "has 8 parts, expected 7"),
        ("activations |  |  |  |  | 1 x block | 1", "'activations' is no category; did you mean 'activation'?"),
        ("input |  |  |  |  | float32[8] | 32", "'float32[8]' is no count of tensors, like '4 x float32[8, 64]'"),
        ("input |  |  |  |  | two x float32[8] | 32", "'two x float32[8]' is no count of tensors"),
        ("input |  |  |  |  | -1 x float32[8] | 32", "'-1 x float32[8]' is no count of tensors"),
        ("input |  |  |  |  | 1 x float32[8] | 32.0", "'32.0' is no number of bytes"),
        ("activation |  |  |  |  | 1 x float32[8] | -32", "'-32' is no number of bytes"),
        ("unattributed |  |  |  |  | 1 x block | --32", "'--32' is no number of bytes"),
    ],
)
def test_a_text_that_is_no_row_is_refused_with_what_would_be_right(text, told):
    with pytest.raises(CompositionError, match=re.escape(told)) as raised:
        row_from_text(text)
    assert str(raised.value).startswith(repr(text)), "the culprit stands first"


def test_a_row_tells_dtype_and_shape_apart():
    assert (ATTENTION.dtype, ATTENTION.shape) == ("float32", "[8, 12, 1024, 1024]")
    assert (Row("input", 4, tensor="float32[]").dtype, Row("input", 4, tensor="float32[]").shape) == ("float32", "[]")
    assert (Row("input", 4).dtype, Row("input", 4).shape) == ("", "")


def test_a_row_is_where_the_library_is_and_from_where_it_was_called():
    library, user = "transformers/gpt2.py:123", "model.py:8"
    assert Row("input", 1, site=user).where == "model.py:8"
    assert Row("input", 1, library=library).where == "transformers/gpt2.py:123"
    assert Row("input", 1, site=user, library=library).where == "transformers/gpt2.py:123 (from model.py:8)"
    assert Row("input", 1).where == ""


def test_rows_that_differ_in_count_and_bytes_only_are_merged():
    one = Row("activation", 10, module="a", operator="mul", count=2)
    same = Row("activation", 5, module="a", operator="mul")
    other = Row("temporary", 5, module="a", operator="mul")
    assert set(merge_rows([one, other, same])) == {Row("activation", 15, module="a", operator="mul", count=3), other}


@unhurried
@given(st.lists(ROWS))
def test_merging_rows_neither_adds_nor_loses_anything(rows):
    together = merge_rows(rows)
    assert sum(row.nbytes for row in together) == sum(row.nbytes for row in rows)
    assert sum(row.count for row in together) == sum(row.count for row in rows)
    assert merge_rows(together) == together


# Compositions


@unhurried
@given(st.lists(ROWS, max_size=6), st.randoms())
def test_the_rows_of_a_composition_come_largest_first_in_whatever_order_given(rows, random):
    shuffled = list(rows)
    random.shuffle(shuffled)
    first, second = composition_of(*rows), composition_of(*shuffled)
    assert first.rows == second.rows
    assert [row.nbytes for row in first.rows] == sorted((row.nbytes for row in rows), reverse=True)


def test_what_is_in_no_row_is_the_rest():
    assert composition_of(Row("input", 60), Row("buffer", 30)).rest == 0
    assert composition_of(Row("input", 60), Row("buffer", 30), more=10).rest == 10
    assert Composition(10, (Row("input", 12), Row("unattributed", -2))).rest == 0


BLOCKS = composition_of(
    Row("activation", 1, module="blocks.*"),
    Row("activation", 10, module="blocks.*.attn"),
    Row("activation", 100, module="blocks.*.attn.proj", tensor="bfloat16[4]"),
    Row("activation", 1000, module="blocks.*.attention", tensor="float32[4]"),
    Row("gradient", 10_000, module="blocks.*.attn", tensor="float32[4]"),
    Row("temporary", 100_000),
)


@pytest.mark.parametrize(
    ("category", "module", "nbytes"),
    [
        ("activation", "*", 1111),
        ("activation", "blocks.*.attn", 110),
        ("activation", "*.attn", 110),
        ("activation", "blocks", 1111),
        ("activation", "attn", 0),
        ("activation", "blocks.*.att*", 1110),
        ("buffer", "*", 0),
    ],
)
def test_a_composition_tells_the_bytes_of_a_category_within_modules(category, module, nbytes):
    assert BLOCKS.of(category, module) == nbytes


def test_a_category_that_there_is_not_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=re.escape("'activations' is no category; did you mean 'activation'?")):
        BLOCKS.of("activations")


def test_a_composition_tells_the_dtypes_in_modules():
    assert BLOCKS.dtypes() == {"bfloat16", "float32"}
    assert BLOCKS.dtypes("*.attn") == {"bfloat16", "float32"}
    assert BLOCKS.dtypes("*.attn", "activation") == {"bfloat16"}
    assert BLOCKS.dtypes("*.attn", "buffer") == frozenset()


# What is kept


def test_what_is_kept_makes_up_95_percent_with_as_few_rows_as_do():
    rows = [Row("activation", nbytes) for nbytes in (90, 5, 4, 1)]
    kept = composition_of(*rows).kept()
    assert kept.rows == (*rows[:2], Row("activation", 5, operator=REST, count=2))
    assert (kept.total, kept.rest) == (100, 0)


@pytest.mark.parametrize("category", ["activation", "gradient", "optimizer state"])
def test_rows_as_large_as_the_last_one_are_kept_with_it(category):
    """95 % end at the second of three equal rows."""
    equal = [Row(category, 4, module=name) for name in ("to_k", "to_q", "to_v")]
    rows = [Row("activation", 88), *equal, Row("activation", 1)]
    assert composition_of(*rows).kept().rows == (*rows[:4], Row("activation", 1, operator=REST))


@pytest.mark.parametrize(("tied", "listed"), [(MOST_TIED, MOST_KEPT + MOST_TIED), (MOST_TIED + 1, MOST_KEPT)])
def test_a_tie_at_the_hundredth_row_is_kept_whole_unless_it_is_large(tied, listed):
    rows = [Row("activation", 20, module=f"m{number}") for number in range(MOST_KEPT - 1)]
    rows += [Row("activation", 10, module=f"n{number}") for number in range(1 + tied)]
    kept = composition_of(*rows, *(Row("activation", 9, module=f"o{number}") for number in range(99))).kept()
    assert len([row for row in kept.rows if row.operator != REST]) == listed


def test_workspaces_do_not_stand_for_the_rows_of_a_small_model():
    rows = [Row("workspace", 1000), *(Row("activation", 10 - number, module=f"m{number}") for number in range(4))]
    assert composition_of(*rows).kept().rows == tuple(rows)


def test_what_is_missing_from_the_other_rows_is_kept_with_them():
    # Somebody else's block that was freed meanwhile: the others hold more than the total.
    whole = composition_of(Row("activation", 60), Row("gradient", 50), Row("unattributed", -10))
    assert whole.kept() == whole


def test_at_most_100_rows_are_kept_and_each_categorys_rest_is_one_row():
    activations = [Row("activation", 10, module=f"m{number}", count=2) for number in range(200)]
    gradients = [Row("gradient", 9, module=f"m{number}") for number in range(30)]
    kept = composition_of(*activations, *gradients).kept()
    assert len([row for row in kept.rows if row.operator != REST]) == 100
    assert [row for row in kept.rows if row.operator == REST] == [
        Row("activation", 1000, operator=REST, count=200),
        Row("gradient", 270, operator=REST, count=30),
    ]
    assert [kept.of(category) for category in ("activation", "gradient")] == [2000, 270]


@unhurried
@given(st.lists(ROWS, max_size=60), st.none() | UNATTRIBUTED)
def test_what_is_kept_and_the_rest_add_up_and_the_rest_is_never_less_than_nothing(rows, unattributed):
    whole = composition_of(*rows, *([unattributed] if unattributed is not None else []))
    assume(whole.total >= 0)
    kept = whole.kept()
    rows, others = ([row for row in kept.rows if (row.operator == REST) is rest] for rest in (False, True))
    assert kept.total == whole.total
    assert set(rows) <= set(whole.rows)
    assert len(rows) <= MOST_KEPT + MOST_TIED
    assert len(rows) <= MOST_KEPT or rows[MOST_KEPT - 1].nbytes == rows[-1].nbytes
    left = [row.nbytes for row in whole.rows if row not in rows]
    assert not rows or left.count(rows[-1].nbytes) in (0, *range(MOST_TIED + 1, len(left) + 1)), "no tie is split"
    assert kept.rest == whole.rest, "a file of the store with more than the peak in its rows is refused"
    rest = sum(row.nbytes for row in others)
    assert len(rows) >= MOST_KEPT or rest <= (1 - KEPT_SHARE) * whole.total + 1e-6 * whole.total
    assert [kept.of(category) for category in CATEGORIES] == [whole.of(category) for category in CATEGORIES]
    assert kept.kept() == kept


def test_what_is_kept_says_what_was_recomputed_and_noted_as_well():
    whole = Composition(100, (Row("input", 100),), {"blocks.*": 4}, ("a note",))
    assert whole.kept() == whole


def test_of_modules_those_are_kept_that_are_unlike_what_is_around_them():
    calls = {"net": Calls(0, 1), "teacher": Calls(1, 1), "teacher.h.*": Calls(6, 6)}
    kept = Composition(100, (Row("input", 100),), no_grad=calls, no_backward=calls).kept()
    assert kept.no_grad == kept.no_backward == {"(all)": (7, 8), "teacher": (1, 1)}
    assert kept.kept() == kept


# Through JSON, and to other processes

COMPOSITIONS = st.builds(
    Composition,
    st.integers(0, 2**60),
    st.lists(ROWS | UNATTRIBUTED, max_size=4).map(tuple),
    st.dictionaries(NAMES, st.integers(1, 99), max_size=3),
    st.lists(NAMES, max_size=2).map(tuple),
    *[st.dictionaries(NAMES, st.builds(Calls, st.integers(0, 99), st.integers(0, 99)), max_size=2)] * 2,
)
EXPLANATIONS = st.builds(
    Explanation,
    COMPOSITIONS,
    COMPOSITIONS,
    COMPOSITIONS,
    st.lists(NAMES, max_size=2).map(tuple),
    st.none() | st.integers(0, 2**60),
)


@unhurried
@given(EXPLANATIONS)
def test_an_explanation_travels_whole(explanation):
    assert from_plain(Explanation, json.loads(json.dumps(to_plain(explanation)))) == explanation
    assert pickle.loads(pickle.dumps(explanation)) == explanation


def test_an_explanation_keeps_the_largest_rows_of_each_of_its_compositions():
    many = composition_of(*(Row("activation", 10, module=f"m{number}") for number in range(300)))
    kept = Explanation(many, many, many, ("a -> a",), 5).kept()
    assert [len(one.rows) for one in (kept.peak, kept.retained, kept.garbage)] == [101, 101, 101]
    assert (kept.cycles, kept.asked) == (("a -> a",), 5)


def test_what_was_recomputed_cannot_be_changed_afterwards():
    composition = Composition(0, (), {"b": 1, "a": 2})
    assert list(composition.recomputed) == ["a", "b"]
    with pytest.raises(TypeError):
        composition.recomputed["a"] = 3


CHAIN, OTHER = ("lib 2.0: model.py:8", "train.py:9"), ("lib 2.0: head.py:3", "train.py:9")


def test_callers_and_the_named_caller_leave_a_process_and_no_baseline_has_them():
    row = Row("activation", 8, site="train.py:9", library="lib 2.0: ops.py:2", callers=(CHAIN, OTHER), named=CHAIN[0])
    read = row_from_text(text_with_callers(row))
    assert (read.callers, read.named) == (row.callers, row.named)
    assert row_from_text(row.text()).callers == ()
    assert text_with_callers(replace(row, callers=(), named="")) == row.text()


def test_callers_do_not_tell_rows_apart():
    row = Row("activation", 8, site="train.py:9", library="lib 2.0: ops.py:2", callers=(CHAIN,))
    (one,) = merge_rows([row, replace(row, callers=(OTHER,)), replace(row, callers=(CHAIN,))])
    assert (one.nbytes, one.count, one.callers) == (24, 3, (CHAIN, OTHER))
    assert one == replace(one, callers=(), named="x.py:1")


def test_the_callers_of_all_layers_are_those_of_the_row_that_joins_them():
    rows = [
        Row("activation", 8, f"h.{layer}.attn", "m.py:1", callers=(chain,))
        for layer, chain in enumerate((CHAIN, OTHER))
    ]
    (one,) = join_layers(rows, {"h.*.attn": [(0,), (1,)]})
    assert (one.path, one.callers) == ("h.*.attn", (CHAIN, OTHER))


def test_of_many_ways_to_a_line_a_few_are_kept():
    row = Row("activation", 8, site="m.py:1")
    (one,) = merge_rows(replace(row, callers=((f"c.py:{number}",),)) for number in range(MOST_CHAINS + 3))
    assert one.callers == tuple((f"c.py:{number}",) for number in range(MOST_CHAINS))


@pytest.mark.parametrize(
    ("site", "library", "named", "expected"),
    [
        ("t.py:9", "lib 2.0: o.py:2", "", "lib 2.0: o.py:2 (from t.py:9)"),
        ("t.py:9", "lib 2.0: o.py:2", "lib 2.0: m.py:8", "lib 2.0: m.py:8, which calls lib 2.0: o.py:2 (from t.py:9)"),
        ("t.py:9", "lib 2.0: o.py:2", "t.py:9", "t.py:9, which calls lib 2.0: o.py:2"),
        ("t.py:9", "lib 2.0: o.py:2", "lib 2.0: o.py:2", "lib 2.0: o.py:2 (from t.py:9)"),
        ("h.py:1", "", "t.py:9", "t.py:9, which calls h.py:1"),
        ("h.py:1", "", "h.py:1", "h.py:1"),
    ],
)
def test_a_named_caller_comes_before_the_line_that_it_calls(site, library, named, expected):
    assert Row("activation", 8, site=site, library=library, named=named).where == expected


def test_callers_leave_each_composition_of_an_explanation():
    called = Composition(8, (Row("activation", 8, site="t.py:1", callers=(("m.py:5", "t.py:1"),)),))
    holders = (Holder("Net.seen[...]", called),)
    explanation = Explanation(
        called, called, called, holders=holders, holders_of_inputs=holders, other_phases={"a": called}
    )
    plain = explanation_without_callers(explanation)
    compositions = [
        *(plain.peak, plain.retained, plain.garbage, plain.other_phases["a"]),
        *(holder.kept for holder in (*plain.holders, *plain.holders_of_inputs)),
    ]
    assert [row.callers for composition in compositions for row in composition.rows] == [()] * 6


def test_of_many_possible_holders_three_are_named():
    holder = holder_at("edcba", Composition(8, ()))
    assert (holder.text, holder.alternatives) == ("kept in: a or b or c or 2 others", tuple("abcde"))
