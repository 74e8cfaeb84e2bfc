"""Choices that are made by an assumption: valid, distinct, and as balanced as masks allow."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.emulating.host_values.routing import AssumedRouting, chosen_of_rows


@given(st.integers(0, 40), st.integers(1, 12), st.data())
def test_each_token_has_other_experts_and_each_expert_the_same_share(tokens, experts, data):
    number = data.draw(st.integers(1, experts))
    chosen = chosen_of_rows("balanced", tokens, experts, number, number, None)
    assert chosen.shape == (tokens, number)
    assert all(len(set(row)) == number for row in chosen.tolist())
    shares = chosen.flatten().bincount(minlength=experts)
    assert int(shares.max() - shares.min()) <= 1


@given(st.integers(0, 20), st.integers(1, 12), st.data())
def test_the_worst_case_is_that_all_tokens_go_to_the_first_experts(tokens, experts, data):
    number = data.draw(st.integers(1, experts))
    assert chosen_of_rows("worst", tokens, experts, number, number, None).tolist() == [[*range(number)]] * tokens


@given(st.sampled_from(["balanced", "worst"]), st.integers(1, 8), st.data())
def test_what_a_mask_takes_away_is_chosen_where_too_few_others_are_left_only(routing, experts, data):
    masks = data.draw(st.lists(st.lists(st.booleans(), min_size=experts, max_size=experts), min_size=1, max_size=12))
    number = data.draw(st.integers(1, experts))
    chosen = chosen_of_rows(routing, len(masks), experts, number, number, torch.tensor(masks)).tolist()
    for row, mask in zip(chosen, masks, strict=True):
        assert len(set(row)) == number
        assert sum(mask[one] for one in row) == max(0, number - mask.count(False))
    of_a_kind = [row for row, mask in zip(chosen, masks, strict=True) if mask == masks[0]]
    shares = torch.tensor(of_a_kind).flatten().bincount(minlength=experts)
    allowed = shares[~torch.tensor(masks[0])]
    if routing == "balanced" and len(allowed) >= number:
        assert int(allowed.max() - allowed.min()) <= 1


def test_more_draws_than_there_are_scores_go_around():
    assert chosen_of_rows("balanced", 1, 2, 3, 3, None).tolist() == [[0, 1, 0]]


def _given(call, **more):
    names = [one.name for one in call._schema.arguments]
    defaults = {one.name: one.default_value for one in call._schema.arguments}
    return {**dict.fromkeys(names), **defaults, **more}


ATEN = torch.ops.aten
CHOICES = [
    (ATEN.topk.default, {"k": 2}, (4, 2), [[0, 1], [2, 0], [1, 2], [0, 1]]),
    (ATEN.topk.default, {"k": 2, "dim": 0}, (2, 3), [[0, 2, 0], [1, 3, 1]]),
    (ATEN.argmax.default, {"dim": -1}, (4,), [0, 1, 2, 0]),
    (ATEN.argmax.default, {"dim": 1, "keepdim": True}, (4, 1), [[0], [1], [2], [0]]),
    (ATEN.argmax.default, {}, (), 0),
    (ATEN.max.dim, {"dim": 1}, (4,), [0, 1, 2, 0]),
    (ATEN.sort.default, {"descending": True}, (4, 3), [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]),
    (ATEN.sort.default, {}, (4, 3), [[2, 1, 0], [0, 2, 1], [1, 0, 2], [2, 1, 0]]),
    (ATEN.multinomial.default, {"num_samples": 1}, (4, 1), [[0], [1], [2], [0]]),
]


@pytest.mark.parametrize(("call", "more", "shape", "expected"), CHOICES)
def test_each_operator_gives_indices_of_its_kind(call, more, shape, expected):
    choosing, made = AssumedRouting(lambda _: True), torch.empty(shape, dtype=torch.int64)
    with choosing.by("balanced"):
        assert choosing.choose(_given(call, self=torch.zeros(4, 3), **more), made, None)
    assert made.tolist() == expected
    assert choosing.made == 1


def test_the_best_come_last_in_a_rising_order():
    choosing, made = AssumedRouting(lambda _: True), torch.empty(4, 3, dtype=torch.int64)
    with choosing.by("worst"):
        choosing.choose(_given(ATEN.sort.default, self=torch.zeros(4, 3)), made, None)
    assert made[:, -2:].flip(1).tolist() == [[0, 1]] * 4


def test_a_group_that_is_masked_is_not_chosen_whether_with_infinity_or_zero():
    scores, mask = torch.zeros(2, 4), torch.tensor([[True, True, False, False], [False, False, True, True]])
    for fill in (-float("inf"), 0.0):
        choosing, made = (
            AssumedRouting(lambda one: one is scores or one.data_ptr() == scores.data_ptr()),
            torch.empty(2, 1),
        )
        taken = choosing.mask("masked_fill", (scores, mask, fill))
        assert taken is not None
        choosing.note_mask(scores, taken)
        with choosing.by("worst"):
            choosing.choose(_given(ATEN.topk.default, self=scores, k=1), made, None)
        assert made.tolist() == [[2], [0]]
    assert choosing.mask("masked_fill", (scores, mask, 1.0)) is None


def test_no_choice_is_made_without_an_assumption_and_none_of_too_many_scores():
    choosing, made = AssumedRouting(lambda _: True), torch.empty(1, 1, dtype=torch.int64)
    assert not choosing.choose(_given(ATEN.topk.default, self=torch.zeros(1, 3), k=1), made, None)
    with choosing.by("balanced"), choosing.by(None):
        assert choosing.routing == "balanced"
        assert not choosing.choose(_given(ATEN.topk.default, self=torch.zeros(1).expand(1, 2**27), k=1), made, None)
    assert choosing.routing is None
