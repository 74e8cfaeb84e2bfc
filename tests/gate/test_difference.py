"""What changed between two compositions: nothing for a refactoring, and for a regression the row that a person would name."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.facts.values.categories import CATEGORIES
from pytest_gpumem.facts.values.composition import REST, Composition, Row, merge_rows
from pytest_gpumem.facts.values.module_calls import EVERYWHERE, Caller, Calls
from pytest_gpumem.facts.values.plain import from_plain, to_plain
from pytest_gpumem.judging.gate.difference import (
    Change,
    Difference,
    PeakMove,
    difference,
    difference_of_peaks,
    with_changed_lines,
)

SIZES = {"bool": 1, "bfloat16": 2, "float32": 4, "int64": 8}


def row(
    module: str = "h.*.attn",
    operator: str = "softmax",
    dtype: str = "float32",
    shape: tuple[int, ...] = (8, 64),
    *,
    count: int = 4,
    category: str = "activation",
    site: str = "model.py:10",
    library: str = "",
) -> Row:
    elements = 1
    for size in shape:
        elements *= size
    nbytes = count * elements * SIZES[dtype]
    return Row(category, nbytes, module, site, library, operator, f"{dtype}{list(shape)}", count)


def made_of(*rows: Row, recomputed: dict[str, int] | None = None) -> Composition:
    return Composition(sum(one.nbytes for one in rows), rows, recomputed or {})


def stored(composition: Composition) -> Composition:
    """What a baseline keeps of it, and gives back."""
    return from_plain(Composition, to_plain(composition.kept()))


WEIGHTS = row("h.*.mlp", "addmm", shape=(64, 256), site="model.py:20")
PARAMETER = row("h.*.mlp", "", shape=(256, 64), category="parameter", site="model.py:5")


def of_release(release: str, line: int, *, kept: bool = False) -> Composition:
    """A model of a library: two lines of one module whose tensors are alike, of which ``kept`` has one tensor more."""
    path = f"transformers {release}: models/llama/modeling_llama.py"
    return made_of(
        row(count=4 + kept, site="test.py:9", library=f"{path}:{line}"),
        row(count=2, site="test.py:9", library=f"{path}:{line + 30}"),
    )


def test_equal_rows_of_two_releases_match_although_lines_moved():
    assert difference(of_release("4.37.2", 300), of_release("4.38.2", 341)).changes == ()


@pytest.mark.parametrize("line", [300, 307])
def test_what_grew_between_two_releases_is_told_at_its_line_of_the_later_one(line):
    (change,) = difference(of_release("4.37.2", 300), of_release("4.38.2", line, kept=True)).changes
    assert change.after.library == f"transformers 4.38.2: models/llama/modeling_llama.py:{line}"
    assert change.before.library == "transformers 4.37.2: models/llama/modeling_llama.py:300"


def first(before: Composition, after: Composition) -> Change:
    return difference(before, after).changes[0]


# A peak that moved to another phase

LOGITS = row("head", "mm", shape=(64, 1000), count=1)
CAST = row("loss", "to", shape=(64, 1000), category="temporary", count=1, site="loss.py:36")
COPIED = row("loss", "contiguous", shape=(63, 1000), category="temporary", count=1, site="loss.py:38")
GRADIENT = row("loss", "NllLossBackward0", shape=(100, 1000), category="temporary", count=1, site="loss.py:26")


def at(phase: str, *rows: Row) -> Composition:
    return replace(made_of(PARAMETER, *rows), phase=phase)


def test_a_peak_that_moved_is_compared_with_what_was_there_in_its_phase_then():
    was, is_now = at("backward", LOGITS, GRADIENT), at("forward", LOGITS, CAST, COPIED)
    then, there = at("forward", LOGITS, CAST), at("backward", LOGITS, GRADIENT)
    told = difference_of_peaks(was, is_now, {"forward": then}, {"backward": there})
    assert told.changes == (Change(None, COPIED),)
    assert (told.before, told.after) == (then.total, is_now.total)
    assert told.moved == PeakMove("backward", "forward", "forward", there.total)


def test_a_peak_that_moved_is_else_compared_at_its_old_phase_now():
    was, is_now = at("backward", LOGITS, GRADIENT), at("forward", LOGITS, CAST, COPIED)
    wider = row("head", "mm", shape=(64, 2000), count=1)
    told = difference_of_peaks(was, is_now, {}, {"backward": at("backward", wider, GRADIENT)})
    assert [(one.before, one.after) for one in told.changes] == [(LOGITS, wider)]
    assert told.moved == PeakMove("backward", "forward", "backward", PARAMETER.nbytes + wider.nbytes + GRADIENT.nbytes)


@pytest.mark.parametrize(("before", "after"), [("forward", "forward"), ("", "forward"), ("forward", "")])
def test_a_peak_in_the_same_phase_or_in_one_that_is_not_known_is_compared_as_it_is(before, after):
    was, is_now = at(before, LOGITS), at(after, LOGITS, COPIED)
    phases = {"forward": at("forward", CAST), "backward": at("backward", CAST)}
    assert difference_of_peaks(was, is_now, phases, phases) == difference(was, is_now)


# Layers


def test_a_layer_that_differs_is_told_by_its_number_and_the_others_are_not():
    small, wide = row("h.*.mlp", "addmm", shape=(8, 64), count=1), row("h.3.mlp", "addmm", shape=(8, 256), count=1)
    four = replace(small, count=4, nbytes=4 * small.nbytes)
    three = replace(small, count=3, nbytes=3 * small.nbytes, layers=((0, 1, 2),))
    (change,) = difference(made_of(four), made_of(three, wide)).changes
    assert change.row.path == "h.3.mlp"
    assert (change.nbytes, change.reason) == (wide.nbytes - small.nbytes, "was float32[8, 64], now float32[8, 256]")
    # Two now, where one was before.
    two, wider = (
        replace(one, count=2, nbytes=2 * one.nbytes, layers=((2 * n, 2 * n + 1),))
        for n, one in enumerate((small, wide))
    )
    (change,) = difference(made_of(three, wide), made_of(two, wider)).changes
    assert (change.before, change.after) == (replace(small, layers=((2,),)), replace(wide, layers=((2,),)))


def test_a_layer_that_saves_more_of_the_same_is_told():
    once = row("h.*", count=4)
    other, twice = (
        replace(once, count=n, nbytes=n * once.nbytes // 4, layers=layers)
        for n, layers in ((3, ((0, 1, 2),)), (2, ((3,),)))
    )
    (change,) = difference(made_of(once), made_of(other, twice)).changes
    assert (change.row.path, change.reason) == ("h.3", "1 -> 2 tensors")


def test_a_baseline_from_before_layers_were_named_is_equal():
    named = (
        replace(row("h.*", count=3), layers=((0, 1, 2),)),
        replace(row("h.*", shape=(9, 9), count=1), layers=((3,),)),
    )
    assert difference(made_of(*(replace(one, layers=()) for one in named)), made_of(*named)).changes == ()


# Refactorings


def renamed(one: Row) -> Row:
    return replace(one, module=one.module.replace("attn", "attention").replace("h.", "blocks."))


def moved(one: Row) -> Row:
    file, _, number = one.site.partition(":")
    return replace(one, site=f"{file}:{int(number) + 7}")


def from_the_library(one: Row) -> Row:
    return replace(one, site="train.py:3", library="transformers/models/gpt2/modeling_gpt2.py:63")


def respelled(one: Row) -> Row:
    return replace(one, operator=f"_{one.operator}") if one.operator else one


def all_at_once(one: Row) -> Row:
    return renamed(moved(respelled(one)))


@pytest.mark.parametrize("refactored", [renamed, moved, from_the_library, respelled, all_at_once])
def test_a_refactoring_shows_nothing(refactored):
    rows = (row(), row(operator="dropout", site="model.py:12"), WEIGHTS, PARAMETER)
    assert difference(made_of(*rows), made_of(*map(refactored, rows))).changes == ()


def test_a_function_that_becomes_a_module_shows_nothing():
    before = made_of(row("net", "relu", count=3), WEIGHTS)
    after = made_of(row("net.relu", "relu", count=3, site="layers.py:90"), WEIGHTS)
    assert difference(before, after).changes == ()


def test_one_module_split_into_two_shows_nothing():
    before = made_of(row("h.*", "add", count=8))
    after = made_of(row("h.*.first", "add", count=4), row("h.*.second", "add", count=4, site="model.py:30"))
    assert difference(before, after).changes == ()


def test_what_is_passed_on_otherwise_but_is_as_large_shows_nothing():
    before = made_of(row("head", "mm", count=1), WEIGHTS)
    after = made_of(row("", "view", count=1, category="temporary"), WEIGHTS)
    assert difference(before, after).changes == ()


# Why


def test_a_wider_dtype_is_told_as_such():
    change = first(made_of(row(dtype="bfloat16"), WEIGHTS), made_of(moved(row()), WEIGHTS))
    assert (change.row, change.reason) == (moved(row()), "was bfloat16, now float32")


def test_a_wider_dtype_is_told_also_when_another_operator_makes_it():
    mask = row(operator="ge", dtype="bool")
    change = first(made_of(row(), mask), made_of(row(), row(operator="to", site="model.py:9")))
    assert change.before == mask
    assert change.reason == "was bool, now float32"


def test_a_cast_beside_what_is_still_there_is_told():
    narrow = row(dtype="bfloat16")
    change = first(made_of(narrow), made_of(narrow, row(operator="to", site="model.py:11")))
    assert change.reason == "was bfloat16 only, now also float32"


def test_another_shape_is_told():
    change = first(made_of(row(shape=(4, 64, 64))), made_of(row(shape=(4, 128, 128))))
    assert change.reason == "was float32[4, 64, 64], now float32[4, 128, 128]"


def test_what_is_kept_that_was_freed_is_told_whether_or_not_a_backward_follows():
    freed = row(category="temporary", count=1)
    assert first(made_of(freed), made_of(row(count=4))).reason == "was temporary, now kept"


def test_what_was_another_category_is_not_told_as_freed_before():
    parameter = row(category="parameter", count=1)
    assert first(made_of(parameter), made_of(row(count=4))).reason == "1 -> 4 tensors"


def test_more_of_the_same_is_told():
    assert first(made_of(row(count=4)), made_of(row(count=12))).reason == "4 -> 12 tensors"


def test_what_is_saved_twice_at_a_line_is_told():
    change = first(made_of(row(operator="mul")), made_of(moved(row(operator="mul")), moved(row(operator="sigmoid"))))
    assert change.row.operator == "sigmoid"
    assert change.reason == "saved twice: mul still saves 4 x float32[8, 64] as well"


def test_what_is_as_large_at_another_line_is_not_said_to_be_saved_twice():
    before = made_of(row())
    assert first(before, made_of(row(), row(operator="triu", site="model.py:33"))).reason == ""


@pytest.mark.parametrize("operator", ["clone", "contiguous"])
def test_a_copy_is_called_one(operator):
    assert first(made_of(row()), made_of(row(), row(operator=operator))).reason == "a copy"


def test_checkpointing_that_was_lost_is_told_for_what_is_kept_again():
    before = made_of(WEIGHTS, recomputed={"h.*": 4})
    after = made_of(WEIGHTS, row(count=2), recomputed={"h.*": 2})
    assert first(before, after).reason == "checkpointing off: h.* was recomputed in 4 calls, now in 2"
    none = made_of(WEIGHTS, row(count=2))
    assert first(before, none).reason == "checkpointing off: h.* was recomputed in 4 calls, now in none"


def test_fewer_and_larger_micro_batches_do_not_switch_checkpointing_off():
    def of(samples: int, calls: int) -> Composition:
        kept = Row("activation", samples * 1024, "h.*", "model.py:3", "", "addmm", f"float32[{samples}, 256]")
        return Composition(kept.nbytes, (kept,), {"h.*": calls})

    told = first(of(256, 16), of(512, 8))
    assert told.reason == "was float32[256, 256], now float32[512, 256]"


def test_checkpointing_elsewhere_is_no_reason():
    before = made_of(WEIGHTS, recomputed={"encoder.*": 4})
    assert first(before, made_of(WEIGHTS, row())).reason == ""


def graph(*rows: Row, **calls: dict[str, Calls]) -> Composition:
    return replace(made_of(WEIGHTS, *rows), **calls)


OFF, ON = {"h.*": Calls(4, 4), "h.*.attn": Calls(4, 4)}, {"h.*": Calls(0, 4), "h.*.attn": Calls(0, 4)}


CALLERS = {
    "h.*": [Caller("net", "net.py:8")],
    "h.*.attn": [Caller("h.*", "block.py:3")],
    "net": [Caller("", "train.py:41")],
}


def explained(before: Composition, after: Composition) -> Difference:
    return difference_of_peaks(before, after, {}, {}, CALLERS)


@pytest.mark.parametrize("grown", [row(), row(category="gradient"), row(category="temporary", operator="MulBackward0")])
def test_a_lost_no_grad_is_said_of_the_outermost_module_and_of_no_row(grown):
    before, after = graph(no_grad=OFF), graph(grown, no_grad=ON)
    for found in (explained(before, after), explained(stored(before), after)):
        (change,) = found.graph
        assert (change.kind, change.module, change.lines, change.within) == (
            "no_grad",
            "h.*",
            ("net.py:8",),
            ("h.*.attn",),
        )
        assert change.sentence == (
            "Grad mode was off in `h.*` (called at net.py:8) in the baseline, and is on now: "
            "autograd keeps its activations for backward."
        )
        assert found.changes[0].reason == ""


def test_a_no_grad_around_the_whole_step_is_said_of_its_callers_line():
    before = graph(no_grad={EVERYWHERE: Calls(9, 9)})
    after = graph(row(), no_grad={**ON, "net": Calls(0, 1)})
    (change,) = explained(before, after).graph
    assert (change.module, change.lines) == ("net", ("train.py:41",))


def test_a_no_grad_that_some_calls_lost_is_said_with_their_number_and_every_line():
    before = graph(row(count=1), no_grad={"h.*.attn": Calls(3, 4)})
    after = graph(row(), no_grad={"h.*.attn": Calls(1, 4)})
    callers = {"h.*.attn": [Caller("", f"block.py:{number}") for number in (3, 5, 7, 9)]}
    (change,) = difference_of_peaks(before, after, {}, {}, callers).graph
    assert change.sentence == (
        "Grad mode was off in 3 of 4 calls of `h.*.attn` (called at block.py:3, block.py:5, block.py:7 or 1 other line) "
        "in the baseline, and in 1 of 4 now: autograd keeps its activations for backward."
    )


def test_a_no_grad_that_all_calls_had_and_some_have_is_said_of_all():
    before, after = graph(no_grad={EVERYWHERE: Calls(9, 9)}), graph(row(), no_grad={"h.*.attn": Calls(1, 4)})
    (change,) = explained(before, after).graph
    assert "was off in all calls of `h.*.attn` (called at block.py:3)" in change.sentence
    assert "and in 1 of 4 now" in change.sentence


def test_a_module_that_backward_reaches_now_is_said_once():
    before, after = graph(no_grad=ON, no_backward=OFF), graph(row(), no_grad=ON, no_backward=ON)
    (change,) = explained(before, after).graph
    assert change.sentence == (
        "Backward did not reach `h.*` (called at net.py:8) in the baseline, and does now: "
        "its activations are kept until then."
    )


def test_a_module_that_two_modules_call_has_both_for_causes():
    off = {"a": Calls(1, 1), "b": Calls(1, 1), "h.*.attn": Calls(2, 2)}
    on = {path: Calls(0, calls.total) for path, calls in off.items()}
    callers = {"h.*.attn": [Caller("a", "a.py:1"), Caller("b", "b.py:1")]}
    found = difference_of_peaks(graph(no_grad=off), graph(row(), no_grad=on), {}, {}, callers)
    assert [change.module for change in found.graph] == ["a", "b"]


def test_a_lost_no_grad_that_explains_next_to_nothing_is_not_said():
    other = row("head", shape=(64, 256, 1000))
    before, after = graph(no_grad=OFF), graph(row(), other, no_grad={**ON, "head": Calls(0, 1)})
    assert explained(before, after).graph == ()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (graph(no_grad=ON), graph(row(), no_grad=ON)),
        (graph(no_grad=OFF), graph(row(), no_grad=OFF)),
        (graph(no_grad=OFF), graph(row("head"), no_grad={**ON, "head": Calls(0, 1)})),
        (graph(no_grad=OFF), graph(row(""), no_grad=ON)),
        (graph(no_grad=OFF), graph(row(category="parameter"), no_grad=ON)),
        # A baseline of before there was such a thing; one that was recorded without its modules; so is this run.
        (graph(), graph(row(), no_grad=ON)),
        (graph(no_grad=OFF), graph(row())),
    ],
    ids=["on", "off", "elsewhere", "in no module", "no part of the graph", "older", "unseen"],
)
def test_where_grad_mode_did_not_change_nothing_is_said_of_it(before, after):
    assert explained(before, after).graph == ()


def test_another_dtype_stays_the_reason_of_a_row_beside_grad_mode():
    before, after = graph(row(dtype="bfloat16"), no_grad=OFF), graph(row(), no_grad=ON)
    found = explained(before, after)
    assert found.changes[0].reason == "was bfloat16, now float32"
    assert [change.module for change in found.graph] == ["h.*"]


def test_what_shrank_has_no_reason():
    change = first(made_of(row(), WEIGHTS), made_of(row(dtype="bfloat16"), WEIGHTS))
    assert (change.nbytes, change.reason) == (-row().nbytes // 2, "")


# Which row


def test_what_grew_at_its_place_is_not_taken_for_what_moved():
    # Twice as much of everything: 3 and 6 become 6 and 12, and the 6 of one are not the 6 of the other.
    before = made_of(row(operator="add", count=3), row(operator="mul", count=6))
    changes = difference(before, made_of(row(operator="add", count=6), row(operator="mul", count=12))).changes
    assert [(one.row.operator, one.reason) for one in changes] == [
        ("mul", "6 -> 12 tensors"),
        ("add", "3 -> 6 tensors"),
    ]


def test_of_rows_alike_the_one_at_the_line_with_more_news_is_the_news():
    # silu(gate) * up became gate * sigmoid(gate), times up: its two tensors are at line 165.
    before = made_of(row("mlp.act", "silu", site="model.py:164"), row("mlp", "mul", site="model.py:164"))
    after = made_of(
        row("mlp", "sigmoid", site="model.py:165"),
        row("mlp", "mul", site="model.py:165"),
        row("mlp", "mul", site="model.py:166"),
    )
    (change,) = difference(before, after).changes
    assert change.row.site == "model.py:165"


def test_of_lines_with_as_much_news_the_nearest_is_where_the_row_was():
    state = row("h.*", "zeros_like", category="optimizer state", site="train.py:21")
    first_of_two, second = replace(state, site="train.py:22"), replace(state, site="train.py:23")
    (change,) = difference(made_of(state), made_of(second, first_of_two)).changes
    assert change.row == second
    few_bytes = Row("workspace", 12, site="train.py:22", operator="div")
    assert first(made_of(state), made_of(second, first_of_two, few_bytes)).row == second
    far, near = replace(state, site="train.py:10"), replace(state, site="train.py:20")
    (change,) = difference(made_of(state), made_of(far, near)).changes
    assert change.row == far


def test_of_changes_alike_the_one_at_the_line_that_grew_most_is_first():
    before = made_of(
        row(count=1), row(operator="sub", site="z.py:2", count=1), row(operator="tanh", site="z.py:2", count=1)
    )
    after = made_of(*(replace(one, nbytes=3 * one.nbytes, count=3) for one in before.rows))
    assert [change.row.site for change in difference(before, after).changes] == ["z.py:2", "z.py:2", "model.py:10"]


def test_changed_lines_come_first_unless_little_grew_and_the_changes_add_up():
    sizes = {"kept.py:1": 1000, "changed.py:2": 400, "changed.py:3": 1}
    added = [row(operator=f"op{n}", shape=(8 * size,), site=site) for n, (site, size) in enumerate(sizes.items())]
    plain = difference(made_of(WEIGHTS), made_of(WEIGHTS, *added))
    told = with_changed_lines(plain, lambda one: "changed line" if one.site.startswith("changed") else "")
    assert [change.row.site for change in plain.changes] == [*sizes]
    assert [change.row.site for change in told.changes] == ["changed.py:2", "kept.py:1", "changed.py:3"]
    reasons = [change.reason for change in told.changes]
    assert [one.startswith("changed line") for one in reasons] == [True, False, True]
    assert sum(change.nbytes for change in told.changes) == plain.nbytes == told.nbytes


def test_what_shrank_at_a_changed_line_is_no_reason():
    shrunk = difference(made_of(WEIGHTS, row(count=2)), made_of(WEIGHTS, row(count=1)))
    assert with_changed_lines(shrunk, lambda _: True) == shrunk


def test_rows_that_matter_are_told_until_they_explain_most_of_the_growth():
    added = [
        row(operator=f"op{n}", shape=(8 * size,), site=f"a.py:{n}") for n, size in enumerate((100, 50, 40, 30, 20, 1))
    ]
    told = difference(made_of(WEIGHTS), made_of(WEIGHTS, *added)).explaining()
    assert [change.row.operator for change in told] == ["op0", "op1", "op2", "op3"]
    assert difference(made_of(WEIGHTS), made_of(WEIGHTS)).explaining() == ()


# What a baseline did not keep


def many(count: int, nbytes: int) -> list[Row]:
    return [
        Row("activation", nbytes, f"m{n}", f"a.py:{n}", "", "mul", f"float32[{nbytes // 4}, {n}]") for n in range(count)
    ]


FEW_BYTES = Row("activation", 12, operator="arange")


def as_older_versions_kept(whole: Composition) -> Composition:
    """Return what a baseline kept when rows that it did not keep had no category."""
    return replace(stored(whole), rows=tuple(row for row in stored(whole).rows if row.operator != REST))


@pytest.mark.parametrize("keep", [stored, as_older_versions_kept])
def test_rows_that_the_baseline_did_not_keep_are_no_growth(keep):
    whole = made_of(WEIGHTS, *many(200, 400))
    assert len(keep(whole).rows) < 110
    assert difference(keep(whole), whole).changes == ()


@pytest.mark.parametrize(
    ("keep", "changed"),
    [(stored, ("activation", "arange", 12)), (as_older_versions_kept, ("other", REST, 12))],
)
def test_a_few_bytes_more_among_the_small_rows_do_not_bring_one_of_them_up(keep, changed):
    """Bytes and number of blocks prove the new row; in baselines of older versions nothing does."""
    whole = made_of(WEIGHTS, *many(200, 400))
    (change,) = difference(keep(whole), made_of(*whole.rows, FEW_BYTES)).changes
    assert (change.row.category, change.row.operator, change.nbytes) == changed


def test_growth_among_small_rows_brings_up_none_of_another_category():
    gradients = [replace(one, category="gradient") for one in many(100, 400)]
    whole = made_of(WEIGHTS, *many(100, 400), *gradients)
    new = [replace(one, module=f"new{number}") for number, one in enumerate(many(5, 300))]
    changes = difference(stored(whole), made_of(*whole.rows, *new)).changes
    assert sum(change.nbytes for change in changes) == 1500
    assert {change.row.category for change in changes} == {"activation"}


def test_a_large_new_row_is_first_also_against_what_a_baseline_kept():
    whole = made_of(WEIGHTS, *many(200, 400))
    new = row(operator="clone", shape=(8, 512))
    change = first(stored(whole), made_of(*whole.rows, new))
    assert change.row == new


@pytest.mark.parametrize("grown", [True, False], ids=["more", "less"])
def test_a_large_row_moves_none_of_the_small_ones_where_neither_side_kept_them(grown):
    small = [replace(one, category="parameter") for one in many(200, 400)]
    big = row(operator="clone", shape=(8, 4096))
    without, with_big = stored(made_of(WEIGHTS, *small)), stored(made_of(WEIGHTS, *small, big))
    assert len(with_big.rows) < len(without.rows)
    before, after = (without, with_big) if grown else (with_big, without)
    (change,) = difference(before, after).changes
    assert change.row == big


# Properties

rows = st.builds(
    row,
    module=st.sampled_from(["", "h.*.attn", "h.*.mlp", "head"]),
    operator=st.sampled_from(["softmax", "mul", "addmm", "to"]),
    dtype=st.sampled_from(sorted(SIZES)),
    shape=st.sampled_from([(8, 64), (64, 8), (4, 4, 4), (1,)]),
    count=st.integers(1, 12),
    category=st.sampled_from([one for one in CATEGORIES if one != "unattributed"]),
    site=st.sampled_from(["", "model.py:10", "model.py:11", "train.py:3"]),
    library=st.sampled_from(["", "lib/nn.py:40"]),
)
compositions = st.lists(rows, max_size=40).map(lambda found: made_of(*merge_rows(found)))


@given(compositions, compositions)
def test_changes_add_up_to_the_growth(before, after):
    for old in (before, before.kept()):
        told = difference(old, after)
        assert sum(change.nbytes for change in told.changes) == told.nbytes == after.total - before.total


@given(compositions)
def test_nothing_changes_from_a_composition_to_itself(composition):
    assert difference(composition, composition).changes == ()
    assert difference(stored(composition), composition).changes == ()
    assert difference(stored(composition), composition.kept()).changes == ()


@given(compositions, st.permutations(["h.*.attn", "h.*.mlp", "head"]), st.integers(0, 50))
def test_no_renaming_of_modules_and_no_moved_lines_change_anything(composition, names, lines):
    new_names = dict(zip(["h.*.attn", "h.*.mlp", "head"], names, strict=True))
    after = [
        replace(
            one,
            module=new_names.get(one.module, one.module) and f"net.{new_names[one.module]}",
            site=one.site and f"{one.site.partition(':')[0]}:{int(one.site.partition(':')[2]) + lines}",
        )
        for one in composition.rows
    ]
    assert difference(composition, made_of(*merge_rows(after))).changes == ()


@given(compositions, compositions)
def test_each_row_is_in_one_change_at_most_and_none_is_without_bytes(before, after):
    told = difference(before, after).changes
    assert all(change.nbytes for change in told)
    for side, of in ((before, "before"), (after, "after")):
        found = [getattr(change, of) for change in told if getattr(change, of) is not None]
        assert len(set(found)) == len(found)
        assert set(found) <= set(side.rows)


@given(compositions, compositions)
def test_growth_comes_first_and_the_order_of_rows_does_not_matter(before, after):
    told = difference(before, after)
    assert [change.nbytes for change in told.changes] == sorted((one.nbytes for one in told.changes), reverse=True)
    shuffled = list(after.rows)
    random.Random(0).shuffle(shuffled)
    assert difference(before, replace(after, rows=tuple(shuffled))) == told


@given(compositions, compositions)
def test_a_difference_travels_as_plain_values(before, after):
    told = difference(before, after)
    assert from_plain(Difference, to_plain(told)) == told


@given(compositions, st.integers(1, 12))
def test_a_row_that_is_all_that_is_new_is_the_only_change(composition, count):
    new = row("tail", "stack", shape=(7, 7), count=count, site="new.py:1")
    (change,) = difference(composition, made_of(*composition.rows, new)).changes
    assert (change.before, change.after) == (None, new)


def test_of_equal_increases_that_of_forward_is_before_that_of_backward():
    """A tensor in backward follows from one in forward, also if its line has more bytes in all."""
    cast = Row("activation", 64, "norm", "net.py:10", operator="to", tensor="float32[16]")
    of_backward = Row("temporary", 64, "norm", "net.py:12", operator="ToCopyBackward0", tensor="float32[16]")
    other = replace(of_backward, nbytes=63, operator="MulBackward0", tensor="float32[15]")
    last = replace(of_backward, nbytes=62, operator="SumBackward0", tensor="float32[14]")
    found = difference(Composition(0, ()), Composition(253, (cast, of_backward, other, last)))
    assert [change.row for change in found.changes] == [cast, of_backward, other, last]
