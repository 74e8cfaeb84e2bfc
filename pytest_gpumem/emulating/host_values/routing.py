"""Choose experts for tokens by an assumed routing, because the router's scores are not computed.

The choices are valid: the indices in a row are distinct, and a masked score is chosen only if too few other scores remain.
They depend only on shapes and masks, so a recomputation in backward makes the same choices.

Example: four tokens choose two of three experts (``scores`` is ``[4, 3]``, ``scores.topk(2)``). ``balanced`` returns
``[[0, 1], [2, 0], [1, 2], [0, 1]]``, so the experts get 3, 3 and 2 tokens. ``worst`` returns ``[[0, 1]] * 4``, so two experts
get all tokens and the third gets none.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_gpumem.emulating.host_values.host_operators import has_storage, is_small, on_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pytest_gpumem.facts.values.option_words import Routing

CHOOSING = frozenset({"topk", "argmax", "max", "sort", "argsort", "multinomial"})
"""Operators that choose among scores. ``max`` chooses only if it has a dimension."""
MAKE_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros", "zero_"})
"""Operators that return zeros even for large results, because the stand-in fills the memory."""
_KEEP_MASKS = frozenset({"clone", "_to_copy", "softmax", "_softmax", "sigmoid", "div", "mul"})
"""Operators for which masked inputs (set to -inf) stay the smallest values in the result."""


class AssumedRouting:
    """The assumed routing for the current step, and the masks on uncomputed scores.

    Args:
        is_unknown: Returns True for a tensor with uncomputed values.
    """

    def __init__(self, is_unknown: Callable[[torch.Tensor], bool]) -> None:
        self._is_unknown = is_unknown
        self.routing: Routing | None = None
        self.made = 0
        """Number of choices made so far by the assumed routing."""
        self._masks: dict[int, tuple[StorageWeakRef, torch.Tensor]] = {}

    @contextmanager
    def by(self, routing: Routing | None) -> Iterator[None]:
        """Assume another routing inside the context. ``None`` keeps the current routing."""
        outer = self.routing
        self.routing = routing or outer
        try:
            yield
        finally:
            self.routing = outer

    def mask(self, name: str, args: tuple[Any, ...]) -> torch.Tensor | None:
        """Return a boolean for each score in an operator's result: true if a known mask removes the score.

        A score is removed if the operator fills it with 0 or a negative number. Routers fill logits with -inf, and
        probabilities with 0.

        Args:
            name: The operator, for example ``"masked_fill"``.
            args: The operator's arguments.

        Returns:
            ``None`` if the operator applies no known mask.
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
        mask_on_host: torch.Tensor = on_host(mask)
        removed = (~mask_on_host if negated else mask_on_host) | torch.zeros(scores.shape, dtype=torch.bool)
        earlier_mask = self._mask_of(scores)
        return removed if earlier_mask is None or earlier_mask.shape != removed.shape else removed | earlier_mask

    def note_mask(self, result: torch.Tensor, mask: torch.Tensor) -> None:
        """Record a mask, as returned by `mask`, for an operator's result."""
        self._masks = {address: note for address, note in self._masks.items() if not note[0].expired()}
        storage = result.untyped_storage()
        self._masks[storage.data_ptr()] = StorageWeakRef(storage), mask

    def forget(self, address: int) -> None:
        """Delete the mask on the storage at an address."""
        self._masks.pop(address, None)

    def choose(self, arguments: Mapping[str, Any], indices: torch.Tensor, excluded: torch.Tensor | None) -> bool:
        """Write the indices chosen by an operator.

        Args:
            arguments: The operator's arguments by name, for example ``{"self": scores, "k": 2, "dim": -1}``.
            indices: The operator's result on the host, ``int64``. It is overwritten.
            excluded: A boolean for each index in the last dimension: true if no row can choose the index.

        Returns:
            False if nothing was written, because no routing is assumed or there are too many scores.
        """
        scores, routing = arguments["self"], self.routing
        if routing is None or not scores.dim() or not is_small((scores, indices), routed=True):
            return False
        dim = arguments.get("dim", -1)
        moved = scores.shape if dim is None else _moved(scores.shape, dim)
        shape = torch.Size([scores.numel()]) if dim is None else moved
        mask = self._mask_of(scores)
        if mask is not None:
            mask = (mask if dim is None else mask.movedim(dim, -1)).reshape(-1, shape[-1])
        elif excluded is not None and dim is not None and dim % scores.dim() == scores.dim() - 1:
            mask = excluded.expand(shape).reshape(-1, shape[-1])
        sorts = "descending" in arguments
        number = shape[-1] if sorts else int(arguments.get("k", arguments.get("num_samples", 1)))
        chosen = chosen_of_rows(routing, shape[:-1].numel(), shape[-1], number, 1 if sorts else number, mask)
        if sorts and not arguments["descending"]:
            chosen = chosen.flip(-1)  # the best scores come last
        chosen = chosen.reshape(*shape[:-1], number)
        indices.copy_((chosen if dim is None else chosen.movedim(-1, dim)).reshape(indices.shape))
        self.made += 1
        return True

    def _number(self, value: object) -> float | None:
        """Return a number, or the value of a known scalar tensor; ``None`` for anything else."""
        if isinstance(value, torch.Tensor):
            return None if value.dim() or self._is_unknown(value) else float(on_host(value))
        return float(value) if isinstance(value, (int, float)) else None

    def _mask_of(self, scores: torch.Tensor) -> torch.Tensor | None:
        note = self._masks.get(scores.untyped_storage().data_ptr()) if has_storage(scores) else None
        return None if note is None or note[0].expired() or note[1].shape != scores.shape else note[1]


def chosen_of_rows(
    routing: Routing, rows: int, size: int, number: int, step: int, excluded: torch.Tensor | None
) -> torch.Tensor:
    """Return the indices chosen by an assumed routing in each row.

    ``balanced`` starts each row ``step`` indices after the previous row with the same mask. If ``step`` equals ``number``, all
    indices are chosen equally often (the counts differ by at most 1). ``worst`` chooses the first allowed indices in each row.

    Example:
        ``chosen_of_rows("balanced", 3, 4, 2, 2, excluded)``, with index 0 excluded in each row, returns
        ``[[1, 2], [3, 1], [2, 3]]``.

    Args:
        routing: ``"balanced"`` or ``"worst"``.
        rows: Number of rows.
        size: Number of scores in a row.
        number: Number of choices in a row.
        step: Offset between the choices in two rows.
        excluded: ``bool[rows, size]``: true for an index that is chosen only if too few other indices are allowed.

    Returns:
        ``int64[rows, number]`` with values below ``size``, distinct in a row if ``number`` is at most ``size``.
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
    """Return for each row the number of equal rows before it."""
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
