"""Choices among values that are not computed, made by an assumption: which experts of a mixture get which tokens.

Each is valid: the indices of a row are distinct, and none is of a score that a known mask takes away, as long as others are
left. They are a function of shapes and masks alone, so that what is computed again in backward chooses the same.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_gpumem.host_values.host_operators import has_storage, is_small, on_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pytest_gpumem.values.option_words import Routing

CHOOSING = frozenset({"topk", "argmax", "max", "sort", "argsort", "multinomial"})
"""Operators that choose among scores; ``max`` where it is given a dimension."""
MAKE_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros", "zero_"})
"""Operators whose results are zeros also where they are large: the stand-in fills them."""
_KEEP_MASKS = frozenset({"clone", "_to_copy", "softmax", "_softmax", "sigmoid", "div", "mul"})
"""Operators of whose results those are the least that a mask has made the least."""


class Choosing:
    """The assumption by which choices are made, and the masks that known tensors have put on scores.

    Args:
        is_unknown: Whether a tensor's values were not computed.
    """

    def __init__(self, is_unknown: Callable[[torch.Tensor], bool]) -> None:
        self._is_unknown = is_unknown
        self.routing: Routing | None = None
        self.made = 0
        """The number of choices so far that were made by an assumption."""
        self._masks: dict[int, tuple[StorageWeakRef, torch.Tensor]] = {}

    @contextmanager
    def by(self, routing: Routing | None) -> Iterator[None]:
        """Choose by another assumption within; ``None`` leaves it as it is."""
        before = self.routing
        self.routing = routing or before
        try:
            yield
        finally:
            self.routing = before

    def mask(self, name: str, args: tuple[Any, ...]) -> torch.Tensor | None:
        """Return which scores a known mask takes away in an operator's result; ``None`` where none does.

        Of what it fills with a number, 0 or less is taken away: routers fill with -inf, or probabilities with 0.
        """
        name = name.removesuffix("_")
        if name == "masked_fill":
            scores, mask, value, negated = *args[:3], False
        elif name == "where" and len(args) == 3:
            mask, scores, value = args
            negated = self._number(scores) is None
            scores, value = (scores, value) if negated else (value, scores)
        else:
            return self._mask_of(args[0]) if name in _KEEP_MASKS and isinstance(args[0], torch.Tensor) else None
        number = self._number(value)
        if number is None or number > 0 or not isinstance(scores, torch.Tensor) or not self._is_unknown(scores):
            return None
        if self._is_unknown(mask) or mask.dtype != torch.bool or not is_small((mask, scores), routed=True):
            return None
        kept: torch.Tensor = on_host(mask)
        taken = (~kept if negated else kept) | torch.zeros(scores.shape, dtype=torch.bool)
        before = self._mask_of(scores)
        return taken if before is None or before.shape != taken.shape else taken | before

    def note_mask(self, result: torch.Tensor, mask: torch.Tensor) -> None:
        """Note the mask of an operator's result, as `mask` has returned it."""
        self._masks = {at: one for at, one in self._masks.items() if not one[0].expired()}
        storage = result.untyped_storage()
        self._masks[storage.data_ptr()] = StorageWeakRef(storage), mask

    def forget(self, address: int) -> None:
        """Note that the mask of the scores in the storage at an address is not known any more."""
        self._masks.pop(address, None)

    def choose(self, given: Mapping[str, Any], made: torch.Tensor, excluded: torch.Tensor | None) -> bool:
        """Write the indices that an operator chooses, and return whether that was done: not of too many scores.

        Args:
            given: What the operator is given, by the names of its arguments.
            made: The indices that it makes, on the host.
            excluded: Booleans, one for each index of the last dimension: true where no row can choose it.
        """
        scores, routing = given["self"], self.routing
        if routing is None or not scores.dim() or not is_small((scores, made), routed=True):
            return False
        dim = given.get("dim", -1)
        moved = scores.shape if dim is None else _moved(scores.shape, dim)
        shape = torch.Size([scores.numel()]) if dim is None else moved
        mask = self._mask_of(scores)
        if mask is not None:
            mask = (mask if dim is None else mask.movedim(dim, -1)).reshape(-1, shape[-1])
        elif excluded is not None and dim is not None and dim % scores.dim() == scores.dim() - 1:
            mask = excluded.expand(shape).reshape(-1, shape[-1])
        orders = "descending" in given
        number = shape[-1] if orders else int(given.get("k", given.get("num_samples", 1)))
        chosen = chosen_of_rows(routing, shape[:-1].numel(), shape[-1], number, 1 if orders else number, mask)
        if orders and not given["descending"]:
            chosen = chosen.flip(-1)  # the best come last
        chosen = chosen.reshape(*shape[:-1], number)
        made.copy_((chosen if dim is None else chosen.movedim(-1, dim)).reshape(made.shape))
        self.made += 1
        return True

    def _number(self, value: object) -> float | None:
        """Return a number, or that of a known tensor of a single one."""
        if isinstance(value, torch.Tensor):
            return None if value.dim() or self._is_unknown(value) else float(on_host(value))
        return float(value) if isinstance(value, (int, float)) else None

    def _mask_of(self, scores: torch.Tensor) -> torch.Tensor | None:
        there = self._masks.get(scores.untyped_storage().data_ptr()) if has_storage(scores) else None
        return None if there is None or there[0].expired() or there[1].shape != scores.shape else there[1]


def chosen_of_rows(
    routing: Routing, rows: int, size: int, number: int, step: int, excluded: torch.Tensor | None
) -> torch.Tensor:
    """Return ``number`` indices below ``size`` for each row: ``int64[rows, number]``, distinct if there are as many.

    Args:
        routing: ``balanced`` begins each row ``step`` indices after the one before that has the same choice, so that all are
            chosen as often, within 1, where ``step`` is ``number``; ``worst`` has the first ones in each row.
        rows: The number of rows.
        size: The number of scores in a row.
        number: The number of choices in a row.
        step: By how many indices rows differ.
        excluded: Booleans of rows and indices: true for those that are chosen only where too few others are.
    """
    within = torch.arange(number) % size
    if excluded is None:
        start = torch.arange(rows) * step if routing == "balanced" else torch.zeros(rows, dtype=torch.int64)
        return (start[:, None] + within) % size
    allowed = ~excluded
    left = allowed.sum(1, keepdim=True)
    place = allowed.cumsum(1) - 1
    if routing == "balanced":
        place = (place - _earlier(excluded)[:, None] * step) % left.clamp(min=1)
    place = torch.where(allowed, place, left + excluded.cumsum(1) - 1)
    order = torch.empty(rows, size, dtype=torch.int64)
    order.scatter_(1, place, torch.arange(size).expand(rows, size))
    return order[:, within]


def _earlier(rows: torch.Tensor) -> torch.Tensor:
    """Return for each row how many of those before it are the same."""
    weights = torch.randint(2**62, (rows.shape[1],), generator=torch.Generator().manual_seed(0))
    _, kinds = torch.unique((rows * weights).sum(1), return_inverse=True)
    order = kinds.argsort(stable=True)
    counts = kinds.bincount()
    earlier = torch.empty_like(kinds)
    earlier[order] = torch.arange(len(kinds)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return earlier


def _moved(shape: torch.Size, dim: int) -> torch.Size:
    sizes = [*shape]
    last = sizes.pop(dim)
    return torch.Size([*sizes, last])
