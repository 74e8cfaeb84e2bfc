"""Tensors of which all elements are 0, or all 1, although some that they are made of were not computed.

Uncomputed floats are taken as finite, and uncomputed token ids as none of those that `torch.isin` looks for, so that text is
generated up to its longest. Neither is certain: what follows from it may be read as one truth, which is noted, and how many
there are is not known.
"""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_gpumem.host_values.host_operators import has_storage, is_exact, is_small, on_host

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.host_values.host_operators import Operator
    from pytest_gpumem.host_values.reads import Use

_OURS = str(Path(__file__).parents[1])
_DISTRIBUTIONS = str(Path(torch.distributions.__file__).parent)
_OF_FINITE = frozenset({"isfinite", "isnan", "isinf", "isposinf", "isneginf"})
"""Operators that ask whether values are finite."""
_SAME = frozenset({"all", "any", "amax", "amin", "clone", "_to_copy"})
"""Operators whose result has the elements of the tensor that it is given; so have those of `_EXTREMES`, of one tensor alone."""
_VALID = frozenset({"all", "_is_all_true"})
"""Operators by which `torch.distributions` refuses values that are not valid."""
_ASKING = _OF_FINITE | _VALID | {"isin"}
_EXTREMES = frozenset({"max", "min"})
_BY_SIGN = {
    **dict.fromkeys(("__and__", "__iand__"), "bitwise_and"),
    **dict.fromkeys(("__or__", "__ior__"), "bitwise_or"),
}
"""Operators that inference mode leaves as they are, and the names that they have outside of it."""
_FILLED = {"ones": True, "ones_like": True, "new_ones": True, "zeros": False, "zeros_like": False, "new_zeros": False}
"""Operators that make tensors of one value, which is known of those that are too large to be computed, too."""
_AND = frozenset({"mul", "logical_and", "bitwise_and"})
_OR = frozenset({"logical_or", "bitwise_or"})
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}


@dataclass(frozen=True, slots=True)
class Constant:
    """The value of all elements of a tensor."""

    value: bool
    noted: Use | None = None
    """The use that a read of it is noted as; ``None`` where it is certain."""


def _doubt(constant: Constant) -> int:
    return (None, "kept", "branch").index(constant.noted)


def comparison_of_floats(operator: Operator, args: tuple[Any, ...], result: object) -> Constant | None:
    """Return what a comparison of single floats that Python had gives, as if Python had compared them."""
    if operator.name not in _COMPARISONS or not isinstance(result, torch.Tensor) or result.dim() > 0:
        return None
    if any(isinstance(one, torch.Tensor) and is_exact(one) for one in args):
        return None
    return Constant(bool(result), "branch")


def _validates() -> bool:
    """Return whether `torch.distributions` looks at what it is given, and raises an error where that is not valid."""
    files = (frame.f_code.co_filename for frame, _ in walk_stack(sys._getframe(1)))  # noqa: SLF001 -- documented
    theirs = next((file for file in files if not file.startswith(_OURS)), "")
    return theirs.startswith(_DISTRIBUTIONS)


class Constants:
    """Tensors that are known to be constant."""

    def __init__(self, is_unknown: Callable[[torch.Tensor], bool]) -> None:
        self._is_unknown = is_unknown
        self._noted: dict[int, tuple[StorageWeakRef, Constant]] = {}

    def note(self, storage: torch.UntypedStorage, constant: Constant | None) -> None:
        """Note that all of a storage is constant, or is not."""
        if constant is None:
            self._noted.pop(storage.data_ptr(), None)
        else:
            self._noted[storage.data_ptr()] = StorageWeakRef(storage), constant

    def forget(self, address: int) -> None:
        """Note that what the storage at an address is filled with is not known any more."""
        self._noted.pop(address, None)

    def noted_as(self, tensor: torch.Tensor) -> Use | None:
        """Return as what a read of a tensor is noted if it holds truths that are likely, and not certain."""
        there = self._of_noted(tensor) if tensor.dtype == torch.bool else None
        return None if there is None else there.noted

    def result(self, operator: Operator, args: tuple[Any, ...]) -> Constant | None:
        """Return what all elements of an operator's result are, where not all that it is given is known."""
        name = _BY_SIGN.get(operator.name) or operator.name.removesuffix("_")
        first, second = (*args, None, None)[:2]
        if not isinstance(first, torch.Tensor):
            return None
        if name in _ASKING and self._is_unknown(first):
            asked = self._asked(name, first, second)
            if asked is not None:
                return asked
        if name in _COMPARISONS and len(args) == 2:
            return self._compared(name, first, second)
        if name in _AND | _OR and isinstance(second, torch.Tensor):
            return self._combined(first, second, decides=name in _OR)
        there = self._of_noted(first)
        if there is None or name in _SAME or (name in _EXTREMES and len(args) == 1):
            return there
        negates = name == "logical_not" or (name == "bitwise_not" and first.dtype == torch.bool)
        return Constant(not there.value, there.noted) if negates else None

    def filled(self, operator: Operator, made: list[torch.Tensor]) -> Constant | None:
        """Return what all elements of integers or truths are that an operator has made of nothing: of a batch's mask."""
        value = _FILLED.get(operator.name)
        is_large = len(made) == 1 and is_exact(made[0]) and not is_small(made)
        return Constant(value) if value is not None and is_large else None

    def _asked(self, name: str, values: torch.Tensor, among: object) -> Constant | None:
        """Return what follows from uncomputed floats being finite and valid, and token ids none of the given ones."""
        if name in _VALID:
            return Constant(True) if _validates() else None
        if name in _OF_FINITE:
            return Constant(name == "isfinite", "kept")
        is_given = isinstance(among, torch.Tensor) and is_exact(values) and not self._is_unknown(among)
        return Constant(False, "branch") if is_given else None

    def _compared(self, name: str, first: torch.Tensor, second: Any) -> Constant | None:
        there = self._of_noted(first)
        if there is not None and isinstance(second, (int, float)):
            return Constant(_COMPARISONS[name](int(there.value), second), there.noted)
        if name not in ("eq", "ne") or not self._is_unknown(first):
            return None
        same = first is second
        infinite = isinstance(second, float) and abs(second) == float("inf")
        return Constant((name == "eq") == same, "kept") if same or infinite else None

    def _combined(self, first: torch.Tensor, second: torch.Tensor, *, decides: bool) -> Constant | None:
        """Return the conjunction of two tensors, or their disjunction, which is what one that ``decides`` is, if one does."""
        if not (is_exact(first) and is_exact(second)):
            return None
        if decides and not first.dtype == second.dtype == torch.bool:
            return None
        found = [self._of(first), self._of(second)]
        deciding = [one for one in found if one is not None and one.value == decides]
        if deciding:
            return min(deciding, key=_doubt)
        one, other = found
        return None if one is None or other is None else Constant(not decides, max(one, other, key=_doubt).noted)

    def _of_noted(self, tensor: torch.Tensor) -> Constant | None:
        there = self._noted.get(tensor.untyped_storage().data_ptr()) if has_storage(tensor) else None
        return None if there is None or there[0].expired() else there[1]

    def _of(self, tensor: torch.Tensor) -> Constant | None:
        there = self._of_noted(tensor)
        if there is not None or self._is_unknown(tensor) or not is_small((tensor,)) or not tensor.numel():
            return there
        values = on_host(tensor)
        least, most = int(values.min()), int(values.max())
        return Constant(bool(least)) if least == most and least in (0, 1) else None
