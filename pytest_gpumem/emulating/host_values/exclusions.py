"""Track which indices an operator such as ``argmax`` cannot choose, because a known mask has set their scores to -inf.

Example: ``generate`` masks the end token's score until the text has its minimum length. So the text cannot end earlier,
although the scores are uncomputed. Scores without a mask are assumed to be finite.

In numbers: ``scores.masked_fill(mask, -inf)`` has four uncomputed scores and the known mask ``[True, False, False, False]``,
so index 0 is *excluded*. A following ``argmax(-1)`` returns an unknown index except 0. Its memory gets the placeholder 1, the
first allowed index. ``torch.isin(token, end_tokens)`` is therefore False for the end token 0.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_gpumem.emulating.host_values.host_operators import is_small, on_host, on_the_same_memory
from pytest_gpumem.emulating.host_values.storage_notes import StorageNotes

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.emulating.host_values.host_operators import Operator

_COPIES = frozenset({"clone", "_to_copy"})
_SCALES = frozenset({"div", "mul"})
_SHARES = frozenset({"softmax", "_softmax"})
_HAVE_INFINITY = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_NEUTRAL = {"mul": 1, "add": 0}
"""Operators on integers, with the second operand for which they return the first operand unchanged."""


class _Layout(NamedTuple):
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """A note about uncomputed scores: a choice in the last dimension cannot return some indices."""

    excluded: torch.Tensor
    """A boolean for each index: true if a choice cannot return the index, because its score is -inf (its probability 0) in
    every row."""
    left: torch.Tensor
    """A boolean for each index: true if the score is unmasked in every row."""
    layout: _Layout | None = None
    """Sizes and strides of the scores. The note is ignored for views with other sizes or strides, because their last dimension
    may differ."""
    are_probabilities: bool = False

    def choices(self) -> Choices | None:
        """Return a note on integers that an operator chooses as indices of these scores; ``None`` if all are excluded."""
        indices = self.excluded.nonzero_static(size=int(self.excluded.count_nonzero())).flatten().tolist()
        return Choices(frozenset(indices), are_new=True) if len(indices) < len(self.excluded) else None


@dataclass(frozen=True, slots=True)
class Choices:
    """A note about integers chosen among uncomputed scores. They cannot have some values."""

    excluded: frozenset[int]
    """Values excluded for all unknown integers in the storage. The placeholders in memory do not have these values either."""
    are_new: bool = False
    """True if the placeholders must still be written to memory."""


class Exclusions:
    """All notes about excluded indices and values, by the storage's address."""

    def __init__(self, is_unknown: Callable[[torch.Tensor], bool]) -> None:
        self._is_unknown = is_unknown
        self._noted: StorageNotes[Scores | Choices] = StorageNotes()

    def note(self, tensor: torch.Tensor, exclusion: Scores | Choices, *, has_values: bool = False) -> None:
        """Store the note about an operator's result, and write placeholders for unknown chosen integers.

        Args:
            tensor: The operator's result, which fills its storage.
            exclusion: The note, as returned by `result`.
            has_values: Whether the CPU has computed the result from placeholders, so the result has values already.
        """
        if isinstance(exclusion, Scores):
            if tensor.dtype not in _HAVE_INFINITY:
                return
            exclusion = replace(exclusion, layout=_layout(tensor))
        elif isinstance(exclusion, Choices) and exclusion.are_new and is_small((tensor,)):
            on_the_same_memory(tensor).fill_(next(at for at in itertools.count() if at not in exclusion.excluded))
        elif not has_values:
            return
        self._noted.set(tensor.untyped_storage(), exclusion)

    def forget(self, address: int) -> None:
        """Delete the note about the storage at an address."""
        self._noted.delete(address)

    def scores_of(self, tensor: torch.Tensor) -> Scores | None:
        """Return the note about a tensor of scores; ``None`` if there is no note."""
        exclusion = self._of(tensor)
        return exclusion if isinstance(exclusion, Scores) else None

    def decide(self, values: object, among: object) -> bool:
        """Return whether ``torch.isin(values, among)`` is certainly False, because all values in ``among`` are excluded."""
        if not (isinstance(values, torch.Tensor) and isinstance(among, torch.Tensor)):
            return False
        exclusion = self._of(values)
        if not isinstance(exclusion, Choices) or self._is_unknown(among) or not is_small((values, among)):
            return False
        return exclusion.excluded.issuperset(on_host(among).flatten().tolist())

    def result(self, operator: Operator, args: tuple[Any, ...]) -> Scores | Choices | None:
        """Return the note on an operator's result if an operand is unknown; ``None`` if no index or value can be excluded."""
        name = operator.name.removesuffix("_")
        first, second, third = (*args, None, None, None)[:3]
        if name == "cat":
            return self._joined(first)
        if name == "where":
            return self._selected(first, second, third)
        if name == "masked_fill":
            return self._selected(second, third, first)
        exclusion = self._of(first) if isinstance(first, torch.Tensor) else None
        if isinstance(exclusion, Scores):
            return self._of_scores(name, exclusion, first, args)
        if exclusion is not None and (name == "clone" or self._is_neutral(second, _NEUTRAL.get(name))):
            return replace(exclusion, are_new=False)
        return None

    @staticmethod
    def _of_scores(name: str, scores: Scores, first: torch.Tensor, args: tuple[Any, ...]) -> Scores | Choices | None:
        second = args[1] if len(args) > 1 else None
        if name in _COPIES:
            return scores
        if name in _SCALES:
            return scores if isinstance(second, (int, float)) and 0 < second < float("inf") else None
        if name == "multinomial":
            # A single draw never returns an index whose probability is 0, and torch raises an exception if all are 0.
            return scores.choices() if scores.are_probabilities and second == 1 else None
        if not isinstance(second, int) or second % first.dim() != first.dim() - 1:
            return None
        if name in _SHARES:
            return None if scores.are_probabilities else replace(scores, are_probabilities=True)
        return scores.choices() if name == "argmax" and bool(scores.left.any()) else None

    def _selected(self, mask: object, if_true: object, if_false: object) -> Scores | None:
        """Return a note on the scores ``torch.where(mask, if_true, if_false)``: the indices with -inf in every row.

        `argmax` and similar operators cannot choose these indices. Return ``None`` if neither value is -inf or has a note, if
        a value contains probabilities, or if the mask and the values do not have the same last dimension.
        """
        values = (if_true, if_false)
        sizes = [value.shape[-1] for value in (mask, *values) if isinstance(value, torch.Tensor) and value.dim()]
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or len({*sizes}) != 1 or not mask.dim():
            return None
        if not any(
            self._is_masking(value) or (isinstance(value, torch.Tensor) and self._of(value)) for value in values
        ):
            return None
        first, second = (self._scores_of(value, sizes[0]) for value in values)
        if first is None or second is None:
            return None
        excluded, left = first.excluded & second.excluded, first.left & second.left
        if not self._is_unknown(mask) and is_small((mask,)):
            rows = on_host(mask).reshape(-1, sizes[0])
            always, never = rows.all(0), ~rows.any(0)
            excluded |= (always & first.excluded) | (never & second.excluded)
            left |= (always & first.left) | (never & second.left)
        return Scores(excluded, left)

    def _scores_of(self, value: object, count: int) -> Scores | None:
        """Return the note on a tensor of scores, or on ``count`` scores that all equal a number; ``None`` for probabilities."""
        nothing, everything = torch.zeros(count, dtype=torch.bool), torch.ones(count, dtype=torch.bool)
        exclusion = self._of(value) if isinstance(value, torch.Tensor) else None
        if isinstance(exclusion, Scores):
            return None if exclusion.are_probabilities else exclusion
        return Scores(everything, nothing) if self._is_masking(value) else Scores(nothing, everything)

    def _is_masking(self, value: object) -> bool:
        """Return whether a number, or a scalar tensor with a known value, is -inf."""
        if isinstance(value, torch.Tensor):
            value = None if value.dim() or self._is_unknown(value) else on_host(value).item()
        return value == -float("inf")

    def _is_neutral(self, value: object, neutral: int | None) -> bool:
        """Return whether a tensor is known and all its elements equal ``neutral``."""
        if neutral is None or not isinstance(value, torch.Tensor) or self._is_unknown(value) or not is_small((value,)):
            return False
        return bool((on_host(value) == neutral).all())

    def _joined(self, tensors: list[torch.Tensor]) -> Choices | None:
        """Return the note for the result of ``torch.cat(tensors)``; ``None`` if any of the unknown tensors has no note."""
        exclusions = [self._of(tensor) for tensor in tensors if self._is_unknown(tensor)]
        choices = [exclusion for exclusion in exclusions if isinstance(exclusion, Choices)]
        if not choices or len(choices) < len(exclusions):
            return None
        return Choices(frozenset.intersection(*(choice.excluded for choice in choices)))

    def _of(self, tensor: torch.Tensor) -> Scores | Choices | None:
        exclusion = self._noted.of(tensor)
        if exclusion is None or not self._is_unknown(tensor):
            return None
        return None if isinstance(exclusion, Scores) and exclusion.layout != _layout(tensor) else exclusion


def _layout(tensor: torch.Tensor) -> _Layout:
    return _Layout(tensor.size(), tensor.stride(), tensor.storage_offset())
