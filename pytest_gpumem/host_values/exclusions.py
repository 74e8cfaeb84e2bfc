"""Indices that a choice among uncomputed scores cannot give, as a known mask has set their scores to -inf.

``generate`` masks the end token until text has its least length. Then no score decides whether the text ends. Scores are
taken as finite where they are not masked.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_gpumem.host_values.host_operators import has_storage, is_small, on_host, on_the_same_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.host_values.host_operators import Operator

_COPIES = frozenset({"clone", "_to_copy"})
_SCALES = frozenset({"div", "mul"})
_SHARES = frozenset({"softmax", "_softmax"})
_HAVE_INFINITY = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_NEUTRAL = {"mul": 1, "add": 0}
"""Operators on integers, and the operand that leaves the other one as it is."""


class _Layout(NamedTuple):
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Uncomputed floats of which some cannot be chosen along the last dimension."""

    excluded: torch.Tensor
    """Booleans, one for each index: true where the score is -inf in each row, or the probability 0."""
    left: torch.Tensor
    """The same: true where the score is masked in no row."""
    layout: _Layout | None = None
    """Sizes and strides of the tensor that this is said of: views of its memory may have another last dimension."""
    are_probabilities: bool = False

    def choices(self) -> Choices | None:
        """Return what an index cannot be that is chosen among these."""
        found = self.excluded.nonzero_static(size=int(self.excluded.count_nonzero())).flatten().tolist()
        return Choices(frozenset(found), are_new=True) if len(found) < len(self.excluded) else None


@dataclass(frozen=True, slots=True)
class Choices:
    """Integers in one storage: each is true in memory, or was not computed."""

    excluded: frozenset[int]
    """Values that one that was not computed cannot be, nor what stands for it in memory."""
    are_new: bool = False
    """True if nothing stands for them yet."""


class Exclusions:
    """Tensors that cannot have some values, or of which some elements cannot be chosen."""

    def __init__(self, is_unknown: Callable[[torch.Tensor], bool]) -> None:
        self._is_unknown = is_unknown
        self._noted: dict[int, tuple[StorageWeakRef, Scores | Choices]] = {}

    def note(self, tensor: torch.Tensor, found: Scores | Choices, *, has_values: bool = False) -> None:
        """Note what an operator's result, the whole of its storage, cannot be.

        Args:
            tensor: The result.
            found: What `result` has returned.
            has_values: Whether the operator was computed of what stands for unknown integers.
        """
        if isinstance(found, Scores):
            if tensor.dtype not in _HAVE_INFINITY:
                return
            found = replace(found, layout=_layout(tensor))
        elif isinstance(found, Choices) and found.are_new and is_small((tensor,)):
            on_the_same_memory(tensor).fill_(next(at for at in itertools.count() if at not in found.excluded))
        elif not has_values:
            return
        storage = tensor.untyped_storage()
        self._noted[storage.data_ptr()] = StorageWeakRef(storage), found

    def forget(self, address: int) -> None:
        """Note that what the storage at an address cannot be is not known any more."""
        self._noted.pop(address, None)

    def scores_of(self, tensor: torch.Tensor) -> Scores | None:
        """Return what cannot be chosen among a tensor's scores, if that is known."""
        found = self._of(tensor)
        return found if isinstance(found, Scores) else None

    def decide(self, values: object, among: object) -> bool:
        """Return whether no uncomputed one of some integers is ``among`` known ones, whatever it is."""
        if not (isinstance(values, torch.Tensor) and isinstance(among, torch.Tensor)):
            return False
        found = self._of(values)
        if not isinstance(found, Choices) or self._is_unknown(among) or not is_small((values, among)):
            return False
        return found.excluded.issuperset(on_host(among).flatten().tolist())

    def result(self, operator: Operator, args: tuple[Any, ...]) -> Scores | Choices | None:
        """Return what an operator's result cannot be, where not all that it is given is known."""
        name = operator.name.removesuffix("_")
        first, second, third = (*args, None, None, None)[:3]
        if name == "cat":
            return self._joined(first)
        if name == "where":
            return self._selected(first, second, third)
        if name == "masked_fill":
            return self._selected(second, third, first)
        found = self._of(first) if isinstance(first, torch.Tensor) else None
        if isinstance(found, Scores):
            return self._of_scores(name, found, first, args)
        if found is not None and (name == "clone" or self._is_neutral(second, _NEUTRAL.get(name))):
            return replace(found, are_new=False)
        return None

    @staticmethod
    def _of_scores(name: str, scores: Scores, first: torch.Tensor, args: tuple[Any, ...]) -> Scores | Choices | None:
        second = args[1] if len(args) > 1 else None
        if name in _COPIES:
            return scores
        if name in _SCALES:
            return scores if isinstance(second, (int, float)) and 0 < second < float("inf") else None
        if name == "multinomial":
            # Of a probability of 0 no single one is drawn, and a row of nothing else is an error.
            return scores.choices() if scores.are_probabilities and second == 1 else None
        if not isinstance(second, int) or second % first.dim() != first.dim() - 1:
            return None
        if name in _SHARES:
            return None if scores.are_probabilities else replace(scores, are_probabilities=True)
        return scores.choices() if name == "argmax" and bool(scores.left.any()) else None

    def _selected(self, mask: object, one: object, other: object) -> Scores | None:
        """Return what cannot be chosen of ``one`` where ``mask`` is true, and of the ``other`` elsewhere."""
        sizes = [value.shape[-1] for value in (mask, one, other) if isinstance(value, torch.Tensor) and value.dim()]
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or len({*sizes}) != 1 or not mask.dim():
            return None
        if not any(
            self._is_masking(value) or (isinstance(value, torch.Tensor) and self._of(value)) for value in (one, other)
        ):
            return None
        first, second = (self._scores_of(value, sizes[0]) for value in (one, other))
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
        """Return what is known of scores, or of a number in the place of each; nothing of probabilities."""
        nothing, everything = torch.zeros(count, dtype=torch.bool), torch.ones(count, dtype=torch.bool)
        found = self._of(value) if isinstance(value, torch.Tensor) else None
        if isinstance(found, Scores):
            return None if found.are_probabilities else found
        return Scores(everything, nothing) if self._is_masking(value) else Scores(nothing, everything)

    def _is_masking(self, value: object) -> bool:
        """Return whether a number, or a tensor of a single one, is -inf."""
        if isinstance(value, torch.Tensor):
            value = None if value.dim() or self._is_unknown(value) else on_host(value).item()
        return value == -float("inf")

    def _is_neutral(self, value: object, neutral: int | None) -> bool:
        """Return whether a tensor holds a number only, and is known to."""
        if neutral is None or not isinstance(value, torch.Tensor) or self._is_unknown(value) or not is_small((value,)):
            return False
        return bool((on_host(value) == neutral).all())

    def _joined(self, tensors: list[torch.Tensor]) -> Choices | None:
        """Return what no unknown integer of several tensors can be; known ones stay true."""
        found = [self._of(one) for one in tensors if self._is_unknown(one)]
        choices = [one for one in found if isinstance(one, Choices)]
        if not choices or len(choices) < len(found):
            return None
        return Choices(frozenset.intersection(*(one.excluded for one in choices)))

    def _of(self, tensor: torch.Tensor) -> Scores | Choices | None:
        there = self._noted.get(tensor.untyped_storage().data_ptr()) if has_storage(tensor) else None
        if there is None or there[0].expired() or not self._is_unknown(tensor):
            return None
        found = there[1]
        return None if isinstance(found, Scores) and found.layout != _layout(tensor) else found


def _layout(tensor: torch.Tensor) -> _Layout:
    return _Layout(tensor.size(), tensor.stride(), tensor.storage_offset())
