"""Decide what the host knows about the tensors to which an operator on the GPU wrote, and store this in the notes.

`outcome_of` decides, and `note_output` applies the decision to each tensor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from pytest_gpumem.emulating.host_values.exclusions import Choices
from pytest_gpumem.emulating.host_values.host_operators import (
    BIGGEST_COPY,
    NO_VALUES,
    compute,
    drawing_as,
    has_storage,
    is_exact,
    is_small,
    on_the_same_memory,
)
from pytest_gpumem.emulating.host_values.routing import CHOOSING, MAKE_ZEROS

if TYPE_CHECKING:
    from pytest_gpumem.emulating.host_values.constants import Constant
    from pytest_gpumem.emulating.host_values.exclusions import Scores
    from pytest_gpumem.emulating.host_values.operator_call import Call
    from pytest_gpumem.emulating.host_values.tensor_notes import TensorNotes
    from pytest_gpumem.facts.values.option_words import Routing

_DRAWN = frozenset({"randint", "randint_like", "random_", "randperm"})
"""Random operators that the CPU computes too, because programs use the drawn integers as indices."""


class Outcome(NamedTuple):
    """A decision about an operator's outputs, which are all tensors that the operator created or changed.

    Examples:
        - ``a + b`` with small known tensors is known, because the CPU computed the sum.
        - ``torch.isfinite(loss)`` with an uncomputed ``loss`` has the constant ``Constant(True, "kept")``.
        - ``scores.topk(2)`` with uncomputed scores is unknown. If a routing is assumed, ``chosen`` is the tensor of indices.
    """

    has_known_inputs: bool
    is_known: bool
    """True if all values that the operator wrote to GPU memory are known."""
    is_computed: bool
    """True if the CPU computed the values, even if it used unknown integers."""
    routing: Routing | None
    """The assumed routing on which the inputs depend."""
    constant: Constant | None
    excluded: Scores | Choices | None
    mask: torch.Tensor | None
    """The mask on an output with uncomputed scores."""
    chosen: torch.Tensor | None
    """The output whose indices an assumed routing chose."""


def outcome_of(
    notes: TensorNotes, call: Call, results: list[torch.Tensor], outputs: list[torch.Tensor], *, has_known_inputs: bool
) -> Outcome:
    """Decide what becomes known about a GPU operator's outputs, and let the CPU or the assumed routing write their values.

    The notes are not changed here, but in `note_output`.

    Args:
        notes: The notes about the operator's inputs.
        call: The call, which has already run on the emulated GPU.
        results: All tensors that the operator returned.
        outputs: All tensors with a storage that the operator returned or changed.
        has_known_inputs: Whether the inputs determine the result.
    """
    operator, args, choosing = call.operator, call.args, notes.choosing
    # The result of `isin` follows from excluded tokens. An assumed routing does not affect the result.
    routing = None if operator.name == "isin" else notes.routing_among(call.tensors)
    excluded = None if has_known_inputs and routing is None else notes.exclusions.result(operator, args)
    is_filled, mask, chosen = False, None, None
    if has_known_inputs:
        # Programs mark the chosen experts in a tensor of zeros. So under an assumed routing, even a large one is known.
        is_filled = choosing.routing is not None and operator.name in MAKE_ZEROS and is_small(outputs, routed=True)
        constant = None if is_filled else notes.constants.filled(operator, results)
    else:
        constant = notes.constants.result(operator, args)
        if choosing.routing is not None:
            chosen = _choose(notes, call, results)
            mask = choosing.mask(operator.name, args)
    if chosen is not None and isinstance(excluded, Choices):
        excluded = replace(excluded, are_new=False)
    if constant is None:
        is_computed = _compute(call, results, outputs, routing, has_known_inputs=has_known_inputs)
        is_known = has_known_inputs and (is_computed or is_filled)
    else:
        is_computed = False
        is_known = constant.noted is None and is_small(tensor for tensor in outputs if tensor.is_cuda)
    return Outcome(has_known_inputs, is_known, is_computed, routing, constant, excluded, mask, chosen)


def note_output(
    notes: TensorNotes, call: Call, outcome: Outcome, output: torch.Tensor, *, is_overwritten: bool
) -> None:
    """Note what is known about an operator's output.

    Args:
        notes: The notes to change.
        call: The call.
        outcome: The decision about all outputs of the call.
        output: The output.
        is_overwritten: Whether the operator wrote to the output's whole storage. If false, older values remain in the storage,
            so the output is known only if these were known before.
    """
    if not output.is_cuda:
        has_values = all(is_exact(source) and is_small((source,)) for source in call.on_gpu)
        notes.note_routing(outcome.routing)
        is_known = outcome.has_known_inputs and output.nbytes <= BIGGEST_COPY
        notes.note_from_gpu(output, is_known, has_values=has_values)
        return
    is_chosen = output is outcome.chosen
    is_known = is_chosen or (outcome.is_known and (is_overwritten or not notes.is_unknown(output)))
    assumed = outcome.routing or (None if is_overwritten else notes.routing_of(output))
    routing = notes.choosing.routing if is_chosen else assumed
    constant = outcome.constant
    notes.note(output, is_known, constant if is_overwritten else None, has_values=outcome.is_computed, routing=routing)
    if is_overwritten:
        if outcome.excluded is not None and notes.captured is None:
            notes.exclusions.note(output, outcome.excluded, has_values=outcome.is_computed or is_chosen)
        if outcome.mask is not None and output.shape == outcome.mask.shape:
            notes.choosing.note_mask(output, outcome.mask)
    if constant is not None and is_small((output,)):
        on_the_same_memory(output).fill_(constant.value)


def _choose(notes: TensorNotes, call: Call, results: list[torch.Tensor]) -> torch.Tensor | None:
    """Let the assumed routing write the indices, if an operator such as ``topk`` chooses among uncomputed scores.

    Returns:
        The tensor with the indices; ``None`` if the operator does not choose among scores.
    """
    if call.operator.name not in CHOOSING or notes.captured is not None:
        return None
    arguments, indices = call.arguments(), results[-1] if results else None
    if indices is None or indices.dtype != torch.int64 or not {"dim", "num_samples"} & arguments.keys():
        return None
    scores = notes.exclusions.scores_of(arguments["self"])
    excluded = None if scores is None else scores.excluded
    return indices if notes.choosing.choose(arguments, on_the_same_memory(indices), excluded) else None


def _compute(
    call: Call,
    results: list[torch.Tensor],
    outputs: list[torch.Tensor],
    routing: Routing | None,
    *,
    has_known_inputs: bool,
) -> bool:
    """Run a GPU operator again on the CPU, and write the values to its results. Return whether values were written."""
    operator = call.operator
    if operator.reads or operator.name in NO_VALUES or (operator.random and operator.name not in _DRAWN):
        return False
    # Compute operators on unknown integers too. Otherwise a counter would stay at 0, and a loop could wait for it forever.
    if not has_known_inputs and not all(map(is_exact, (*call.tensors, *outputs))):
        return False
    on_gpu = (*call.on_gpu, *(tensor for tensor in outputs if tensor.is_cuda))
    if not is_small(on_gpu, routed=routing is not None and has_known_inputs) or not all(map(has_storage, results)):
        return False
    if not operator.random:
        return compute(call.func, call.args, call.named, results)
    with drawing_as(call.named, results[0].device) as drawing:
        return compute(call.func, call.args, drawing, results)
