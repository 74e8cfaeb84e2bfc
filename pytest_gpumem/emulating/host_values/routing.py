"""Choose experts for tokens by an assumed routing, because an emulated GPU does not compute the router's scores.

The chosen indices in a row are distinct, and a masked index is chosen only if a row has too few unmasked indices. The choices
depend only on shapes and masks, so a recomputation in backward makes the same choices.

Example: four tokens choose two of three experts (``scores`` is ``[4, 3]``, ``scores.topk(2)``). ``balanced`` returns
``[[0, 1], [2, 0], [1, 2], [0, 1]]``, so the experts get 3, 3 and 2 tokens. ``worst`` returns ``[[0, 1]] * 4``, so two experts
get all tokens and the third gets none.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.emulating.host_values.host_operators import is_small, on_host
from pytest_gpumem.emulating.host_values.storage_notes import StorageNotes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pytest_gpumem.facts.values.option_words import Routing

CHOOSING = frozenset({"topk", "argmax", "max", "sort", "argsort", "multinomial"})
"""Operators that return the indices of chosen scores. ``max`` returns indices only if it is called with a dimension."""
MAKE_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros", "zero_"})
"""Operators whose results are known to be zeros even if they are large, because CUDA's stand-in fills their memory."""
_KEEP_MASKS = frozenset({"clone", "_to_copy", "softmax", "_softmax", "sigmoid", "div", "mul"})
"""Operators after which masked scores (-inf or 0) are still the smallest values, so a choice still avoids them."""


class AssumedRouting:
    """The currently assumed routing, and the masks on uncomputed scores.

    Args:
        is_unknown: A function that returns True for a tensor with uncomputed values.
    """

    def __init__(self, is_unknown: Callable[[torch.Tensor], bool]) -> None:
        self._is_unknown = is_unknown
        self.routing: Routing | None = None
        self.made = 0
        """The number of operators so far whose indices the assumed routing has chosen."""
        self._masks: StorageNotes[torch.Tensor] = StorageNotes()

    @contextmanager
    def by(self, routing: Routing | None) -> Iterator[None]:
        """Assume a routing within the context. With ``None``, the current assumption remains."""
        outer = self.routing
        self.routing = routing or outer
        try:
            yield
        finally:
            self.routing = outer

    def mask(self, name: str, args: tuple[Any, ...]) -> torch.Tensor | None:
        """Return the mask on an operator's result, as a boolean for each score. True marks a score to avoid.

        An operator such as ``masked_fill`` masks a score if it replaces the score by 0 or a negative number. Routers replace
        logits by -inf, and probabilities by 0.

        Args:
            name: The operator's name: ``"masked_fill"``.
            args: The operator's arguments.

        Returns:
            The mask; ``None`` if the operator masks no scores or its mask is unknown.
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
        """Store the mask on an operator's result."""
        self._masks.set(result.untyped_storage(), mask)

    def forget(self, address: int) -> None:
        """Delete the mask on the scores in the storage at an address."""
        self._masks.delete(address)

    def choose(self, arguments: Mapping[str, Any], indices: torch.Tensor, excluded: torch.Tensor | None) -> bool:
        """Choose indices by the assumed routing, and write them to an operator's result.

        Args:
            arguments: The operator's arguments by name, for example ``{"self": scores, "k": 2, "dim": -1}``.
            indices: The operator's result as a host tensor with dtype ``int64``, which is overwritten.
            excluded: A boolean for each index in the last dimension: true if the index must not be chosen in any row.

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
            chosen = chosen.flip(-1)  # an ascending sort returns the best scores last
        chosen = chosen.reshape(*shape[:-1], number)
        indices.copy_((chosen if dim is None else chosen.movedim(-1, dim)).reshape(indices.shape))
        self.made += 1
        return True

    def _number(self, value: object) -> float | None:
        """Return the float for a number or for a known scalar tensor; ``None`` for other values."""
        if isinstance(value, torch.Tensor):
            return None if value.dim() or self._is_unknown(value) else float(on_host(value))
        return float(value) if isinstance(value, (int, float)) else None

    def _mask_of(self, scores: torch.Tensor) -> torch.Tensor | None:
        mask = self._masks.of(scores)
        return None if mask is None or mask.shape != scores.shape else mask


def chosen_of_rows(
    routing: Routing, rows: int, size: int, number: int, step: int, excluded: torch.Tensor | None
) -> torch.Tensor:
    """Choose ``number`` indices in each row by an assumed routing. A row is a token, and an index is an expert.

    With ``balanced``, a row's choices begin ``step`` indices after the choices of the previous row with the same mask. If
    ``step`` equals ``number``, every index is chosen equally often (the counts differ by at most 1). With ``worst``, every row
    chooses its first allowed indices.

    Example:
        ``chosen_of_rows("balanced", 3, 4, 2, 2, excluded)``, with index 0 excluded in each row, returns
        ``[[1, 2], [3, 1], [2, 3]]``.

    Args:
        routing: ``"balanced"`` or ``"worst"``.
        rows: Number of rows.
        size: Number of scores in a row.
        number: Number of choices in a row.
        step: The distance from a row's first choice to the next row's first choice, for ``balanced``.
        excluded: ``bool[rows, size]``. An index with the value true is chosen only if too few other indices are allowed.
            ``None`` if all indices are allowed.

    Returns:
        The chosen indices, ``int64[rows, number]``. The indices in a row are distinct if ``number`` is at most ``size``.
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
    """Return for each row how many earlier rows are equal to it."""
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
