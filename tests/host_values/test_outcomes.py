"""What becomes known about an operator's outputs. These tests use host tensors, because a decision depends on notes only."""

from __future__ import annotations

import pytest
import torch

from pytest_gpumem.emulating.host_values.constants import Constant
from pytest_gpumem.emulating.host_values.host_operators import operator_of, tensors_among
from pytest_gpumem.emulating.host_values.operator_call import Call
from pytest_gpumem.emulating.host_values.outcomes import Outcome, outcome_of
from pytest_gpumem.emulating.host_values.reads import Reads
from pytest_gpumem.emulating.host_values.tensor_notes import TensorNotes

ATEN = torch.ops.aten
NOTHING = Outcome(
    has_known_inputs=False,
    is_known=False,
    is_computed=False,
    routing=None,
    constant=None,
    excluded=None,
    mask=None,
    chosen=None,
)


@pytest.fixture
def notes() -> TensorNotes:
    return TensorNotes(Reads())


def _unknown(notes, *shape, dtype=torch.float32):
    tensor = torch.zeros(shape, dtype=dtype)
    notes.note_unknown(tensor)
    return tensor


def _outcome(notes, func, *args):
    """Return the outcome of an operator and its results, which are filled with 7 before the decision."""
    call = Call(func, operator_of(func), args, {}, tensors_among(args))
    results = tensors_among((call.run(),))
    for tensor in results:
        tensor.fill_(7)
    known = notes.are_known(call.tensors)
    return outcome_of(notes, call, results, results, has_known_inputs=known), results


def test_a_small_result_of_known_inputs_is_computed(notes):
    outcome, (total,) = _outcome(notes, ATEN.add.Tensor, torch.ones(2), torch.ones(2))
    assert outcome == NOTHING._replace(has_known_inputs=True, is_known=True, is_computed=True)
    assert total.tolist() == [2, 2]


def test_a_result_of_unknown_floats_is_unknown(notes):
    assert _outcome(notes, ATEN.neg.default, _unknown(notes, 2))[0] == NOTHING


def test_unknown_integers_are_computed_but_remain_unknown(notes):
    outcome, (total,) = _outcome(notes, ATEN.add.Scalar, _unknown(notes, 2, dtype=torch.int64), 1)
    assert outcome == NOTHING._replace(is_computed=True)
    assert total.tolist() == [1, 1]


def test_allocated_memory_has_no_values(notes):
    outcome, (empty,) = _outcome(notes, ATEN.empty_like.default, torch.ones(2))
    assert outcome == NOTHING._replace(has_known_inputs=True)
    assert empty.tolist() == [7, 7]


def test_unknown_floats_are_assumed_to_be_finite(notes):
    outcome, _ = _outcome(notes, ATEN.isinf.default, _unknown(notes, 2))
    assert outcome == NOTHING._replace(constant=Constant(False, "kept"))


@pytest.mark.parametrize("routing", ["worst", None])
def test_an_assumed_routing_chooses_among_unknown_scores(notes, routing):
    with notes.choosing.by(routing):
        outcome, (values, indices) = _outcome(notes, ATEN.topk.default, _unknown(notes, 2, 3), 2)
    assert outcome.chosen is (None if routing is None else indices)
    assert outcome._replace(chosen=None) == NOTHING
    assert indices.tolist() == ([[7, 7]] * 2 if routing is None else [[0, 1]] * 2)
    assert values.tolist() == [[7, 7]] * 2


def test_a_mask_on_unknown_scores_is_found_only_if_a_routing_is_assumed(notes):
    args = (_unknown(notes, 3), torch.tensor([True, False, False]), -float("inf"))
    without = _outcome(notes, ATEN.masked_fill.Scalar, *args)[0]
    with notes.choosing.by("balanced"):
        within = _outcome(notes, ATEN.masked_fill.Scalar, *args)[0]
    assert without.mask is None
    assert within.mask.tolist() == [True, False, False]
    assert without.excluded.excluded.tolist() == within.excluded.excluded.tolist() == [True, False, False]
